"""kvmem and the peer in turns, on the same tokens.

The law of fairness: both sides get the same ids, equally many samples a turn, a turn of
warm-up, and all cores; while one works the other stands still, which is looked at, not
assumed.

    decode(clock, peer, batch=8, context=128, steps=8, warm_up=2, rounds=9, seed=0)
    prefill(clock, peer, tokens=512, calls=2, rounds=9, seed=0)
"""

import statistics
from collections.abc import Callable, Iterator

import numpy as np

from experiments.engine_clock import EngineClock
from experiments.harness import Rounds, Timed, interleave
from experiments.peer import Peer

__all__ = ["OURS", "PEER", "decode", "prefill"]

OURS, PEER = "kvmem", "peer"
_TICK = 0.02  # seconds: what the system's clock of processes can tell apart, twice


def decode(
    clock: EngineClock,
    peer: Peer,
    *,
    batch: int,
    context: int,
    steps: int,
    warm_up: int,
    rounds: int,
    seed: int,
) -> Rounds:
    """Time a greedy step of `batch` sequences after `context` tokens of each."""
    ours, theirs = (_texts(clock, batch, context, seed) for _ in range(2))

    def our_turn() -> list[float]:
        return clock.decode(next(ours), steps, warm_up)

    def their_turn() -> list[float]:
        asked = dict(prompts=next(theirs), steps=steps, warm_up=warm_up)
        return peer.ask("decode", **asked)["seconds"]

    return interleave(_jobs(peer, our_turn, their_turn), rounds)


def prefill(
    clock: EngineClock, peer: Peer, *, tokens: int, calls: int, rounds: int, seed: int
) -> Rounds:
    """Time the way from a prompt of `tokens` to its next token."""
    ours, theirs = (_texts(clock, calls, tokens, seed) for _ in range(2))

    def our_turn() -> list[float]:
        return [clock.first_token(prompt)[0] for prompt in next(ours)]

    def their_turn() -> list[float]:
        return [
            peer.ask("prefill", prompt=prompt)["seconds"] for prompt in next(theirs)
        ]

    return interleave(_jobs(peer, our_turn, their_turn), rounds)


def _texts(
    clock: EngineClock, count: int, length: int, seed: int
) -> Iterator[list[list[int]]]:
    """Yield fresh random prompts for every turn; equal seeds give equal ones."""
    rng = np.random.default_rng([seed, count, length])
    while True:
        shape = (count, length)
        yield rng.integers(0, clock.engine.model.spec.vocab, shape).tolist()


def _jobs(
    peer: Peer,
    our_turn: Callable[[], list[float]],
    their_turn: Callable[[], list[float]],
) -> dict[str, Callable[[], Timed]]:
    """Return a job a side whose figure is the median of its samples."""

    def ours() -> Timed:
        before = peer.cpu_seconds()
        seconds = our_turn()
        assert peer.cpu_seconds() - before <= _TICK, "the peer ran in kvmem's turn"
        return Timed(statistics.median(seconds))

    return {PEER: lambda: Timed(statistics.median(their_turn())), OURS: ours}
