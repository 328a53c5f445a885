"""The loop of an engine: admit, plan, compute, choose, and what follows a token.

It wraps what is tested without it: the scheduler decides on the host, the page table
plays its decisions on the device, one compiled step computes, the sampler chooses. The
law: between two turns the device's books equal the host's, and every page is free,
cached, or held by a sequence that is still going.
"""

import jax

from kvmem import errors, prefix, transfer
from kvmem import pool as pools
from kvmem.blend import BlendConfig
from kvmem.budget import Budget
from kvmem.geometry import LifecycleGroup, Spread, Topology
from kvmem.manage import Knobs, Selection
from kvmem.model import attention
from kvmem.model.loaded import LoadedModel
from kvmem.serve import balance, compile_cache, keeping
from kvmem.serve.blending import Blender
from kvmem.serve.buckets import ServeConfig, declare
from kvmem.serve.choose import Choice
from kvmem.serve.draft.judge import Chosen, judged, last_places
from kvmem.serve.draft.protocol import Draft
from kvmem.serve.draft.trees import Mover
from kvmem.serve.draft.verifier import Settled, Verifier
from kvmem.serve.draft.wipe import Wiper
from kvmem.serve.page_table import PageTable
from kvmem.serve.request import Delta, Sequence
from kvmem.serve.requests import Requests
from kvmem.serve.scheduler import Scheduler
from kvmem.serve.stats import Counts
from kvmem.serve.step import Stepper, envelopes
from kvmem.serve.work import Row, Work
from kvmem.store import PartedStore, RecordStore

__all__ = ["Loop"]


class Loop:
    """A model, its pool, the sequences in it, and one turn of them all.

    Args: as of `Engine`.
    """

    def __init__(
        self,
        model: LoadedModel,
        groups: tuple[LifecycleGroup, ...],
        budget: Budget,
        topology: Topology,
        *,
        order: str,
        config: ServeConfig,
        store: RecordStore | PartedStore | None,
        poison: bool,
        checked: bool,
        certified: bool,
        executor: str,
        blend: BlendConfig | None,
        manager: Selection | None,
        rebalance: Knobs | None,
        draft: Draft | None,
    ):
        own, groups = groups, (*groups, *(draft.groups if draft is not None else ()))
        virtual = tuple(Spread.of(group, topology).virtual(group) for group in groups)
        keeping.require(virtual, store, certified, config)
        _require_paid(budget, groups)
        if config.compile_cache:
            compile_cache.enable()
        self.model = model
        self.tokenizer = model.tokenizer
        self.budget = budget
        self.config = config
        self.groups, self.own_groups = groups, own
        self.topology, self.order = topology, order
        self.executor, self.poison = executor, poison
        page_tokens = virtual[0].page_size  # of a virtual page, in every group
        self.buckets = declare(config, page_tokens)
        self.stepper = Stepper(model, own, topology, order, executor, groups)
        self.pool = pools.from_budget(
            budget, topology, poison=poison, sharding=self.stepper.page_sharding
        )
        self.balance = balance.of(
            groups, topology, order, budget, config, manager, rebalance
        )
        self.table = self._make_table(page_tokens)
        self.scheduler = Scheduler(
            self.table,
            max_batch=config.max_batch,
            prefill_chunk=config.prefill_chunk,
            max_length=config.max_length,
            prefix_cache=config.prefix_cache,
        )
        self.records_of, self.recall = keeping.of(
            self.table, groups, topology, order, store
        )
        if certified:
            self._certify()
        self.blender = None
        if blend is not None:
            ledger, drafts = self.table.ledger, draft is not None
            self.blender = Blender(blend, self.stepper, topology, order, ledger, drafts)
        self.verifier = None if draft is None else self._start(draft)
        drafts = None if self.verifier is None else self.verifier.proposer
        keeping.join(self.recall, model, groups, drafts)
        self._checked = checked
        self._counts = Counts()
        self._eos = frozenset(self.tokenizer.eos_ids)
        self._requests = Requests()

    def _make_table(self, page_tokens: int) -> PageTable:
        """Return the books of a pool that nothing was taken of."""
        cache = prefix.PrefixCache(
            page_tokens, prefix.policy.NAMED[self.config.eviction]()
        )
        ledger = pools.Ledger.fresh(self.pool)
        lives = [group.lifecycle for group in self.groups]
        return PageTable(ledger, cache, lives, self.balance.manager)

    def _certify(self) -> None:
        """Require that steps write what records say, over all pages, once."""
        write = attention.writer(Spread.of(self.groups[0], self.topology))
        transfer.require_certified(
            self.records_of.plan,
            write,
            mesh=self.stepper.mesh,
            deals=self.topology.dcp > 1,
        )

    def _start(self, draft: Draft) -> Verifier:
        """Start a draft on what is built so far, and let it into every step."""
        proposer = draft.start(self)
        self.buckets = declare(
            self.config,
            self.table.page_size,
            proposer.num_drafted,
            proposer.wants_features,
            proposer.width,
        )
        self.scheduler.draft = proposer
        self.scheduler.headroom = proposer.num_drafted
        pages = envelopes(self.groups, self.topology, self.order)
        spreads = [Spread.of(group, self.topology) for group in self.groups]
        size, lanes = self.table.page_size, self.config.max_batch
        wiper = Wiper(pages, spreads, self.topology, size, lanes)
        mover = None
        if proposer.width > 1:
            mover = Mover(pages[0], self.topology, lanes * proposer.num_drafted)
        capacity = self.buckets.pages[-1] * size
        return Verifier(proposer, self.scheduler, wiper, mover, capacity)

    def _turn(self) -> list[Delta]:
        """Run one prefill chunk or one decode batch; return the tokens it gave."""
        for sequence, is_first in self.scheduler.admit():
            reason = self._fetch(sequence, is_first)
            if is_first:
                self._counts.admitted(sequence, reason)
        work = self.scheduler.plan()
        if work is None:
            self._require_progress()
            return []
        if self.verifier is not None:
            work = self.verifier.widen(work)
            self.pool = self.verifier.wipe(self.table.apply(self.pool))
        deltas = self._take(work, self._run(work))
        if not self.scheduler.has_work:
            self.balance.settle(self.table.room, holding=0)
        self._check()
        return deltas

    def _fetch(self, sequence: Sequence, is_first: bool) -> str | None:
        """Fill an admitted sequence's pages from the store, as far as it has them, and
        from texts that are registered, wherever in the prompt they stand.

        Returns:
            Why the store's part ends where it does; None without a store.
        """
        if self.recall is None:
            self._blend(sequence)
            return None
        self.pool = self.table.apply(self.pool)
        self.pool, fetched = self.recall.fetch(self.pool, sequence)
        if (
            fetched.num_tokens and not sequence.num_computed
        ):  # as behind a cached prefix
            sequence.num_computed -= self.table.shelf.back_off
        sequence.num_computed += fetched.num_tokens
        if is_first:
            sequence.store_reason = fetched.reason
            sequence.stored_tokens = min(
                fetched.num_tokens, sequence.num_prompt - sequence.cached_tokens
            )
        self._blend(sequence)
        return fetched.reason

    def _blend(self, sequence: Sequence) -> None:
        """Fill an admitted sequence's pages from registered texts."""
        if self.blender is None:
            return
        self.pool = self.table.apply(self.pool)
        self.pool, blended = self.blender.fill(self.pool, sequence)
        sequence.num_computed += blended.num_tokens
        sequence.is_mixed |= blended.num_reused > 0
        if sequence.first_token_s is None:
            sequence.reused_tokens = blended.num_exact + blended.num_reused
            sequence.recomputed_tokens = blended.num_recomputed

    def _run(self, work: Work) -> jax.Array:
        """Compute the rows of `work`; return logits, one row a bucket row; of drafted
        work as many places a row as a step verifies, the row's own the last."""
        self.pool = self.table.apply(self.pool)
        if work.kind == "prefill":
            bucket = self.buckets.prefill(work.rows[0].count, work.end)
        elif all(row.count == 1 for row in work.rows):
            bucket = self.buckets.decode(len(work.rows), work.end)
        else:
            bucket = self.buckets.verify(len(work.rows), work.end)
        feeds = [row.feed for row in work.rows]
        batch = self.stepper.pack(feeds, bucket)
        self.pool, logits, *features = self.stepper(self.pool, batch)
        for hidden in features:
            self.verifier.proposer.observe(feeds, hidden)
        return logits

    def _take(self, work: Work, logits: jax.Array) -> list[Delta]:
        """Take the tokens that come next: of each row one, or a run of drafted ones
        that stand and the one behind them."""
        plain = work.plain
        if self.verifier is not None and work.kind == "decode":
            self.verifier.counts.plain_steps(len(plain.rows))
        ready = self.scheduler.advance(plain)
        lasts = last_places(work, logits)
        last = {row.sequence: at for row, at in zip(work.rows, lasts, strict=True)}
        choosing = [Choice(s, last[s]) for s in ready]
        choosing += [Choice(t, at) for s, at, _ in choosing for t in self._fork(s)]
        proposed = None if self.verifier is None else self.verifier.proposed
        chosen, runs = judged(work, logits, choosing, self.buckets, proposed)
        deltas = []
        for choice, token in zip(choosing, chosen, strict=True):
            deltas += self._emit(choice.sequence, [token])
            if choice.sequence.finish_reason:
                self._finish_ended([choice.sequence])
        drafted = [row for row in work.rows if row.drafts]
        return deltas + (self._verify(drafted, runs) if drafted else [])

    def _verify(self, drafted: list[Row], runs: list[list[Chosen]]) -> list[Delta]:
        """Emit the runs of drafted rows; leave nothing of the tokens that do not
        stand."""
        deltas, settled = [], []
        for row, run in zip(drafted, runs, strict=True):
            emitted = self._emit(row.sequence, run)
            settled.append(Settled(row, len(emitted)))
            deltas += emitted
        if (again := self.verifier.again(settled)) is not None:
            self._run(again)
        self.pool = self.verifier.move(self.pool, settled)
        self.verifier.settle(settled)
        self.pool = self.verifier.wipe(self.table.apply(self.pool))
        self._finish_ended([row.sequence for row in drafted])
        return deltas

    def _fork(self, sequence: Sequence) -> list[Sequence]:
        """Start the other samples of a prompt that has just been computed."""
        if sequence.sample or sequence.output_ids or sequence.sampling.n == 1:
            return []
        twins = [
            sequence.twin(sample, self.tokenizer.stream())
            for sample in range(1, sequence.sampling.n)
        ]
        for twin in twins:
            self.scheduler.fork(sequence, twin)
        self._requests.add_samples(twins)
        return [twin for twin in twins if twin.vpages]

    def _emit(self, sequence: Sequence, chosen: list[Chosen]) -> list[Delta]:
        """Take tokens in one after the other, up to one that ends the sequence."""
        deltas = []
        for token, probs in chosen:
            deltas.append(sequence.accept(token, self._eos, probs))
            if sequence.finish_reason:
                break
        return deltas

    def _finish_ended(self, sequences: list[Sequence]) -> None:
        """Finish those that have ended, then conclude their requests."""
        ended = [sequence for sequence in sequences if sequence.finish_reason]
        for sequence in ended:
            self._finish(sequence)
        for request_id in dict.fromkeys(s.request_id for s in ended):
            self._conclude(request_id)

    def _finish(self, sequence: Sequence) -> None:
        """Keep a finished sequence's records, and give its pages back."""
        if self.recall and self.recall.store.writable and not sequence.is_mixed:
            self.pool = self.table.apply(self.pool)
            try:
                self.recall.keep(self.pool, sequence)
            except Exception as error:  # whatever a disk or its library says
                sequence.store_error = f"{type(error).__name__}: {error}"
        if self.blender is not None:
            self.pool = self.table.apply(self.pool)
            self.blender.keep(self.pool, sequence)
        self.balance.observe(sequence)
        self.scheduler.finish(sequence)

    def _conclude(self, request_id: int) -> None:
        """Make the output of a request once all its samples have ended."""
        if samples := self._requests.conclude(request_id):
            self._counts.ended(samples)

    def _require_progress(self) -> None:
        if self.scheduler.has_work and not self.scheduler.running:
            raise errors.OutOfPages(
                errors.say(
                    f"{len(self.scheduler.waiting)} requests waiting, none running",
                    f"no page can be had: {self.table.accounts()}",
                    "This is a defect of the scheduler; please report it",
                )
            )

    def _check(self) -> None:
        """In checked mode: the books keep their laws, and the host mirrors them."""
        if not self._checked:
            return
        self.pool = self.table.apply(self.pool)
        broken = (
            *pools.check(self.pool),
            *self.table.ledger.differences(self.pool),
            *self.scheduler.objections(),
            *(self.verifier.proposer.objections() if self.verifier else ()),
        )
        if broken:
            raise errors.CorruptPage(
                errors.say(
                    "a checked step", "; ".join(broken), "Please report this state"
                )
            )


def _require_paid(budget: Budget, groups: tuple[LifecycleGroup, ...]) -> None:
    """Refuse a budget that was solved for other groups than take its pages."""
    paid, taking = ([each.domain for each in of] for of in (budget.groups, groups))
    if paid != taking:
        raise errors.IncompatiblePlan(
            errors.say(
                f"an engine of the groups {', '.join(taking)} on a budget of "
                f"{', '.join(paid)}",
                "a budget pays for every group that takes pages of its pool, those of "
                "draft layers behind the target's",
                "Solve it for (*groups, *draft.groups)",
            )
        )
