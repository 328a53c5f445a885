"""Records: tokens out of a pool's pages as token records, and back into pages.

The two verbs of this room. The page table is the caller's (physical ids on the host),
the plan says which byte is which, and the records say nothing of either: what one
topology exports, every other one imports.

    records = export_records(pool.pages, page_ids, plan, num_tokens=704)
    pages = import_records(reader.pages, their_ids, records, their_plan)

Every argument is checked before a byte moves, so a refused import changes nothing.
"""

import functools
from collections.abc import Sequence

import numpy as np

from kvmem.canonical.plan import CopyPlan
from kvmem.transfer import checks, device, host, replicas
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

    Every byte is read from one of its holders; over whole pages, however many and
    whatever their ids, holders of a head give equally much to within one field.

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
        export = functools.partial(device.export_pages, pages, ids, plan, window)
    else:
        export = functools.partial(
            host.export_pages, pages, ids, plan, window, threads=threads
        )
    export(out)
    if verify_replicas:
        replicas.verify(export, plan, window, out)
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
