"""Which token comes next: the rows of a step, each chosen as its own request asks.

The law: greedy rows alone cost one argmax; what one request asks for changes no other's
token; and the choice for a place of a text is the same whether the tokens before it
were known or only proposed.

    tokens, logprobs = choose.next_tokens(logits, [Choice(sequence, row)], width=8)
"""

from collections.abc import Sequence as ListLike
from typing import NamedTuple

import jax
import numpy as np

from kvmem import errors
from kvmem.serve import sampler
from kvmem.serve.request import SamplingParams, Sequence, TokenLogprobs

__all__ = ["Choice", "next_tokens", "token_logprobs"]


class Choice(NamedTuple):
    """A token to choose: of a sequence, from a row of logits.

    `ahead` counts the proposed tokens between those known and this one.
    """

    sequence: Sequence
    row: int
    ahead: int = 0

    @property
    def key(self) -> sampler.RowKey:
        """What decides the choice beside the logits."""
        s = self.sequence
        return sampler.RowKey(s.sampling, s.sample, len(s.tokens) + self.ahead)


def next_tokens(
    logits: jax.Array, choices: ListLike[Choice], width: int, is_checked: bool = False
) -> tuple[np.ndarray, list[TokenLogprobs | None]]:
    """Return a token a choice, and its log-probabilities where asked for.

    Args:
        logits: f32[N, V] of a step, or f32[S, n, V], whose rows are counted through.
        choices: whose they are.
        width: rows that the sampler is compiled for, no fewer than choices.
        is_checked: whether logits that are no numbers are looked for.

    Raises:
        CorruptPage: they were, and are.
    """
    asked = [choice.sequence.sampling for choice in choices]
    rows = np.asarray([choice.row for choice in choices])
    is_greedy = all(params.temperature == 0 for params in asked)
    wants_probs = any(params.logprobs is not None for params in asked)
    if is_checked:
        _require_numbers(logits, choices, rows)
    if is_greedy and not wants_probs:
        tokens = np.asarray(sampler.greedy(logits)).reshape(-1)
        return tokens[rows], [None] * len(rows)
    logits = sampler.take_rows(logits, rows, width)
    if is_greedy:
        tokens = sampler.greedy(logits)
    else:
        keys = [choice.key for choice in choices]
        tokens = sampler.sample(logits, sampler.pack_rows(keys, width))
    found: list[TokenLogprobs | None] = [None] * len(rows)
    if wants_probs:
        found = token_logprobs(logits, tokens, asked)
    return np.asarray(tokens)[: len(rows)], found


def _require_numbers(
    logits: jax.Array, choices: ListLike[Choice], rows: np.ndarray
) -> None:
    """Refuse to choose by NaN, of which every comparison takes the same token."""
    wrong = np.asarray(sampler.has_nan(logits)).reshape(-1)[rows]
    if wrong.any():
        names = sorted(
            {c.sequence.request_id for c, w in zip(choices, wrong, strict=True) if w}
        )
        raise errors.CorruptPage(
            errors.say(
                f"tokens for the requests {', '.join(map(str, names))}",
                "their logits are no numbers, and would confirm whatever was drafted",
                "Look for NaN in the weights, or in the pages (pool.checked)",
            )
        )


def token_logprobs(
    logits: jax.Array, tokens: jax.Array, asked: ListLike[SamplingParams]
) -> list[TokenLogprobs | None]:
    """Return what each request asks to know of its token, None where it does not.

    Args:
        logits: f32[N, V].
        tokens: i32[N], the token of each row.
        asked: of the first rows; the others are padding.
    """
    values = map(np.asarray, sampler.log_probabilities(logits, tokens))
    return _logprobs(asked, *values)


def _logprobs(
    asked: ListLike[SamplingParams],
    chosen: np.ndarray,
    ids: np.ndarray,
    top: np.ndarray,
) -> list[TokenLogprobs | None]:
    """Cut what was computed for the widest request to what each one asked for."""
    return [
        None
        if params.logprobs is None
        else TokenLogprobs(
            float(chosen[at]),
            tuple(
                (int(token), float(value))
                for token, value in zip(
                    ids[at, : params.logprobs], top[at, : params.logprobs], strict=True
                )
            ),
        )
        for at, params in enumerate(asked)
    ]
