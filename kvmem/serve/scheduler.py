"""Who runs next: admission, chunks of prefill, batches of decode, preemption.

A pure host object over a `PageTable`; it never touches a device. Laws: a request that
can never fit is refused when it arrives; an admitted sequence has pages for every token
it already knows (of a window, for those of its next step); when pages run short, the
newest sequence gives all of its own back and waits, so the oldest always goes on; one
that was sent back twice begins again only when another has ended; whatever ends, its
pages return exactly once. Where a draft keeps memory of its own, a sequence begins with
both or not at all.
Looking for a waiting sequence's prefix changes nothing and evicts nothing; and only
tokens that are computed, accepted, and all of one epoch of weights are published.

    scheduler.add(sequence)
    scheduler.admit()                 # waiting -> running, prefix hits adopted
    work = scheduler.plan()           # Work("prefill" | "decode", rows), or None
    scheduler.advance(work)           # their tokens are computed

A sequence with one token left decodes, one with more prefills: a prefix hit that leaves
one token goes straight to the decode batch. Where layers keep a recurrent state, a
prefill chunk ends at the last whole page that leaves a token, and where another text
has parted before: there a snapshot is taken, and others may go on from it.
"""

from collections import deque
from typing import Protocol

from kvmem import errors
from kvmem.prefix import Hit
from kvmem.serve import admissible
from kvmem.serve.draft import room
from kvmem.serve.holding import Holding
from kvmem.serve.page_table import PageTable
from kvmem.serve.request import Sequence
from kvmem.serve.work import Admission, Row, Work

__all__ = ["Partner", "Scheduler"]

_MAX_RETRACTED = 2  # times that a sequence is sent back before another ends


class Partner(Protocol):
    """Who else keeps memory of the sequences that run: a draft."""

    def begin(self, sequence: Sequence, may_wait: bool) -> bool:
        """Make room for a sequence; say whether it may run.

        Args:
            sequence: with its tokens known.
            may_wait: whether others run, that may give pages back.
        """

    def forked(self, sequence: Sequence, twin: Sequence) -> None:
        """Learn that a twin goes on from what its sequence has computed."""

    def forget(self, sequence: Sequence) -> None:
        """Give back what is kept of a sequence, if anything is."""

    def clear(self) -> int:
        """Drop what is cached of texts that have ended; return the pages freed."""


class Scheduler:
    """Sequences waiting and running, and the policy between them."""

    def __init__(
        self,
        table: PageTable,
        *,
        max_batch: int,
        prefill_chunk: int,
        max_length: int,
        prefix_cache: bool = True,
        draft: Partner | None = None,
        headroom: int = 0,
    ):
        self.table = table
        self.prefix_cache = prefix_cache
        self.max_batch = max_batch
        self.prefill_chunk = prefill_chunk
        self.max_length = max_length
        self.draft = draft
        self.headroom = headroom  # drafted tokens that a step may add
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preempted = 0
        self._sent_back: list[Sequence] = []  # since another ended
        self.weights_epoch = 0
        self._prefilled_last = False

    @property
    def has_work(self) -> bool:
        """Say whether any sequence is waiting or running."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for admission, first come first served.

        Raises:
            OutOfPages: it could never fit, alone in an empty pool.
            ConfigError: an empty prompt, one beyond the longest text, more samples
                than a batch holds, images beyond the prompt, other weights.
        """
        admissible.require(
            sequence,
            self.table.needs,
            max_batch=self.max_batch,
            max_length=self.max_length,
            prefill_chunk=self.prefill_chunk,
            weights_epoch=self.weights_epoch,
        )
        sequence.identity = sequence.identity.at_epoch(self.weights_epoch)
        self.waiting.append(sequence)

    def admit(self) -> list[Admission]:
        """Move waiting sequences into the running set while pages and rows allow.

        Pages of a cached prefix are shared, the rest of what is known is handed out.
        """
        admitted = []
        while self.waiting and self._has_rows_for(self.waiting[0]):
            sequence = self.waiting[0]
            if sequence.num_retracted >= _MAX_RETRACTED and self.running:
                break
            is_first = not sequence.was_admitted
            if not self._give_pages(sequence):
                break
            self.waiting.popleft()
            self.running.append(sequence)
            admitted.append(Admission(sequence, is_first))
        return admitted

    def plan(self) -> Work | None:
        """Choose the next step; prefill chunks and decode batches take turns.

        Decoding may preempt: rows whose next page cannot be had go back to waiting.
        """
        prefilling = [s for s in self.running if s.num_left > 1]
        decoding = [s for s in self.running if s.num_left == 1]
        if prefilling and not (decoding and self._prefilled_last):
            self._prefilled_last = True
            first = prefilling[0]
            count = self._chunk(first)
            if self._grow(first, first.num_computed + count):
                return Work("prefill", (Row(first, first.num_computed, count),))
        self._prefilled_last = False
        rows = [
            Row(sequence, sequence.num_computed, 1)
            for sequence in decoding
            if sequence.held is not None and self._grow(sequence, len(sequence.tokens))
        ]
        return Work("decode", tuple(rows)) if rows else None

    def advance(self, work: Work) -> list[Sequence]:
        """Count the tokens of `work` as computed; return who needs a next token.

        A sequence that has computed all it knows offers its whole pages for reuse; one
        that gives pages of a window back offers them before, so that a text that ends
        in the middle of a page finds what the page's first token reads.
        """
        for row in work.rows:
            self._pass(row.sequence, row.count, work.kind == "prefill")
        return [row.sequence for row in work.rows if row.sequence.num_left == 0]

    def take(self, sequence: Sequence, count: int) -> None:
        """Count `count` more tokens as computed: its own one and drafted ones that
        were accepted, and are part of its text already."""
        self._pass(sequence, count, is_prefill=False)

    def _pass(self, sequence: Sequence, count: int, is_prefill: bool) -> None:
        before, size = sequence.num_computed, self.table.page_size
        sequence.num_computed = now = before + count
        is_ready = not is_prefill or sequence.num_left == 0
        if self.table.has_states and self._snapshot(sequence, is_ready):
            pass  # published with it
        elif is_ready and (is_prefill or not sequence.output_ids):
            self.publish(sequence)
        elif self.table.drops_pages and (is_prefill or now // size > before // size):
            self.publish(sequence)
        if self.table.drops_pages:
            self.table.trim(sequence.held, now)

    def publish(self, sequence: Sequence) -> None:
        """Offer a sequence's computed whole pages to later requests."""
        if self.prefix_cache and not sequence.is_mixed:
            computed = sequence.tokens[: sequence.num_computed]
            self.table.publish(computed, sequence.held, sequence.identity)

    def fork(self, sequence: Sequence, twin: Sequence) -> None:
        """Start another sample from the pages of one that has just finished its prompt.

        Without a page for the copy the twin waits like any other sequence: its prompt
        is in the prefix cache.
        """
        held = None
        if self._draft_begins(twin):
            held = self.table.fork(sequence.held, sequence.num_computed)
        if held is None:
            self._forget_pages(twin)
            self.waiting.appendleft(twin)
            return
        twin.held = held
        if self.draft is not None:
            self.draft.forked(sequence, twin)
        self.running.append(twin)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence that ran to its end: publish its pages, then give them
        back."""
        self.publish(sequence)
        self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and give its pages back; once."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            raise errors.InvalidId(
                errors.say(
                    f"request {sequence.request_id} sample {sequence.sample}",
                    "it has ended, and its pages were given back then",
                    "Drop a sequence once",
                )
            )
        if sequence.held is not None:
            self.table.give_back(sequence.held)
        self._forget_pages(sequence)
        for other in self._sent_back:
            other.num_retracted = 0
        self._sent_back = []

    def reset(self, weights_epoch: int) -> int:
        """Forget every cached page; what is computed from now on is of this epoch.

        Sequences that run go on with the pages they hold; if the weights are others,
        those are published no more. Waiting ones have no pages and begin anew.

        Returns:
            Pages of a draft's own pool that became free.
        """
        if weights_epoch != self.weights_epoch:
            self.weights_epoch = weights_epoch
            self.disown()
            for sequence in self.waiting:
                sequence.identity = sequence.identity.at_epoch(weights_epoch)
        self.table.clear_cache()
        return 0 if self.draft is None else self.draft.clear()

    def disown(self) -> None:
        """Publish nothing of the sequences that run, from now on."""
        for sequence in self.running:
            sequence.is_mixed = True

    def objections(self) -> tuple[str, ...]:
        """Return the laws of the pages that do not hold."""
        return self.table.objections(s.held for s in self.running)

    def _has_rows_for(self, sequence: Sequence) -> bool:
        """Keep rows for samples that are still to fork from a prompt in prefill."""
        taken = sum(
            1 if s.sample or s.num_computed >= s.num_prompt else s.sampling.n
            for s in self.running
        )
        mine = 1 if sequence.sample or sequence.output_ids else sequence.sampling.n
        return taken + mine <= self.max_batch

    def _give_pages(self, sequence: Sequence) -> bool:
        """Share the cached prefix and hand out the rest; all or nothing."""
        hit = self._look_up(sequence)
        if self.headroom and self.running and not self._has_headroom(sequence, hit):
            return False
        if not self._draft_begins(sequence):
            return False  # before anything is evicted for it
        held = self._begin(sequence, hit)
        if held is None and hit.num_tokens and not self.running:
            # Alone, it may do without the pages that it would have copied.
            hit = Hit(0, (), "there is no room to read the cached prefix")
            held = self._begin(sequence, hit)
        if held is None:
            self._forget_draft(sequence)
            return False
        sequence.held = held
        sequence.num_computed = hit.num_tokens
        sequence.stops = self._stops(len(sequence.tokens), hit)
        again = self.table.shelf.back_off if hit.num_tokens else 0  # but found
        again = 0 if self.table.has_states else again  # a page at most, and all of it
        num_found = min(hit.num_tokens + again, len(sequence.tokens) - 1)
        sequence.found(num_found, hit.reason)
        return True

    def _has_headroom(self, sequence: Sequence, hit: Hit) -> bool:
        """Say whether its first step of drafted tokens would find its pages too."""
        length = min(len(sequence.tokens) + self.headroom, sequence.max_length - 1)
        length = max(length, len(sequence.tokens))
        return room.can_begin(self.table, hit, length, self.prefill_chunk)

    def _draft_begins(self, sequence: Sequence) -> bool:
        return self.draft is None or self.draft.begin(sequence, bool(self.running))

    def _begin(self, sequence: Sequence, hit: Hit) -> Holding | None:
        tokens, identity = sequence.tokens, sequence.identity
        return self.table.begin(hit, tokens, identity, self.prefill_chunk)

    def _stops(self, length: int, hit: Hit) -> tuple[int, ...]:
        """Return the lengths at which a prefill stops for snapshots of its states."""
        if not self.table.has_states or not self.prefix_cache:
            return ()
        size, shelf = self.table.page_size, self.table.shelf
        stops = (hit.num_matched, (length - 1) // size * size)
        if shelf.back_off:
            stops = map(shelf.resumed, (hit.num_matched, length // size * size))
        return tuple(stop for stop in stops if stop > hit.num_tokens)

    def _look_up(self, sequence: Sequence) -> Hit:
        if not self.prefix_cache:
            return Hit(0, (), "the prefix cache is off")
        return self.table.match(sequence.tokens, sequence.identity)

    def _chunk(self, sequence: Sequence) -> int:
        """Return the tokens of a sequence's next prefill chunk."""
        start = sequence.num_computed
        count = min(sequence.num_left, self.prefill_chunk)
        stops = (stop - start for stop in sequence.stops if stop > start)
        return min([count, *stops])

    def _snapshot(self, sequence: Sequence, is_ready: bool) -> bool:
        """Take a snapshot of the states of a sequence that stands where one is due.

        That is at its stops, and while it decodes at each whole page, where the one
        before is given up.
        """
        length = sequence.num_computed
        if not self.prefix_cache or sequence.is_mixed or length % self.table.page_size:
            return False
        is_stop = length in sequence.stops
        if not is_stop and not is_ready:
            return False
        computed = sequence.tokens[:length]
        identity = sequence.identity
        self.table.snapshot(computed, sequence.held, identity, moves=not is_stop)
        return True

    def _grow(self, sequence: Sequence, length: int) -> bool:
        """Make room for `length` tokens, preempting the newest if need be.

        Returns:
            Whether the sequence still runs.
        """
        while not self.table.extend(sequence.held, length):
            newest = self.running[-1]
            self._preempt(newest)
            if newest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Send a sequence back to the head of the queue without its pages."""
        self.running.remove(sequence)
        self.table.give_back(sequence.held)
        self._forget_pages(sequence)
        self.waiting.appendleft(sequence)
        sequence.num_retracted += 1
        self._sent_back.append(sequence)
        self.num_preempted += 1

    def _forget_draft(self, sequence: Sequence) -> None:
        if self.draft is not None:
            self.draft.forget(sequence)

    def _forget_pages(self, sequence: Sequence) -> None:
        self._forget_draft(sequence)
        sequence.held = None
        sequence.stops = ()
        sequence.num_computed = 0
        sequence.is_mixed = False
        sequence.identity = sequence.identity.at_epoch(self.weights_epoch)
