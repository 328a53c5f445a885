"""Between the engine's pages and texts that were computed before, at any place.

What a store's chunks are to a prefix, registered texts are to the rest of a prompt:
their records are turned to the new place, put into the sequence's own pages, and a
share of their tokens is computed anew. The law: at least one known token is left to a
step; a text that begins a prompt as it was registered is exact, everything behind it is
not, and a sequence that holds such pages shares them with nobody (`is_mixed`). Only
equal identities share texts.

    pool, blended = blender.fill(pool, sequence)     # tokens that need no step
    blender.keep(pool, sequence)                     # a text to be found again
"""

import dataclasses
import time
from collections.abc import Mapping
from collections.abc import Sequence as ListLike
from typing import NamedTuple

import numpy as np

from kvmem import canonical, errors, transfer
from kvmem import pool as pools
from kvmem.blend import BlendConfig, Library, Run, gate, match
from kvmem.blend.recompute import Batch, Recompute, Shape, null_table, rounded
from kvmem.geometry import LifecycleGroup, Topology, rerotate
from kvmem.serve.identity import PLAIN, Identity
from kvmem.serve.request import Sequence
from kvmem.serve.step import Stepper, envelopes

__all__ = ["Blended", "Blender"]

_THREADS = 2
Records = Mapping[str, np.ndarray]  # u8[n, record] by the group's name


class Blended(NamedTuple):
    """What was put into a sequence's pages.

    Of `num_tokens`, `num_exact` are a registered text's own beginning, `num_reused`
    were found elsewhere, and `num_recomputed` of these computed anew.
    """

    num_tokens: int = 0
    num_exact: int = 0
    num_reused: int = 0
    num_recomputed: int = 0


class Blender:
    """Registered texts seen from one engine.

    `fill_s` are seconds spent in putting them into pages so far.

    Args:
        config: what is recomputed.
        stepper: the engine's: weights, groups, placement.
        topology, order: of the pool's pages.
        ledger: says which physical pages a virtual one is.
        drafts: whether the engine drafts.

    Raises:
        IncompatiblePlan: a model that cannot be blended, with every law it breaks; or
            an engine that drafts.
    """

    def __init__(
        self,
        config: BlendConfig,
        stepper: Stepper,
        topology: Topology,
        order: str,
        ledger: pools.Ledger,
        drafts: bool = False,
    ):
        groups = stepper.groups
        gate.require(groups, topology, config)
        _require_no_draft(drafts)
        self.config = config
        self.groups: tuple[LifecycleGroup, ...] = groups
        self.fill_s = 0.0
        self._ledger = ledger
        self._plans = [canonical.plan(group, topology, order) for group in groups]
        self._pass = Recompute(
            stepper.weights,
            envelopes(groups, topology, order),
            gate.check_layer(groups, config),
            stepper.mesh,
        )
        self._libraries: dict[Identity, Library[Records]] = {}
        self._learning: dict[int, int | None] = {}

    @property
    def num_traces(self) -> int:
        """How often the pass was traced."""
        return self._pass.num_traces

    def add(
        self, tokens: ListLike[int], records: Records, identity: Identity = PLAIN
    ) -> int:
        """Register a text by its records, wherever they come from; return its number.

        Args:
            tokens: token ids, computed from the beginning of a text.
            records: u8[n, record] of every group, by its name; copied.
            identity: whose text it is; its epoch is that of the weights that computed
                the text, the first ones' (0) if it names none.

        Raises:
            FormatMismatch: a group's records are missing, or are not these tokens'.
            ConfigError: a text shorter than a chunk, or one with images.
        """
        self.require_registrable(tokens, identity)
        self._require_whole(len(tokens), records)
        held = {name: np.array(rows) for name, rows in records.items()}
        return self._hold(tokens, held, identity)

    def _hold(self, tokens: ListLike[int], held: Records, identity: Identity) -> int:
        """Register a text by records that nobody else has."""
        library = self._libraries.setdefault(
            _dated(identity), Library(self.config.chunk_tokens)
        )
        return library.add(tokens, held)

    def require_registrable(self, tokens: ListLike[int], identity: Identity) -> None:
        """Refuse a text that could not be found again, before it is computed.

        Raises:
            ConfigError: a text shorter than a chunk, or one with images.
        """
        match.require_chunk(len(tokens), self.config.chunk_tokens)
        if identity.images:
            raise errors.ConfigError(
                errors.say(
                    "a text with images to be found again",
                    "a text is found by its tokens, and placeholders say nothing",
                    "Register the text around them",
                )
            )

    def forget(self, number: int, identity: Identity = PLAIN) -> None:
        """Drop a registered text.

        Raises:
            InvalidId: there is none of that number under this identity.
        """
        none = Library(self.config.chunk_tokens)
        self._libraries.get(_dated(identity), none).forget(number)

    def clear(self) -> None:
        """Drop every registered text, of all identities."""
        self._libraries.clear()

    def texts(self, identity: Identity = PLAIN) -> tuple[int, ...]:
        """Return the numbers of the texts that are registered under an identity."""
        library = self._libraries.get(_dated(identity))
        return () if library is None else tuple(library.texts)

    def learn(self, request_id: int) -> None:
        """Let a request be computed exactly, and its prompt be registered."""
        self._learning[request_id] = None

    def learned(self, request_id: int) -> int | None:
        """Return the number of a text that was learned, None if it was not; once."""
        return self._learning.pop(request_id)

    def keep(self, pool: pools.Pool, sequence: Sequence) -> None:
        """Register the prompt of a finished sequence, if it was to be learned.

        Not that of a mixed one: what other weights began is no text of either.
        """
        if sequence.request_id not in self._learning or sequence.is_mixed:
            return
        count = sequence.num_prompt
        records = {
            group.name: transfer.export_records(
                pool.pages,
                self._pages(sequence, number),
                self._plans[number],
                num_tokens=count,
                threads=_THREADS,
            )
            for number, group in enumerate(self.groups)
        }
        number = self._hold(sequence.tokens[:count], records, sequence.identity)
        self._learning[sequence.request_id] = number

    def fill(
        self, pool: pools.Pool, sequence: Sequence, left: int = 1
    ) -> tuple[pools.Pool, Blended]:
        """Donates `pool`. Put what is found of a sequence's tokens into its pages.

        All known tokens but the last `left` are in the pages then, or as many as
        before. The pages must be handed out on the device, those from `num_computed` on
        be its own.
        """
        started = time.perf_counter()
        known, first = len(sequence.tokens) - left, sequence.num_computed
        library = self._library_of(sequence)
        if library is None or known <= first:
            return pool, Blended()
        runs = library.find(sequence.tokens[:known])
        exact = [run for run in runs if run.is_prefix and run.stop > first]
        stop = max([first, *(run.stop for run in exact)])
        num_exact = stop - first
        if exact:
            pool = self._put(pool, sequence, library, _clipped(exact, first, stop))
        later = _clipped(runs, stop, known)
        num_reused = sum(run.num_tokens for run in later)
        if num_reused < self.config.min_tokens:
            self.fill_s += time.perf_counter() - started
            return pool, Blended(num_exact, num_exact)
        pool = self._put(pool, sequence, library, later)
        pool, num_recomputed = self._compute(pool, sequence, stop, known, later)
        self.fill_s += time.perf_counter() - started
        done = Blended(known - first, num_exact, num_reused, num_recomputed)
        return pool, done

    def _library_of(self, sequence: Sequence) -> Library[Records] | None:
        """Return the texts that a sequence may share; at ratio 1 nothing is reused."""
        if self.config.recomputes_all or sequence.request_id in self._learning:
            return None
        return self._libraries.get(sequence.identity)

    def _put(
        self,
        pool: pools.Pool,
        sequence: Sequence,
        library: Library[Records],
        runs: ListLike[Run],
    ) -> pools.Pool:
        """Donates `pool`. Write the records of runs, turned to their new places."""
        pages = pool.pages
        for number, group in enumerate(self.groups):
            table = self._pages(sequence, number)
            for run in runs:
                kept = library.texts[run.text].kept[group.name]
                records = kept[run.offset : run.offset + run.num_tokens]
                if run.delta and self._turns(group):
                    records = transfer.rerotate(
                        records, group, run.delta, threads=_THREADS
                    )
                pages = transfer.import_records(
                    pages,
                    table,
                    records,
                    self._plans[number],
                    first_token=run.start,
                    threads=_THREADS,
                )
        return dataclasses.replace(pool, pages=pages)

    def _compute(
        self,
        pool: pools.Pool,
        sequence: Sequence,
        start: int,
        stop: int,
        runs: ListLike[Run],
    ) -> tuple[pools.Pool, int]:
        """Donates `pool`. Compute what was not found in [start, stop), and the share
        of what was; return how many tokens that share has."""
        count = stop - start
        is_reused = np.zeros(rounded(count), bool)
        for run in runs:
            is_reused[run.start - start : run.stop - start] = True
        num_reused = int(is_reused.sum())
        num_recomputed = self.config.num_recomputed(num_reused)
        num_chosen = count - num_reused + num_recomputed
        shape = Shape(len(is_reused), rounded(num_chosen), bool(num_recomputed))
        tokens = np.zeros(len(is_reused), np.int32)
        tokens[:count] = sequence.tokens[start:stop]
        width = -(-rounded(stop, 128) // self.groups[0].page_size)
        batch = Batch(
            tokens,
            is_reused,
            np.int32(start),
            np.int32(count),
            np.int32(num_chosen),
            tuple(self._table(sequence, g, width) for g in range(len(self.groups))),
        )
        pages = self._pass(pool.pages, shape, batch)
        return dataclasses.replace(pool, pages=pages), num_recomputed

    def _pages(self, sequence: Sequence, group: int) -> np.ndarray:
        """Return the physical pages of a sequence by their place in its text."""
        return self._ledger.translate(group, sequence.held.columns[group])

    def _table(self, sequence: Sequence, group: int, width: int) -> np.ndarray:
        ids = self._pages(sequence, group)[:width]
        table = null_table(width)
        table[: len(ids)] = ids
        return table

    def _turns(self, group: LifecycleGroup) -> bool:
        """Say whether a group's rows are turned: all but an index that may be stale."""
        if not self.config.allow_stale_selector:
            return True
        return not any(rerotate.obstacle(layer) for layer in group.layers)

    def _require_whole(self, count: int, records: Records) -> None:
        faults = []
        for group in self.groups:
            found = records.get(group.name)
            if not isinstance(found, np.ndarray):
                faults.append(f"those of group {group.name!r} are missing")
            elif found.shape != (count, group.record_nbytes) or found.dtype != np.uint8:
                faults.append(
                    f"those of group {group.name!r} are "
                    f"{found.dtype}{list(found.shape)}, "
                    f"not uint8[{count}, {group.record_nbytes}]"
                )
        if faults:
            raise errors.FormatMismatch(
                errors.say(
                    f"records of a text of {count} tokens",
                    f"a text is reused with all of its groups: {'; '.join(faults)}",
                    f"Give u8[n, record] of {', '.join(g.name for g in self.groups)}",
                )
            )


def _dated(identity: Identity) -> Identity:
    return identity.at_epoch(identity.epoch or 0)


def _require_no_draft(drafts: bool) -> None:
    if drafts:
        raise errors.IncompatiblePlan(
            errors.say(
                "blending in an engine that drafts",
                "a draft goes on from what the target's steps gave it, and reused "
                "tokens take no step",
                "Leave [blend] or [speculative] out",
            )
        )


def _clipped(runs: ListLike[Run], start: int, stop: int) -> list[Run]:
    """Return what of the runs lies in [start, stop)."""
    found = []
    for run in runs:
        first, last = max(run.start, start), min(run.stop, stop)
        if first < last:
            moved = run.offset + first - run.start
            found.append(Run(first, last, run.text, moved))
    return found
