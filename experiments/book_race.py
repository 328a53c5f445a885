"""The pool's books and bytes: handout, zeroing, and rows written by the token.

Books are timed alone, on pages of a few bytes: one page to each of many sequences, with
references counted and shortage flagged. Zeroing is timed apart, against memset of the
same bytes. The law under test: no verb costs more in a larger pool.

    timed = interleave(handout_jobs((1024, 65536), 256, calls=8), rounds=9)
"""

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness import Timed
from kvmem import geometry, pool, prefix
from kvmem.geometry import LayerSpec, Topology
from kvmem.model.attention import write_rows
from kvmem.pool import dispatch, moves, verbs

__all__ = [
    "MEMSET_ONE",
    "MEMSET_PAGES",
    "ZERO",
    "handout_jobs",
    "ledger_job",
    "prefix_job",
]
__all__ += ["write_jobs", "zero_jobs"]

MEMSET_PAGES, MEMSET_ONE, ZERO = "memset_of_pages", "one_memset", "zero"
_PAGE_NBYTES = 16
_HEAD_DIM = 128
_ROW_NBYTES = 4096  # of a token: 16 heads of 128 in bf16, keys and values together


def handout_jobs(
    pool_sizes: Sequence[int], sequences: int, calls: int
) -> dict[str, Callable[[], Timed]]:
    """Return a job a pool size: the books of handing one page to each sequence.

    A job's figure is the median of `calls` handouts; the releases between them, which
    bring the pages back in another order, are not timed.
    """
    return {
        f"handout_{size}_pages": functools.partial(
            _handouts, _Books(size), sequences, calls
        )
        for size in pool_sizes
    }


class _Books:
    """A pool of tiny pages, held across jobs."""

    def __init__(self, num_pages: int):
        self.pool = pool.init(num_pages, _PAGE_NBYTES)


def _handouts(books: _Books, sequences: int, calls: int) -> Timed:
    want = np.ones(sequences, np.int32)
    rng = np.random.default_rng(books.pool.num_pages)
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        books.pool, vpages, ok = dispatch.call(
            verbs._handout_books, books.pool, 0, want, 1
        )
        jax.block_until_ready((books.pool, vpages, ok))
        seconds.append(time.perf_counter() - start)
        assert bool(ok), "a page for everybody"
        given = rng.permutation(np.asarray(vpages)[:, 0])
        assert len(set(given.tolist())) == sequences, "no page twice"
        books.pool, rejected = pool.release(books.pool, 0, given)
        assert not np.asarray(rejected).any()
    return Timed(statistics.median(seconds))


def zero_jobs(page_nbytes: int, count: int) -> dict[str, Callable[[], object]]:
    """Return jobs that clear `count` pages of a pool twice as large, and memset.

    memset clears the same pages in the same order. One memset of as many bytes in one
    run is there for scale: libc writes a run longer than the caches past them, which no
    order of single pages can have.
    """
    shape = (2 * count, page_nbytes)
    order = np.random.default_rng(0).permutation(shape[0]).astype(np.int32)
    stack, zero = jnp.asarray(order), jax.jit(moves.zero, donate_argnums=0)
    plain, run = np.ones(shape, np.uint8), np.ones(count * page_nbytes, np.uint8)
    first = order[:count].tolist()

    def memset_pages() -> None:
        for page in first:
            plain[page].fill(0)

    pages = jnp.ones((1, *shape), jnp.uint8)
    return {
        MEMSET_PAGES: memset_pages,
        ZERO: _held(pages, lambda pages: zero(pages, stack, 0, count)),
        MEMSET_ONE: lambda: run.fill(0),
    }


def write_jobs(
    pool_nbytes: Sequence[int], tokens: int, page_size: int
) -> dict[str, Callable[[], jax.Array]]:
    """Return jobs that write a token of each of `tokens` sequences, a pool size each.

    By the pool's own verb, by attention's (keys and values of head-major pages), and,
    for scale, by a plain scatter into an array that is stored as bf16. A row is 4 KiB.
    """
    jobs = {}
    for nbytes in pool_nbytes:
        rng, name = np.random.default_rng(0), f"{nbytes >> 20}_mib_pool"
        num_pages = nbytes // (page_size * _ROW_NBYTES)
        ids = rng.permutation(num_pages)[:tokens].astype(np.int32)
        slots = rng.integers(0, page_size, tokens).astype(np.int32)
        rows = jnp.asarray(
            rng.standard_normal((tokens, _ROW_NBYTES // 2)), jnp.bfloat16
        )
        jobs[f"tokens_write_{name}"] = _by_pool(num_pages, page_size, ids, slots, rows)
        jobs[f"attention_write_{name}"] = _by_attention(
            num_pages, page_size, ids, slots, rows
        )
        jobs[f"plain_scatter_{name}"] = _by_scatter(
            num_pages * page_size, ids * page_size + slots, rows
        )
    return jobs


def ledger_job(num_pages: int, pages: int) -> Callable[[], object]:
    """Return a job: the host's books hand `pages` out and take them back."""
    ledger = pool.Ledger(num_pages)

    def cycle() -> None:
        vpages = ledger.handout(0, [pages], pages)[0]
        ledger.release(0, vpages)

    return cycle


def prefix_job(texts: int, tokens: int, shared: int, page_size: int):
    """Return a job: find a text of `tokens` among many that begin alike."""
    cache, rng = prefix.PrefixCache(page_size), np.random.default_rng(0)
    beginning = rng.integers(0, 1 << 15, shared).tolist()
    known = [
        beginning + rng.integers(0, 1 << 15, tokens - shared).tolist()
        for _ in range(texts)
    ]
    whole = tokens // page_size
    for number, text in enumerate(known):
        cache.publish(text, range(number * whole, (number + 1) * whole))
    order = itertools.cycle(rng.permutation(texts).tolist())
    return lambda: cache.match(known[next(order)])


def _by_pool(num_pages, page_size, ids, slots, rows) -> Callable[[], jax.Array]:
    """Write whole rows of one entry with `pool.tokens.write`."""
    heads = _ROW_NBYTES // 2 // _HEAD_DIM
    built = _envelope(heads, page_size, "token_major")
    entry = built.entries[0]
    raw = jax.lax.bitcast_convert_type(rows, jnp.uint8).reshape(len(ids), -1)
    pages = jnp.zeros((num_pages, entry.nbytes * page_size), jnp.uint8)  # keys alone
    return _held(pages, lambda pages: pool.tokens.write(pages, entry, ids, slots, raw))


def _by_attention(num_pages, page_size, ids, slots, rows) -> Callable[[], jax.Array]:
    """Write keys and values of head-major pages, as a decode step does."""
    heads = _ROW_NBYTES // 4 // _HEAD_DIM
    built = _envelope(heads, page_size, "head_major")
    k, v = jnp.split(rows.reshape(len(ids), 1, 2 * heads, _HEAD_DIM), 2, axis=2)
    args = (k, v, ids[:, None], slots, np.ones(len(ids), np.int32))
    write = jax.jit(
        lambda pages, *args: write_rows(pages, built, "layers.0", *args),
        donate_argnums=0,
    )
    pages = jnp.zeros((num_pages, built.nbytes), jnp.uint8)
    return _held(pages, lambda pages: write(pages, *args))


def _by_scatter(num_slots, at, rows) -> Callable[[], jax.Array]:
    """Scatter rows into an array that is stored as bf16."""
    scatter = jax.jit(
        lambda array, at, rows: array.at[at].set(rows, mode="drop"), donate_argnums=0
    )
    array = jnp.zeros((num_slots, rows.shape[1]), rows.dtype)
    return _held(array, lambda array: scatter(array, at, rows))


def _envelope(heads: int, page_size: int, order: str) -> geometry.Envelope:
    """Return the page of one layer of bf16."""
    layer = LayerSpec("layers.0", 0, "gqa", heads, _HEAD_DIM, dtype="bfloat16")
    (group,) = geometry.group_layers((layer,), page_size)
    return geometry.envelope.build(group, Topology(), 0, order)


def _held(array: jax.Array, verb: Callable) -> Callable[[], jax.Array]:
    """Return a job that donates an array and keeps what comes back."""
    held = [array]

    def job() -> jax.Array:
        held.append(verb(held.pop()))
        return held[0]

    return job
