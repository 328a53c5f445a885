"""Rejection: drafted tokens that were drawn, judged by what they were drawn from.

Speculative sampling as `accept` has it, for the rows of a step. The tokens follow the
target's distribution, and a draft near the target is accepted more often than by the
coupled choice of `verifier`; but they are others than those of a step without drafts,
so a seed gives the same tokens only beside the same draft.

    runs = runs_of(logits, {0: row}, proposed, keys)     # {0: (4, 17, 9)}
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvmem import errors
from kvmem.serve import sampler
from kvmem.serve.draft.accept import accept_sampled
from kvmem.serve.request import SamplingParams, Sequence
from kvmem.serve.work import Row

__all__ = ["Proposed", "runs_of", "warm_up"]


class Proposed(NamedTuple):
    """What drafted tokens were drawn from: f32[N, k, V], and whose row is which."""

    probs: jax.Array
    rows: Mapping[Sequence, int]


def runs_of(
    logits: jax.Array, rows: Mapping[int, Row], proposed: Proposed
) -> dict[int, tuple[int, ...]]:
    """Return the tokens that each drafted row gives: those that stand, and one more.

    Args:
        logits: f32[S, k + 1, V] of the step; a row of c tokens has its last c places.
        rows: drafted rows by their place among the S.
        proposed: what their tokens were drawn from.

    Raises:
        CorruptPage: probabilities that are none, of target or draft.
    """
    seqs, places, _ = logits.shape
    width = places - 1
    counts = np.zeros(seqs, np.int32)
    ids = np.zeros((seqs, width), np.int32)
    whose = np.zeros(seqs, np.int32)
    spare = sampler.RowKey(next(iter(rows.values())).sequence.sampling, 0, 0)
    keys = [spare] * seqs
    for at, row in rows.items():
        sequence, counts[at] = row.sequence, len(row.drafts)
        ids[at, : counts[at]] = row.drafts
        whose[at] = proposed.rows[sequence]
        keys[at] = sampler.RowKey(
            sequence.sampling, sequence.sample, len(sequence.tokens)
        )
    packed = sampler.pack_rows(keys, seqs)
    target, draft = _aligned(logits, proposed.probs, counts, whose, width)
    target = sampler.probabilities(target, packed)
    found = accept_sampled(target, draft, ids, counts, packed.keys)
    taken, after, wrong = (np.asarray(each) for each in found)
    _require_sound(rows, wrong)
    return {at: (*row.drafts[: taken[at]], int(after[at])) for at, row in rows.items()}


def warm_up(rows: int, probs: jax.Array) -> None:
    """Compile what judges a step of `rows` rows whose tokens are drawn from
    f32[N, k, V]."""
    _, width, vocab = probs.shape
    none = np.zeros(rows, np.int32)
    keys = [sampler.RowKey(SamplingParams(), 0, 0)] * rows
    packed = sampler.pack_rows(keys, rows)
    logits = jnp.zeros((rows, width + 1, vocab), jnp.float32)
    target, draft = _aligned(logits, probs, none, none, width)
    target = sampler.probabilities(target, packed)
    ids = np.zeros((rows, width), np.int32)
    accept_sampled(target, draft, ids, none, packed.keys)


@jax.jit
def _gather(logits, probs, counts, whose, steps):
    """Bring places to the left: logits of place j, and what token j was drawn from."""
    first = steps - counts[:, None]  # of the k + 1 places those before are padding
    at = jnp.clip(first + jnp.arange(logits.shape[1])[None], 0, steps)
    return jnp.take_along_axis(logits, at[..., None], axis=1), probs[whose]


def _aligned(logits, probs, counts, whose, width: int):
    """Return f32[S, k + 1, V] logits and f32[S, k, V] probabilities, row by row."""
    short = width - probs.shape[1]
    if short:
        probs = jnp.pad(probs, ((0, 0), (0, short), (0, 0)))
    return _gather(logits, probs, counts, whose, np.int32(width))


def _require_sound(rows: Mapping[int, Row], wrong: np.ndarray) -> None:
    names = sorted({row.sequence.request_id for at, row in rows.items() if wrong[at]})
    if names:
        raise errors.CorruptPage(
            errors.say(
                f"drafted tokens of the requests {', '.join(map(str, names))}",
                "their probabilities, or those that they were drawn from, are none",
                "Look for NaN in the weights, or in the pages (pool.checked)",
            )
        )
