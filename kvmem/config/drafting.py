"""From the table [speculative] to the draft that an engine starts.

The law: what is drafted is what was planned. The draft's layers, their groups and the
bytes of a pool of its own are those that the budget was asked about; and what is
planned but not run is refused before a weight is read.

    draft = drafting.draft_of(plan, asked, model, ...)
"""

from collections.abc import Sequence

from kvmem import serve
from kvmem.config.model import ModelConfig
from kvmem.config.speculative import OWN_LAYERS, SpeculativeConfig
from kvmem.geometry import LifecycleGroup
from kvmem.model.loaded import LoadedModel
from kvmem.model.spec import ModelSpec
from kvmem.speculative import SpecPlan

__all__ = ["draft_of", "unserved"]


def unserved(
    plan: SpecPlan,
    draft: ModelConfig | None,
    spec: object,
    stored: Sequence[LifecycleGroup],
) -> list[tuple[str, str, str]]:
    """Return what is asked for that is planned and not run: asked, law, cure.

    Args:
        plan: of the engine.
        draft: the draft model's table.
        spec: the target's facts.
        stored: the draft's groups, where records are kept beside the pool; else ().
    """
    faults = []
    if plan.algorithm in OWN_LAYERS and not isinstance(spec, ModelSpec):
        what = f'speculative.algorithm = "{plan.algorithm}"'
        law = "draft layers have the shape of a target whose layers are all alike"
        faults.append((what, law, "draft with ngram"))
    if any(group.lifecycle.kind != "full" for group in stored):
        what = "a store beside a draft of " + ", ".join(g.name for g in stored)
        law = (
            "a text comes back with all that its draft keeps of it, and windows and "
            "states of a draft have passed the places where it may end"
        )
        faults.append((what, law, "leave the store out, or draft with ngram"))
    if draft is not None and plan.algorithm is None:
        what = f"draft.source = {draft.source!r}"
        law = "a draft model proposes by an algorithm"
        cure = 'set speculative.algorithm to "two_engine", or leave [draft] out'
        faults.append((what, law, cure))
    return faults


def draft_of(
    plan: SpecPlan,
    asked: SpeculativeConfig,
    draft: ModelConfig | None,
    model: LoadedModel,
    **facts: object,
):
    """Return the draft of a plan; None where nobody drafts.

    Args:
        plan: of the engine; it breaks no rule.
        asked: the table.
        draft: the draft model's table.
        model: the target, loaded.
        facts: groups, solved and order, as of `kvmem.serve.draft.make.draft_of`.
    """
    if plan.algorithm is None:
        return None
    return serve.draft_of(
        plan,
        model,
        layers=asked.layers,
        matches=asked.matches,
        small=None if draft is None else draft.load(),
        seed=asked.seed or 0,
        weights=asked.weights,
        acceptance=asked.acceptance or "coupled",
        **facts,
    )
