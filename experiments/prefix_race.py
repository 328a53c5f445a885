"""What bench_prefix times: a tree of texts that begin alike, and pages given back.

A turn makes a tree anew: texts are entered, found, missed, and half of the pages are
evicted and released into a pool, tails first. The law: what is found and what is
dropped is counted in every turn, so nothing is timed that does nothing.
"""

import time
from collections.abc import Callable

import numpy as np

from experiments.measure import Timed
from kvmem import pool
from kvmem.prefix import Hit, PrefixCache
from kvmem.serve.page_table import PageTable

__all__ = ["LOOKUPS", "Forest", "free_job", "lookup_job", "texts"]

LOOKUPS = 100_000  # of a turn of the calibrated job
_VOCABULARY = 50_000


def texts(requests: int, tokens: int, stems: int, shared: int) -> list[list[int]]:
    """Return token ids of `requests` texts, the first `shared` those of one stem."""
    rng = np.random.default_rng(0)
    heads = rng.integers(0, _VOCABULARY, (stems, shared)).tolist()
    tails = rng.integers(0, _VOCABULARY, (requests, tokens - shared)).tolist()
    return [heads[at % stems] + tail for at, tail in enumerate(tails)]


def lookup_job() -> Callable[[], object]:
    """Return the calibrated job: look-ups in a dict of 65,536 integers."""
    table = {n: n for n in range(65_536)}
    keys = [n % 65_536 for n in range(0, 7 * LOOKUPS, 7)]
    return lambda: [table[key] for key in keys][0]


class Forest:
    """One tree over texts, its pages out of a pool `slack` times as large."""

    def __init__(self, known: list[list[int]], page_size: int, slack: int = 1):
        self._known = known
        self._tails = [text[len(text) // 2 :] for text in known]
        self._page_size = page_size
        self._pages = len(known[0]) // page_size
        self._slack = slack
        self._cache = PrefixCache(page_size)
        self._ledger = pool.Ledger(1)

    def jobs(self) -> dict[str, Callable[[], object]]:
        """Return the parts of a turn, in their order."""
        return {
            "insert": self.insert,
            "match": self.match,
            "miss": self.miss,
            "evict_half": self.evict_half,
        }

    def insert(self) -> Timed:
        """Enter every text into an empty tree, its pages handed out before."""
        total = len(self._known) * self._pages
        self._ledger = pool.Ledger(self._slack * total)
        pages = self._ledger.handout(0, [total], total)[0].tolist()
        rows = [pages[at : at + self._pages] for at in range(0, total, self._pages)]
        self._cache = cache = PrefixCache(self._page_size)
        pairs = list(zip(self._known, rows, strict=True))
        took = _timed(lambda: [cache.publish(text, row) for text, row in pairs])
        kept = set(cache.vpages())
        self._ledger.release(0, [page for page in pages if page not in kept])
        return took

    def match(self) -> None:
        """Find every text."""
        cache, whole = self._cache, (self._pages - 1) * self._page_size
        for text in self._known:
            assert cache.match(text).num_tokens >= whole

    def miss(self) -> None:
        """Look for as many texts that are not there."""
        cache = self._cache
        for text in self._tails:
            assert cache.match(text).num_tokens == 0

    def evict_half(self) -> Timed:
        """Drop half of the tree's pages and release them."""
        cache, ledger = self._cache, self._ledger
        refs, half = ledger.groups[0].refs, cache.num_pages // 2
        free = ledger.num_free
        took = _timed(
            lambda: ledger.release(0, cache.evict(half, lambda v: refs[v] == 1))
        )
        assert ledger.num_free == free + half
        return took


def free_job(pool_pages: int, sequences: int, pages: int) -> Callable[[], Timed]:
    """Return a job: sequences of a batch give `pages` back, one after the other."""

    def job() -> Timed:
        table = PageTable(pool.Ledger(pool_pages), PrefixCache(16))
        text = [0] * (16 * pages)
        held = [table.begin(Hit(0, ()), text) for _ in range(sequences)]
        took = _timed(lambda: [table.give_back(each) for each in held])
        assert table.accounts().free == pool_pages
        return took

    return job


def _timed(work: Callable[[], object]) -> Timed:
    start = time.perf_counter()
    work()
    return Timed(time.perf_counter() - start)
