"""A trace of chats of many turns: who asks what when, and which pages return when.

Chats begin at random times, each on one of a few system prompts of unequal popularity;
after an answer its person thinks, and asks again with the whole chat before the new
words, or leaves. The law: a trace is decided by its seed alone, and every text begins
with all that its chat said before.

    requests = chat_trace.make(ChatTraffic(chats=100))
"""

import bisect
import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["ChatTraffic", "Request", "Uses", "make"]

_VOCABULARY = 50_000


@dataclasses.dataclass(frozen=True)
class ChatTraffic:
    """How people chat.

    Args:
        seed: decides everything.
        chats: how many begin.
        stems: system prompts; the k-th is chosen 1/k as often as the first.
        stem_tokens: of a system prompt.
        mean_turns: of a chat (geometric).
        question_tokens: of a question, on average (exponential).
        answer_tokens: of an answer, on average (exponential).
        chats_per_minute: that begin.
        think_s: seconds between an answer and the next question, on average; most are
            short and some are long (log-normal).
    """

    seed: int = 0
    chats: int = 200
    stems: int = 6
    stem_tokens: int = 256
    mean_turns: float = 5.0
    question_tokens: int = 48
    answer_tokens: int = 160
    chats_per_minute: float = 4.0
    think_s: float = 60.0


class Request(NamedTuple):
    """One turn: a prompt of `num_prompt` tokens, and the answer behind it."""

    time_s: float
    tokens: list[int]
    num_prompt: int


def make(traffic: ChatTraffic) -> list[Request]:
    """Return the requests of all chats in the order of their times."""
    rng = np.random.default_rng(traffic.seed)
    stems = [_words(rng, traffic.stem_tokens) for _ in range(traffic.stems)]
    weights = 1 / np.arange(1, traffic.stems + 1)
    starts = np.cumsum(rng.exponential(60 / traffic.chats_per_minute, traffic.chats))
    requests = []
    for start in starts:
        stem = stems[rng.choice(traffic.stems, p=weights / weights.sum())]
        requests += _chat(rng, traffic, float(start), stem)
    return sorted(requests, key=lambda request: request.time_s)


def _chat(
    rng: np.random.Generator, traffic: ChatTraffic, time_s: float, stem: list[int]
) -> list[Request]:
    """Return the turns of one chat."""
    turns, said = [], stem
    for _ in range(rng.geometric(1 / traffic.mean_turns)):
        prompt = said + _words(rng, 1 + rng.exponential(traffic.question_tokens))
        said = prompt + _words(rng, 1 + rng.exponential(traffic.answer_tokens))
        turns.append(Request(time_s, said, len(prompt)))
        time_s += traffic.think_s * rng.lognormal(-0.5, 1.0)
    return turns


def _words(rng: np.random.Generator, count: float) -> list[int]:
    return rng.integers(0, _VOCABULARY, int(count)).tolist()


class Uses:
    """Which request asks for which page of text: the future that a trace knows.

    `names[at]` are the pages of request `at`, equal where all tokens up to their end
    are; the last token of a text is never fed, so its page may be missing.
    """

    def __init__(self, requests: Sequence[Request], page_size: int):
        numbers: dict[tuple[int, tuple[int, ...]], int] = {}
        self.names: list[list[int]] = []
        self._asked: list[list[int]] = []
        for at, request in enumerate(requests):
            name, names = -1, []
            for end in range(page_size, len(request.tokens), page_size):
                page = tuple(request.tokens[end - page_size : end])
                name = numbers.setdefault((name, page), len(numbers))
                names.append(name)
            self.names.append(names)
            self._asked += [[] for _ in range(len(numbers) - len(self._asked))]
            for asked in names[: (request.num_prompt - 1) // page_size]:
                self._asked[asked].append(at)

    @property
    def num_pages(self) -> int:
        """Different pages of the whole trace."""
        return len(self._asked)

    def next(self, name: int, now: int) -> float:
        """Return the request after `now` that asks for a page; infinity for none."""
        asked = self._asked[name]
        at = bisect.bisect_right(asked, now)
        return asked[at] if at < len(asked) else math.inf
