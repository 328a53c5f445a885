"""Followers: pages that a draft keeps for the virtual ids of its target.

A draft that indexes virtual positions keeps every token on every token shard, where the
target keeps one in dcp. So behind each page of the target stand dcp pages of the draft,
the range is that of the virtual ids and not of the tokens asked for, and its highest id
can be written. The law: budget and pool builder both ask here.

    pages(num_vpages=100, topology=Topology(dcp=4))      # 400
    row_nbytes(drafts, Topology(dcp=4))                  # bytes a row of the target
"""

from collections.abc import Sequence
from fractions import Fraction

from kvmem.geometry import envelope
from kvmem.geometry.groups import LifecycleGroup
from kvmem.geometry.terms import Term
from kvmem.geometry.topology import Topology

__all__ = ["page_nbytes", "pages", "per_slot", "row_nbytes", "terms"]


def pages(num_vpages: int, topology: Topology) -> int:
    """Return the draft's pages on a rank for `num_vpages` virtual pages of the target.

    A virtual page holds page_size * dcp positions, which are dcp whole pages.
    """
    return num_vpages * topology.dcp


def page_nbytes(
    drafts: Sequence[LifecycleGroup], topology: Topology, order: str = "head_major"
) -> int:
    """Return the bytes of one page of each of the drafts' groups on a rank.

    Heads are divided by the head shards of the group that attends, padding is counted.
    """
    return sum(envelope.build(each, topology, 0, order).nbytes for each in drafts)


def row_nbytes(
    drafts: Sequence[LifecycleGroup], topology: Topology, order: str = "head_major"
) -> int | Fraction:
    """Return the bytes on a rank for one row of the target's pool, padding included."""
    found = sum(
        Fraction(pages(1, topology) * page_nbytes([each], topology, order), each.slots)
        for each in drafts
    )
    return int(found) if found == int(found) else found


def terms(
    drafts: Sequence[LifecycleGroup], topology: Topology, order: str = "head_major"
) -> list[Term]:
    """Return the claims of a draft's groups; together they are `row_nbytes`."""
    found = []
    for draft in drafts:
        name = "draft" if len(drafts) == 1 else f"draft {draft.name}"
        built = envelope.build(draft, topology, 0, order)
        held = topology.dcp * max(topology.replicas(field) for field in draft.fields)
        for what, nbytes, replicas in (
            ("kv", built.payload_nbytes, held),
            ("padding", built.padding_nbytes, 1),
        ):
            each = per_slot(Fraction(pages(1, topology) * nbytes), draft)
            if nbytes:
                found.append(Term(f"{name} {what}", "draft", each, replicas=replicas))
    return found


def per_slot(nbytes: int | Fraction, group: LifecycleGroup) -> int | Fraction:
    """Return bytes of a page as bytes of each slot, whole where they are."""
    each = Fraction(nbytes) / group.slots
    return int(each) if each.denominator == 1 else each
