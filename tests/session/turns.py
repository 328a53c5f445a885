"""Threads that take turns: one of many interleavings, chosen by a seed and repeatable.

Every change of the disk, every try of a lock and every wait is a point where another
thread may go on. Time passes only while somebody waits, so that a lock's patience is
the same on a busy machine.
"""

import contextlib
import random
import threading
from collections.abc import Callable, Sequence


def with_turns(disk_class):
    """Return a class of disks whose threads take turns once `interleave` runs them."""

    class TakingTurns(disk_class):
        def __init__(self, *args):
            super().__init__(*args)
            self._turn = threading.Condition()
            self._waiting: list[int] = []
            self._now_running: int | None = None
            self._mine = threading.local()
            self._rng, self._time = random.Random(0), 0.0

        def perform(self, step, action):
            self._yield()
            return super().perform(step, action)

        def try_lock(self, path):
            self._yield()
            return super().try_lock(path)

        def now(self):
            return self._time

        def pause(self, seconds):
            self._time += seconds
            self._yield()

        def _yield(self) -> None:
            """Let a thread be chosen, and wait until it is this one."""
            number = getattr(self._mine, "number", None)
            if number is None:  # no thread of an interleaving
                return
            with self._turn:
                self._choose()
                self._turn.wait_for(lambda: self._now_running == number, timeout=30)

        def _choose(self) -> None:
            self._now_running = self._rng.choice(self._waiting or [None])
            self._turn.notify_all()

        def interleave(self, jobs: Sequence[Callable[[], object]], seed: int) -> list:
            """Run jobs in threads that take turns; return answers or errors."""
            self._rng = random.Random(seed)
            self._waiting = list(range(len(jobs)))
            answers: list = [None] * len(jobs)

            def run(number: int) -> None:
                self._mine.number = number
                with self._turn:
                    self._turn.wait_for(lambda: self._now_running == number, timeout=30)
                try:
                    answers[number] = jobs[number]()
                except Exception as error:
                    answers[number] = error
                with self._turn, contextlib.suppress(ValueError):
                    self._waiting.remove(number)
                    self._choose()

            threads = [threading.Thread(target=run, args=(i,)) for i in self._waiting]
            for thread in threads:
                thread.start()
            with self._turn:
                self._choose()
            for thread in threads:
                thread.join(60)
            return answers

    return TakingTurns
