"""Records: tokens out of a pool's pages as token records, and back into pages.

The two verbs of this room. The page table is the caller's (physical ids on the host),
the plan says which byte is which, and the records say nothing of either: what one
topology exports, every other one imports.

    records = export_records(pool.pages, page_ids, plan, num_tokens=704)
    pages = import_records(reader.pages, their_ids, records, their_plan)

Every argument is checked before a byte moves, so a refused import changes nothing.
"""

from collections.abc import Sequence

import numpy as np

from kvmem import errors
from kvmem.canonical.judge import Objection, judge
from kvmem.canonical.plan import CopyPlan
from kvmem.transfer import checks, device, host
from kvmem.transfer.arrays import Pages
from kvmem.transfer.choose import choose
from kvmem.transfer.window import Window

__all__ = ["export_records", "import_records"]

PageIds = Sequence[int] | np.ndarray


def export_records(
    pages: Pages,
    page_ids: PageIds,
    plan: CopyPlan,
    num_tokens: int,
    first_token: int = 0,
    out: np.ndarray | None = None,
    *,
    implementation: str = "auto",
    verify_replicas: bool = False,
    threads: int = 1,
) -> np.ndarray:
    """Return the records of tokens [first_token, first_token + num_tokens).

    Args:
        pages: u8[R, P, E], on one device or split over its ranks; a tuple where the
            plan's order has several arrays.
        page_ids: physical pages of the sequence by table position; positions that hold
            none of the tokens are not looked at.
        out: u8[num_tokens, record] to fill, C-contiguous; None: a new array.
        implementation: "host", "device" or "auto" (see `choose`).
        verify_replicas: compare the bytes of every holder of a head.
        threads: host executor only; numpy copies without the interpreter's lock.

    Raises:
        FormatMismatch: pages or `out` of another shape or dtype than the plan's.
        InvalidId: a table too short, or a page outside the pool.
        CorruptPage: `verify_replicas` found holders that differ; names the ranks.
    """
    pages = tuple(pages) if isinstance(pages, list) else pages
    window = Window(first_token, num_tokens, plan.page_tokens)
    ids = checks.page_table(pages, page_ids, plan, window)
    if out is None:
        out = np.empty((num_tokens, plan.record_nbytes), np.uint8)
    checks.records_fit(out, plan, num_tokens, "out")
    checks.writable(out)
    checks.threads_count(threads)
    chosen = choose(pages, implementation).implementation
    if num_tokens == 0:
        return out
    if chosen == "device":
        out[...] = device.export_pages(pages, ids, plan, window)
    else:
        host.export_pages(pages, ids, plan, window, out, threads)
    if verify_replicas:
        _verify(chosen, pages, ids, plan, window, out)
    return out


def import_records(
    pages: Pages,
    page_ids: PageIds,
    records: np.ndarray,
    plan: CopyPlan,
    first_token: int = 0,
    *,
    implementation: str = "auto",
    threads: int = 1,
) -> Pages:
    """Write records into the slots of their tokens, on every holder. Donates `pages`.

    Bytes of other tokens and padding keep their values.

    Args:
        pages: u8[R, P, E], on one device or split over its ranks; a tuple where the
            plan's order has several arrays.
        page_ids: physical pages by table position, as for `export_records`.
        records: u8[num_tokens, record]; row 0 is token `first_token` of the table.

    Raises:
        FormatMismatch: records of another length or dtype than the plan's.
        InvalidId: a table too short, a page outside the pool, or one page twice.
    """
    pages = tuple(pages) if isinstance(pages, list) else pages
    window = Window(first_token, len(records), plan.page_tokens)
    checks.records_fit(records, plan, len(records), "records")
    ids = checks.page_table(pages, page_ids, plan, window)
    checks.distinct(ids, window)
    checks.threads_count(threads)
    chosen = choose(pages, implementation).implementation
    if len(records) == 0:
        return pages
    if chosen == "device":
        return device.import_pages(pages, ids, plan, window, records)
    packed = np.ascontiguousarray(records)
    return host.import_pages(pages, ids, plan, window, packed, threads)


def _verify(chosen, pages, ids, plan, window, records) -> None:
    """Compare every replica's bytes with the elected ones, rank by rank."""
    seen = np.empty_like(records)
    for rank in plan.replicated:
        if chosen == "device":
            seen[...] = device.export_pages(pages, ids, plan, window, rank=rank)
        else:
            host.export_pages(pages, ids, plan, window, seen, rank=rank)
        merged = np.where(_held(plan, rank, window), seen, records)
        objections = judge(records, merged, plan.group, window.first_token)
        if objections:
            raise errors.CorruptPage(
                errors.say(
                    f"verify_replicas: rank {rank} differs from "
                    f"ranks {_other_holders(plan, rank, objections[0])}",
                    f"all holders of a head keep equal bytes; {objections[0]}, and "
                    f"{len(objections) - 1} more fields",
                    "Compute these tokens again on every rank",
                )
            )


def _held(plan: CopyPlan, rank: int, window: Window) -> np.ndarray:
    """Return bool[num_tokens, record]: the bytes that `rank` holds."""
    _, canonical = plan.units_of(plan.runs[rank])
    units = plan.record_nbytes // plan.unit_nbytes
    held = np.zeros(plan.page_tokens * units, bool)
    held[canonical] = True
    tokens = np.arange(window.first_token, window.stop_token) % plan.page_tokens
    return np.repeat(held.reshape(-1, units)[tokens], plan.unit_nbytes, axis=1)


def _other_holders(plan: CopyPlan, rank: int, found: Objection) -> list[int]:
    (field,) = (
        f for f in plan.group.fields if (f.layer, f.name) == (found.layer, found.field)
    )
    shard = plan.topology.dcp_index(rank)
    holders = plan.topology.holders(field, found.head)
    return [r for r in holders if r != rank and plan.topology.dcp_index(r) == shard]
