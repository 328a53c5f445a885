"""Paged logits of every hybrid equal those of whole texts without a cache."""

import numpy as np
import pytest

FAMILIES = ["gpt_oss", "gemma3", "gemma3 shared", "deepseek_v32", "qwen3_next"]
WIDE = ("gemma3 shared", "qwen3_next")  # read on pages of 16 in every run
SIZES = [
    pytest.param(
        name,
        size,
        marks=[pytest.mark.long] if size == 16 and name not in WIDE else [],
        id=f"{name}-{size}",
    )
    for name in FAMILIES
    for size in (4, 16)
]


def in_two(run, texts, cuts, steps=24):
    """Read each text up to its cut, then to its end; logits after both."""
    found = []
    for begin, end in ((np.zeros_like(cuts), cuts), (cuts, np.full_like(cuts, 24))):
        tokens = np.full((len(texts), steps), 258, np.int32)
        for row, (a, b) in enumerate(zip(begin, end, strict=True)):
            tokens[row, : b - a] = texts[row, a:b]
        found.append(run.read(tokens, end - begin))
    return found


@pytest.mark.parametrize(("family", "page_size"), SIZES)
def test_prefill_cut_at_every_boundary_equals_dense(
    family, page_size, texts, texts_of, dense_of
):
    dense = dense_of(family)
    run = texts_of(family, page_size)
    for cut in range(1, 24):
        cuts = np.array([cut, (cut + 7) % 23 + 1, (cut + 15) % 23 + 1])
        first, last = in_two(run, texts, cuts)
        np.testing.assert_allclose(first, dense[range(3), cuts - 1], atol=2e-4)
        np.testing.assert_allclose(last, dense[:, 23], atol=2e-4)
        for seq in range(3):
            run.give_back(seq)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_one_by_one_in_batches_of_mixed_lengths_equal_dense(
    family, texts, texts_of, dense_of
):
    dense = dense_of(family)
    run = texts_of(family)
    starts = np.array([3, 11, 0])
    tokens = np.full((3, 24), 258, np.int32)
    for row, start in enumerate(starts):
        tokens[row, :start] = texts[row, :start]
    run.read(tokens, starts)
    while (run.lengths < 24).any():
        at = np.minimum(run.lengths, 23)
        new = (run.lengths < 24).astype(np.int32)
        logits = run.read(texts[range(3), at][:, None], new)
        for row in np.flatnonzero(new):
            np.testing.assert_allclose(logits[row], dense[row, at[row]], atol=2e-4)
