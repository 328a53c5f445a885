"""From the table [speculative] to the draft that an engine starts.

The law: what is drafted is what was planned. The draft's layers, their groups and the
bytes of a pool of its own are those that the budget was asked about; and what is
planned but not run is refused before a weight is read.

    draft = drafting.draft_of(plan, asked, model, ...)
"""

from kvmem import serve
from kvmem.config.model import ModelConfig
from kvmem.config.speculative import SpeculativeConfig
from kvmem.model.loaded import LoadedModel
from kvmem.speculative import SpecPlan

__all__ = ["draft_of", "unserved"]

_SERVED = ("ngram", "two_engine", "frozen_kv")


def unserved(plan: SpecPlan, draft: ModelConfig | None) -> list[tuple[str, str, str]]:
    """Return what a plan asks for that is planned and not run: asked, law, cure."""
    faults = []
    if draft is not None and plan.algorithm is None:
        asked = f"draft.source = {draft.source!r}"
        law = "a draft model proposes by an algorithm"
        cure = 'set speculative.algorithm to "two_engine", or leave [draft] out'
        faults.append((asked, law, cure))
    if plan.algorithm not in (None, *_SERVED):
        asked = f"speculative.algorithm = {plan.algorithm!r}"
        law = f"this version drafts with {', '.join(_SERVED)} and plans the others"
        faults.append((asked, law, "use one of them"))
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
    fewest = asked.min_match or 1
    return serve.draft_of(
        plan,
        model,
        layers=asked.layers,
        matches=(fewest, asked.max_match or max(3, fewest)),
        small=None if draft is None else draft.load(),
        **facts,
    )
