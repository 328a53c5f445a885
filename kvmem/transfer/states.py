"""States: the record of a recurrent state, out of the pages it is cut into, and back.

In a unified pool a state lies in K pages, cut between its entries; its record is made
by the plan of the whole. So the pages are joined into one, as large as the uncut state,
and a transfer of one page does the rest. The law: bytes move between the uncut page and
its parts entry by entry, and no byte of another page is read or written.

    record = export_state(pool.pages, parts, plan, envelope.cut(whole, page_nbytes))
    pages = import_state(reader.pages, their_parts, record, their_plan, their_cut)
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvmem import errors
from kvmem.canonical.plan import CopyPlan
from kvmem.geometry import Envelope
from kvmem.transfer import checks
from kvmem.transfer.records import PageIds, export_records, import_records
from kvmem.transfer.window import Window

__all__ = ["export_state", "import_state"]


class _Span(NamedTuple):
    """An entry's bytes in the uncut page, and in its parts end to end."""

    whole: int
    cut: int
    nbytes: int


def export_state(
    pages: jax.Array, parts: PageIds, plan: CopyPlan, cut: Envelope
) -> np.ndarray:
    """Return the record of one state, u8[record].

    Args:
        pages: u8[R, P, E], as for `export_records`.
        parts: K physical pages, in the order of the envelope's extents.
        plan: of the state's group.
        cut: the group's envelope, cut to pages of E bytes.

    Raises:
        InvalidId: not K pages, or one outside the pool.
        FormatMismatch: pages that are not those of the envelope.
    """
    ids = _checked(pages, parts, cut)
    joined = _joiner(_spans(plan, cut), plan.page_nbytes, pages.sharding)(pages, ids)
    return export_records(joined, [0], plan, num_tokens=1)[0]


def import_state(
    pages: jax.Array, parts: PageIds, record: np.ndarray, plan: CopyPlan, cut: Envelope
) -> jax.Array:
    """Write the record of one state into its pages, on every rank. Donates `pages`.

    Padding between entries becomes zero.

    Args:
        record: u8[record], as `export_state` gives it.

    Raises:
        FormatMismatch: a record of another length; nothing has changed then.
    """
    ids = _checked(pages, parts, cut)
    if len(np.unique(ids)) != len(ids):
        checks.distinct(ids, Window(0, len(ids), 1))
    shape = pages.shape[0], 1, plan.page_nbytes
    joined = jnp.zeros(shape, jnp.uint8, device=pages.sharding)
    joined = import_records(joined, [0], np.asarray(record)[None], plan)
    return _parter(_spans(plan, cut), pages.sharding)(pages, ids, joined)


def _checked(pages: jax.Array, parts: PageIds, cut: Envelope) -> np.ndarray:
    """Return the parts as i32[K], or refuse them."""
    ids = np.asarray(parts, np.int32)
    inside = ids.size == 0 or (ids.min() >= 0 and ids.max() < pages.shape[1])
    if ids.shape != (cut.extents,) or not inside:
        raise errors.InvalidId(
            errors.say(
                f"a state in pages {ids.tolist()}",
                f"it lies in {cut.extents} of the physical pages 0 to "
                f"{pages.shape[1] - 1}",
                "Give the parts of one held virtual page",
            )
        )
    if pages.shape[2] * cut.extents != cut.nbytes:
        raise errors.FormatMismatch(
            errors.say(
                f"pages of {pages.shape[2]} bytes",
                f"the state is cut into {cut.extents} parts of {cut.nbytes} bytes in "
                "all",
                "Cut the envelope to the pool's own pages",
            )
        )
    return ids


@functools.lru_cache(maxsize=64)
def _spans(plan: CopyPlan, cut: Envelope) -> tuple[_Span, ...]:
    """Return where each entry stands, by its place in the uncut page."""
    part_nbytes = cut.nbytes // cut.extents
    pairs = zip(plan.envelope(0).entries, cut.entries, strict=True)
    return tuple(
        sorted(
            _Span(whole.offset, part.extent * part_nbytes + part.offset, whole.nbytes)
            for whole, part in pairs
        )
    )


@functools.lru_cache(maxsize=64)
def _joiner(
    spans: Sequence[_Span], nbytes: int, sharding: jax.sharding.Sharding
) -> Callable[[jax.Array, np.ndarray], jax.Array]:
    def join(pages, ids):  # u8[R, P, E], i32[K] -> u8[R, 1, nbytes]
        held = pages[:, ids].reshape(pages.shape[0], -1)
        moves = [(span.whole, span.cut, span.nbytes) for span in spans]
        return _laid_out(held, moves, nbytes)[:, None]

    return jax.jit(join, out_shardings=sharding)


@functools.lru_cache(maxsize=64)
def _parter(
    spans: Sequence[_Span], sharding: jax.sharding.Sharding
) -> Callable[[jax.Array, np.ndarray, jax.Array], jax.Array]:
    def part(pages, ids, joined):  # the other way round, into the pages
        ranks, _, page_nbytes = pages.shape
        moves = [(span.cut, span.whole, span.nbytes) for span in spans]
        held = _laid_out(joined[:, 0], moves, ids.size * page_nbytes)
        return pages.at[:, ids].set(held.reshape(ranks, -1, page_nbytes))

    return jax.jit(part, donate_argnums=0, out_shardings=sharding)


def _laid_out(
    source: jax.Array, moves: Sequence[tuple[int, int, int]], nbytes: int
) -> jax.Array:
    """Return u8[R, nbytes]: pieces (to, from, bytes) of the source, zeros between."""
    pieces, end = [], 0
    for to, start, size in sorted(moves):
        pieces.append(jnp.zeros((source.shape[0], to - end), jnp.uint8))
        pieces.append(source[:, start : start + size])
        end = to + size
    pieces.append(jnp.zeros((source.shape[0], nbytes - end), jnp.uint8))
    return jnp.concatenate(pieces, axis=1)
