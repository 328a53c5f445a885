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

from kvmem.model import draft_spec
from kvmem.model.draft_spec import DraftPartition, DraftSpec
from kvmem.model.hybrid.spec import HybridSpec
from kvmem.model.loaded import LoadedModel
from kvmem.model.spec import ModelSpec

__all__ = ["MtpPartition", "MtpSpec", "draw", "spec_of", "with_params"]


@dataclasses.dataclass(frozen=True)
class MtpSpec(DraftSpec):
    """Draft layers behind a model's hidden rows."""

    @property
    def width(self) -> int:
        """Elements that one row is fused of: a hidden row and an embedding."""
        return 2 * self.hidden

    @property
    def extras(self) -> dict[str, tuple[int, ...]]:
        """Name what fuses two rows into one."""
        return {
            "mtp.fuse.weight": (self.hidden, self.width),
            "mtp.hidden_norm.weight": (self.hidden,),
            "mtp.embed_norm.weight": (self.hidden,),
        }


@dataclasses.dataclass(frozen=True)
class MtpPartition(DraftPartition):
    """The share of one rank; what fuses the two rows is on every rank."""


def spec_of(target: ModelSpec | HybridSpec, layers: int) -> MtpSpec:
    """Return the facts of draft layers for a model.

    Raises:
        IncompatiblePlan: a target without attention.
    """
    return draft_spec.spec_of(MtpSpec, target, layers)


def draw(target: LoadedModel, layers: int = 1, seed: int = 0) -> LoadedModel:
    """Return draft layers that nobody has trained, with weights of a seed."""
    return draft_spec.drawn(spec_of(target.spec, layers), target, seed)


def with_params(
    target: LoadedModel, layers: int, params: Mapping[str, np.ndarray], source: str
) -> LoadedModel:
    """Return draft layers of given weights, with the target's embeddings and head.

    Raises:
        FormatMismatch: tensors that are not those of `MtpSpec.own_parameters`.
    """
    return draft_spec.completed(spec_of(target.spec, layers), target, params, source)
