"""What an engine says of itself: where its pages are, what it found, what it holds.

The law: a question changes nothing; what it hands out (records, an output) is the
caller's own.

    engine.stats().misses
    engine.records(request_id)
"""

import numpy as np

from kvmem import errors
from kvmem.serve.buckets import Bucket
from kvmem.serve.guard import Guard
from kvmem.serve.loop import Loop
from kvmem.serve.page_table import Accounts
from kvmem.serve.request import Output
from kvmem.serve.stats import EngineStats

__all__ = ["Answers"]


class Answers(Loop):
    """The questions that an engine answers.

    Args: as of `Engine`.
    """

    def __init__(self, *args, **facts):
        super().__init__(*args, **facts)
        self._guard = Guard()

    @property
    def has_work(self) -> bool:
        """Say whether any request is not finished."""
        return self.scheduler.has_work

    @property
    def accounts(self) -> Accounts:
        """Where every page is."""
        return self.table.accounts()

    @property
    def num_traces(self) -> dict[Bucket, int]:
        """How often the step was traced, a bucket."""
        return dict(self.stepper.num_traces)

    def stats(self) -> EngineStats:
        """Return what was found again and why not, and where every page is."""
        return self._counts.stats(
            self.accounts,
            waiting=len(self.scheduler.waiting),
            running=len(self.scheduler.running),
            preempted=self.scheduler.num_preempted,
            evicted_pages=self.table.num_evicted,
            weights_epoch=self.scheduler.weights_epoch,
            manager=self.balance.stats(self.table),
            drafting=None if self.verifier is None else self.verifier.counts.stats(),
        )

    def take_output(self, request_id: int) -> Output:
        """Return the output of a finished request, and forget it.

        Raises:
            InvalidId: the request is unknown, going, or was taken before.
        """
        return self._requests.take(request_id)

    def records(
        self, request_id: int, sample: int = 0
    ) -> np.ndarray | dict[str, np.ndarray]:
        """Return the token records of a going request: u8[num_computed, record].

        A copy, in the canonical form: the same bytes at every topology and page size.
        Of several groups, by their names: of a window the tokens whose pages are held,
        the last of them the newest; of a state one record.

        Raises:
            InvalidId: the request or the sample is not going.
        """
        for sequence in self._requests.samples(request_id):
            if sequence.sample == sample and sequence.vpages:
                with self._guard("records"):
                    self.pool = self.table.apply(self.pool)
                    return self.records_of.export(self.pool, sequence)
        raise errors.InvalidId(
            errors.say(
                f"records of request {request_id} sample {sample}",
                "only a request that is going holds pages",
                "Ask between its first step and its last",
            )
        )
