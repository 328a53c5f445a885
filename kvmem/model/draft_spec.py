"""Layers of a draft's own: the shape of a target's layers, and weights of their own.

What reads a model's hidden rows (`mtp`, `dflash`) brings layers of full attention, and
speaks with the model's own embeddings, last norm and head. They are alike the model's
where all of those are; behind a hybrid they have the heads, biases, norms and rope of
its last full attention, else of its last attention, whose window they do not have.
Behind latents, which stand for the keys of all heads, they have the query heads of
those with one KV head as wide as a value. The law: only a draft's own tensors are
drawn, trained, saved and loaded; the rest is the target's, read as the target reads it.

    @dataclasses.dataclass(frozen=True)
    class MySpec(DraftSpec):
        @property
        def extras(self): return {"my.fuse.weight": (self.hidden, self.hidden)}

    spec = spec_of(MySpec, target.spec, layers=1)
    draft = drawn(spec, target, seed=0)

No jax: the plan of a draft is read without a device.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from kvmem import errors, geometry
from kvmem.model.hybrid.mixers import Attention, Latent
from kvmem.model.hybrid.spec import HybridSpec
from kvmem.model.loaded import LoadedModel
from kvmem.model.partition import Partition
from kvmem.model.spec import ModelSpec

__all__ = ["ARRAYS_OF_TARGET", "WORDS", "DraftPartition", "DraftSpec", "completed"]
__all__ += ["drawn", "spec_of"]

ARRAYS_OF_TARGET = ("embed", "norm", "lm_head")  # of a rank, by their names there
WORDS = "draft.words"  # names the ids that may be proposed, beside the tensors

_STD = 0.02  # of drawn weights
_OF_TARGET = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")


@dataclasses.dataclass(frozen=True)
class DraftSpec(ModelSpec):
    """Draft layers of the shape of a model's own.

    `embed_scale` is what the model multiplies its embeddings by; `zero_norm` says that
    the weight of its last norm is what that adds to one. `words` are the token ids that
    the layers may propose, ascending; () for all of them.
    """

    embed_scale: float = 1.0
    zero_norm: bool = False
    words: tuple[int, ...] = ()

    @property
    def extras(self) -> dict[str, tuple[int, ...]]:
        """Name the tensors beside those of the layers, as "kind.name.weight"."""
        return {}

    def layer_specs(self, kv_dtype: str = "float32") -> tuple[geometry.LayerSpec, ...]:
        """Describe what each draft layer keeps of a token."""
        return tuple(
            dataclasses.replace(layer, name=f"draft.{layer.index}")
            for layer in super().layer_specs(kv_dtype)
        )

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name every tensor, those of the target among them."""
        return super().parameters() | self.extras

    def own_parameters(self) -> dict[str, tuple[int, ...]]:
        """Name the tensors that are the draft's own, which are trained."""
        every = self.parameters()
        return {name: shape for name, shape in every.items() if name not in _OF_TARGET}


@dataclasses.dataclass(frozen=True)
class DraftPartition(Partition):
    """The share of one rank; the extras are on every rank, as "name", and so are the
    head's rows of the words that may be proposed, if not all are, as "said"."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name every array of one rank with its shape, `[out, in]`."""
        spec, found = self.spec, super().shapes()
        found |= {name.split(".")[1]: shape for name, shape in spec.extras.items()}
        return found | ({"said": (len(spec.words), spec.hidden)} if spec.words else {})

    @property
    def num_own_elements(self) -> int:
        """Elements of one rank's arrays that are not the target's."""
        return sum(
            math.prod(shape)
            for name, shape in self.shapes().items()
            if name not in ARRAYS_OF_TARGET
        )

    def rank_params(
        self, params: Mapping[str, np.ndarray], rank: int
    ) -> dict[str, np.ndarray]:
        """Cut one rank's arrays out of the draft's."""
        spec, own = self.spec, super().rank_params(params, rank)
        own |= {name.split(".")[1]: params[name] for name in spec.extras}
        if spec.words:
            tied = spec.tie_embeddings
            head = "model.embed_tokens.weight" if tied else "lm_head.weight"
            own["said"] = params[head][np.asarray(spec.words)]
        return own


def spec_of[Kind: DraftSpec](
    kind: type[Kind], target: ModelSpec | HybridSpec, layers: int
) -> Kind:
    """Return the facts of draft layers for a model.

    Raises:
        IncompatiblePlan: a target without attention, or one that drafts itself.
    """
    if isinstance(target, HybridSpec):
        facts = _of_hybrid(target)
    elif type(target) is ModelSpec:
        facts = {f.name: getattr(target, f.name) for f in dataclasses.fields(target)}
    else:
        raise _no_shape(target, "layers that draft are verified, and verify nothing")
    return kind(**facts | {"name": f"{target.name} draft", "layers": layers})


def _of_hybrid(target: HybridSpec) -> dict[str, object]:
    """Return the facts of draft layers that hybrids leave to be read."""
    facts = ("hidden", "mlp", "vocab", "norm_eps", "tie_embeddings", "max_position")
    found = {name: getattr(target, name) for name in (*facts, "bos_id", "eos_ids")}
    family = target.family
    scale = target.hidden**0.5 if family.scaled_embeddings else 1.0
    found |= {"embed_scale": scale, "zero_norm": family.zero_norms}
    return found | _heads_of(target)


def _heads_of(target: HybridSpec) -> dict[str, object]:
    """Return the heads of draft layers, and how those are rotated."""
    reads = [each for each in target.mixers if isinstance(each, Attention | Latent)]
    whole = [each for each in reads if getattr(each, "window", None) is None]
    if not reads:
        raise _no_shape(target, "they attend, and have their heads from its attention")
    shape = (whole or reads)[-1]
    if isinstance(shape, Latent):
        return {
            "heads": shape.heads,
            "kv_heads": 1,
            "head_dim": shape.v_dim,
            "rope": geometry.Rope(shape.rope.theta),
        }
    return {
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rope": shape.rope,
        "qkv_bias": shape.bias,
        "qk_norm": shape.qk_norm,
    }


def _no_shape(target: ModelSpec | HybridSpec, law: str) -> errors.IncompatiblePlan:
    return errors.IncompatiblePlan(
        errors.say(
            f"draft layers for {target.name}", law, "Draft with ngram or two_engine"
        )
    )


def drawn(spec: DraftSpec, target: LoadedModel, seed: int) -> LoadedModel:
    """Return draft layers that nobody has trained, with weights of a seed."""
    rng = np.random.default_rng(seed)
    dtype = target.params["model.norm.weight"].dtype
    params = {
        name: (
            np.ones(shape)
            if name.endswith("norm.weight")
            else rng.normal(0, _STD, shape)
        ).astype(dtype)
        for name, shape in spec.own_parameters().items()
    }
    return completed(spec, target, params, f"drawn from seed {seed}")


def completed(
    spec: DraftSpec,
    target: LoadedModel,
    params: Mapping[str, np.ndarray],
    source: str,
) -> LoadedModel:
    """Return draft layers of given weights, with the target's embeddings and head.

    Args:
        spec: of the layers.
        target: the model.
        params: the tensors of `spec.own_parameters`, and i32[M] `WORDS` if only those
            token ids are to be proposed.
        source: for people.

    Raises:
        FormatMismatch: other tensors, or words that are not ascending ids of the model.
    """
    own = dict(params)
    if (words := own.pop(WORDS, None)) is not None:
        spec = dataclasses.replace(spec, words=_words_of(words, spec.vocab, source))
    shared = {n: target.params[n] for n in _OF_TARGET if n in target.params}
    every = {**shared, **own}
    spec.require({name: array.shape for name, array in every.items()}, source)
    return LoadedModel(spec, every, target.tokenizer, f"draft layers {source}")


def _words_of(words: np.ndarray, vocab: int, source: str) -> tuple[int, ...]:
    ids = np.asarray(words, np.int64).reshape(-1)
    if len(ids) and (np.diff(ids, prepend=-1, append=vocab) > 0).all():
        return tuple(ids.tolist())
    raise errors.FormatMismatch(
        errors.say(
            f"draft layers {source} with {len(ids)} words",
            f"words are ascending token ids below {vocab}, one at least",
            "Write the layers with kvmem.model.draft_layers.save",
        )
    )
