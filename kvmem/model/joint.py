"""Joint ids: whose bytes those of a target and its draft are, kept together.

The keys and values that a draft keeps depend on its own weights and, where it reads
hidden rows, on the target's. The law: records of both have an id that neither has
alone, so that neither is ever found for another partner.

    joint.facts(model, draft)       # what the id digests
    joint.model_id(model, draft)    # 64 hex digits; the target's own without a draft
"""

from collections.abc import Mapping

from kvmem.model import loaded
from kvmem.model.loaded import LoadedModel

__all__ = ["facts", "model_id"]


def facts(target: LoadedModel, draft: LoadedModel | None) -> Mapping[str, object]:
    """Return the facts of a target and a draft; the target's own without one."""
    if draft is None:
        return target.facts
    return {
        "scheme": "kvmem joint id 1",
        "target": target.facts,
        "draft": draft.facts,
    }


def model_id(target: LoadedModel, draft: LoadedModel | None) -> str:
    """Return whose bytes the records of both are (64 hex digits)."""
    return target.model_id if draft is None else loaded.id_of(facts(target, draft))
