"""Quality: what two sets of logits agree on, and that no NaN passes for agreement."""

import numpy as np
import pytest

from kvmem.blend.quality import compare

FULL = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)


def test_the_divergence_is_that_of_the_full_distribution_from_the_blended_one():
    blended = FULL + np.random.default_rng(1).normal(size=FULL.shape)
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (FULL, blended))
    found = compare(FULL, blended)
    assert found.kl == pytest.approx((p * np.log(p / q)).sum(-1).mean(), rel=1e-5)
    same = (FULL.argmax(-1) == blended.argmax(-1)).tolist()
    assert (found.agreement, found.first) == (sum(same) / 5, same[0])
    assert compare(FULL, FULL) == (1.0, True, 0.0)


def test_a_padded_vocabulary_takes_no_part():
    padded = np.pad(FULL, ((0, 0), (0, 3)), constant_values=-np.inf)
    other = np.pad(FULL[:, ::-1], ((0, 0), (0, 3)), constant_values=-np.inf)
    found, alone = compare(padded, other), compare(FULL, FULL[:, ::-1])
    assert found[:2] == alone[:2] and found.kl == pytest.approx(alone.kl)


@pytest.mark.parametrize("where", ["full", "blended", "both"])
def test_a_token_without_a_number_agrees_with_none(where):
    broken = FULL.copy()
    broken[0, 3] = np.nan
    full, blended = (
        broken if where in (side, "both") else FULL for side in ("full", "blended")
    )
    found = compare(full, blended)
    assert (found.agreement, found.first) == (0.8, False)
    assert np.isnan(found.kl), "no gate opens"
