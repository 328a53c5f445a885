"""Parts: what a text leaves behind, by how long each kind of it is read.

A model of several lifecycle groups keeps a record of every token for full attention and
index keys, the trailing tokens of windows, and states that stand after whole chunks.
Each kind is a part, a store of its own:

    base        all groups that keep every token, their records side by side: so index
                keys and their latent are there together or not at all
    window128   a part a window: the chunks that a query reads, sink tokens included
    state       one row a chunk boundary: what stands after so many tokens

The law: a part is known by lifecycles alone, whatever the page sizes and topologies
are; and what a text of n chunks goes on from is the same rule as in the prefix cache.

    parts = parts_of(groups)
    parts[1].needed(40, chunk_tokens=16)      # range(32, 40) of window128
"""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvmem.errors import IncompatiblePlan, say
from kvmem.geometry import Lifecycle, LifecycleGroup

BASE = "base"
_PART = re.compile(r"(.+)\.(?:base|state|window\d+(?:s\d+)?)")
_TAG_NBYTES = 8  # before a state: how many tokens it stands after, little-endian


class Rows(NamedTuple):
    """Some chunks of a text in one part.

    `ordinals` say which chunks, ascending; of a state, after which one it stands. Row i
    is the records of the tokens of chunk ordinals[i], or a state.
    """

    ordinals: tuple[int, ...]
    rows: np.ndarray  # u8[len(ordinals), bytes]

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return self.rows.nbytes


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of what is kept.

    Args:
        name: of its folder: "base", "window128s4", "state".
        life: which of a text's chunks are read.
        groups: numbers of the groups whose records lie side by side in it.
        sizes: bytes of a record of each of them.
    """

    name: str
    life: Lifecycle
    groups: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def record_nbytes(self) -> int:
        """Bytes of a token in this part, or of a state."""
        return sum(self.sizes)

    @property
    def is_state(self) -> bool:
        """Say whether a row is a state, not a run of tokens."""
        return self.life.kind == "state"

    def row_nbytes(self, chunk_tokens: int) -> int:
        """Return the bytes of a row as it is handed in and out."""
        return self.record_nbytes * (1 if self.is_state else chunk_tokens)

    def stored_nbytes(self, chunk_tokens: int) -> int:
        """Return the record size of the part's store.

        A state's row is its tag and its bytes, padded to a whole number of records.
        """
        if not self.is_state:
            return self.record_nbytes
        return -(-(_TAG_NBYTES + self.record_nbytes) // chunk_tokens)

    def needed(self, num_chunks: int, chunk_tokens: int) -> tuple[int, ...]:
        """Return the chunks without which nobody goes on after `num_chunks`."""
        if num_chunks == 0:
            return ()
        if self.is_state:
            return (num_chunks - 1,)
        stale = self.life.stale(num_chunks * chunk_tokens, chunk_tokens)
        return (*range(stale.start), *range(stale.stop, num_chunks))

    def packed(self, rows: Rows, chunk_tokens: int) -> np.ndarray:
        """Return rows as the part's store takes them: u8[n, stored bytes a chunk]."""
        if not self.is_state:
            return rows.rows
        stored = np.zeros(
            (len(rows.ordinals), self.stored_nbytes(chunk_tokens) * chunk_tokens),
            np.uint8,
        )
        tags = (np.asarray(rows.ordinals, "<u8") + 1) * chunk_tokens
        stored[:, :_TAG_NBYTES] = tags[:, None].view(np.uint8)
        stored[:, _TAG_NBYTES : _TAG_NBYTES + self.record_nbytes] = rows.rows
        return stored

    def unpacked(
        self, ordinals: Sequence[int], stored: np.ndarray, chunk_tokens: int
    ) -> Rows:
        """Return what the part's store gave, u8[n, stored bytes of a chunk], as rows.

        They end before a state that does not stand where its key says.
        """
        if not self.is_state:
            return Rows(tuple(ordinals), stored)
        tags = stored[:, :_TAG_NBYTES].copy().view("<u8")[:, 0].tolist()
        stands = [(at + 1) * chunk_tokens for at in ordinals[: len(tags)]]
        pairs = zip(tags, stands, strict=True)
        good = sum(itertools.takewhile(bool, (a == b for a, b in pairs)))
        states = stored[:good, _TAG_NBYTES : _TAG_NBYTES + self.record_nbytes]
        return Rows(tuple(ordinals[:good]), states)


def parts_of(groups: Sequence[LifecycleGroup]) -> tuple[Part, ...]:
    """Return the parts of a model, base first.

    Raises:
        IncompatiblePlan: no group keeps every token, so no text would be whole.
    """
    lives = list(dict.fromkeys(group.lifecycle for group in groups))
    full = [life for life in lives if life.kind == "full"]
    if not full:
        names = ", ".join(group.name for group in groups)
        raise IncompatiblePlan(
            say(
                f"a store for the groups {names}",
                "a text is kept by the records of all its tokens, and no layer of this "
                "model keeps them",
                "Leave the store out for this model",
            )
        )
    parts = []
    for life in [*full, *(life for life in lives if life.kind != "full")]:
        members = [n for n, group in enumerate(groups) if group.lifecycle == life]
        sizes = tuple(groups[n].record_nbytes for n in members)
        name = BASE if life.kind == "full" else life.name
        parts.append(Part(name, life, tuple(members), sizes))
    return tuple(parts)


def part_id(format_id: str, name: str) -> str:
    """Return the name of a part's folder."""
    return f"{format_id}.{name}"


def whole_id(folder: str) -> str:
    """Return the format id that a folder is a part of, or is."""
    match = _PART.fullmatch(folder)
    return match[1] if match else folder
