"""From a plan of drafting to the facts that an engine starts.

The law: what is drafted is what was planned: so many tokens, by whom, in the bytes that
the budget pays for.

    draft_of(SpecPlan("frozen_kv", steps=3), model, layers=10)
"""

from collections.abc import Sequence

from kvmem import errors
from kvmem.budget import Budget
from kvmem.geometry import LifecycleGroup, Topology
from kvmem.model import cut, dflash, draft_layers, mtp
from kvmem.model.loaded import LoadedModel
from kvmem.serve.draft.dflash import DFlash
from kvmem.serve.draft.dspark import DSpark
from kvmem.serve.draft.frozen_kv import FrozenKV
from kvmem.serve.draft.mtp import MTP
from kvmem.serve.draft.ngram import NGram
from kvmem.serve.draft.own_pages import paid_for
from kvmem.serve.draft.protocol import Draft
from kvmem.serve.draft.two_engine import TwoEngine
from kvmem.speculative import SpecPlan, draft_pool

__all__ = ["draft_of"]

_LAYERED = {"mtp": (MTP, mtp), "dspark": (DSpark, mtp), "dflash": (DFlash, dflash)}


def draft_of(
    plan: SpecPlan,
    model: LoadedModel,
    *,
    layers: int | None = None,
    matches: tuple[int, int] = (1, 3),
    small: LoadedModel | None = None,
    seed: int = 0,
    weights: str | None = None,
    acceptance: str = "coupled",
    groups: Sequence[LifecycleGroup] = (),
    solved: Budget | None = None,
    order: str = "head_major",
) -> Draft | None:
    """Return the draft of a plan; None where nobody drafts.

    Args:
        plan: that breaks no rule.
        model: the target.
        layers: of the target's first ones, for "frozen_kv", and for "two_engine"
            without a model of its own; None: half of them. Draft layers of "mtp",
            "dspark" and "dflash"; None: one.
        matches: the fewest and the most tokens that "ngram" looks for.
        small: the model of "two_engine".
        seed: that draft layers are drawn from.
        weights: file of draft layers that were trained; None: they are drawn.
        acceptance: of tokens that "two_engine" samples.
        groups: of the draft, in the target's pool or in one of its own.
        solved: the budget, which pays for that pool.
        order: its page order.

    Raises:
        ConfigError: an algorithm that nobody runs.
        FormatMismatch: a file of draft layers for another model.
        OutOfPages: a pool that holds no page of the draft.
    """
    if plan.algorithm is None:
        return None
    if plan.algorithm == "ngram":
        return NGram(plan.num_drafted, *matches)
    if plan.algorithm in _LAYERED:
        facts, kind = _LAYERED[plan.algorithm]
        made = (
            kind.draw(model, layers or 1, seed)
            if weights is None
            else draft_layers.load(weights, model, layers or 1, kind.with_params)
        )
        return facts(made, tuple(groups), plan.num_drafted)
    layers = layers or -(-cut.num_layers(model.spec) // 2)
    if plan.algorithm == "frozen_kv":
        return FrozenKV(layers, plan.num_drafted, plan.width)
    if plan.algorithm == "two_engine":
        small = small or cut.first_layers(model, layers)
        topology = Topology(plan.tp, plan.dcp)
        num_vpages = solved.draft_pages // plan.dcp  # of the target, which it follows
        nbytes = draft_pool(plan, groups, num_vpages, topology, order).nbytes
        paid = paid_for(groups, nbytes, topology, order)
        return TwoEngine(
            small, tuple(groups), paid, plan.num_drafted, acceptance=acceptance
        )
    raise errors.ConfigError(
        errors.say(
            f"a draft by {plan.algorithm!r}",
            "an engine runs what it has a proposer for",
            "Use ngram, two_engine, frozen_kv, mtp, dspark or dflash",
        )
    )
