"""Layers of a draft's own: the shape of a target's layers, and weights of their own.

What reads a model's hidden rows (`mtp`, `dflash`) brings layers that are alike the
model's, and speaks with the model's own embeddings, last norm and head. The law: only a
draft's own tensors are drawn, trained, saved and loaded; the rest is the target's.

    @dataclasses.dataclass(frozen=True)
    class MySpec(DraftSpec):
        @property
        def extras(self): return {"my.fuse.weight": (self.hidden, self.hidden)}

    spec = spec_of(MySpec, target.spec, layers=1)
    draft = drawn(spec, target, seed=0)

No jax: the plan of a draft is read without a device.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from kvmem import errors, geometry
from kvmem.model.loaded import LoadedModel
from kvmem.model.partition import Partition
from kvmem.model.spec import ModelSpec

__all__ = ["DraftPartition", "DraftSpec", "completed", "drawn", "spec_of"]

_STD = 0.02  # of drawn weights
_OF_TARGET = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")


@dataclasses.dataclass(frozen=True)
class DraftSpec(ModelSpec):
    """Draft layers of the shape of a model's own."""

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
    """The share of one rank; the extras are on every rank, as "name"."""

    def rank_params(
        self, params: Mapping[str, np.ndarray], rank: int
    ) -> dict[str, np.ndarray]:
        """Cut one rank's arrays out of the draft's."""
        own = super().rank_params(params, rank)
        return own | {name.split(".")[1]: params[name] for name in self.spec.extras}


def spec_of[Kind: DraftSpec](kind: type[Kind], target: ModelSpec, layers: int) -> Kind:
    """Return the facts of draft layers for a model.

    Raises:
        IncompatiblePlan: a target whose layers differ.
    """
    if type(target) is not ModelSpec:
        raise errors.IncompatiblePlan(
            errors.say(
                f"draft layers for {target.name}",
                "they have the shape of the target's own, where all of those are alike",
                "Draft with ngram or two_engine",
            )
        )
    facts = {f.name: getattr(target, f.name) for f in dataclasses.fields(target)}
    return kind(**facts | {"name": f"{target.name} draft", "layers": layers})


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

    Raises:
        FormatMismatch: tensors that are not those of `spec.own_parameters`.
    """
    shared = {n: target.params[n] for n in _OF_TARGET if n in target.params}
    every = {**shared, **params}
    spec.require({name: array.shape for name, array in every.items()}, source)
    return LoadedModel(spec, every, target.tokenizer, f"draft layers {source}")
