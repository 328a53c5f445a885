"""Pool sizes for one model in every mix of full attention and windows.

Two bytes an element, 4 heads of 64, 32 layers, 10,000,000 bytes: the figures are those
that SGLang's pool configurator gives, with its ratio of window rows to full rows.
"""

import pytest

from kvmem import budget
from kvmem.geometry import Topology

BYTES = 10_000_000


def solve(groups, *, nbytes=BYTES, max_tokens=None, **more):
    limits = [] if nbytes is None else [budget.limit("memory", nbytes)]
    size = groups[0].page_size
    pages = None if max_tokens is None else max_tokens // size
    return budget.solve(groups, Topology(), limits, max_pages=pages, **more)


def tokens(solved):
    return tuple(group.tokens for group in solved.groups)


@pytest.mark.parametrize(
    ("page_size", "nbytes", "max_tokens", "expected"),
    [
        (1, BYTES, None, 305),
        (128, BYTES, None, 256),
        (1, None, 100, 100),
        (128, None, 1_000, 896),
    ],
)
def test_full_attention_takes_whole_pages(gqa, page_size, nbytes, max_tokens, expected):
    solved = solve(gqa(page_size), nbytes=nbytes, max_tokens=max_tokens)
    assert tokens(solved) == (expected,)


def test_a_draft_of_four_layers_leaves_271_tokens(gqa):
    solved = solve(gqa(), draft=gqa(full=4, domain="draft")[0])
    assert tokens(solved) == (271,)
    assert solved.used_nbytes == 271 * 1_024 * 36 <= BYTES


@pytest.mark.parametrize("kind", ["unified", "split"])
@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(0.25, (488, 122)), (0.5, (406, 203)), (0.75, (348, 261)), (1.0, (305, 305))],
)
def test_windows_get_their_ratio_of_the_rows(gqa, kind, ratio, expected):
    groups = gqa(full=16, windows=16)
    solved = solve(groups, window_ratio=ratio, kind=kind)
    assert tokens(solved) == expected
    assert 0.99 * BYTES < solved.used_nbytes <= BYTES
    if kind == "split":  # equal pages share one free list all the same
        assert [pool.groups for pool in solved.pools] == [(0, 1)]


def test_windows_round_down_to_whole_pages(gqa):
    groups = gqa(128, full=16, windows=16)
    assert tokens(solve(groups, window_ratio=0.5)) == (384, 128)


def test_a_cap_holds_for_every_pool(gqa):
    groups = gqa(full=15, windows=17)  # pages of two sizes
    solved = solve(groups, nbytes=None, max_tokens=200, window_ratio=0.5, kind="split")
    assert tokens(solved) == (200, 100)
    assert solved.left_nbytes == 0
    capped = solve(groups, max_tokens=200, window_ratio=0.5, kind="split")
    assert (tokens(capped), capped.binding_limit) == ((200, 100), "max_pages")


@pytest.mark.parametrize(
    ("nbytes", "max_tokens", "expected"), [(BYTES, None, 305), (None, 500, 500)]
)
def test_windows_alone_take_everything(gqa, nbytes, max_tokens, expected):
    groups = gqa(full=0, windows=32)
    solved = solve(groups, nbytes=nbytes, max_tokens=max_tokens, window_ratio=0.25)
    assert tokens(solved) == (expected,)
