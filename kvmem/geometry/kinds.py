"""Kinds: layers that keep something else than keys and values a head.

Each constructor names the fields of one kind, so that budgets, pages, records and the
format id follow from the same declaration:

- `latent`: multi-head latent attention: one row a token on every rank, its rotated part
  at the tail (DeepSeek-V2 and later);
- `mxfp8`: keys and values a head in fp8 with block scales;
- `indexer`: the keys by which sparse attention selects tokens, with a scale a block;
- `gated_delta`, `mamba2`, `kda`: recurrent layers: the last inputs of a short
  convolution and a matrix a head, one record a sequence.

    latent("layers.0", 0, rank=512, rope_dim=64, dtype="bfloat16", scale=0.1147)
    # one field of 1,152 bytes a token
"""

import dataclasses

from kvmem import errors
from kvmem.geometry.fields import LayerSpec, Part
from kvmem.geometry.rope import Rope

__all__ = ["gated_delta", "indexer", "kda", "latent", "mamba2", "mxfp8"]

FP8 = "float8_e4m3fn"
E8M0 = "float8_e8m0fnu"
_MX_BLOCK = 32  # elements that share one power of two
_SCALE_BLOCK = 128  # elements of an fp8 row that share one float32 scale


def latent(
    name: str,
    index: int,
    *,
    rank: int,
    rope_dim: int,
    scale: float,
    dtype: str = "bfloat16",
    rope: Rope | None = None,
    fp8: bool = False,
    window: int | None = None,
) -> LayerSpec:
    """Return a layer of latent attention: a row of `rank` + `rope_dim` elements.

    Args:
        rank: elements of the compressed keys and values.
        rope_dim: elements of the rotated key that all heads share, behind them.
        scale: factor on the scores, of the whole query: (nope + rope) ** -0.5.
        dtype: of the row; with `fp8` of its rotated part alone.
        rope: rotation of the tail; its window in the row is set here.
        fp8: keep the compressed part in fp8 with a float32 scale a 128 elements: the
            656 bytes a token of DeepSeek-V3.2's sparse attention (512 + 16 + 128).
        window: sliding window; None: full attention.
    """
    if rope is not None:
        rope = _at_tail(rope, rank, rope_dim)
    row = Part("latent", 0, rank + rope_dim, dtype)
    parts: tuple[Part, ...] = (row,)
    if fp8:
        _require_blocks(name, rank)
        parts = (
            Part("latent", 0, rank, FP8),
            Part("scale", 0, rank // _SCALE_BLOCK, "float32", is_scale=True),
            Part("rope", 0, rope_dim, dtype),
        )
    return LayerSpec(
        name,
        index,
        kind="mla",
        head_dim=rank + rope_dim,
        dtype=FP8 if fp8 else dtype,
        rope=rope,
        window=window,
        scale=scale,
        parts=parts,
    )


def indexer(
    name: str,
    index: int,
    *,
    dim: int,
    scale: float = 1.0,
    dtype: str = FP8,
    rope: Rope | None = None,
) -> LayerSpec:
    """Return the index keys of a sparse attention layer: a row a token, on every rank.

    An fp8 row has a float32 scale a 128 elements, at the tail of its page: 128 + 4
    bytes a token (DeepSeek-V3.2's indexer). Other dtypes need none.

    Args:
        index: of the layer whose latent it selects from; the two share it.
    """
    parts = (Part("key", 0, dim, dtype),)
    if dtype == FP8:
        _require_blocks(name, dim)
        scales = Part("scale", 0, dim // _SCALE_BLOCK, "float32", is_scale=True)
        parts = (*parts, scales)
    return LayerSpec(
        name,
        index,
        kind="indexer",
        head_dim=dim,
        dtype=dtype,
        rope=rope,
        scale=scale,
        parts=parts,
    )


def mxfp8(layer: LayerSpec) -> LayerSpec:
    """Return a layer of keys and values in fp8, a power of two a block of 32 elements.

    The OCP Microscaling format: a head's row, and one byte of scale a block beside it.

    Raises:
        ConfigError: a layer of another kind, or rows that are no whole blocks.
    """
    widths = (layer.head_dim, layer.value_dim)
    if layer.kind != "gqa" or any(width % _MX_BLOCK for width in widths):
        raise errors.ConfigError(
            errors.say(
                f"layer {layer.name!r} of kind {layer.kind!r} in mxfp8, rows of "
                f"{' and '.join(map(str, widths))} elements",
                f"one scale serves {_MX_BLOCK} elements of a key or value",
                "Use another kv_dtype",
            )
        )
    parts = []
    for name, width in zip(("k", "v"), widths, strict=True):
        parts.append(Part(name, layer.kv_heads, width, FP8))
        scales = (f"{name}_scale", layer.kv_heads, width // _MX_BLOCK, E8M0)
        parts.append(Part(*scales, is_scale=True))
    return dataclasses.replace(layer, dtype=FP8, parts=tuple(parts))


def gated_delta(
    name: str,
    index: int,
    *,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    conv_kernel: int,
    conv_dtype: str = "bfloat16",
    state_dtype: str = "float32",
) -> LayerSpec:
    """Return a gated delta net layer (Qwen3-Next): three convolutions and a matrix.

    Every part is cut by its own heads: a rank holds the convolution tails of its key
    heads and value heads, and the key_dim x value_dim matrix of its value heads.
    """
    tail = conv_kernel - 1
    return _state(
        name,
        index,
        Part("conv_q", key_heads, key_dim * tail, conv_dtype),
        Part("conv_k", key_heads, key_dim * tail, conv_dtype),
        Part("conv_v", value_heads, value_dim * tail, conv_dtype),
        Part("ssm", value_heads, key_dim * value_dim, state_dtype),
    )


def mamba2(
    name: str,
    index: int,
    *,
    heads: int,
    head_dim: int,
    groups: int,
    state: int,
    conv_kernel: int,
    conv_dtype: str = "bfloat16",
    state_dtype: str = "float32",
) -> LayerSpec:
    """Return a Mamba-2 layer: convolution over x, B and C, and a matrix a head."""
    tail = conv_kernel - 1
    return _state(
        name,
        index,
        Part("conv_x", heads, head_dim * tail, conv_dtype),
        Part("conv_b", groups, state * tail, conv_dtype),
        Part("conv_c", groups, state * tail, conv_dtype),
        Part("ssm", heads, head_dim * state, state_dtype),
    )


def kda(
    name: str,
    index: int,
    *,
    heads: int,
    head_dim: int,
    conv_kernel: int,
    conv_dtype: str = "bfloat16",
    state_dtype: str = "float32",
) -> LayerSpec:
    """Return a Kimi delta attention layer: three convolutions and a square matrix."""
    return gated_delta(
        name,
        index,
        key_heads=heads,
        value_heads=heads,
        key_dim=head_dim,
        value_dim=head_dim,
        conv_kernel=conv_kernel,
        conv_dtype=conv_dtype,
        state_dtype=state_dtype,
    )


def _state(name: str, index: int, *parts: Part) -> LayerSpec:
    """Return a recurrent layer; a convolution of one tap has no tail to keep."""
    kept = tuple(part for part in parts if part.elements)
    return LayerSpec(
        name, index, kind="state", dtype=kept[-1].dtype, scale=1.0, parts=kept
    )


def _at_tail(rope: Rope, rank: int, rope_dim: int) -> Rope:
    """Return the rotation with its window at the tail of a latent row."""
    return dataclasses.replace(rope, offset=rank, width=rope_dim)


def _require_blocks(name: str, width: int) -> None:
    if width % _SCALE_BLOCK:
        raise errors.ConfigError(
            errors.say(
                f"an fp8 row of {width} elements (layer {name!r})",
                f"one scale serves {_SCALE_BLOCK} elements",
                f"Give a multiple of {_SCALE_BLOCK}, or a dtype that needs no scale",
            )
        )
