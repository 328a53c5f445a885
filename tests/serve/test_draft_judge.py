"""Judging: what stands of drafted tokens, by equal choice or by exact rejection."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem import errors
from kvmem.serve.buckets import Buckets
from kvmem.serve.draft.judge import judged, run_of
from kvmem.serve.draft.rejection import Proposed, runs_of
from kvmem.serve.work import Row, Work

VOCAB, ROWS = 8, 4096


@pytest.mark.parametrize(
    ("drafts", "chosen", "emitted"),
    [
        ((4, 5, 6), (4, 5, 6, 7), 4),
        ((4, 5, 6), (4, 5, 9, 7), 3),
        ((4, 5, 6), (9, 5, 6, 7), 1),
        ((4,), (4, 5), 2),
    ],
)
def test_a_run_ends_with_the_first_token_that_was_not_drafted(drafts, chosen, emitted):
    assert run_of(drafts, chosen) == emitted


@pytest.fixture(scope="module")
def models():
    """What target and draft say of three places: probabilities f32[3, 8]."""
    rng = np.random.default_rng(3)
    target, draft = rng.normal(0, 1.2, (2, 3, VOCAB))
    return np.asarray(target, np.float32), np.asarray(draft, np.float32)


@pytest.fixture
def drawn(models, new_sequence):
    """Rows that drafted two tokens, each of its own seed, drawn from the draft."""
    _, draft = models
    rng = np.random.default_rng(4)
    probs = np.asarray(jax.nn.softmax(jnp.asarray(draft[:2]), axis=-1))
    ids = [rng.choice(VOCAB, ROWS, p=p / p.sum()) for p in probs.astype(float)]
    rows = {
        at: Row(new_sequence([1], temperature=1.0, seed=at), 0, 3, (int(a), int(b)))
        for at, (a, b) in enumerate(zip(*ids, strict=True))
    }
    whose = {row.sequence: at for at, row in rows.items()}
    given = jnp.broadcast_to(jnp.asarray(probs)[None], (ROWS, 2, VOCAB))
    return rows, Proposed(given, whose)


def test_sampled_tokens_follow_the_targets_distribution(models, drawn):
    """First tokens as the target alone has them, and the second behind each of them.

    4096 rows: a frequency errs by 0.008 at most in one of a few hundred cases; a draft
    taken at its word errs by 0.2.
    """
    target, draft = models
    rows, proposed = drawn
    logits = jnp.broadcast_to(jnp.asarray(target)[None], (ROWS, 3, VOCAB))
    runs = runs_of(logits, rows, proposed)
    want = np.asarray(jax.nn.softmax(jnp.asarray(target), axis=-1))
    first = np.bincount([run[0] for run in runs.values()], minlength=VOCAB) / ROWS
    assert np.abs(first - want[0]).max() < 0.03
    longer = [run[1] for run in runs.values() if len(run) > 1]
    second = np.bincount(longer, minlength=VOCAB) / len(longer)
    assert np.abs(second - want[1]).max() < 0.04
    last = [run[2] for run in runs.values() if len(run) > 2]
    third = np.bincount(last, minlength=VOCAB) / len(last)
    assert np.abs(third - want[2]).max() < 0.05
    # accepted as often as the theory says: the overlap of the two
    other = np.asarray(jax.nn.softmax(jnp.asarray(draft), axis=-1))
    overlap = np.minimum(want[0], other[0]).sum()
    assert abs(len(longer) / ROWS - overlap) < 0.03
    assert (
        np.abs(np.bincount([r.drafts[0] for r in rows.values()]) / ROWS - want[0]).max()
        > 0.1
    )


def test_a_row_of_fewer_tokens_is_judged_by_its_own_places(models, drawn):
    """One drafted token and its two places stand at the end of the step's three."""
    target, _ = models
    rows, proposed = drawn
    short = {
        at: row._replace(count=2, drafts=row.drafts[:1]) for at, row in rows.items()
    }
    padded = np.concatenate([np.full_like(target[:1], np.nan), target[:2]])
    logits = jnp.broadcast_to(jnp.asarray(padded)[None], (ROWS, 3, VOCAB))
    runs = runs_of(logits, short, proposed)
    want = np.asarray(jax.nn.softmax(jnp.asarray(target[0])))
    first = np.bincount([run[0] for run in runs.values()], minlength=VOCAB) / ROWS
    assert np.abs(first - want).max() < 0.03
    assert {len(run) for run in runs.values()} == {1, 2}


def test_probabilities_that_are_none_are_a_fault(models, drawn):
    target, _ = models
    rows, proposed = drawn
    logits = jnp.broadcast_to(jnp.asarray(target)[None], (ROWS, 3, VOCAB))
    request = rows[5].sequence.request_id
    with pytest.raises(errors.CorruptPage, match=f"of the requests {request}:"):
        runs_of(logits.at[5, 1].set(jnp.nan), rows, proposed)
    broken = proposed.probs.at[5].set(jnp.nan)
    with pytest.raises(errors.CorruptPage, match="no|none"):
        runs_of(logits, rows, proposed._replace(probs=broken))


def test_logits_that_are_no_numbers_confirm_nothing(new_sequence):
    """Every comparison with NaN takes one token: an accept rate of 1, silently."""
    buckets = Buckets((2,), (4,), (8,), 4, drafted=2)
    rows = (Row(new_sequence([1]), 0, 3, (0, 0)), Row(new_sequence([1]), 0, 3, (0, 0)))
    logits = np.zeros((2, 3, VOCAB), np.float32)
    _, runs = judged(Work("decode", rows), jnp.asarray(logits), [], buckets)
    assert [len(run) for run in runs] == [3, 3]
    logits[1, 0, 4] = np.nan
    words = f"tokens for the requests {rows[1].sequence.request_id}:"
    with pytest.raises(errors.CorruptPage, match=words):
        judged(Work("decode", rows), jnp.asarray(logits), [], buckets)
