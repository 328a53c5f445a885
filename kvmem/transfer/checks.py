"""Checks: what a transfer refuses, in words, before a byte moves."""

from collections.abc import Sequence

import jax
import numpy as np

from kvmem import errors
from kvmem.canonical.plan import CopyPlan
from kvmem.transfer.window import Window

__all__ = [
    "distinct",
    "page_table",
    "pages_fit",
    "records_fit",
    "threads_count",
    "writable",
]


def page_table(
    pages: jax.Array,
    page_ids: Sequence[int] | np.ndarray,
    plan: CopyPlan,
    window: Window,
) -> np.ndarray:
    """Return the page table as i64[M], or refuse what cannot be moved."""
    pages_fit(pages, plan)
    if window.first_token < 0 or window.num_tokens < 0:
        raise errors.InvalidId(
            errors.say(
                f"tokens [{window.first_token}, {window.stop_token})",
                "positions and counts are not negative",
                "Give first_token >= 0 and num_tokens >= 0",
            )
        )
    ids = np.asarray(page_ids)
    if ids.size == 0:
        ids = ids.astype(np.int64)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise errors.InvalidId(
            errors.say(
                f"a page table of {ids.dtype}{ids.shape}",
                "a table is one row of integers",
                "Give one physical page id a position",
            )
        )
    if len(ids) < window.pages.stop:
        raise errors.InvalidId(
            errors.say(
                f"tokens up to {window.stop_token} from {len(ids)} pages",
                f"a page keeps {window.page_tokens} tokens",
                f"Give a table of {window.pages.stop} pages",
            )
        )
    touched = ids[window.pages.start : window.pages.stop]
    outside = touched[(touched < 0) | (touched >= pages.shape[1])]
    if outside.size:
        raise errors.InvalidId(
            errors.say(
                f"pages {outside.tolist()}",
                f"the pool has physical pages 0 to {pages.shape[1] - 1}",
                "Translate virtual pages first, and give only pages that are held",
            )
        )
    return ids.astype(np.int64)


def pages_fit(pages: jax.Array, plan: CopyPlan) -> None:
    """Refuse pages that are not a pool of the plan's ranks and page."""
    if pages.ndim != 3 or pages.dtype != np.uint8:
        raise errors.FormatMismatch(
            errors.say(
                f"pages of {pages.dtype}{pages.shape}",
                "a pool is u8[ranks, pages, page bytes]",
                "Give pool.pages",
            )
        )
    if pages.sharding.shard_shape(pages.shape)[1:] != pages.shape[1:]:
        raise errors.IncompatiblePlan(
            errors.say(
                f"pages sharded by {pages.sharding}",
                "a pool is split over its ranks and along no other axis",
                'Shard pages with NamedSharding(mesh, PartitionSpec("tp"))',
            )
        )
    ranks, _, page_nbytes = pages.shape
    if ranks != plan.topology.ranks:
        raise errors.IncompatiblePlan(
            errors.say(
                f"a pool of {ranks} ranks with a plan for {plan.topology.ranks}",
                "a plan says which heads each rank holds",
                f"Make the plan for {ranks} ranks",
            )
        )
    if page_nbytes < plan.page_nbytes:
        raise errors.FormatMismatch(
            errors.say(
                f"pages of {page_nbytes} bytes with a plan for {plan.page_nbytes}",
                "a page holds its whole envelope",
                "Make plan and pool from one group, page size and order",
            )
        )


def records_fit(
    records: np.ndarray, plan: CopyPlan, num_tokens: int, name: str
) -> None:
    """Refuse records of another dtype, count or length than the plan's."""
    shape = (num_tokens, plan.record_nbytes)
    if records.dtype != np.uint8:
        raise errors.FormatMismatch(
            errors.say(
                f"{name} of {records.dtype}",
                "a record is bytes; a cast would change them",
                "Give uint8, for example by `.view(np.uint8)`",
            )
        )
    if records.shape != shape:
        raise errors.FormatMismatch(
            errors.say(
                f"{name} of {records.shape[-1]} bytes a row, shape {records.shape}",
                f"a record of this model is {plan.record_nbytes} bytes, shape {shape}",
                "Read with the model that wrote, and compare format ids",
            )
        )


def distinct(ids: np.ndarray, window: Window) -> None:
    """Refuse a table that names one of the window's pages twice."""
    touched = ids[window.pages.start : window.pages.stop]
    if len(np.unique(touched)) != len(touched):
        raise errors.InvalidId(
            errors.say(
                f"an import into pages {touched.tolist()}",
                "one page cannot hold the tokens of two table positions",
                "Give every position a page of its own",
            )
        )


def writable(out: np.ndarray) -> None:
    """Refuse an `out` that records cannot be laid into, one after another."""
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise errors.FormatMismatch(
            errors.say(
                "an `out` that is read-only or strided",
                "records are written in place, one after another",
                "Give a writable C-contiguous array",
            )
        )


def threads_count(threads: int) -> None:
    """Refuse a number of threads that cannot copy anything."""
    if threads < 1:
        raise errors.ConfigError(
            errors.say(
                f"threads = {threads}",
                "at least one thread copies",
                "Give threads >= 1",
            )
        )
