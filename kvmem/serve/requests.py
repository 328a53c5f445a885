"""Requests from their first sample to their output.

The law: a request is open while any sample of it goes on; when the last one has ended
it has one output, which is taken once; and a token that came is heard by the stream of
its request, whoever ran the step.

    requests.open(leader)
    requests.hear(deltas)
    requests.conclude(request_id)      # makes the output if every sample has ended
    requests.take(request_id)
"""

import itertools
from collections import deque
from collections.abc import Iterable

from kvmem import errors
from kvmem.serve.request import Completion, Delta, Output, Sequence

__all__ = ["Requests", "require_kept"]


class Requests:
    """Every request of one engine that is open, or whose output was not taken."""

    def __init__(self):
        self._ids = itertools.count()
        self._samples: dict[int, list[Sequence]] = {}
        self._outputs: dict[int, Output] = {}
        self._streams: dict[int, deque[Delta]] = {}

    def next_id(self) -> int:
        """Return an id that no request had."""
        return next(self._ids)

    def open(self, leader: Sequence) -> None:
        """Take in a request by its first sample."""
        self._samples[leader.request_id] = [leader]

    def is_open(self, request_id: int) -> bool:
        """Say whether any sample goes on."""
        return request_id in self._samples

    def samples(self, request_id: int) -> tuple[Sequence, ...]:
        """Return the samples of an open request that have begun; else none."""
        return tuple(self._samples.get(request_id, ()))

    def add_samples(self, twins: Iterable[Sequence]) -> None:
        """Take in further samples of an open request."""
        for twin in twins:
            self._samples[twin.request_id].append(twin)

    def listen(self, request_id: int) -> deque[Delta]:
        """Return where the tokens of a request will be heard, until `deafen`."""
        return self._streams.setdefault(request_id, deque())

    def deafen(self, request_id: int) -> None:
        """Stop listening."""
        del self._streams[request_id]

    def hear(self, deltas: Iterable[Delta]) -> None:
        """Pass tokens on to the streams of their requests."""
        for delta in deltas:
            if delta.request_id in self._streams:
                self._streams[delta.request_id].append(delta)

    def conclude(self, request_id: int) -> tuple[Sequence, ...]:
        """Make the output of a request whose samples have all ended; return them.

        Returns:
            Its samples, none while one goes on.
        """
        samples = self._samples[request_id]
        expected = samples[0].sampling.n if len(samples) > 1 else 1
        if any(s.finish_reason is None for s in samples) or len(samples) < expected:
            return ()
        del self._samples[request_id]
        leader = samples[0]
        self._outputs[request_id] = Output(
            request_id=request_id,
            prompt_ids=tuple(leader.tokens[: leader.num_prompt]),
            completions=tuple(_completion(s) for s in samples),
            cached_tokens=leader.cached_tokens,
            stored_tokens=leader.stored_tokens,
            reused_tokens=leader.reused_tokens,
            recomputed_tokens=leader.recomputed_tokens,
            miss_reason=leader.miss_reason,
            store_reason=leader.store_reason,
            first_token_s=leader.first_token_s,
            store_error=next((s.store_error for s in samples if s.store_error), None),
        )
        return tuple(samples)

    def output(self, request_id: int) -> Output | None:
        """Return an output that was not taken yet."""
        return self._outputs.get(request_id)

    def take(self, request_id: int) -> Output:
        """Return the output of a request that has ended, and forget it.

        Raises:
            InvalidId: the request is unknown, going, or was taken before.
        """
        if request_id not in self._outputs:
            state = "still going" if self.is_open(request_id) else "not known"
            raise errors.InvalidId(
                errors.say(
                    f"the output of request {request_id}",
                    f"the request is {state}",
                    "Take an output once, after its last token",
                )
            )
        return self._outputs.pop(request_id)

    def forget(self, request_id: int) -> None:
        """Drop an output that nobody will take."""
        self._outputs.pop(request_id, None)


def require_kept(outputs: Iterable[Output]) -> None:
    """Raise when the store could not keep a finished request; the answers go along.

    Raises:
        NotKept: carries every output.
    """
    outputs = tuple(outputs)
    faults = [output.store_error for output in outputs if output.store_error]
    if faults:
        raise errors.NotKept(
            errors.say(
                f"keeping the records of {len(faults)} of {len(outputs)} requests",
                f"the store said {faults[0][:500]}",
                "The answers are in this error's `outputs`; mend the store, or open it "
                "with read_only=True",
            ),
            outputs,
        )


def _completion(sequence: Sequence) -> Completion:
    wants = sequence.sampling.logprobs is not None
    return Completion(
        output_ids=sequence.output_ids,
        text=sequence.text,
        finish_reason=sequence.finish_reason,
        logprobs=tuple(sequence.logprobs) if wants else None,
    )
