"""Faults that people met on a GPU alone, asked of the kernels on the device.

The law: each question has a counted answer, and a program with that fault gets another
count: clearing after writing, a block that is not masked, a pool that is held twice.

    clears_first(kernels(), rounds=1000)    # {"case": "NAN-05", "wrong_nbytes": 0, ...}

The same questions run by the references, and by the kernels under the interpreter.
"""

import functools
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint

from pallas_kernels import (
    append_tokens,
    export_records,
    gather_pages,
    import_records,
    interpret,
    zero_pages,
)
from pallas_kernels.append_tokens import Run
from pallas_kernels.records import Layout

__all__ = ["Moves", "answers", "clears_first", "kernels", "masks_its_last_block"]
__all__ += ["peak_objection", "references", "restored_peaks"]

_SLOTS, _ROW = 16, 256
_RUNS = (Run(0, _ROW, 0, _ROW),)
_BLOCK = (Run(0, 64, 0, 64), Run(256, 4, 64, 4))  # rows of 68 bytes go in fours
_ALLOWED = 1.05


class Moves(NamedTuple):
    """What runs: the kernels, or what says what is right."""

    zero: Callable
    append: Callable
    gather: Callable
    exported: Callable
    imported: Callable


def kernels(interpreted: bool = False) -> Moves:
    """Return the kernels, on the device or under the interpreter."""
    mode = {"interpret": interpret.params()} if interpreted else {}
    ops = zero_pages, append_tokens, gather_pages, export_records, import_records
    return Moves(*(functools.partial(op.kernel, **mode) for op in ops))


def references() -> Moves:
    """Return the references."""
    ops = zero_pages, append_tokens, gather_pages, export_records, import_records
    return Moves(*(op.reference for op in ops))


def answers(interpreted: bool) -> Iterator[dict]:
    """Yield what the kernels answer; peaks of memory on a device alone."""
    moves = kernels(interpreted)
    yield clears_first(moves, rounds=2 if interpreted else 1000)
    yield masks_its_last_block(moves)
    if not interpreted:
        with tempfile.TemporaryDirectory() as folder:
            peaks = restored_peaks(pathlib.Path(folder), moves, 1 << 30)
        objection = peak_objection(*peaks)
        yield {"case": "JAX-11 a restored pool is held once", "objection": objection}


def clears_first(moves: Moves, rounds: int) -> dict:
    """Hand out, write and read in one donated step, again and again.

    Every page that comes back holds what was written, and zeros around it.
    """
    pages = jnp.full((8, _SLOTS * _ROW), 0xC1, jnp.uint8)
    step = jax.jit(functools.partial(_step, moves), donate_argnums=0)
    wrong = jnp.zeros((), jnp.int32)
    for turn in range(rounds):
        pages, wrong = step(pages, wrong, jnp.int32(turn))
    of = rounds * 3 * _SLOTS * _ROW
    case = "NAN-05 pages are cleared before they are written"
    return {"case": case, "wrong_nbytes": int(wrong), "of_nbytes": of}


def _step(moves: Moves, pages, wrong, turn):
    ids = (turn + jnp.arange(3, dtype=jnp.int32) * 3) % 8
    slots = (turn + jnp.arange(3, dtype=jnp.int32)) % _SLOTS
    rows = jax.random.bits(jax.random.key(turn), (3, _ROW), jnp.uint8)
    pages = moves.zero(pages, ids)
    pages = moves.append(pages, ids, slots, rows, runs=_RUNS, page_slots=_SLOTS)
    found = moves.gather(pages, ids).reshape(3, _SLOTS, _ROW)
    expected = jnp.zeros_like(found).at[jnp.arange(3), slots].set(rows)
    return pages, wrong + (found != expected).sum(dtype=jnp.int32)


def masks_its_last_block(moves: Moves) -> dict:
    """Move 10 tokens in blocks of 4: the third has 2, and what is behind them stays."""
    found, right = (_last_blocks(each) for each in (moves, references()))
    wrong = sum(int((a != b).sum()) for a, b in zip(found, right, strict=True))
    case = "NAN-06 a partial block moves its own rows"
    return {
        "case": case,
        "wrong_nbytes": wrong,
        "of_nbytes": sum(each.size for each in right),
    }


def _last_blocks(moves: Moves) -> list[np.ndarray]:
    """Append, import and export 10 tokens of pages of 4."""
    rng, token = np.random.default_rng(10), np.arange(10, dtype=np.int32)
    pages = rng.integers(0, 256, (4, 512), np.uint8)
    rows = rng.integers(0, 256, (10, 128), np.uint8)
    ids, table = np.array([2, 0, 3], np.int32), np.array([[0, 0], [256, 64]], np.int32)
    short, into = rows[:, :68].copy(), np.full_like(rows, 0xC1)
    append = functools.partial(moves.append, runs=_BLOCK, page_slots=4)
    records = {"layout": Layout(64, 64, 4)}
    imported = functools.partial(moves.imported, **records)
    exported = functools.partial(moves.exported, **records)
    first = np.int32(0)
    made = (
        jax.jit(append)(pages, ids[token // 4], token % 4, short),
        jax.jit(imported)(pages, ids, table, rows, first),
        jax.jit(exported)(into, pages, ids, table, first),
    )
    return [np.asarray(each) for each in made]


def restored_peaks(
    folder: pathlib.Path,
    moves: Moves,
    nbytes: int,
    peak: Callable[[], int] | None = None,
) -> tuple[int, int]:
    """Return the peak bytes of a donated step on a fresh pool, and on a restored one.

    Args:
        peak: bytes that were in use at most; None: what the device says.
    """
    peak = peak or (lambda: jax.devices()[0].memory_stats()["peak_bytes_in_use"])
    step = jax.jit(moves.zero, donate_argnums=0)
    ids = jnp.arange(4, dtype=jnp.int32)
    pages = jnp.ones((nbytes // 4096, 4096), jnp.uint8)
    with orbax.checkpoint.StandardCheckpointer() as saver:
        saver.save(folder / "pool", {"pages": pages})
    pages = jax.block_until_ready(step(pages, ids))
    fresh, like = (
        peak(),
        jax.ShapeDtypeStruct(pages.shape, pages.dtype, sharding=pages.sharding),
    )
    pages.delete()
    with orbax.checkpoint.StandardCheckpointer() as saver:
        restored = saver.restore(folder / "pool", {"pages": like})["pages"]
    held = jax.block_until_ready(step(restored, ids))
    found = peak()
    held.delete()
    return fresh, found


def peak_objection(fresh: int, restored: int) -> str | None:
    """Say that a restored pool takes more memory than a fresh one, None if not."""
    if restored <= _ALLOWED * fresh:
        return None
    return (
        f"{restored:,} B at most with a restored pool, {fresh:,} B with a fresh one: "
        f"more than {_ALLOWED} of it"
    )
