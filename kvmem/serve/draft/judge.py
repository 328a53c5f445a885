"""Judging: which tokens a step gives, drafted rows and others, from one look at it.

The choice for a place is made as if the tokens before it stood; a drafted row gives as
many as confirm what was drafted, and the one behind them. The law: one choice a place,
by the request's own parameters and noise, whatever else the step computes; tokens that
were drawn with their probabilities are judged by those instead.

    own, runs = judged(work, logits, choices, buckets, proposed=None)
"""

from collections.abc import Sequence as ListLike

import jax
import numpy as np

from kvmem.serve import choose, sampler
from kvmem.serve.buckets import Buckets
from kvmem.serve.choose import Choice
from kvmem.serve.draft import rejection
from kvmem.serve.draft.rejection import Proposed
from kvmem.serve.request import TokenLogprobs
from kvmem.serve.work import Row, Work

__all__ = ["Chosen", "judged", "last_places", "run_of"]

Chosen = tuple[int, TokenLogprobs | None]


def last_places(work: Work, logits: jax.Array) -> list[int]:
    """Return where the last place of each row of work stands among all rows of logits.

    Args:
        work: rows in the order of the step.
        logits: f32[S, V], or f32[S, n, V].
    """
    places = logits.shape[1] if logits.ndim == 3 else 1
    return [(at + 1) * places - 1 for at in range(len(work.rows))]


def judged(
    work: Work,
    logits: jax.Array,
    own: ListLike[Choice],
    buckets: Buckets,
    proposed: Proposed | None = None,
) -> tuple[list[Chosen], list[list[Chosen]]]:
    """Return the token of each choice of `own`, and the run of each drafted row.

    Args:
        work: the step, drafted rows among others.
        logits: of it.
        own: choices of rows without drafts.
        buckets: what a sampler is compiled for.
        proposed: what drafted tokens were drawn from; None: they were named.

    Raises:
        CorruptPage: logits of a drafted step that are no numbers.
    """
    if not work.is_drafted:
        return _chosen(logits, own, buckets, False), []
    lasts = last_places(work, logits)
    drafted = [
        (at, row, last)
        for at, (row, last) in enumerate(zip(work.rows, lasts, strict=True))
        if row.drafts
    ]
    if proposed is not None:
        rows = {at: row for at, row, _ in drafted}
        runs = rejection.runs_of(logits, rows, proposed)
        spelled = [
            _with_logprobs(logits, row, last, runs[at], buckets)
            for at, row, last in drafted
        ]
        return _chosen(logits, own, buckets, True), spelled
    ahead = [
        Choice(row.sequence, last + 1 - row.count + at, depth)
        for _, row, last in drafted
        for at, depth in enumerate(_depths(row))
    ]
    chosen = _chosen(logits, [*own, *ahead], buckets, True)
    found, at = [], len(own)
    for _, row, _ in drafted:
        found.append(_run(row, chosen[at : at + row.count]))
        at += row.count
    return chosen[: len(own)], found


def run_of(drafts: ListLike[int], chosen: ListLike[int]) -> int:
    """Return how many of the chosen tokens are emitted: those that confirm a drafted
    one, and the one behind them.

    Args:
        drafts: k drafted tokens.
        chosen: k + 1 tokens, each the choice behind the drafted ones before it.
    """
    for at, (drafted, token) in enumerate(zip(drafts, chosen[:-1], strict=True)):
        if drafted != token:
            return at + 1
    return len(chosen)


def _depths(row: Row) -> list[int]:
    """Return how many drafted tokens stand before the choice of each place."""
    if row.chains is None:
        return list(range(row.count))
    return [0, *list(range(1, row.chains.length + 1)) * row.chains.count]


def _run(row: Row, chosen: list[Chosen]) -> list[Chosen]:
    """Return the choices that are emitted: of a tree, along the chain that begins with
    the first of them."""
    if row.chains is None:
        return chosen[: run_of(row.drafts, [token for token, _ in chosen])]
    length = row.chains.length
    begins = row.drafts[::length]
    if chosen[0][0] not in begins:
        return chosen[:1]
    first = begins.index(chosen[0][0]) * length
    drafts = row.drafts[first : first + length]
    mine = [chosen[0], *chosen[1 + first : 1 + first + length]]
    return mine[: run_of(drafts, [token for token, _ in mine])]


def _chosen(
    logits: jax.Array, choices: ListLike[Choice], buckets: Buckets, is_checked: bool
) -> list[Chosen]:
    if not choices:
        return []
    width = buckets.choices(len(choices))
    tokens, probs = choose.next_tokens(logits, choices, width, is_checked)
    return list(zip(tokens.tolist(), probs, strict=True))


def _with_logprobs(
    logits: jax.Array, row: Row, last: int, run: tuple[int, ...], buckets: Buckets
) -> list[Chosen]:
    """Return a run's tokens with their log-probabilities, if they are asked for."""
    sampling = row.sequence.sampling
    if sampling.logprobs is None:
        return [(token, None) for token in run]
    width = buckets.choices(buckets.drafted + 1)
    first = last + 1 - row.count
    rows = np.arange(first, first + len(run))
    tokens = np.zeros(width, np.int32)
    tokens[: len(run)] = run
    taken = sampler.take_rows(logits, rows, width)
    probs = choose.token_logprobs(taken, tokens, [sampling] * len(run))
    return list(zip(run, probs, strict=True))
