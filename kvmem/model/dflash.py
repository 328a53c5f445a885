"""Block drafts: layers that propose several tokens at once from a model's hidden rows.

Of every token that the model has read the draft keeps keys and values of the model's
own row of it (the row before the last norm), a layer each. To propose, it reads the
last token and a mask at each place behind it; they see all kept rows and each other,
the later ones too, and each mask says with the model's own head which token stands in
its place. The form is that of block diffusion drafts (DFlash, arXiv:2602.06036); one
forward a block, whatever its length. The law: what is kept of a token follows from the
model's row of it alone, so nothing of a block outlives its proposal, and whoever has
the text may have the rows too.

    draft = dflash.draw(model, layers=1, seed=0)
    draft.spec.own_parameters()["dflash.mask.weight"]      # (576,)

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

__all__ = ["DFlashPartition", "DFlashSpec", "draw", "spec_of", "with_params"]


@dataclasses.dataclass(frozen=True)
class DFlashSpec(DraftSpec):
    """Draft layers that see a model's hidden rows, and propose a block."""

    @property
    def extras(self) -> dict[str, tuple[int, ...]]:
        """Name what projects the model's rows, and what stands for unknown tokens."""
        return {
            "dflash.fuse.weight": (self.hidden, self.hidden),
            "dflash.hidden_norm.weight": (self.hidden,),
            "dflash.mask.weight": (self.hidden,),
        }


@dataclasses.dataclass(frozen=True)
class DFlashPartition(DraftPartition):
    """The share of one rank; the projection and the mask are on every rank."""


def spec_of(target: ModelSpec | HybridSpec, layers: int) -> DFlashSpec:
    """Return the facts of a block draft for a model.

    Raises:
        IncompatiblePlan: a target without attention.
    """
    return draft_spec.spec_of(DFlashSpec, target, layers)


def draw(target: LoadedModel, layers: int = 1, seed: int = 0) -> LoadedModel:
    """Return a block draft that nobody has trained, with weights of a seed."""
    return draft_spec.drawn(spec_of(target.spec, layers), target, seed)


def with_params(
    target: LoadedModel, layers: int, params: Mapping[str, np.ndarray], source: str
) -> LoadedModel:
    """Return a block draft of given weights, with the target's embeddings and head.

    Raises:
        FormatMismatch: tensors that are not those of `DFlashSpec.own_parameters`.
    """
    return draft_spec.completed(spec_of(target.spec, layers), target, params, source)
