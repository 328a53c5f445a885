"""The gated delta net (Qwen3-Next): a matrix a head in place of keys and values.

A sequence keeps the last inputs of three short convolutions and one matrix a value
head, all in one state that is updated in place. Each token decays the matrix, takes out
what it holds under the token's key and puts the token's value there:

    S <- exp(g) S;    S <- S + k (beta (v - S^T k))^T;    out = S^T q

The law: after a step the state stands after exactly starts + num_new tokens, in any
chunks; a row without new tokens changes nothing; a state at starts = 0 is read as zeros
whatever lies there; a null page drops writes and reads as zeros.

    pages, out = mix(pages, envelope, "layers.0", inputs, table, starts, num_new)

Letters: S sequences, Q new tokens, H key heads and W value heads of a rank (a multiple:
neighbouring value heads share a key head), N key and V value elements, C taps of the
convolution. Source: arXiv:2412.06464, section 3, and Qwen3-Next's public modelling code
for the convolution and the normed keys.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from kvmem.errors import IncompatiblePlan, say
from kvmem.geometry import Envelope
from kvmem.model.mixers import rows
from kvmem.pool.table import GroupTable

__all__ = ["Inputs", "dense", "gates", "mix"]

_NORM_EPS = 1e-6  # of the normed queries and keys


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """One rank's projections of the new tokens, and its convolutions."""

    q: jax.Array  # [S, Q, H, N] before the convolution
    k: jax.Array  # [S, Q, H, N]
    v: jax.Array  # [S, Q, W, V]
    g: jax.Array  # [S, Q, W] logarithm of the decay, <= 0
    beta: jax.Array  # [S, Q, W] in [0, 1]
    conv_q: jax.Array  # [H, N, C] the last tap is the token's own
    conv_k: jax.Array  # [H, N, C]
    conv_v: jax.Array  # [W, V, C]


def gates(
    a: jax.Array, b: jax.Array, a_log: jax.Array, dt_bias: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return g = -exp(a_log) softplus(a + dt_bias) and beta = sigmoid(b), f32 both.

    Args:
        a, b: [S, Q, W] projections of the new tokens.
        a_log, dt_bias: [W].
    """
    a, b, rate, bias = (x.astype(jnp.float32) for x in (a, b, a_log, dt_bias))
    decay = jax.nn.softplus(a + bias[None, None])
    return -jnp.exp(rate)[None, None] * decay, jax.nn.sigmoid(b)


def mix(
    pages: jax.Array,
    envelope: Envelope,
    layer: str,
    inputs: Inputs,
    table: GroupTable,
    starts: jax.Array,
    num_new: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Read the new tokens into the live states, in place. Donates `pages`.

    Args:
        pages: u8[P, E], the pages of one rank.
        envelope: of the state group, cut to the pool's pages.
        layer: the layer's name in the envelope.
        inputs: rows >= num_new may hold anything.
        table: pages i32[S, K], the K extents of each live state.
        starts: i32[S] tokens that the states stand after.
        num_new: i32[S] how many of the Q rows are real.

    Returns:
        The pages, and f32[S, Q, W, V] before the output norm and gate. Rows >= num_new
        hold finite numbers of no meaning.
    """
    held = {
        name: rows.plan_of(envelope, layer, name)
        for name in (*_CONVS, "ssm")
        if rows.has_field(envelope, layer, name)
    }
    _require(inputs, held, layer)
    _require_extents(table, envelope, layer)
    state = {
        name: _read(pages, plan, table, starts, _shape(inputs, name))
        for name, plan in held.items()
    }
    # Every read stands before the first write: else the compiler copies the pool.
    pages, state = lax.optimization_barrier((pages, state))
    out, state = _advance(inputs, state, num_new)
    ids = jnp.where(num_new[:, None] > 0, table.pages, pages.shape[0])
    slots = jnp.zeros_like(starts)
    for name, plan in held.items():
        flat = state[name].reshape(len(starts), plan.heads, plan.head_dim)
        pages = rows.write(pages, plan, ids, slots, flat)
    return pages, out


def dense(inputs: Inputs, conv_dtype: str = "float32") -> jax.Array:
    """Read whole texts without a cache: f32[S, Q, W, V].

    Args:
        conv_dtype: of the convolution's tail in the pages, which its inputs are rounded
            to, so that no cut of a text changes them.
    """
    seqs, steps = inputs.q.shape[:2]
    state = {
        name: jnp.zeros((seqs, *_shape(inputs, name)), conv_dtype) for name in _CONVS
    }
    state["ssm"] = jnp.zeros((seqs, *_shape(inputs, "ssm")), jnp.float32)
    return _advance(inputs, state, jnp.full(seqs, steps, jnp.int32))[0]


_CONVS = ("conv_q", "conv_k", "conv_v")


def _shape(inputs: Inputs, name: str) -> tuple[int, ...]:
    """Return what a head keeps of a field, heads first."""
    if name == "ssm":
        return (*inputs.v.shape[2:3], inputs.k.shape[3], inputs.v.shape[3])
    heads, width, taps = getattr(inputs, name).shape
    return heads, width, taps - 1


def _read(pages, plan: rows.FieldPlan, table, starts, shape) -> jax.Array:
    """Read one field of the live states, [S, *shape]; zeros where a text begins."""
    found = rows.read(pages, plan, table.pages).reshape(len(starts), *shape)
    begun = (starts > 0).reshape(-1, *(1 for _ in shape))
    return jnp.where(begun, found, jnp.zeros_like(found))


def _advance(
    inputs: Inputs, state: Mapping[str, jax.Array], num_new: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Take num_new tokens into a state: the outputs and the state after them."""
    steps = jnp.arange(inputs.q.shape[1], dtype=jnp.int32)
    real = steps[None, :] < num_new[:, None]  # [S, Q]
    after, mixed = {}, {}
    for name in _CONVS:
        fresh = jnp.where(real[..., None, None], getattr(inputs, name[-1]), 0.0)
        tail = state.get(name)
        mixed[name], after[name] = _convolve(
            fresh, getattr(inputs, name), tail, num_new
        )
    share = inputs.v.shape[2] // inputs.k.shape[2]
    width = inputs.k.shape[3]
    q = jnp.repeat(_normed(mixed["conv_q"]), share, axis=2) * width**-0.5
    k = jnp.repeat(_normed(mixed["conv_k"]), share, axis=2)
    g, beta = (
        jnp.where(real[..., None], x.astype(jnp.float32), 0.0)
        for x in (inputs.g, inputs.beta)
    )
    before = state["ssm"].astype(jnp.float32)
    out, after["ssm"] = _recur(before, q, k, mixed["conv_v"], g, beta)
    return out, {name: after[name] for name in state}


def _convolve(
    fresh: jax.Array, taps: jax.Array, tail: jax.Array | None, num_new: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Convolve rows [S, Q, H, N] causally, then silu; and the tail after num_new.

    A tail is [S, H, N, C - 1], the oldest input first. Inputs are rounded to its dtype,
    so that those of this step equal those that the next one will find.
    """
    kept = taps.shape[-1] - 1
    if tail is None:
        tail = jnp.zeros((*fresh.shape[:1], *fresh.shape[2:], kept), fresh.dtype)
    line = jnp.concatenate(
        [jnp.moveaxis(tail, 3, 1), fresh.astype(tail.dtype)], axis=1
    )  # [S, C - 1 + Q, H, N]
    num_steps, taps = fresh.shape[1], taps.astype(jnp.float32)
    out = sum(
        line[:, tap : tap + num_steps].astype(jnp.float32) * taps[None, None, ..., tap]
        for tap in range(kept + 1)
    )
    last = num_new[:, None] + jnp.arange(kept, dtype=jnp.int32)[None]
    after = jnp.take_along_axis(line, last[..., None, None], axis=1)
    return jax.nn.silu(out), jnp.moveaxis(after, 1, 3)


def _normed(x: jax.Array) -> jax.Array:
    """Scale rows to unit length; a row of zeros stays."""
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _NORM_EPS)


def _recur(state, q, k, v, g, beta) -> tuple[jax.Array, jax.Array]:
    """Run the rule token by token: outputs [S, Q, W, V], the state after the last.

    A padded token has g = 0 and beta = 0, which leave the state as it is.
    """

    def token(state, inputs):
        q, k, v, g, beta = inputs  # [S, W, N] twice, [S, W, V], [S, W] twice
        state = state * jnp.exp(g)[..., None, None]
        found = jnp.sum(state * k[..., None], axis=-2)
        put = (v - found) * beta[..., None]
        state = state + k[..., None] * put[..., None, :]
        return state, jnp.sum(state * q[..., None], axis=-2)

    by_token = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta))
    state, out = lax.scan(token, state, by_token)
    return jnp.moveaxis(out, 0, 1), state


def _require(inputs: Inputs, held: Mapping[str, rows.FieldPlan], layer: str) -> None:
    """Refuse inputs that are not those of the state, or heads that do not share."""
    needed = {name for name in _CONVS if getattr(inputs, name).shape[2] > 1} | {"ssm"}
    if needed != held.keys():
        raise IncompatiblePlan(
            say(
                f"layer {layer!r} with {', '.join(sorted(held))} in its pages",
                f"its convolutions need {', '.join(sorted(needed))}",
                "Declare the layer with the kernel of its convolutions",
            )
        )
    for name, plan in held.items():
        heads, width, depth = _shape(inputs, name)
        plan.require((heads, width * depth), f"{name!r} of layer {layer!r}:")
    values, keys = inputs.v.shape[2], inputs.k.shape[2]
    if values % keys:
        raise IncompatiblePlan(
            say(
                f"{values} value heads on {keys} key heads (layer {layer!r})",
                "each key head serves equally many value heads",
                f"Give a multiple of {keys} value heads",
            )
        )


def _require_extents(table: GroupTable, envelope: Envelope, layer: str) -> None:
    """Refuse a table that does not name every page of a state."""
    if table.pages.shape[1] != envelope.extents:
        raise IncompatiblePlan(
            say(
                f"a table of {table.pages.shape[1]} columns (layer {layer!r})",
                f"a state stands in {envelope.extents} pages",
                "Give the pages of all extents of the live state, in order",
            )
        )
