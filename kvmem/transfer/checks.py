"""Checks: what a transfer refuses, in words, before a byte moves."""

from collections.abc import Sequence

import jax
import numpy as np

from kvmem import errors
from kvmem.canonical.plan import CopyPlan
from kvmem.transfer.arrays import Pages, listed, num_pages
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
    pages: Pages,
    page_ids: Sequence[int] | np.ndarray,
    plan: CopyPlan,
    window: Window,
) -> np.ndarray:
    """Return the page table as i64[M], or refuse what cannot be moved."""
    pages_fit(pages, plan)
    _whole(window)
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
    held = num_pages(pages, plan)
    outside = touched[(touched < 0) | (touched >= held)]
    if outside.size:
        raise errors.InvalidId(
            errors.say(
                f"pages {outside.tolist()}",
                f"the pool has physical pages 0 to {held - 1}",
                "Translate virtual pages first, and give only pages that are held",
            )
        )
    return ids.astype(np.int64)


def pages_fit(pages: Pages, plan: CopyPlan) -> None:
    """Refuse pages that are not a pool of the plan's ranks, arrays and page."""
    arrays = listed(pages)
    _on_devices(arrays)
    _declared(arrays, plan)
    for index, array in enumerate(arrays):
        _is_bytes(array, plan, index)
        _split_over_ranks(array, plan)
        _holds_pages(array, plan, index)
    placed = {(array.sharding, _pages_in(array, plan)) for array in arrays}
    if len(placed) > 1:
        raise errors.IncompatiblePlan(
            errors.say(
                f"arrays placed or sized differently: {sorted(map(str, placed))}",
                "a page id means the same page in every array of a pool",
                "Give all arrays one sharding and one number of pages",
            )
        )


def _whole(window: Window) -> None:
    for number in (window.first_token, window.num_tokens):
        if isinstance(number, bool) or not isinstance(number, int | np.integer):
            raise errors.InvalidId(
                errors.say(
                    f"a window of num_tokens = {window.num_tokens!r} from first_token "
                    f"= {window.first_token!r}",
                    "tokens are counted in whole numbers",
                    "Give an int for each",
                )
            )


def _on_devices(arrays: Sequence[jax.Array]) -> None:
    for array in arrays:
        if not isinstance(array, jax.Array):
            raise errors.FormatMismatch(
                errors.say(
                    f"pages as a {type(array).__name__}",
                    "a pool is a jax array, which says on which device each rank lies",
                    "Give pool.pages, or jnp.asarray of the pages",
                )
            )


def _declared(arrays: Sequence[jax.Array], plan: CopyPlan) -> None:
    if len(arrays) != plan.num_arrays:
        raise errors.FormatMismatch(
            errors.say(
                f"{len(arrays)} arrays with a plan for {plan.num_arrays} "
                f"(order {plan.order!r})",
                "what each array keeps is declared by the order, never guessed from "
                "its shape",
                'Make the plan with an order like "layer | token head field", or give '
                "one array",
            )
        )


def _is_bytes(array: jax.Array, plan: CopyPlan, index: int) -> None:
    regions = _regions(plan, index)
    is_pool = array.ndim == (3 if regions == 1 and plan.num_pages is None else 2)
    if not is_pool or array.dtype != np.uint8:
        shape = "[ranks, pages, page bytes]"
        if plan.num_pages is not None:
            shape = f"[ranks, bytes] with {regions} regions of {plan.num_pages} pages"
        raise errors.FormatMismatch(
            errors.say(
                f"pages of {array.dtype}{array.shape}",
                f"a pool is u8{shape}",
                "Give pool.pages, or view the array as bytes",
            )
        )


def _regions(plan: CopyPlan, index: int) -> int:
    return sum(plane.index == index for plane in plan.planes)


def _pages_in(array: jax.Array, plan: CopyPlan) -> int:
    return array.shape[1] if array.ndim == 3 else plan.num_pages


def _split_over_ranks(array: jax.Array, plan: CopyPlan) -> None:
    if array.sharding.shard_shape(array.shape)[1:] != array.shape[1:]:
        raise errors.IncompatiblePlan(
            errors.say(
                f"pages sharded by {array.sharding}",
                "a pool is split over its ranks and along no other axis",
                'Shard pages with NamedSharding(mesh, PartitionSpec("tp"))',
            )
        )
    ranks = array.shape[0]
    if ranks != plan.topology.ranks:
        raise errors.IncompatiblePlan(
            errors.say(
                f"a pool of {ranks} ranks with a plan for {plan.topology.ranks}",
                "a plan says which heads each rank holds",
                f"Make the plan for {ranks} ranks",
            )
        )


def _holds_pages(array: jax.Array, plan: CopyPlan, index: int) -> None:
    planes = [plane for plane in plan.planes if plane.index == index]
    needed, unit = planes[0].page_stride, "pages"
    if array.ndim == 2:
        needed = max(plane.address(plan.num_pages) for plane in planes)
        unit = "an array"
    if array.shape[-1] < needed:
        raise errors.FormatMismatch(
            errors.say(
                f"{unit} of {array.shape[-1]} bytes with a plan for {needed}",
                "a page holds its whole envelope",
                "Make plan and pool from one group, page size and order",
            )
        )


def records_fit(
    records: np.ndarray, plan: CopyPlan, num_tokens: int, name: str
) -> None:
    """Refuse records of another dtype, count or length than the plan's."""
    shape = (num_tokens, plan.record_nbytes)
    if not isinstance(records, np.ndarray | jax.Array):
        raise errors.FormatMismatch(
            errors.say(
                f"{name} as a {type(records).__name__}",
                "records are an array of bytes, a row a token",
                "Give u8[num_tokens, record]",
            )
        )
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
