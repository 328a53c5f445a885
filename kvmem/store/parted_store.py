"""A store of several parts: all that a text needs to go on, or nothing of it.

    <root>/<model_id>/<format_id>.base/<segment>/        records of every token
                      <format_id>.window128/<segment>/   of the tokens windows read
                      <format_id>.state/<segment>/       states after whole chunks

The law: `put` writes windows and states before the base, so a chunk of the base is the
commit of its text; `get` serves the longest prefix that every part can go on from, the
fixed point of the prefix cache, and where a row of any part is missing, damaged or of
other tokens the prefix is shorter: never a part without the others.

    with PartedStore.open(root, model_id, format_id, parts_of(groups)) as store:
        store.put(keys, tokens, {"state": states, "base": records})
        found = store.get(keys, tokens)      # found.rows["state"] stands after num_hit

Each part is a `PageStore` of its own folder; they share the root's one writer lock.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from kvmem.errors import FormatMismatch, InvalidId, say
from kvmem.geometry import hit_pages
from kvmem.store import requests, root_folder, shared_lock
from kvmem.store.page_key import PageKey
from kvmem.store.page_store import PageStore, refuse_url
from kvmem.store.parted_reader import PartedReader, holds
from kvmem.store.parts import BASE, Part, Rows, part_id
from kvmem.store.record_store import RecordStats, RecordStore
from kvmem.store.results import Erased, GcReport, PutResult, SegmentReport
from kvmem.store.segment import Facts
from kvmem.store.segment_store import SegmentStore


@dataclasses.dataclass(frozen=True, eq=False)
class PartedResult:
    """What a text may go on from, and which part ends it there.

    `rows` has all that is read after `num_hit` chunks, of chunks from `first` on. The
    reason is a part's name and one of `GetResult`'s, as in "state: not_found".
    """

    num_hit: int  # leading chunks, those before `first` included
    rows: Mapping[str, Rows]
    reason: str | None
    detail: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(rows.nbytes for rows in self.rows.values())


@dataclasses.dataclass(frozen=True)
class PartedStats:
    """All parts as one, and each by itself; chunks of the base are counted."""

    num_chunks: int
    nbytes: int  # of all parts
    written: int
    written_nbytes: int  # of all parts
    already_present: int
    hits: int
    misses: dict[str, int]  # calls of get that fell short, by reason
    parts: dict[str, RecordStats]


class PartedStore:
    """The parts of one model id and format id."""

    def __init__(
        self, facts: Facts, parts: Sequence[Part], stores: Mapping[str, RecordStore]
    ):
        """Join stores, one a part; `open` makes those of a root.

        Args:
            facts: of the whole: its record is the base's.
            parts: base first.
            stores: by the name of their part, each of the part's `stored_nbytes`.
        """
        self.facts, self.parts = facts, tuple(parts)
        self.stores = dict(stores)
        self.root: Path | None = None
        self._written_nbytes = 0
        self._hits = 0
        self._misses: collections.Counter[str] = collections.Counter()

    @classmethod
    def open(
        cls,
        root: str | Path,
        model_id: str,
        format_id: str,
        parts: Sequence[Part],
        chunk_tokens: int = 16,
        read_only: bool = False,
    ) -> "PartedStore":
        """Open every part of a root's model and format, making them if they are new.

        Args:
            root: the store's folder.
            model_id, chunk_tokens, read_only: as `PageStore.open` says.
            format_id: of the whole model, all groups in one digest.
            parts: what it keeps.

        Raises:
            StoreLocked: another writer has the root open.
            FormatMismatch: the root holds another chunk or record size.
        """
        refuse_url(root)
        facts = Facts(model_id, format_id, int(chunk_tokens), parts[0].record_nbytes)
        root_folder.check_facts(facts)
        shares = [None] * len(parts)
        if not read_only:
            lock = root_folder.take(Path(root).absolute(), chunk_tokens)
            shares = shared_lock.split(lock, len(parts))
        try:
            stores = {
                part.name: PageStore.open(
                    root,
                    model_id,
                    part_id(format_id, part.name),
                    part.stored_nbytes(chunk_tokens),
                    chunk_tokens,
                    read_only,
                    lock=share,
                )
                for part, share in zip(parts, shares, strict=True)
            }
        except BaseException:
            for share in filter(None, shares):
                share.release()
            raise
        made = cls(facts, parts, stores)
        made.root = Path(root).absolute()
        return made

    @property
    def writable(self) -> bool:
        """Say whether `put` may be called."""
        return all(store.writable for store in self.stores.values())

    def __enter__(self) -> "PartedStore":
        """Return the store."""
        return self

    def __exit__(self, *_) -> None:
        """Close the store."""
        self.close()

    def close(self) -> None:
        """Close every part; the last one lets the next writer in."""
        with contextlib.ExitStack() as closing:
            for store in self.stores.values():
                closing.callback(store.close)

    def put(
        self,
        keys: Sequence[PageKey],
        tokens: np.ndarray,
        rows: Mapping[str, Rows],
    ) -> PutResult:
        """Keep rows of one text; return once they are durable, and what the base did.

        Args:
            keys: of the text's whole chunks, from its first on.
            tokens: i32[n, chunk_tokens] or flat.
            rows: of each part, those that are not held (`holds`).

        Raises:
            InvalidId: a part that is not this store's, or a chunk without a key.
            Conflict, FormatMismatch, StoreLocked, OSError: as `PageStore.put`. What
                was written before it is no hit: the base commits.
        """
        keys, tokens = requests.checked_request(self.facts, keys, tokens)
        self._check_rows(len(keys), rows)
        done = PutResult(0, 0, 0, None)
        for part in (*self.parts[1:], self.parts[0]):
            given = rows.get(part.name)
            if given is None or not given.ordinals:
                continue
            at = list(given.ordinals)
            chunk = self.facts.chunk_tokens
            kept = self.stores[part.name].put(
                [keys[i] for i in at],
                tokens[at],
                part.packed(given, chunk).reshape(len(at), chunk, -1),
                parent=keys[at[0] - 1] if at[0] else None,
            )
            self._written_nbytes += kept.nbytes
            done = kept if part.name == BASE else done
        return done

    def get(
        self,
        keys: Sequence[PageKey],
        tokens: np.ndarray,
        deadline_s: float | None = None,
        *,
        first: int = 0,
        page_tokens: int = 1,
    ) -> PartedResult:
        """Return what a text may go on from: the longest prefix that suits all parts.

        Args:
            keys: of the text's whole chunks, from its first on.
            tokens: i32[n, chunk_tokens] or flat; compared with those stored.
            deadline_s: seconds that it may take; what has not come by then is a miss.
            first: chunks before it are the caller's own, and not read.
            page_tokens: a window's rows begin with that page, where they are there.
        """
        keys, tokens = requests.checked_request(self.facts, keys, tokens)
        asked = PartedReader(self.parts, self.stores, keys, tokens, first, deadline_s)
        num_hit, rows = asked.settle()
        reason, detail = (None, "")
        if num_hit < len(keys):
            reason, detail = asked.blame(num_hit)
            self._misses[reason] += 1
        if num_hit <= first:
            return PartedResult(min(first, num_hit), {}, reason, detail)
        self._hits += num_hit - first
        for part in self.parts:
            if part.life.kind == "window":
                rows[part.name] = asked.extended(part, rows[part.name], page_tokens)
        return PartedResult(num_hit, rows, reason, detail)

    def holds(self, name: str, keys: Sequence[PageKey]) -> np.ndarray:
        """Return bool[n]: which keys a part holds; nothing is read or verified."""
        return holds(self.stores[name], keys)

    def contains(self, keys: Sequence[PageKey]) -> int:
        """Return how many leading chunks every part could go on from."""
        lives = [part.life for part in self.parts]
        held = [self.holds(part.name, keys) for part in self.parts]
        return hit_pages(lives, self.facts.chunk_tokens, held)

    def refresh(self) -> int:
        """Take in what another process wrote, the base first; count its segments."""
        return sum(
            store.refresh()
            for store in self.stores.values()
            if isinstance(store, SegmentStore)
        )

    def verify(self) -> dict[str, tuple[SegmentReport, ...]]:
        """Read every byte of every part."""
        return {name: store.verify() for name, store in self.stores.items()}

    def gc(self) -> dict[str, GcReport]:
        """Tidy every part."""
        return {name: store.gc() for name, store in self.stores.items()}

    def retain(self, keep: Collection[PageKey]) -> Erased:
        """Keep the chunks of these keys alone in every part, the base's first."""
        parts = [self.stores[part.name].retain(keep) for part in self.parts]
        rest = sum((each.num_lost for each in parts[1:]), parts[0].num_lost)
        unread = sum(each.unread_nbytes for each in parts)
        return Erased(parts[0].num_chunks, rest, unread)

    def stats(self) -> PartedStats:
        """Return counters and what is held."""
        parts = {name: store.stats() for name, store in self.stores.items()}
        base = parts[BASE]
        return PartedStats(
            num_chunks=base.num_chunks,
            nbytes=sum(each.nbytes for each in parts.values()),
            written=base.written,
            written_nbytes=self._written_nbytes,
            already_present=base.already_present,
            hits=self._hits,
            misses=dict(self._misses),
            parts=parts,
        )

    def _check_rows(self, num_chunks: int, rows: Mapping[str, Rows]) -> None:
        """Refuse what cannot be put, before anything is."""
        widths = {p.name: p.row_nbytes(self.facts.chunk_tokens) for p in self.parts}
        for name, given in rows.items():
            at = given.ordinals
            fits = all(0 <= i < num_chunks for i in at) and list(at) == sorted(set(at))
            if name not in self.stores or not fits:
                raise InvalidId(
                    say(
                        f"rows {list(at)} of part {name!r} of {num_chunks} chunks",
                        f"the parts here are {', '.join(self.stores)}, and rows are of "
                        "chunks that have a key, ascending",
                        "Make parts with parts_of(groups), keys with chain_keys",
                    )
                )
            shape = len(at), widths[name]
            if given.rows.shape != shape or given.rows.dtype != np.uint8:
                raise FormatMismatch(
                    say(
                        f"rows {given.rows.dtype}{list(given.rows.shape)} of {name!r}",
                        f"they are uint8{list(shape)}",
                        "View the bytes as uint8, one row a chunk or a state",
                    )
                )
