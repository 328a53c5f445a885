"""Terms of a plan: the claims of each group, for a row of tokens or before the first.

The law: padding is a claim of its own, and the claims for a plan's rows are what its
pages take, to the byte.
"""

from collections.abc import Sequence
from fractions import Fraction

from kvmem.budget.rows import Frame
from kvmem.geometry import LifecycleGroup, Term, Topology, envelope

__all__ = ["draft_terms", "group_terms"]


def group_terms(frame: Frame, at: int, rows: int, topology: Topology) -> list[Term]:
    """Return a group's claims: for a row of the target, or fixed where it is capped."""
    member, need, lead = frame.members[at], frame.needs[at], frame.members[frame.first]
    group = member.group
    alone = sum(m.group.domain == group.domain for m in frame.members) == 1
    name = group.domain if alone else f"{group.domain} {group.name}"
    replicas = max(topology.replicas(field) for field in group.fields)
    if group.domain == "draft" or group.is_state:
        replicas *= topology.dcp
    terms = []
    for what, nbytes in (
        ("" if group.is_state and not alone else " kv", member.payload_nbytes),
        (" padding", member.padding_nbytes),
    ):
        if need.is_capped(rows):
            per_token, owed = 0, nbytes * need.at(rows)
        else:
            per_token, owed = _per_token(nbytes * need.per_row, lead.group), 0
        if nbytes:
            held = replicas if what != " padding" else 1
            terms.append(Term(f"{name}{what}", group.domain, per_token, owed, held))
    return terms


def draft_terms(
    draft: LifecycleGroup,
    drafts: Sequence[LifecycleGroup],
    topology: Topology,
    order: str,
) -> list[Term]:
    """Return the claims of a group, one of `drafts` that follow the target's ids."""
    name = "draft" if len(drafts) == 1 else f"draft {draft.name}"
    built = envelope.build(draft, topology, 0, order)
    replicas = topology.dcp * max(topology.replicas(field) for field in draft.fields)
    payload = _per_token(Fraction(built.payload_nbytes * topology.dcp), draft)
    terms = [Term(f"{name} kv", "draft", payload, replicas=replicas)]
    if built.padding_nbytes:
        padding = _per_token(Fraction(built.padding_nbytes * topology.dcp), draft)
        terms.append(Term(f"{name} padding", "draft", padding))
    return terms


def _per_token(page_nbytes: Fraction, group: LifecycleGroup) -> int | Fraction:
    """Return bytes of a page as bytes of each slot, whole where they are."""
    each = page_nbytes / group.slots
    return int(each) if each.denominator == 1 else each
