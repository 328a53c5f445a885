"""A clock around an engine's own verbs: what a person who serves would wait for.

The law: nothing is stripped. A decode step is `Engine.step`, with its scheduling, its
books, the compiled step and the choice of every token; a prefill is the way from `add`
to the first token.

    clock = EngineClock(engine)
    clock.decode(prompts, steps=8, warm_up=2)     # seconds, one a step
    clock.first_token(prompt)                     # seconds
"""

import time
from collections.abc import Sequence

from kvmem.serve import Engine, Output, SamplingParams

__all__ = ["EngineClock"]

Prompt = Sequence[int]


class EngineClock:
    """One engine, idle between the jobs it is given."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def decode(
        self, prompts: Sequence[Prompt], steps: int, warm_up: int
    ) -> list[float]:
        """Time greedy steps of a batch in which every prompt takes part.

        Prompts are prefilled first, in turns with the decoding of those before.
        """
        early = len(prompts) * (1 + max(map(len, prompts)))  # more than prefills last
        limit = self.engine.config.max_length - max(map(len, prompts))
        sampling = SamplingParams(
            max_tokens=min(limit, early + warm_up + steps), ignore_eos=True
        )
        begun = [self.engine.add(prompt, sampling) for prompt in prompts]
        while len(self.engine.step()) < len(prompts):
            pass
        seconds = []
        for _ in range(warm_up + steps):
            start = time.perf_counter()
            deltas = self.engine.step()
            seconds.append(time.perf_counter() - start)
            assert len(deltas) == len(prompts), "a row left the batch"
        for request_id in begun:
            self.engine.abort(request_id)
            self.engine.take_output(request_id)
        return seconds[warm_up:]

    def first_token(self, prompt: Prompt) -> tuple[float, Output]:
        """Time a prompt from its arrival to its first token."""
        start = time.perf_counter()
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        request_id = self.engine.add(prompt, sampling)
        while not self.engine.step():
            pass
        seconds = time.perf_counter() - start
        return seconds, self.engine.take_output(request_id)
