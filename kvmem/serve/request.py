"""Requests and what comes back: sampling parameters, outputs, one sequence's progress.

A request is a prompt with `SamplingParams`; it becomes `n` sequences that share the
prompt's pages. The law a sequence keeps: its first `num_computed` tokens have their KV
in its pages, and num_computed < len(tokens) until it ends, so the next step always has
a token to feed.

    SamplingParams(max_tokens=32)                              # greedy
    SamplingParams(temperature=0.8, top_p=0.95, seed=7, n=4)
"""

import dataclasses
import time

import numpy as np

from kvmem import errors
from kvmem.model.tokenizer import TextStream
from kvmem.serve.holding import Holding
from kvmem.serve.identity import PLAIN, Identity

__all__ = [
    "MAX_LOGPROBS",
    "Completion",
    "Delta",
    "Output",
    "SamplingParams",
    "Sequence",
    "TokenLogprobs",
]

MAX_LOGPROBS = 20
NEVER_ADMITTED = "ended before it was admitted"


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Args:
        max_tokens: tokens to generate at most, each sample.
        temperature: 0 takes the most likely token (greedy); else logits are divided by
            it.
        top_k: sample among the k most likely tokens; 0: among all.
        top_p: sample among the most likely tokens whose probability reaches p.
        seed: decides the sampled tokens, together with the sample's number alone.
        n: samples of one prompt; they share its pages.
        stop: one text or several that end a sample; what is returned stops before.
        stop_ids: token ids that end a sample, besides the model's own.
        ignore_eos: go on past the model's end-of-text ids.
        logprobs: report the chosen token and this many alternatives; None: nothing.

    Raises:
        ConfigError: every value that is out of range, at once.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self):
        broken = self._mistyped() or self._out_of_range()
        if broken:
            raise errors.ConfigError(
                errors.say(
                    f"sampling {self}",
                    f"the law is {', '.join(broken)}",
                    "Change the values named",
                )
            )

    def _mistyped(self) -> list[str]:
        """Give numbers and lists their types; return the laws of those that have
        none."""
        broken = []
        whole = ["max_tokens", "top_k", "seed", "n"]
        whole += ["logprobs"] * (self.logprobs is not None)
        for name in whole:
            broken += self._set(name, _whole(getattr(self, name)), "a whole number")
        for name in ("temperature", "top_p"):
            broken += self._set(name, _real(getattr(self, name)), "a number")
        broken += self._set("stop", _texts(self.stop), "a text or texts")
        broken += self._set("stop_ids", _ids(self.stop_ids), "token ids >= 0")
        is_bool = self.ignore_eos if isinstance(self.ignore_eos, bool) else None
        return broken + self._set("ignore_eos", is_bool, "true or false")

    def _set(self, name: str, value: object, kind: str) -> list[str]:
        if value is None:
            return [f"{name} is {kind}"]
        object.__setattr__(self, name, value)
        return []

    def _out_of_range(self) -> list[str]:
        laws = {
            "max_tokens >= 1": self.max_tokens >= 1,
            "temperature >= 0": self.temperature >= 0,
            "0 <= top_k < 2**31": 0 <= self.top_k < 2**31,
            "0 < top_p <= 1": 0 < self.top_p <= 1,
            "0 <= seed < 2**32": 0 <= self.seed < 2**32,
            "n >= 1": self.n >= 1,
            "no empty stop text": all(self.stop),
            f"0 <= logprobs <= {MAX_LOGPROBS}": self.logprobs is None
            or 0 <= self.logprobs <= MAX_LOGPROBS,
        }
        return [law for law, holds in laws.items() if not holds]


def _whole(value: object) -> int | None:
    """Return a whole number, None for everything else; a bool is no number."""
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return int(value) if is_whole else None


def _real(value: object) -> float | None:
    is_real = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    return float(value) if is_real else None


def _texts(value: object) -> tuple[str, ...] | None:
    if isinstance(value, str):
        return (value,)
    is_list = isinstance(value, list | tuple)
    return tuple(value) if is_list and all(isinstance(t, str) for t in value) else None


def _ids(value: object) -> tuple[int, ...] | None:
    ids = [_whole(v) for v in value] if isinstance(value, list | tuple) else [None]
    return None if any(v is None or v < 0 for v in ids) else tuple(ids)


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Natural-log probabilities, before temperature, at one generated token."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Delta:
    """One generated token of one sample, as `stream` yields it."""

    request_id: int
    sample: int
    token_id: int
    text: str
    finish_reason: str | None = None
    logprobs: TokenLogprobs | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
    """One sample: `finish_reason` is "length", "stop" or "abort"."""

    output_ids: tuple[int, ...]
    text: str
    finish_reason: str
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Output:
    """What a finished request returns.

    `cached_tokens` of the prompt were found in pages of this process, `stored_tokens`
    more in the page store, when it was first admitted; `miss_reason` says why neither
    had any, and is None where one had; `store_reason` says why the store's part ends
    before the prompt does. `reused_tokens` of the rest were found in registered texts,
    and `recomputed_tokens` of these computed anew. `first_token_s` is seconds from the
    request's arrival to its first token.
    """

    request_id: int
    prompt_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    cached_tokens: int = 0
    stored_tokens: int = 0
    miss_reason: str | None = None
    store_reason: str | None = None
    first_token_s: float | None = None
    store_error: str | None = None
    reused_tokens: int = 0
    recomputed_tokens: int = 0

    @property
    def output_ids(self) -> tuple[int, ...]:
        """Token ids of the first sample."""
        return self.completions[0].output_ids

    @property
    def text(self) -> str:
        """Text of the first sample."""
        return self.completions[0].text


class Sequence:
    """One sample's tokens, pages and progress; mutable, owned by the scheduler."""

    def __init__(
        self,
        request_id: int,
        sample: int,
        prompt_ids: tuple[int, ...],
        sampling: SamplingParams,
        decoder: TextStream,
        identity: Identity = PLAIN,
    ):
        self.identity = identity
        self.is_mixed = False  # pages of several epochs of weights, or blended ones
        self.request_id = request_id
        self.sample = sample
        self.sampling = sampling
        self.tokens = list(prompt_ids)
        self.num_prompt = len(prompt_ids)
        self.num_computed = 0
        self.num_retracted = 0  # times it was sent back since another ended
        self.held: Holding | None = None  # its pages, while it runs
        self.stops: tuple[int, ...] = ()  # lengths at which a prefill chunk ends
        self.finish_reason: str | None = None
        self.text = ""  # what was shown; no stop text begins in it
        self.logprobs: list[TokenLogprobs] = []
        self.cached_tokens = 0
        self.stored_tokens = 0
        self.reused_tokens = 0
        self.recomputed_tokens = 0
        self.miss_reason: str | None = NEVER_ADMITTED
        self.store_reason: str | None = None
        self.arrived_s = time.perf_counter()
        self.first_token_s: float | None = None
        self.store_error: str | None = None
        self._decoder = decoder
        self._decoded = ""

    @property
    def vpages(self) -> list[int]:
        """Its virtual pages of the first group; none while it waits."""
        return [] if self.held is None else self.held.columns[0]

    @property
    def output_ids(self) -> tuple[int, ...]:
        """Tokens generated so far."""
        return tuple(self.tokens[self.num_prompt :])

    @property
    def num_left(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.tokens) - self.num_computed

    @property
    def max_length(self) -> int:
        """Tokens of this sequence when it runs to its limit."""
        return self.num_prompt + self.sampling.max_tokens

    def twin(self, sample: int, decoder: TextStream) -> "Sequence":
        """Return another sample of the same request, sharing nothing mutable."""
        other = Sequence(
            self.request_id,
            sample,
            tuple(self.tokens),
            self.sampling,
            decoder,
            self.identity,
        )
        other.num_computed = self.num_computed
        other.is_mixed = self.is_mixed
        other.arrived_s = self.arrived_s
        other.cached_tokens = self.cached_tokens
        other.stored_tokens = self.stored_tokens
        other.reused_tokens = self.reused_tokens
        other.recomputed_tokens = self.recomputed_tokens
        other.miss_reason = self.miss_reason
        other.store_reason = self.store_reason
        return other

    @property
    def was_admitted(self) -> bool:
        """Say whether it was ever given pages."""
        return self.miss_reason != NEVER_ADMITTED

    def found(self, num_tokens: int, reason: str | None) -> None:
        """Note what the prefix cache had when it was first admitted."""
        if not self.was_admitted:
            self.cached_tokens = min(num_tokens, self.num_prompt)
            self.miss_reason = reason

    def accept(
        self, token: int, eos_ids: frozenset[int], logprobs: TokenLogprobs | None
    ) -> Delta:
        """Take one generated token; decide whether the sequence ends with it."""
        if self.first_token_s is None:
            self.first_token_s = time.perf_counter() - self.arrived_s
        self.tokens.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        self._decoded += self._decoder.push(token)
        self.finish_reason = self._ending(token, eos_ids)
        shown, self.text = len(self.text), self._decoded[: self._visible()]
        return Delta(
            self.request_id,
            self.sample,
            token,
            self.text[shown:],
            self.finish_reason,
            logprobs,
        )

    def _ending(self, token: int, eos_ids: frozenset[int]) -> str | None:
        """Say why the sequence ends here, cutting its text before a stop text."""
        seen = len(self.text)
        found = [self._decoded.find(stop, seen) for stop in self.sampling.stop]
        if found := [at for at in found if at >= 0]:
            self._decoded = self._decoded[: min(found)]
            return "stop"
        ends = token in eos_ids and not self.sampling.ignore_eos
        if not ends and token not in self.sampling.stop_ids:
            if len(self.tokens) < self.max_length:
                return None
            self._decoded += self._decoder.finish()
            return "length"
        self._decoded += self._decoder.finish()
        return "stop"

    def _visible(self) -> int:
        """Count the characters that no stop text can take back any more."""
        if self.finish_reason is not None:
            return len(self._decoded)
        held = 0
        for stop in self.sampling.stop:
            longest = min(len(stop) - 1, len(self._decoded) - len(self.text))
            for length in range(longest, held, -1):
                if self._decoded.endswith(stop[:length]):
                    held = length
                    break
        return len(self._decoded) - held
