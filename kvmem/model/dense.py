"""Attention over whole texts without a cache: what paged attention has to equal.

    out = attend(q, k, v, scale, View(window=128), sink_logits)      # [S, Q, H * G, D]

Letters as in `kvmem.model.attention`; here Q tokens are all there are.
"""

import jax
import jax.numpy as jnp

from kvmem.model.attention import ALL, View

__all__ = ["attend"]


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    scale: float,
    view: View = ALL,
    sink_logits: jax.Array | None = None,
) -> jax.Array:
    """Attend causally from every token of a text to those that it sees.

    Args:
        q: [S, Q, H * G, D] queries, rotated; the G queries of a KV head adjacent.
        k, v: [S, Q, H, D] and [S, Q, H, Dv].
        scale: factor on the scores.
        view: what a query sees of the positions before it.
        sink_logits: [H * G] learned scores that take part in each softmax.

    Returns:
        [S, Q, H * G, Dv] in float32.
    """
    group = q.shape[2] // k.shape[2]
    q, k, v = (rows.astype(jnp.float32) for rows in (q, k, v))
    k, v = (jnp.repeat(rows, group, axis=2) for rows in (k, v))
    scores = jnp.einsum("sqhd,sthd->shqt", q, k) * scale
    places = jnp.arange(q.shape[1], dtype=jnp.int32)
    n, at = places[:, None], places[None, :]
    sees = (at <= n) & view.keeps(at, n)
    scores = jnp.where(sees[None, None], scores, -jnp.inf)
    if sink_logits is not None:
        shape = (*scores.shape[:3], 1)
        sink = sink_logits.astype(jnp.float32).reshape(1, -1, 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sink, shape)], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]]
    return jnp.einsum("shqt,sthd->sqhd", weights, v)
