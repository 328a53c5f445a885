"""Re-rotation of token records: keys to other places, everything else as it is.

Pure, on bytes: what was computed at one place of a text is made what it would be at
another, as far as rotation goes. The law: only the declared windows of keys change, and
in quantised keys the scales beside them; values, other dims, other fields and rows that
do not move are bit-identical. Turn records as they were stored, not copies that were
turned before: each turn rounds once.

    moved = rerotate(records, group, delta=512)            # all rows by one distance
    moved = rerotate(records, group, new - old)            # i64[n], a distance a row
"""

import concurrent.futures
import functools
import itertools

import jax
import numpy as np

from kvmem import errors
from kvmem.canonical import record_offsets
from kvmem.geometry import LifecycleGroup, np_dtype, quantise
from kvmem.geometry import rerotate as turning
from kvmem.geometry.rerotate import Turn
from kvmem.transfer import checks

__all__ = ["rerotate"]

_FARTHEST = 1 << 31


def rerotate(
    records: np.ndarray,
    group: LifecycleGroup,
    delta: int | np.ndarray,
    *,
    threads: int = 1,
) -> np.ndarray:
    """Return records whose keys stand `delta` places further on.

    Args:
        records: u8[n, record], as they were stored.
        delta: new place minus stored place; one integer, or i64[n].
        threads: that share the records; numpy computes without the interpreter's lock.

    Raises:
        IncompatiblePlan: every layer whose rows cannot be turned, each with its reason.
        FormatMismatch: records that are not the group's, or distances that are not one
            a row, or lead nowhere.
        ConfigError: no thread.
        CorruptPage: quantised keys that are not finite.
    """
    _require(records, group, delta)
    checks.threads_count(threads)
    moved, places = np.array(records), np.asarray(delta, np.int64)
    if places.any():
        cuts = [len(moved) * turn // threads for turn in range(threads + 1)]
        pieces = [slice(a, b) for a, b in itertools.pairwise(cuts)]
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            each = (places[piece] if places.ndim else places for piece in pieces)
            turn = functools.partial(_turn_all, group)
            list(pool.map(turn, (moved[piece] for piece in pieces), each))
    return moved


def _turn_all(group: LifecycleGroup, records: np.ndarray, delta: np.ndarray) -> None:
    """Turn every key of some records in place, those that move."""
    if not delta.all():  # a copy of those that move, put back behind them
        changed = np.flatnonzero(delta)
        rows = records[changed]
        _turn_all(group, rows, delta[changed])
        records[changed] = rows
        return
    starts = record_offsets(group)
    for layer in group.layers:
        for turn in turning.turns(layer):
            for head in range(turn.field.rows):
                at = starts[layer.name, turn.field.name, head]
                scales_at = None
                if turn.scales is not None:
                    scales_at = starts[layer.name, turn.scales.name, head]
                _turn(records, turn, at, scales_at, delta)


def _turn(
    rows: np.ndarray, turn: Turn, at: int, scales_at: int | None, delta: np.ndarray
) -> None:
    """Turn one head's keys in place."""
    keys = _read(rows, at, turn.field.head_nbytes, turn.field.dtype)
    if turn.scales is None:
        _write(rows, at, turning.by_delta(keys, turn.rope, delta))
        return
    scales = _read(rows, scales_at, turn.scales.head_nbytes, turn.scales.dtype)
    turned = turning.by_delta(quantise.dequantise(keys, scales), turn.rope, delta)
    num_scales = scales.shape[1]
    new, new_scales = quantise.quantise(
        turned, turn.field.dtype, turn.scales.dtype, num_scales
    )
    block = keys.shape[1] // num_scales
    window = turn.rope.window(keys.shape[1])
    touched = slice(window.start // block, window.stop // block)
    keys[:, window.start : window.stop] = new[:, window.start : window.stop]
    scales[:, touched] = new_scales[:, touched]
    _write(rows, at, keys)
    _write(rows, scales_at, scales)


def _read(rows: np.ndarray, at: int, nbytes: int, dtype: str) -> np.ndarray:
    return np.array(rows[:, at : at + nbytes]).view(np_dtype(dtype))


def _write(rows: np.ndarray, at: int, values: np.ndarray) -> None:
    raw = np.ascontiguousarray(values).view(np.uint8)
    rows[:, at : at + raw.shape[1]] = raw


def _require(records: np.ndarray, group: LifecycleGroup, delta) -> None:
    """Refuse what cannot be turned, all layers at once."""
    reasons = [
        f"layer {layer.name!r}: {reason}"
        for layer in group.layers
        if (reason := turning.obstacle(layer)) is not None
    ]
    if reasons:
        raise errors.IncompatiblePlan(
            errors.say(
                f"records of group {group.name!r} moved to another place",
                "; ".join(reasons),
                "Compute these tokens again at their new place",
            )
        )
    if not isinstance(records, np.ndarray | jax.Array):
        raise errors.FormatMismatch(
            errors.say(
                f"records as a {type(records).__name__}",
                "records are an array of bytes, a row a token",
                "Give u8[n, record]",
            )
        )
    shape = records.shape
    if records.dtype != np.uint8 or len(shape) != 2 or shape[1] != group.record_nbytes:
        raise errors.FormatMismatch(
            errors.say(
                f"records of {records.dtype}{list(shape)}",
                f"a record of this group is u8[{group.record_nbytes}]",
                "Read with the model that wrote",
            )
        )
    given = np.asarray(delta)
    whole = np.issubdtype(given.dtype, np.integer)
    if not whole or given.shape not in ((), (len(records),)):
        raise errors.FormatMismatch(
            errors.say(
                f"distances {given.dtype}{list(given.shape)}, {len(records)} records",
                "a distance is an integer, one for all rows or one a row",
                "Give new place minus stored place",
            )
        )
    farthest = max(abs(int(given.min())), abs(int(given.max()))) if given.size else 0
    if farthest >= _FARTHEST:
        raise errors.FormatMismatch(
            errors.say(
                f"a distance of {farthest:,} tokens, from {given.dtype}",
                "places are less than 2^31, and unsigned ones that are subtracted wrap",
                "Subtract signed integers",
            )
        )
