"""The first token of a stored text: resumed from the store, or prefilled again.

One engine runs both, in turns and warm. The stored text was written before by the same
engine, which then gave its writer's lock back; its pages are dropped from the prefix
cache before each turn, so the store's files are the only way back. The prefilled side
reads texts that are not stored, by chunks of each size offered: the law is that
resuming is compared with the best of them.

    race = run(engine, tokens=700, chunks=(128, 256), rounds=9, seed=0)
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.engine_clock import EngineClock
from experiments.harness import Rounds, Timed, interleave
from kvmem.serve import Engine

__all__ = ["Race", "run"]

RESUMED = "resumed"


class Race(NamedTuple):
    """Seconds of each side, and what the resumed one did."""

    rounds: Rounds
    stored_tokens: int  # came from the store, at every turn
    known_tokens: int  # of the text, the last one apart, that its whole chunks hold
    same_token: bool  # the next token was always that of the run which wrote
    fetch_s: float  # mean seconds of a turn in the store and the pages

    @property
    def best(self) -> str:
        """The chunk size that prefills soonest."""
        sides = [side for side in self.rounds.seconds if side != RESUMED]
        return min(sides, key=self.rounds.median)

    @property
    def ratio(self) -> float:
        """How many times sooner the resumed token comes than the best prefilled."""
        return self.rounds.ratio(self.best, RESUMED)


def run(
    engine: Engine, tokens: int, chunks: Sequence[int], rounds: int, seed: int
) -> Race:
    """Write a text of `tokens` to the engine's store, then time both ways to it."""
    clock, rng = EngineClock(engine), np.random.default_rng(seed)
    vocab, usual = engine.model.spec.vocab, engine.scheduler.prefill_chunk
    stored = rng.integers(0, vocab, tokens).tolist()
    _, written = clock.first_token(stored)
    store = engine.recall.store
    store.close()
    turns = []

    def resumed() -> Timed:
        engine.scheduler.prefill_chunk = usual
        engine.table.clear_cache()
        before = engine.recall.fetch_s
        seconds, output = clock.first_token(stored)
        turns.append((output, engine.recall.fetch_s - before))
        return Timed(seconds)

    def prefilled(chunk: int) -> Timed:
        engine.scheduler.prefill_chunk = chunk
        seconds, output = clock.first_token(rng.integers(0, vocab, tokens).tolist())
        assert output.stored_tokens + output.cached_tokens == 0
        return Timed(seconds)

    jobs = {RESUMED: resumed}
    jobs |= {f"chunk {chunk}": functools.partial(prefilled, chunk) for chunk in chunks}
    timed = interleave(jobs, rounds)
    engine.scheduler.prefill_chunk = usual
    chunk = store.facts.chunk_tokens
    return Race(
        rounds=timed,
        stored_tokens=min(output.stored_tokens for output, _ in turns),
        known_tokens=(tokens - 1) // chunk * chunk,
        same_token={o.output_ids for o, _ in turns} == {written.output_ids},
        fetch_s=sum(seconds for _, seconds in turns) / len(turns),
    )
