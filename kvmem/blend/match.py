"""Match: texts that were computed once, found again at any offset of another text.

A text is registered by its chunks of C tokens, side by side, under a polynomial hash of
64 bits. In a text that is looked up the hash rolls over every position. The law: a hit
is a hit only when the chunk's whole digest and then its tokens are equal, so what is
found is there; every occurrence is found, however often and wherever it stands, and
there is no limit on how many texts are registered. A hit grows to both sides as far as
tokens are equal: any run of 2C - 1 tokens of a registered text is found whole.

    library = Library(chunk_tokens=32)
    number = library.add(document, kept=records)
    library.find(system + other + document)    # (Run(start=…, stop=…, text=number),)
"""

import collections
import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvmem import errors

__all__ = ["Library", "Run", "Text", "require_chunk", "rolling"]

_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that its powers have inverses
_INVERSE = np.uint64(pow(int(_BASE), -1, 1 << 64))
_DIGEST_NBYTES = 16


class Run(NamedTuple):
    """Tokens [start, stop) of a text are tokens from `offset` on of a registered one.

    Of the two, only tokens are equal: their keys stand `start - offset` places apart.
    """

    start: int
    stop: int
    text: int
    offset: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the run."""
        return self.stop - self.start

    @property
    def delta(self) -> int:
        """Places that its keys are to be moved on."""
        return self.start - self.offset

    @property
    def is_prefix(self) -> bool:
        """Say whether both texts begin with it: then nothing was seen but itself."""
        return self.start == self.offset == 0


@dataclasses.dataclass(frozen=True, eq=False)
class Text[T]:
    """A registered text, and whatever was kept of it."""

    tokens: np.ndarray  # i32[n]
    kept: T


class _Place(NamedTuple):
    """A chunk of a registered text."""

    digest: bytes
    text: int
    offset: int


class Library[T]:
    """Registered texts; numbers are never given twice."""

    def __init__(self, chunk_tokens: int):
        self.chunk_tokens = chunk_tokens
        self.texts: dict[int, Text[T]] = {}
        self._places: dict[int, list[_Place]] = collections.defaultdict(list)
        self._next = 0

    def __len__(self) -> int:
        """Return how many texts are registered."""
        return len(self.texts)

    def add(self, tokens: Sequence[int] | np.ndarray, kept: T) -> int:
        """Register a text; return its number.

        Args:
            tokens: token ids, at least one chunk of them.
            kept: what is to be had again when it is found.

        Raises:
            ConfigError: a text that no chunk of this size lies in.
        """
        ids = _as_ids(tokens)
        require_chunk(len(ids), self.chunk_tokens)
        number, self._next = self._next, self._next + 1
        self.texts[number] = Text(ids, kept)
        hashes = rolling(ids, self.chunk_tokens)[:: self.chunk_tokens]
        for at, value in enumerate(hashes.tolist()):
            offset = at * self.chunk_tokens
            digest = _digest(ids[offset : offset + self.chunk_tokens])
            self._places[value].append(_Place(digest, number, offset))
        return number

    def forget(self, number: int) -> None:
        """Drop a text.

        Raises:
            InvalidId: it is not registered.
        """
        if number not in self.texts:
            raise errors.InvalidId(
                errors.say(
                    f"text {number}",
                    f"{len(self)} texts are registered, and it is none of them",
                    "Give a number that `add` returned, once",
                )
            )
        ids = self.texts.pop(number).tokens
        values = rolling(ids, self.chunk_tokens)[:: self.chunk_tokens]
        for value in set(values.tolist()):
            left = [place for place in self._places[value] if place.text != number]
            if left:
                self._places[value] = left
            else:
                del self._places[value]

    def occurrences(self, tokens: Sequence[int] | np.ndarray) -> tuple[Run, ...]:
        """Return every chunk of a registered text at every place where it stands."""
        ids = _as_ids(tokens)
        hashes = rolling(ids, self.chunk_tokens).tolist()
        return tuple(
            Run(at, at + self.chunk_tokens, place.text, place.offset)
            for at, value in enumerate(hashes)
            for place in self._equal(ids, at, self._places.get(value, ()))
        )

    def find(
        self, tokens: Sequence[int] | np.ndarray, first: int = 0
    ) -> tuple[Run, ...]:
        """Return runs that cover what is found of a text, ascending, none overlapping.

        Where several registered texts have a token, one that begins both texts is
        taken, for that is exact; then the longest run, the earliest of equals.

        Args:
            tokens: the text.
            first: tokens before it are not looked up.
        """
        ids = _as_ids(tokens)
        found, is_free = [], np.ones(len(ids), bool)
        is_free[:first] = False
        ranked = sorted(
            self._runs(ids, first), key=lambda run: (not run.is_prefix, -run.num_tokens)
        )
        for run in ranked:
            # One piece is left: what was taken is longer, or begins the text, and so
            # lies over one of the run's ends.
            left = np.flatnonzero(is_free[run.start : run.stop])
            if left.size:
                before, stop = int(left[0]), run.start + int(left[-1]) + 1
                start = run.start + before
                found.append(Run(start, stop, run.text, run.offset + before))
                is_free[start:stop] = False
        return tuple(sorted(found))

    def _runs(self, ids: np.ndarray, first: int) -> Iterator[Run]:
        """Yield every run around a chunk, as far as tokens are equal, once each."""
        stops: dict[tuple[int, int], int] = {}  # by text, and by how far it is moved
        hashes = rolling(ids, self.chunk_tokens)[first:].tolist()
        for at, value in enumerate(hashes, first):
            places = [
                place
                for place in self._places.get(value, ())
                if stops.get((place.text, at - place.offset), 0) <= at
            ]
            for place in self._equal(ids, at, places):
                run = self._grown(ids, at, place)
                stops[run.text, run.delta] = run.stop
                yield run

    def _equal(
        self, ids: np.ndarray, at: int, places: Sequence[_Place]
    ) -> list[_Place]:
        """Return the chunks that stand at `at`: equal digests and equal tokens."""
        if not places:
            return []
        window = ids[at : at + self.chunk_tokens]
        digest = _digest(window)
        return [
            place
            for place in places
            if place.digest == digest and np.array_equal(self._chunk(place), window)
        ]

    def _chunk(self, place: _Place) -> np.ndarray:
        own = self.texts[place.text].tokens
        return own[place.offset : place.offset + self.chunk_tokens]

    def _grown(self, ids: np.ndarray, at: int, place: _Place) -> Run:
        """Return the run around a chunk."""
        own, offset = self.texts[place.text].tokens, place.offset
        room = min(at, offset)
        back = _common(ids[at - room : at][::-1], own[offset - room : offset][::-1])
        ahead = _common(ids[at:], own[offset:])
        return Run(at - back, at + ahead, place.text, offset - back)


def require_chunk(num_tokens: int, chunk_tokens: int) -> None:
    """Refuse a text that is shorter than a chunk.

    Raises:
        ConfigError: with both sizes.
    """
    if num_tokens < chunk_tokens:
        raise errors.ConfigError(
            errors.say(
                f"a text of {num_tokens} tokens to be found again",
                f"texts are found by chunks of {chunk_tokens} tokens",
                "Register longer texts, or lower blend.chunk_tokens",
            )
        )


def rolling(ids: np.ndarray, width: int) -> np.ndarray:
    """Return u64[n - width + 1]: the hash of every window of `width` tokens.

    With S[i] the sum of (t_j + 1) B^j over j < i, a window's is (S[i + w] - S[i]) B^-i,
    all modulo 2^64: equal windows have equal hashes wherever they stand.
    """
    if len(ids) < width:
        return np.empty(0, np.uint64)
    with np.errstate(over="ignore"):
        sums = np.zeros(len(ids) + 1, np.uint64)
        values = ids.astype(np.uint64) + np.uint64(1)
        np.cumsum(values * _powers(_BASE, len(ids)), out=sums[1:])
        windows = sums[width:] - sums[: len(sums) - width]
        return windows * _powers(_INVERSE, len(windows))


def _powers(base: np.uint64, count: int) -> np.ndarray:
    """Return 1, base, base^2, ... modulo 2^64."""
    factors = np.full(count, base, np.uint64)
    factors[:1] = 1
    return np.cumprod(factors)


def _common(left: np.ndarray, right: np.ndarray) -> int:
    """Count the tokens with which both begin."""
    length = min(len(left), len(right))
    differs = np.flatnonzero(left[:length] != right[:length])
    return int(differs[0]) if differs.size else length


def _digest(ids: np.ndarray) -> bytes:
    return hashlib.blake2b(ids.tobytes(), digest_size=_DIGEST_NBYTES).digest()


def _as_ids(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.array(tokens, np.int32)
