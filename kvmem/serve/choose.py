"""Which token comes next: the rows of a step, each chosen as its own request asks.

The law: greedy rows alone cost one argmax; what one request asks for changes no other's
token.

    tokens, logprobs = choose.next_tokens(logits, [(sequence, row)], buckets)
"""

import jax
import numpy as np

from kvmem.serve import sampler
from kvmem.serve.buckets import Buckets
from kvmem.serve.request import SamplingParams, Sequence, TokenLogprobs

__all__ = ["next_tokens"]


def next_tokens(
    logits: jax.Array, choosing: list[tuple[Sequence, int]], buckets: Buckets
) -> tuple[np.ndarray, list[TokenLogprobs | None]]:
    """Return a token a sequence, and its log-probabilities where asked for.

    Args:
        logits: f32[S, V] of a step.
        choosing: sequences, and the row of each.
        buckets: what the sampler is compiled for.
    """
    asked = [sequence.sampling for sequence, _ in choosing]
    rows = np.asarray([row for _, row in choosing])
    is_greedy = all(params.temperature == 0 for params in asked)
    wants_probs = any(params.logprobs is not None for params in asked)
    if is_greedy and not wants_probs:
        return np.asarray(sampler.greedy(logits))[rows], [None] * len(rows)
    width = buckets.decode(len(rows), 1).rows
    logits = sampler.take_rows(logits, rows, width)
    if is_greedy:
        tokens = sampler.greedy(logits)
    else:
        keys = [
            sampler.RowKey(s.sampling, s.sample, len(s.tokens)) for s, _ in choosing
        ]
        tokens = sampler.sample(logits, sampler.pack_rows(keys, width))
    found: list[TokenLogprobs | None] = [None] * len(rows)
    if wants_probs:
        values = map(np.asarray, sampler.log_probabilities(logits, tokens))
        found = _logprobs(asked, *values)
    return np.asarray(tokens)[: len(rows)], found


def _logprobs(
    asked: list[SamplingParams], chosen: np.ndarray, ids: np.ndarray, top: np.ndarray
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
