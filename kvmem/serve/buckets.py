"""Buckets: the shapes that steps are compiled for, declared before the first of them.

A step's arrays are padded to a bucket (rows, new tokens, table width), so the number of
compiled programs is the number of declared buckets that traffic touches, whatever the
lengths. Widths grow by factors of 4/3 and 3/2, so a table is at most a third too wide:
a step reads every page of its table, and reading is what a decode step mostly does.

    buckets = declare(ServeConfig(max_batch=8, max_length=1024), page_size=16)
    buckets.decode(rows=3, length=130)        # Bucket(rows=8, tokens=1, pages=12)
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from kvmem import errors, settings
from kvmem.geometry import LifecycleGroup
from kvmem.prefix import policy

__all__ = ["Bucket", "Buckets", "ServeConfig", "declare"]

_FIRST_WIDTH = 128


class Bucket(NamedTuple):
    """Static shapes of one step: rows S, new tokens a row Q, table width M in pages.

    `logits` of the last new tokens of each row are computed, and `features` of them
    returned too (0: of none). The new tokens stand in one chain, or in several.
    """

    rows: int
    tokens: int
    pages: int
    logits: int = 1
    features: int = 0
    chains: int = 1

    def width(self, group: LifecycleGroup) -> int:
        """Return the columns of a group's table: of a window, the most it holds."""
        if group.is_state:
            return 1
        life, size = group.lifecycle, group.page_size
        return life.peak(self.pages * size, size, self.tokens)


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """How an engine batches.

    Args:
        max_batch: sequences that run at once.
        max_length: tokens of the longest sequence, prompt and output.
        prefill_chunk: tokens of a prompt computed in one step, at most.
        batches: row counts a decode step is compiled for; empty: 1, half and all of
            max_batch.
        chunks: token counts a prefill step is compiled for; empty: prefill_chunk and
            its half, quarter and eighth.
        widths: table widths in tokens; empty: 128, 192, 256, 384, ... to max_length.
        prefix_cache: share the pages of equal prefixes between requests.
        eviction: which cached pages are forgotten first: "lru" (used longest ago),
            "lfu" (used least often) or "size_aware" (long and seldom used).
        compile_cache: keep compiled programs on disk (where jax is not set to already).
    """

    max_batch: int = 8
    max_length: int = 2048
    prefill_chunk: int = 256
    batches: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    prefix_cache: bool = True
    eviction: str = "lru"
    compile_cache: bool = True

    def __post_init__(self):
        settings.settle(self)
        laws = {
            "max_batch >= 1": self.max_batch >= 1,
            "max_length >= 2": self.max_length >= 2,
            "prefill_chunk >= 1": self.prefill_chunk >= 1,
            "max(batches) == max_batch": not self.batches
            or max(self.batches) == self.max_batch,
            "max(chunks) == prefill_chunk": not self.chunks
            or max(self.chunks) == self.prefill_chunk,
            f"eviction is one of {', '.join(policy.NAMED)}": self.eviction
            in policy.NAMED,
            "max(widths) >= max_length": not self.widths
            or max(self.widths) >= self.max_length,
            "every bucket >= 1": all(
                size >= 1 for size in (*self.batches, *self.chunks, *self.widths)
            ),
        }
        broken = [law for law, holds in laws.items() if not holds]
        if broken:
            raise errors.ConfigError(
                errors.say(
                    f"serving with {self}",
                    f"the law is {', '.join(broken)}",
                    "Change the values named, or leave the lists empty",
                )
            )


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Declared sizes, ascending; `pages` are table widths.

    `drafted` tokens of each row may be verified in one step, 0 where nobody drafts;
    in `chains` beside each other; `features` says that steps answer with the hidden
    rows of all their tokens too.
    """

    batches: tuple[int, ...]
    chunks: tuple[int, ...]
    pages: tuple[int, ...]
    page_size: int
    drafted: int = 0
    features: bool = False
    chains: int = 1

    def decode(self, rows: int, length: int) -> Bucket:
        """Return the bucket of one new token for `rows` sequences up to `length`."""
        return self._bucket(_at_least(self.batches, rows), 1, self._width(length))

    def prefill(self, tokens: int, length: int) -> Bucket:
        """Return the bucket of a chunk of `tokens` that ends at `length`.

        A chunk of one token is what a decode step of one row computes.
        """
        return self._bucket(1, _at_least(self.chunks, tokens), self._width(length))

    def verify(self, rows: int, length: int) -> Bucket:
        """Return the bucket of the drafted tokens of `rows` sequences, and one of each
        sequence's own, up to `length`; with logits for all of them."""
        rows, tokens = _at_least(self.batches, rows), self.drafted + 1
        bucket = self._bucket(rows, tokens, self._width(length), tokens)
        return bucket._replace(chains=self.chains)

    def choices(self, count: int) -> int:
        """Return the rows that a sampler is compiled for, no fewer than `count`."""
        sizes = self.batches
        if self.drafted:
            sizes = sorted({*sizes, *(rows * (self.drafted + 1) for rows in sizes)})
        return _at_least(sizes, count)

    def all(self) -> tuple[Bucket, ...]:
        """Return every declared bucket once: batches and chunks, at each width."""
        shapes = [(rows, 1, 1) for rows in self.batches]
        shapes += [(1, tokens, 1) for tokens in self.chunks]
        plain = [
            self._bucket(rows, tokens, pages, logits)
            for rows, tokens, logits in dict.fromkeys(shapes)
            for pages in self.pages
        ]
        if not self.drafted:
            return tuple(plain)
        sizes = [(rows, pages) for rows in self.batches for pages in self.pages]
        verified = [self.verify(rows, pages * self.page_size) for rows, pages in sizes]
        return (*plain, *verified)

    def _bucket(self, rows: int, tokens: int, pages: int, logits: int = 1) -> Bucket:
        return Bucket(rows, tokens, pages, logits, tokens if self.features else 0)

    def _width(self, length: int) -> int:
        return _at_least(self.pages, -(-length // self.page_size))


def declare(
    config: ServeConfig,
    page_size: int,
    drafted: int = 0,
    features: bool = False,
    chains: int = 1,
) -> Buckets:
    """Return the buckets of an engine, defaults filled in."""
    batches = config.batches or (1, config.max_batch // 2, config.max_batch)
    chunks = config.chunks or [config.prefill_chunk >> n for n in range(4)]
    widths = config.widths or _widths(config.max_length)
    pages = {-(-width // page_size) for width in widths}
    return Buckets(
        batches=tuple(sorted({size for size in batches if size})),
        chunks=tuple(sorted({size for size in chunks if size})),
        pages=tuple(sorted(pages)),
        page_size=page_size,
        drafted=drafted,
        features=features,
        chains=chains,
    )


def _widths(max_length: int) -> tuple[int, ...]:
    """Return 128, 192, 256, 384, 512, ... up to the first that holds max_length."""
    widths = [_FIRST_WIDTH]
    while widths[-1] < max_length:
        power = _FIRST_WIDTH << ((len(widths) - 1) // 2)
        widths.append(power * 3 // 2 if len(widths) % 2 else power * 2)
    return tuple(widths)


def _at_least(sizes: Sequence[int], wanted: int) -> int:
    for size in sizes:
        if size >= wanted:
            return size
    raise AssertionError(f"no bucket of {wanted} among {sizes}")
