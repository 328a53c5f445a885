"""Distilling block drafts: what each mask says beside what the model said there.

A block begins at every place that the model wrote, reads the token there and the
model's rows of those before, and its masks learn to say what the model took for likely
at theirs. It does not see the tokens between: mask j learns what follows on average.
The law is that of `draft_training`: what is trained are the draft's own tensors.

    trainer = BlockTrainer(model, begun(model), lessons, Learning(taught=80))
    state, loss = trainer.step(trainer.start(), lessons.of(slice(4)), number=0)
"""

import jax.numpy as jnp
import numpy as np

from experiments.draft_texts import Lessons
from experiments.draft_training import Pass, Trainer
from kvmem.model import dflash
from kvmem.model.dflash_decoder import DFlashDecoder
from kvmem.model.loaded import LoadedModel

__all__ = ["BlockTrainer", "begun"]


def begun(target: LoadedModel, layers: int = 1) -> LoadedModel:
    """Return a block draft of the model's last layers, which read its rows as they are.

    A mask begins as the mean of all embeddings.

    Raises:
        IncompatiblePlan: a target without attention.
    """
    spec, skipped = dflash.spec_of(target.spec, layers), target.spec.layers - layers
    dtype = target.params["model.norm.weight"].dtype
    params = {
        "dflash.fuse.weight": np.eye(spec.hidden, dtype=dtype),
        "dflash.hidden_norm.weight": np.ones(spec.hidden, dtype),
        "dflash.mask.weight": target.params["model.embed_tokens.weight"].mean(0),
    }
    for name in spec.own_parameters().keys() - params.keys():
        _, _, index, what = name.split(".", 3)
        of = (skipped + int(index)) % target.spec.layers
        params[name] = target.params[f"model.layers.{of}.{what}"]
    return dflash.with_params(target, layers, params, "of the model's last layers")


class BlockTrainer(Trainer):
    """Distils one block draft; `Learning.depth` is how many masks a block has."""

    decoder = DFlashDecoder
    complete = staticmethod(dflash.with_params)
    prefix = "dflash"

    def passes(self, draft: DFlashDecoder, lessons: Lessons, depth: int) -> list[Pass]:
        """Return of the first masks of whole blocks what each makes of its place."""
        (texts, length), masks = lessons.tokens.shape, self.learning.depth
        first = length - self.learning.taught
        places = jnp.arange(first, length - masks + 1, dtype=jnp.int32)
        anchors = jnp.broadcast_to(places[None], (texts, len(places)))
        rows = draft.block_rows(lessons.rows, lessons.tokens, anchors, masks)
        ahead = (lessons.likely, lessons.logprobs)
        return [
            Pass(
                rows[:, :, mask],
                *(x[:, first + mask :][:, : len(places)] for x in ahead),
            )
            for mask in range(depth)
        ]
