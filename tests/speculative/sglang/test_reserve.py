"""Published figures of what SGLang reserves for a verification."""

import pytest

from kvmem.budget import sglang as budgets
from kvmem.speculative import Server, SpecPlan, check, sglang


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ((3, 1, 4, 1), 4),
        ((3, 1, 4, 64), 4),
        ((3, 4, 4, 1), 12),
        ((3, 4, 16, 64), 512),
        ((3, 2, 5, 4), 16),
        ((5, 8, 64, 16), 256),
        ((1, 2, 4, 16), 32),  # a branch that ends with its page
        ((2, 2, 4, 16), 64),
    ],
)
def test_what_a_verification_reserves(given, tokens):
    assert sglang.alloc_length(*given) == tokens
    assert sglang.reserve_length(*given) == 2 * tokens


def test_a_draft_without_rows_reserves_no_whole_pages():
    assert sglang.alloc_length(3, 4, 16, 64, has_draft_rows=False) == 16


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ((3, 1, 4, 1), 8),
        ((3, 4, 16, 64), 1_024 + 63),
        ((3, 1, 4, 64), 8 + 63),
        ((3, 4, 4, 1), 8),
        ((5, 8, 64, 16), 512 + 15),
    ],
)
def test_a_row_is_wider_by_what_is_reserved_behind_it(given, tokens):
    assert sglang.row_headroom(*given) == tokens


def test_a_reservation_past_the_row_is_refused_and_not_cut():
    """SGLang #26972: 1,024 tokens reserved in a row that was 20 wider."""
    given = {"steps": 3, "topk": 4, "draft_tokens": 16, "page_size": 64}
    plan = SpecPlan("eagle", **given, pool_kind="split", server=Server(row_width=20))
    (broken,) = check(plan, rules="sglang")
    assert broken.gate == "width of a request's row"
    assert "20 tokens wider than the context, with 1087 reserved" in str(broken)
    enough = SpecPlan(
        "eagle", **given, pool_kind="split", server=Server(row_width=1_087)
    )
    assert check(enough, rules="sglang") == ()


def test_a_window_pool_counts_what_a_verification_reserves():
    """The figures of the window cap, its reservation from the rule that has it."""
    tree = sglang.alloc_length(3, 2, 5, page_size=4)
    one = sglang.alloc_length(3, 2, 5, page_size=1)
    assert (tree, one) == (16, 6)
    cap = budgets.window_cap(8, 4, 2, chunk=4, drafted=5, reserved=tree)
    assert cap == 104
    cap = budgets.window_cap(8, 1, 2, chunk=4, drafted=5, reserved=one, overlap=True)
    assert cap == 91
