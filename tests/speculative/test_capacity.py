"""Capacities of drafting: rows, entries and lengths, each compared in full."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem import errors
from kvmem.speculative import SpecPlan, capacity

MIB = 1 << 20


@pytest.mark.case("SPC-01")
def test_the_state_of_a_draft_has_room_for_topk_times_the_batch():
    plan = SpecPlan("frozen_kv", 8, steps=1, max_batch=2, max_length=128)
    held = capacity.attention_rows(plan) * plan.max_length
    used = capacity.attention_rows(plan) * 100  # both sequences at 100
    assert (capacity.attention_rows(plan), held, used) == (16, 2_048, 1_600)
    capacity.require_entries("draft attention", held, used)
    without_topk = plan.max_batch * plan.max_length
    assert without_topk == 256
    with pytest.raises(errors.OutOfPages, match="256 entries: 1,600 are needed"):
        capacity.require_entries("draft attention", without_topk, used)


@pytest.mark.parametrize("max_batch", [1, 3, 48])
@pytest.mark.parametrize("topk", [None, 1, 2, 8])
def test_the_draft_attends_for_topk_rows_a_sequence(max_batch, topk):
    plan = SpecPlan("frozen_kv", topk, max_batch=max_batch)
    assert capacity.attention_rows(plan) == max_batch * (topk or 1)


@pytest.mark.case("SPC-02")
def test_a_row_has_room_for_what_is_drafted_behind_the_longest_text():
    plan = SpecPlan("frozen_kv", 2, draft_tokens=4, max_batch=1, max_length=64)
    assert capacity.row_entries(plan) == 68
    assert capacity.attention_entries(plan) == 136
    needed = capacity.attention_rows(plan) * (64 + 4)
    capacity.require_entries("draft rows", capacity.attention_entries(plan), needed)
    with pytest.raises(errors.OutOfPages, match="136 are needed"):
        capacity.require_entries("draft rows", 2 * 64, needed)


@pytest.mark.case("SPC-03")
def test_rows_are_padded_and_a_slice_past_their_end_is_short_without_a_word():
    rows = capacity.verify_rows(33, 3)
    padded = capacity.verify_rows(33, 3, multiple=8)
    assert (rows, padded) == (132, 136)
    short = jnp.zeros(rows)
    assert short[:padded].shape == (132,)  # no error from jax, and four rows too few
    cut = jax.lax.dynamic_slice(jnp.arange(rows), (128,), (8,))
    assert int(cut[0]) == 124  # and a slice of fixed size begins elsewhere
    with pytest.raises(errors.OutOfPages, match="132 entries: 136 are needed"):
        capacity.require_entries("verify rows", short.shape[0], padded)
    capacity.require_entries("verify rows", np.zeros(padded).shape[0], padded)


@pytest.mark.case("SPC-04")
def test_nothing_is_proposed_where_the_draft_has_no_row_for_it():
    plan = SpecPlan("two_engine", steps=4, max_length=64, draft_max_length=32)
    assert [capacity.proposable(plan, n) for n in (27, 28, 29, 31, 32, 33, 63)] == [
        *(4, 4, 3, 1, 0, 0, 0)
    ]
    alone = SpecPlan("two_engine", steps=4, max_length=64)
    assert [capacity.proposable(alone, n) for n in (33, 60, 61, 64, 65)] == [
        *(4, 4, 3, 0, 0)
    ]


@pytest.mark.case("SPC-07")
def test_a_page_is_kept_for_reuse_when_its_last_row_is_accepted():
    committed = 14
    for accepted, pages in ((0, 0), (1, 0), (2, 1), (4, 1)):
        assert capacity.publishable_pages(committed + accepted, 16) == pages


@pytest.mark.case("BUD-10")
def test_a_verification_owes_its_rows_before_the_first_page():
    plan = SpecPlan("mtp", steps=8, max_batch=32)
    term = capacity.workspace_term(plan, row_nbytes=2 * MIB)
    assert (term.owner, term.bytes_per_token) == ("draft", 0)
    assert term.fixed_bytes == 32 * 9 * 2 * MIB == 576 * MIB
