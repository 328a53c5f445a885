"""Select: which tokens of a reused text are computed anew.

Tokens whose keys at the check layer deviate most from what their new text makes of them
are those that the text before them matters to. The law: tokens that were not found are
always chosen; of the others the `count` highest scores, the earlier of equals; chosen
ones are ascending, and the set is the same for every layer behind the check layer.
Source: CacheBlend (arXiv:2405.16444), with one set for all later layers.

    chosen = choose(scores(new, old), must, num_chosen=40, width=64)

Letters: N tokens, M the padded width of the chosen set, K elements of a token's keys.
"""

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["choose", "scores"]


def scores(new: jax.Array, old: jax.Array) -> jax.Array:
    """Return f32[N]: the squared distance of each token's keys [N, K], both rotated to
    the new place."""
    return jnp.square(new.astype(jnp.float32) - old.astype(jnp.float32)).sum(axis=-1)


def choose(
    scored: jax.Array, must: jax.Array, num_chosen: jax.Array, width: int
) -> jax.Array:
    """Return i32[M], the chosen tokens ascending; N, one past the end, behind them.

    Args:
        scored: f32[N]; what is no number counts as most.
        must: bool[N] tokens that are chosen whatever they score.
        num_chosen: i32, chosen ones in all; tokens past the end of the text are not
            among the N highest, so it is at most the tokens that are real.
        width: M >= num_chosen, static.
    """
    count = scored.shape[0]
    most = jnp.finfo(scored.dtype).max  # below what must be: that is never left out
    ranked = jnp.where(jnp.isnan(scored), most, jnp.minimum(scored, most))
    ranked = jnp.where(must, jnp.inf, ranked)
    _, order = lax.top_k(ranked, min(width, count))
    if width > count:
        order = jnp.concatenate([order, jnp.full(width - count, count, order.dtype)])
    rank = jnp.arange(width, dtype=jnp.int32)
    return jnp.sort(jnp.where(rank < num_chosen, order, count).astype(jnp.int32))
