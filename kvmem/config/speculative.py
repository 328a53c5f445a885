"""The table [speculative]: who drafts, how wide and how far.

SpeculativeConfig("ngram", draft_tokens=4).plan(pool_kind="unified").num_drafted    # 4
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from kvmem import errors, settings
from kvmem.geometry import LayerSpec, LifecycleGroup
from kvmem.speculative import SpecPlan
from kvmem.speculative.rules_kvmem import Algorithm

__all__ = ["OWN_LAYERS", "Algorithm", "SpeculativeConfig", "model_kind"]

_OF_TARGET = ("two_engine", "frozen_kv")  # the target's first layers and its head
OWN_LAYERS = ("mtp", "dflash", "dspark")  # layers of their own behind the target's
_READ_BY = {  # option -> the algorithms that read it
    "layers": (*_OF_TARGET, *OWN_LAYERS),
    "weights": OWN_LAYERS,
    "seed": OWN_LAYERS,
    "min_match": ("ngram",),
    "max_match": ("ngram",),
    "acceptance": ("two_engine",),
}


@dataclasses.dataclass(frozen=True)
class SpeculativeConfig:
    """Who drafts, how wide and how far.

    Args:
        algorithm: "ngram" (prompt look-up), "two_engine" (a model of its own), "mtp"
            (draft layers in the target's manager), "dflash" (a block at once from the
            target's features), "dspark" (mtp's weights on virtual ids) or "frozen_kv"
            (the target's first layers on its own pages); None: nobody drafts.
        topk: tokens proposed for each place; None: one, a linear chain.
        steps: draft steps of one verification; None: 4, or one pass.
        draft_tokens: tokens proposed for a sequence; None: as many as the steps bring.
        layers: of the draft. The target's first ones with its head (two_engine without
            [draft], frozen_kv), None: half of them; else layers of its own, None: one.
        weights: checkpoint of trained draft layers; None: drawn from the seed.
        seed: of draft layers that are not trained.
        min_match, max_match: tokens that ngram looks for, the longest match first;
            None: 1 and 3.
        acceptance: of tokens that two_engine samples; None: "coupled", the target's own
            draw decides. "rejection": exact rejection sampling, other tokens of the
            same distribution, more of them accepted.
    """

    algorithm: Algorithm | None = None
    topk: int | None = None
    steps: int | None = None
    draft_tokens: int | None = None
    layers: int | None = None
    weights: str | None = None
    seed: int | None = None
    min_match: int | None = None
    max_match: int | None = None
    acceptance: Literal["coupled", "rejection"] | None = None

    def __post_init__(self):
        settings.settle(self)
        counts = ("topk", "steps", "draft_tokens", "layers", "min_match", "max_match")
        settings.require_positive(**{name: getattr(self, name) for name in counts})
        if self.seed is not None and self.seed < 0:
            raise errors.ConfigError(
                errors.say(
                    f"speculative.seed = {self.seed}",
                    "draft layers are drawn from a count, and none is below zero",
                    "Give an integer >= 0",
                )
            )
        faults = [
            f"speculative.{name} with algorithm {self.algorithm!r} (read by "
            f"{', '.join(readers)})"
            for name, readers in _READ_BY.items()
            if getattr(self, name) is not None and self.algorithm not in readers
        ]
        if self.weights is not None and self.seed is not None:
            faults.append("speculative.weights and a seed to draw them from")
        fewest, most = self.matches
        if fewest > most:
            faults.append(f"min_match = {fewest} above {most}")
        if faults:
            raise errors.ConfigError(
                errors.say(
                    "; ".join(faults),
                    "a setting that nothing reads would be ignored",
                    "Leave them out, or name an algorithm that reads them",
                )
            )

    @property
    def matches(self) -> tuple[int, int]:
        """The fewest and the most tokens that ngram looks for."""
        fewest = self.min_match or 1
        return fewest, self.max_match or max(3, fewest)

    def draft_layers(
        self, target: Sequence[LayerSpec], draft: Sequence[LayerSpec] | None
    ) -> tuple[LayerSpec, ...]:
        """Return what the layers of the draft keep of a token, () where nothing.

        Layers of its own have the shape of the target's last layer with keys.

        Args:
            target: the target's layers.
            draft: those of a draft model, None without one.

        Raises:
            ConfigError: a draft model that the algorithm does not run, or more layers
                than the target has.
        """
        self._require_layers(target, draft)
        if draft is not None:
            return tuple(draft)
        if self.algorithm == "two_engine":
            return tuple(target[: self.num_layers(len(target))])
        if self.algorithm not in OWN_LAYERS:
            return ()
        shape = [each for each in target if each.kind in ("gqa", "mla")][-1]
        return tuple(
            dataclasses.replace(
                shape, name=f"draft.{index}", index=index, window=None, shares=None
            )
            for index in range(self.num_layers(len(target)))
        )

    def num_layers(self, of_target: int) -> int:
        """Return how many layers draft, for a target of so many."""
        if self.layers is not None:
            return self.layers
        return -(-of_target // 2) if self.algorithm in _OF_TARGET else 1

    def _require_layers(
        self, target: Sequence[LayerSpec], draft: Sequence[LayerSpec] | None
    ) -> None:
        """Refuse a draft that nobody runs, or layers that the target does not have."""
        faults = []
        if draft is not None and self.algorithm not in (None, "two_engine"):
            faults.append(f"[draft] with {self.algorithm!r}, which brings its own")
        if draft is not None and self.layers is not None:
            faults.append(f"speculative.layers = {self.layers} beside [draft]")
        if self.algorithm in _OF_TARGET and (self.layers or 0) > len(target):
            faults.append(f"speculative.layers = {self.layers} of {len(target)}")
        if self.algorithm in OWN_LAYERS and not any(
            each.kind in ("gqa", "mla") for each in target
        ):
            faults.append(f"{self.algorithm!r} for a target without keys")
        if faults:
            raise errors.ConfigError(
                errors.say(
                    "; ".join(faults),
                    "a draft's layers come from one place, and are counted there",
                    'Use algorithm = "two_engine" for a model of its own, or fewer '
                    "layers",
                )
            )

    def plan(self, groups: Sequence[LifecycleGroup] = (), **facts: Any) -> SpecPlan:
        """Return the facts that rule sets judge.

        Args:
            groups: the target's, which say of what kind the model is.
            facts: further fields of the plan: pools, ranks, sizes of the engine.
        """
        return SpecPlan(
            self.algorithm,
            self.topk,
            self.steps,
            self.draft_tokens,
            model_kind=model_kind(groups),
            **facts,
        )


def model_kind(groups: Sequence[LifecycleGroup]) -> str:
    """Return what a model keeps besides full attention, as plans name it."""
    kinds = {group.lifecycle.kind for group in groups}
    found = "_".join(kind for kind in ("window", "state") if kind in kinds)
    return found or "dense"
