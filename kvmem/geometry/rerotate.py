"""Re-rotation: a stored key turned on to another place, as facts and on the host.

A key that stands rotated at place p is moved to q by one turn of q - p. The law: the
turn is made in float32 from the row as it was stored, with the frequencies that rotated
it; it has unit length, so a magnitude that is in the row stays in it once; dims outside
the window and rows that do not move keep their bytes. What cannot be turned is refused
with the reason, never turned by guess.

    turns(layer)                      # (Turn(field="k", scales=None, rope=...),)
    by_delta(rows, rope, delta)       # f32[n, D] of rows that move by delta[n]
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from kvmem import errors
from kvmem.geometry.fields import Field, LayerSpec, np_dtype
from kvmem.geometry.quantise import narrow
from kvmem.geometry.rope import KINDS, Rope

__all__ = ["Turn", "by_delta", "obstacle", "turns"]


class Turn(NamedTuple):
    """A field whose rows turn, by a window in its own dims; and its scales, if any."""

    field: Field
    scales: Field | None
    rope: Rope


def by_delta(rows: np.ndarray, rope: Rope, delta: int | np.ndarray) -> np.ndarray:
    """Return rows turned on by `delta` places, in their own dtype.

    Args:
        rows: [..., D] of any float dtype, rotated as `rope` says.
        delta: new place minus the stored one; an integer, or one for each of the first
            axes of `rows`.
    """
    delta = np.asarray(delta, np.int64)
    window = rope.window(rows.shape[-1])
    angles = delta[..., None] * rope.inverse_frequencies(rows.shape[-1])  # float64
    inner = [1] * (rows.ndim - 1 - delta.ndim)
    wide = angles.reshape(*delta.shape, *inner, len(window) // 2)
    cos, sin = np.cos(wide).astype(np.float32), np.sin(wide).astype(np.float32)
    found = rows.copy()
    part = rows[..., window.start : window.stop].astype(np.float32)
    first, second = _pairs(part, rope.style)
    turned = np.empty_like(part)
    into = _pairs(turned, rope.style)
    into[0][...] = first * cos - second * sin
    into[1][...] = second * cos + first * sin
    turned_rows = _as(turned, rows.dtype)
    if not delta.all():
        moved = (delta != 0).reshape(*delta.shape, *[1] * (rows.ndim - delta.ndim))
        turned_rows = np.where(
            moved, turned_rows, rows[..., window.start : window.stop]
        )
    found[..., window.start : window.stop] = turned_rows
    return found


def turns(layer: LayerSpec) -> tuple[Turn, ...]:
    """Return what turns in the rows of a layer: nothing where rows are not rotated.

    Raises:
        IncompatiblePlan: rows that cannot be turned; says which law they meet.
    """
    reason = obstacle(layer)
    if reason is not None:
        raise errors.IncompatiblePlan(
            errors.say(
                f"keys of layer {layer.name!r} turned to another place",
                reason,
                "Compute these tokens again at their new place",
            )
        )
    return () if layer.rope is None else (_turn(layer),)


def obstacle(layer: LayerSpec) -> str | None:
    """Say why a layer's rows cannot be turned, None where they can."""
    rope = layer.rope
    if layer.kind == "state":
        return "a recurrent state has no rows that stand at a place"
    if rope is None:
        if layer.kind == "gqa":
            return None  # stored unrotated: bytes are the same at every place
        return f"no window is declared in its {layer.kind} rows, and none is guessed"
    if KINDS[rope.kind] is not None:
        return KINDS[rope.kind]
    try:
        window = rope.window(layer.head_dim)
    except errors.ConfigError as error:
        return str(error).rstrip(".")
    if layer.kind == "mla" and (window.start == 0 or window.stop != layer.head_dim):
        return (
            f"a latent of {layer.head_dim} dims is rotated at its tail, and the window "
            f"is [{window.start}, {window.stop})"
        )
    return _field_obstacle(layer, window)


def _field_obstacle(layer: LayerSpec, window: range) -> str | None:
    held = _held(layer, window)
    if held is None:
        return f"the window [{window.start}, {window.stop}) lies in no one field"
    field, start = held
    if reason := _scales_obstacle(layer, field):
        return reason
    scales = _scales_of(layer, field)
    if scales is None:
        return None
    block = _elements(field) // _elements(scales)
    if (window.start - start) % block or (window.stop - start) % block:
        return (
            f"a scale serves {block} dims, and the window "
            f"[{window.start}, {window.stop}) ends inside a block: dims that do not "
            "turn would be rounded again"
        )
    return None


def _turn(layer: LayerSpec) -> Turn:
    window = layer.rope.window(layer.head_dim)
    field, start = _held(layer, window)
    rope = dataclasses.replace(
        layer.rope, offset=window.start - start, width=len(window)
    )
    return Turn(field, _scales_of(layer, field), rope)


def _held(layer: LayerSpec, window: range) -> tuple[Field, int] | None:
    """Return the field that a window lies in, and where its dims begin.

    A row's dims are those of its fields end to end, scales apart: of keys and values
    the keys alone, of a latent all.
    """
    start = 0
    for field in layer.fields:
        if field.is_scale or (layer.kind == "gqa" and field.name != "k"):
            continue
        width = _elements(field)
        if start <= window.start and window.stop <= start + width:
            return field, start
        start += width
    return None


def _area(layer: LayerSpec, field: Field) -> tuple[list[Field], list[Field]]:
    """Return the quantised rows that a field stands among, and the scales behind them.

    Scales are those of the rows before them, back to other scales. Rows of a byte an
    element are the quantised ones, where there are any: the rotated part of a latent
    stands unscaled between its fp8 part and the scales of that.
    """
    rows, scales = [], []
    for each in layer.fields:
        if each.is_scale:
            scales.append(each)
        elif scales and field in rows:
            break
        else:
            rows, scales = [*([] if scales else rows), each], []
    narrow = [row for row in rows if np_dtype(row.dtype).itemsize == 1]
    return narrow or rows, scales


def _scales_of(layer: LayerSpec, field: Field) -> Field | None:
    rows, scales = _area(layer, field)
    return scales[0] if scales and field in rows else None


def _scales_obstacle(layer: LayerSpec, field: Field) -> str | None:
    """Say why a field's scales are not its own; None where they are, or it has none."""
    rows, scales = _area(layer, field)
    if not scales or field not in rows:
        return None
    if len(rows) > 1 or len(scales) > 1:
        return (
            f"scales {_named(scales)} stand behind rows {_named(rows)}, and which "
            f"serve {field.name!r} is not said"
        )
    if scales[0].rows != field.rows or _elements(field) % _elements(scales[0]):
        return (
            f"{scales[0].rows} x {_elements(scales[0])} scales serve no equal blocks "
            f"of {field.rows} x {_elements(field)} dims"
        )
    return None


def _named(fields: list[Field]) -> str:
    return " and ".join(repr(field.name) for field in fields)


def _elements(field: Field) -> int:
    return field.head_nbytes // np_dtype(field.dtype).itemsize


def _pairs(rows: np.ndarray, style: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the two members of each pair, as views."""
    half = rows.shape[-1] // 2
    if style == "half":
        return rows[..., :half], rows[..., half:]
    return rows[..., 0::2], rows[..., 1::2]


def _as(rows: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return narrow(rows, dtype.name)
