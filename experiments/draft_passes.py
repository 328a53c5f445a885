"""What draft layers make of whole texts, from every place of them at once.

A draft that proposes reads the model's rows of the text so far; then, for each further
token, its own row of the token before. Here every place begins such a chain: pass 0
reads the model's rows everywhere, and pass d stands d tokens behind, where it sees keys
of pass 0 up to its chain's first token and of each pass behind that. The law: a chain
has the rows that it would have alone, one token after the other.

    first, second = passes(draft, tokens, rows, depth=2, taught=80)
"""

import jax
import jax.numpy as jnp

from kvmem.model.mtp_decoder import MtpDecoder
from kvmem.model.rotate import angles

__all__ = ["passes"]


def passes(
    draft: MtpDecoder, tokens: jax.Array, rows: jax.Array, depth: int, taught: int
) -> list[jax.Array]:
    """Return rows of each pass at the last places of texts.

    Args:
        draft: the layers.
        tokens: i32[N, L] whole texts.
        rows: f32[N, L, D] what the model made of them, before its last norm.
        depth: passes.
        taught: last places that are asked for, fewer than L.

    Returns:
        f32[N, taught, D], then of pass d f32[N, taught - d + 1, D], from the place on
        that the pass before allows.
    """
    spec, length = draft.partition.spec, tokens.shape[1]
    first = length - taught
    keys, found = [[] for _ in draft.layers], []
    x, behind = rows, 0  # rows of the pass before, and the place of their first
    for number in range(depth):
        at = first + number - 1 if number else 0
        if number:
            hidden = x[:, at - 1 - behind : -1]
        else:
            hidden = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        x, behind = draft.enter(tokens[:, at:], None, hidden), at
        places = jnp.arange(at, length, dtype=jnp.int32)
        cos, sin = angles(spec.rope, spec.head_dim, places[None])
        for layer, known in zip(draft.layers, keys, strict=True):
            q, k, v = layer.heads(x, cos, sin)
            known.append((k, v))
            x = layer.mix(x, _seen(q, known, first), None)
        found.append(x if number else x[:, first:])
    return found


def _seen(q: jax.Array, known: list[tuple[jax.Array, jax.Array]], first: int):
    """Attend from one pass to the first, and to one row of each between.

    Args:
        q: f32[N, Q, H, Dh] of the last pass.
        known: keys and values f32[N, K, KH, Dh] of each pass, the last one's too.
        first: place of the first row that is taught.
    """
    (k, v), *chain = known
    if not chain:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)
    count, width = q.shape[1], q.shape[-1]
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, width) / width**0.5
    scores = jnp.einsum("nqkgd,njkd->nkgqj", grouped, k)
    # Row t of pass d stands at place first + d - 1 + t, d tokens behind its chain's.
    steps = jnp.arange(count, dtype=jnp.int32)
    is_behind = (
        jnp.arange(k.shape[1], dtype=jnp.int32)[None] > first - 1 + steps[:, None]
    )
    scores = jnp.where(is_behind[None, None, None], -jnp.inf, scores)
    own = [jnp.einsum("nqkgd,nqkd->nkgq", grouped, k[:, :count]) for k, _ in chain]
    scores = jnp.concatenate([scores, jnp.stack(own, -1)], -1)
    shares = jax.nn.softmax(scores)
    seen = jnp.einsum("nkgqj,njkd->nqkgd", shares[..., : -len(chain)], v)
    for at, (_, values) in enumerate(chain, start=-len(chain)):
        share = jnp.moveaxis(shares[..., at], -1, 1)[..., None]
        seen += share * values[:, :count, :, None]
    return seen.reshape(q.shape)
