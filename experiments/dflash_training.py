"""Distilling block drafts: what each mask says beside what the model said there.

A block begins at every place that the model wrote, reads the token there and the
model's rows of those before, and its masks learn to say what the model took for likely
at theirs. It does not see the tokens between: mask j learns what follows on average.
The law is that of `draft_training`: what is trained are the draft's own tensors.

    trainer = BlockTrainer(model, dflash.draw(model), lessons, Learning(taught=80))
    state, loss = trainer.step(trainer.start(), lessons.of(slice(4)), number=0)
"""

import jax.numpy as jnp

from experiments.draft_texts import Lessons
from experiments.draft_training import Pass, Trainer
from kvmem.model import dflash
from kvmem.model.dflash_decoder import DFlashDecoder

__all__ = ["BlockTrainer"]


class BlockTrainer(Trainer):
    """Distils one block draft; `Learning.depth` is how many masks a block has."""

    decoder = DFlashDecoder
    complete = staticmethod(dflash.with_params)
    prefix = "dflash"

    def passes(self, draft: DFlashDecoder, lessons: Lessons, depth: int) -> list[Pass]:
        """Return of each mask its rows, and what was likely in its place."""
        texts, length = lessons.tokens.shape
        first = length - self.learning.taught
        places = jnp.arange(first, length - depth + 1, dtype=jnp.int32)
        anchors = jnp.broadcast_to(places[None], (texts, len(places)))
        rows = draft.block_rows(lessons.rows, lessons.tokens, anchors, depth)
        ahead = (lessons.likely, lessons.logprobs)
        return [
            Pass(
                rows[:, :, mask],
                *(x[:, first + mask :][:, : len(places)] for x in ahead),
            )
            for mask in range(depth)
        ]
