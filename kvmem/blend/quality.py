"""Quality: how far blended logits are from those of a full recompute.

compare(full, blended)      # Quality(agreement=0.94, first=True, kl=0.02)
"""

from typing import NamedTuple

import numpy as np

__all__ = ["Quality", "compare"]


class Quality(NamedTuple):
    """Of n next tokens: the share that is equal, whether the first one is, and the
    mean divergence (nats) of the full distribution from the blended one."""

    agreement: float
    first: bool
    kl: float


def compare(full: np.ndarray, blended: np.ndarray) -> Quality:
    """Compare logits f32[n, V] of the same tokens.

    Columns that are -inf in both (padding of a vocabulary) take no part. Tokens with a
    NaN on either side agree with none, and the divergence is then NaN.
    """
    agree = full.argmax(axis=-1) == blended.argmax(axis=-1)
    agree &= ~np.isnan(full + blended).any(axis=-1)
    wanted, found = _log_probs(full), _log_probs(blended)
    seen = ~np.isneginf(wanted)
    wanted, found = (np.where(seen, side, 0.0) for side in (wanted, found))
    gaps = np.where(seen, np.exp(wanted) * (wanted - found), 0.0)
    return Quality(float(agree.mean()), bool(agree[0]), float(gaps.sum(-1).mean()))


def _log_probs(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide = wide - wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
