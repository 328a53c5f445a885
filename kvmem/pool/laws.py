"""The laws of a pool, checked: every one that is broken, in words.

The law of laws: a page is free or owned, once; the two directions of the map agree; a
virtual page is mapped, in all its parts, exactly while somebody holds it; counters
count. With the tables of all holders, references are counted too: nothing else can see
that one is too many.

    check(pool)                                    # () when sound
    check(pool, holders=[[table_a, table_b]])      # one list of tables for each group
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvmem import errors
from kvmem.pool.ledger import Ledger
from kvmem.pool.state import Pool

__all__ = ["check", "checked"]

# How many pages of one broken law are named before the rest is only counted.
_MAX_NAMED = 8


def check(
    books: Pool | Ledger,
    holders: Sequence[Sequence[np.typing.ArrayLike]] | None = None,
) -> tuple[str, ...]:
    """Return the laws broken by a pool's books, or a ledger's; () when sound.

    Reads the books to the host, never the pages.

    Args:
        holders: for each group, every array of virtual ids that some sequence or cache
            holds; an id in it is one reference, an id beyond the end is padding.
    """
    p2v, free = np.asarray(books.p2v), np.asarray(books.free)
    num_free = int(books.num_free)
    groups = [_GroupView(i, group) for i, group in enumerate(books.groups)]
    is_free, broken = _check_stack("free", free, num_free)
    broken += _check_pages(p2v, is_free, num_free, books.null_owner, groups)
    for view in groups:
        broken += _check_group(view, p2v, books.null_page)
    if holders is not None:
        for view, tables in zip(groups, holders, strict=True):
            broken += _check_holders(view, tables)
    return tuple(broken)


def checked(verb: Callable) -> Callable:
    """Return a verb of the pool in checked mode: asked first, and followed by `check`.

    The ledger of the pool as it stands refuses with numbers what the verb would refuse
    with a flag, before the pool is donated; afterwards the books must be sound, and
    equal to the ledger's. Each call waits for the device and reads every book.

    Raises:
        OutOfPages, InvalidId, ConfigError: as the verb of `Ledger` of the same name.
        KVMemError: the books are broken.
    """

    def run(pool: Pool, *args: object):
        ledger = Ledger.of(pool)
        getattr(ledger, verb.__name__)(*args)
        answer = verb(pool, *args)
        after = answer[0] if isinstance(answer, tuple) else pool
        broken = (*check(after), *ledger.differences(after))
        if broken:
            raise errors.KVMemError(
                errors.say(
                    f"the books after {verb.__name__}"
                    + "".join(f" in group {group}" for group in args[:1]),
                    "; ".join(broken),
                    "Look for who changed them outside the verbs of kvmem.pool",
                )
            )
        return answer

    run.__name__, run.__doc__ = verb.__name__, verb.__doc__
    return run


class _GroupView:
    """One group's books on the host, with its name."""

    def __init__(self, index: int, books):
        self.index = index
        self.v2p, self.refs = np.asarray(books.v2p), np.asarray(books.refs)
        self.pins, self.vfree = np.asarray(books.pins), np.asarray(books.vfree)
        self.num_vfree = int(books.num_vfree)

    def page(self, vpage: int) -> str:
        return f"virtual page {vpage} of group {self.index}"


def _check_stack(name: str, stack: np.ndarray, count: int):
    """Return which ids are free, and what is wrong with the stack itself."""
    free = np.zeros(stack.size, bool)
    if not 0 <= count <= stack.size:
        return free, [f"num_{name} is {count}, outside 0 to {stack.size}"]
    live = stack[:count]
    inside = (live >= 0) & (live < stack.size)
    ids, counts = np.unique(live[inside], return_counts=True)
    free[ids] = True
    strays = live[~inside]
    broken = _named(f"{name} holds page {page}, out of range" for page in strays)
    broken += _named(
        f"{name} holds page {page} more than once" for page in ids[counts > 1]
    )
    return free, broken


def _check_pages(
    p2v: np.ndarray,
    is_free: np.ndarray,
    num_free: int,
    null_owner: tuple[int, int],
    groups: list[_GroupView],
) -> list[str]:
    """Check that each physical page is free or owned, and owned by whom it says."""
    owned = (p2v != np.int32(null_owner)).any(axis=1)
    owners = [f"({g}, {v})" for g, v in p2v.tolist()]
    broken = _named(
        f"page {p} is both free and owned by (group, vpage) {owners[p]}"
        for p in np.nonzero(is_free & owned)[0]
    )
    broken += _named(
        f"page {p} is neither free nor owned" for p in np.nonzero(~is_free & ~owned)[0]
    )
    if num_free + owned.sum() != owned.size:
        broken.append(
            f"num_free is {num_free} and {owned.sum()} pages are owned, "
            f"of {owned.size} in all"
        )
    mapped = np.zeros(owned.size, bool)
    for view in groups:
        mine = np.nonzero(p2v[:, 0] == view.index)[0]
        mine = mine[(p2v[mine, 1] >= 0) & (p2v[mine, 1] < view.refs.size)]
        mapped[mine] = (view.v2p[p2v[mine, 1]] == mine[:, None]).any(axis=1)
    return broken + _named(
        f"page {p} names owner (group, vpage) {owners[p]}, which does not map it"
        for p in np.nonzero(owned & ~mapped)[0]
    )


def _check_group(view: _GroupView, p2v: np.ndarray, null_page: int) -> list[str]:
    """Check one group's map, references, pins and stack."""
    is_free, broken = _check_stack("vfree", view.vfree, view.num_vfree)
    broken = [f"group {view.index}: {law}" for law in broken]
    refs, held = view.refs, view.refs > 0
    parts = view.v2p != null_page
    mapped, whole = parts.any(axis=1), parts.all(axis=1)
    ordered = np.sort(view.v2p, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
    pages = np.clip(view.v2p, 0, null_page - 1)
    owner_group, owner_vpage = p2v[pages][..., 0], p2v[pages][..., 1]
    ids = np.arange(refs.size)[:, None]
    owns = (pages == view.v2p) & (owner_group == view.index) & (owner_vpage == ids)
    laws = [
        (refs < 0, "has {refs} references"),
        (mapped & ~held, "is mapped to {pages} and held by nobody"),
        (~mapped & held, "has {refs} references and no page"),
        (mapped & ~whole, "is mapped in part, {pages}"),
        (whole & twice, "maps one page twice, {pages}"),
        (
            mapped & (parts & ~owns).any(axis=1),
            "maps {pages}, owned by another or out of range",
        ),
        (is_free & (held | mapped), "is both free and in use, refs {refs}"),
        (~is_free & ~held & ~mapped, "is neither free nor in use"),
        (view.pins < 0, "has {pins} pins"),
        ((view.pins > 0) & ~held, "is pinned and held by nobody"),
    ]
    for wrong, text in laws:
        broken += _named(
            f"{view.page(v)} "
            + text.format(refs=refs[v], pages=view.v2p[v].tolist(), pins=view.pins[v])
            for v in np.nonzero(wrong)[0]
        )
    if view.num_vfree + held.sum() != refs.size:
        broken.append(
            f"group {view.index}: num_vfree is {view.num_vfree} and {held.sum()} "
            f"virtual pages are held, of {refs.size} in all"
        )
    return broken


def _check_holders(
    view: _GroupView, tables: Sequence[np.typing.ArrayLike]
) -> list[str]:
    """Check that references are as many as the holders that can be shown."""
    flat = [np.asarray(table, np.int64).reshape(-1) for table in tables]
    ids = np.concatenate([np.zeros(0, np.int64), *flat])
    below = np.unique(ids[ids < 0])
    broken = _named(f"a holder of group {view.index} lists page {v}" for v in below)
    live = ids[(ids >= 0) & (ids < view.refs.size)]
    counts = np.bincount(live, minlength=view.refs.size)
    return broken + _named(
        f"{view.page(v)} has {view.refs[v]} references and {counts[v]} holders"
        for v in np.nonzero(counts != view.refs)[0]
    )


def _named(messages: Iterator[str]) -> list[str]:
    """Return the first messages of one law, and how many more there are."""
    messages = list(messages)
    rest = len(messages) - _MAX_NAMED
    return messages[:_MAX_NAMED] + [f"… and {rest} more like it"] * (rest > 0)
