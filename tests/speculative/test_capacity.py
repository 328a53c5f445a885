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
    rows = capacity.attention_rows(sequences=2, width=8)
    held = capacity.attention_entries(rows, 128)
    used = capacity.attention_entries(rows, 100)  # both sequences at 100
    assert (rows, held, used) == (16, 2_048, 1_600)
    capacity.require_entries("draft attention", held, used)
    without_topk = capacity.attention_entries(2, 128)
    assert without_topk == 256
    with pytest.raises(errors.OutOfPages, match="256 entries: 1,600 are needed"):
        capacity.require_entries("draft attention", without_topk, used)


@pytest.mark.case("SPC-02")
def test_a_row_has_room_for_what_is_drafted_behind_the_longest_text():
    """64 tokens of text, 4 drafted in two chains: 68 entries a row, 136 in all."""
    rows = capacity.attention_rows(sequences=1, width=2)
    needed = capacity.attention_entries(rows, 64 + 4)
    assert needed == 136
    capacity.require_entries("draft rows", 136, needed)
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
def test_nothing_is_proposed_where_target_or_draft_has_no_row_for_it():
    """A draft of 32 draws the token behind them, which is not fed to it."""
    behind = [
        capacity.proposable(4, n, longest=64, known=32)
        for n in (28, 29, 30, 31, 32, 33, 63)
    ]
    assert behind == [4, 4, 3, 2, 1, 0, 0]
    alone = [capacity.proposable(4, n, longest=64) for n in (33, 59, 60, 62, 63, 65)]
    assert alone == [4, 4, 3, 1, 0, 0]
    assert capacity.proposable(4, 9) == 4


def test_chains_of_a_tree_end_with_the_text_all_alike():
    found = [capacity.proposable(6, n, longest=20, width=2) for n in (15, 16, 17, 18)]
    assert found == [6, 6, 4, 2]


@pytest.mark.case("BUD-10")
def test_a_verification_owes_its_rows_before_the_first_page():
    plan = SpecPlan("mtp", steps=8, max_batch=32)
    term = capacity.workspace_term(plan, row_nbytes=2 * MIB)
    assert (term.owner, term.bytes_per_token) == ("draft", 0)
    assert term.fixed_bytes == 32 * 9 * 2 * MIB == 576 * MIB
