"""Terms of a plan: the claims of each group, for a row of tokens or before the first.

The law: padding is a claim of its own, and the claims for a plan's rows are what its
pages take, to the byte. Those of a draft that follows the target's ids are in
`kvmem.geometry.followers`.
"""

from kvmem.budget.rows import Frame
from kvmem.geometry import Term, Topology, followers

__all__ = ["group_terms"]


def group_terms(frame: Frame, at: int, rows: int, topology: Topology) -> list[Term]:
    """Return a group's claims: for a row of the target, or fixed where it is capped."""
    member, need, lead = frame.members[at], frame.needs[at], frame.members[frame.first]
    group = member.group
    alone = sum(m.group.domain == group.domain for m in frame.members) == 1
    name = group.domain if alone else f"{group.domain} {group.name}"
    replicas = max(topology.replicas(field) for field in group.fields)
    if group.is_replicated:
        replicas *= topology.dcp
    terms = []
    for what, nbytes in (
        ("" if group.is_state and not alone else " kv", member.payload_nbytes),
        (" padding", member.padding_nbytes),
    ):
        if need.is_capped(rows):
            per_token, owed = 0, nbytes * need.at(rows)
        else:
            per_token, owed = followers.per_slot(nbytes * need.per_row, lead.group), 0
        if nbytes:
            held = replicas if what != " padding" else 1
            terms.append(Term(f"{name}{what}", group.domain, per_token, owed, held))
    return terms
