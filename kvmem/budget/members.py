"""Members: what one page of each group takes in its pool, and what it leaves empty.

In a unified pool all groups take physical pages of one size E, that of the largest page
of tokens: a smaller one wastes the rest, and a state lies in as many as it needs. In a
split plan each size of page has a pool of its own, shared by the groups that have it.
With decode context parallelism a virtual page covers dcp times as many tokens: of a
group that is spread over the ranks it is still one physical page of each of them, of a
paged group that every rank keeps whole it is dcp (`geometry.Spread`).

The law: a group that wastes more than an eighth of its pages is reported, with the page
sizes that would not.
"""

import dataclasses
from collections.abc import Sequence
from fractions import Fraction

from kvmem.budget.pages import Padding
from kvmem.geometry import Envelope, LifecycleGroup, Spread, Topology, envelope

__all__ = ["Member", "members_of", "paddings"]

_MOST = Fraction(1, 8)  # of a page that may be padding without a word
_STATE_SIZES = [2**exponent for exponent in range(13)]  # pages of 1 to 4,096 tokens


@dataclasses.dataclass(frozen=True)
class Member:
    """A group in its pool: `envelope` is cut to the pool's pages.

    A page of the group is a virtual one; `padding_nbytes` are bytes of it that mean
    nothing.
    """

    group: LifecycleGroup
    envelope: Envelope
    pool: int
    spread: Spread = Spread()

    @property
    def virtual(self) -> LifecycleGroup:
        """The group as its pages are counted, each of `page_size` tokens."""
        return self.spread.virtual(self.group)

    @property
    def parts(self) -> int:
        """Envelopes that one page of the group takes."""
        return self.spread.parts(self.group)

    @property
    def extents(self) -> int:
        """Physical pages that one page of the group lies in."""
        return self.parts * self.envelope.extents

    @property
    def nbytes(self) -> int:
        """Bytes of a rank that one page of the group takes."""
        return self.extents * self.page_nbytes

    @property
    def page_nbytes(self) -> int:
        """Bytes of a physical page of the pool."""
        return self.envelope.nbytes // self.envelope.extents

    @property
    def payload_nbytes(self) -> int:
        """Bytes of one page of the group that mean something."""
        return self.parts * self.envelope.payload_nbytes

    @property
    def padding_nbytes(self) -> int:
        """Bytes of one page of the group that mean nothing."""
        return self.parts * self.envelope.padding_nbytes


def members_of(
    groups: Sequence[LifecycleGroup], topology: Topology, order: str, kind: str
) -> tuple[Member, ...]:
    """Return each group in its pool; pools are numbered in the order of groups.

    Raises:
        IncompatiblePlan: heads that the topology does not divide, an interleave that
            does not divide the page, or an entry of a state that no page of tokens
            holds.
    """
    spreads = [Spread.of(group, topology) for group in groups]
    built = [envelope.build(group, topology, 0, order) for group in groups]
    if kind == "split":
        sizes = list(dict.fromkeys(each.nbytes for each in built))
        return tuple(
            Member(*row, sizes.index(row[1].nbytes), spread)
            for *row, spread in zip(groups, built, spreads, strict=True)
        )
    paged = [e.nbytes for g, e in zip(groups, built, strict=True) if not g.is_state]
    page_nbytes = max(paged or [each.nbytes for each in built])
    if len(built) == 1:
        return (Member(groups[0], built[0], 0, spreads[0]),)
    return tuple(
        Member(group, envelope.cut(each, page_nbytes), 0, spread)
        for group, each, spread in zip(groups, built, spreads, strict=True)
    )


def paddings(
    members: Sequence[Member], topology: Topology, order: str
) -> tuple[Padding, ...]:
    """Return the members that waste more than an eighth of what their pages take."""
    found = []
    for member in members:
        taken = member.nbytes
        if member.padding_nbytes <= _MOST * taken:
            continue
        sizes = (
            _sizes_for_state(member, members, topology, order)
            if member.group.is_state
            else _own_sizes(member, topology, order)
        )
        found.append(Padding(member.group.name, member.padding_nbytes, taken, sizes))
    return tuple(found)


def _own_sizes(member: Member, topology: Topology, order: str) -> tuple[int, ...]:
    """Return (least, most) tokens of a page that fill the pool's page, () if none."""
    group, page_nbytes = member.group, member.page_nbytes
    per_token = Fraction(member.envelope.payload_nbytes, group.page_size)
    most = int(page_nbytes // per_token)
    while most > group.page_size:
        sized = dataclasses.replace(group, page_size=most)
        if envelope.build(sized, topology, 0, order).nbytes <= page_nbytes:
            break
        most -= 1
    least = -int(-((1 - _MOST) * page_nbytes) // per_token)
    return (least, most) if least <= most else ()


def _sizes_for_state(
    member: Member, members: Sequence[Member], topology: Topology, order: str
) -> tuple[int, ...]:
    """Return the sizes of the paged groups' pages that a state would fill."""
    whole = envelope.build(member.group, topology, 0, order)
    longest = max(entry.nbytes for entry in whole.entries)
    longest = -(-longest // envelope.ALIGNMENT) * envelope.ALIGNMENT
    found = []
    for size in _STATE_SIZES:
        page_nbytes = max(
            envelope.build(
                dataclasses.replace(each.group, page_size=size), topology, 0, order
            ).nbytes
            for each in members
            if not each.group.is_state
        )
        if page_nbytes >= longest:
            cut = envelope.cut(whole, page_nbytes)
            if cut.padding_nbytes <= _MOST * cut.nbytes:
                found.append(size)
    return tuple(found)
