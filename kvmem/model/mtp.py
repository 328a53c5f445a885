"""Draft layers: a few layers that read a model's hidden rows and its next token.

At position i they read what the model made of token i - 1 (its row before the last
norm) and the embedding of token i, and say with the model's own head what token i + 1
may be; they go on from their own rows where the model's are not there yet. The form is
that of multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2). The law:
what they keep of position i depends on the tokens up to i alone, so whoever has the
text may have it too.

    draft = mtp.draw(model, layers=1, seed=0)
    draft.spec.layer_specs()[0].name      # "draft.0"

No jax: the plan of a draft is read without a device.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from kvmem import errors, geometry
from kvmem.model.loaded import LoadedModel
from kvmem.model.partition import Partition
from kvmem.model.spec import ModelSpec

__all__ = ["MtpPartition", "MtpSpec", "draw", "with_params"]

_STD = 0.02  # of drawn weights
_OF_TARGET = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")


@dataclasses.dataclass(frozen=True)
class MtpSpec(ModelSpec):
    """Draft layers of the shape of a model's own, behind its hidden rows."""

    @property
    def width(self) -> int:
        """Elements that one row is fused of: a hidden row and an embedding."""
        return 2 * self.hidden

    def layer_specs(self, kv_dtype: str = "float32") -> tuple[geometry.LayerSpec, ...]:
        """Describe what each draft layer keeps of a token."""
        return tuple(
            dataclasses.replace(layer, name=f"draft.{layer.index}")
            for layer in super().layer_specs(kv_dtype)
        )

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name every tensor, those of the target among them."""
        return super().parameters() | {
            "mtp.fuse.weight": (self.hidden, self.width),
            "mtp.hidden_norm.weight": (self.hidden,),
            "mtp.embed_norm.weight": (self.hidden,),
        }

    def own_parameters(self) -> dict[str, tuple[int, ...]]:
        """Name the tensors that are the draft's own, which are trained."""
        every = self.parameters()
        return {name: shape for name, shape in every.items() if name not in _OF_TARGET}


@dataclasses.dataclass(frozen=True)
class MtpPartition(Partition):
    """The share of one rank; what fuses the two rows is on every rank."""

    def rank_params(
        self, params: Mapping[str, np.ndarray], rank: int
    ) -> dict[str, np.ndarray]:
        """Cut one rank's arrays out of the draft's."""
        own = super().rank_params(params, rank)
        for name in ("fuse", "hidden_norm", "embed_norm"):
            own[name] = params[f"mtp.{name}.weight"]
        return own


def spec_of(target: ModelSpec, layers: int) -> MtpSpec:
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
    return MtpSpec(**facts | {"name": f"{target.name} draft", "layers": layers})


def draw(target: LoadedModel, layers: int = 1, seed: int = 0) -> LoadedModel:
    """Return draft layers that nobody has trained, with weights of a seed."""
    spec = spec_of(target.spec, layers)
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
    return with_params(target, layers, params, f"drawn from seed {seed}")


def with_params(
    target: LoadedModel, layers: int, params: Mapping[str, np.ndarray], source: str
) -> LoadedModel:
    """Return draft layers of given weights, with the target's embeddings and head.

    Raises:
        FormatMismatch: tensors that are not those of `MtpSpec.own_parameters`.
    """
    spec = spec_of(target.spec, layers)
    shared = {n: target.params[n] for n in _OF_TARGET if n in target.params}
    every = {**shared, **params}
    spec.require({name: array.shape for name, array in every.items()}, source)
    return LoadedModel(spec, every, target.tokenizer, f"draft layers {source}")
