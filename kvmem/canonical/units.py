"""Units: a page as a row of equal small blocks, and runs as pairs of block numbers.

The unit is the largest block that no run, row or page cuts. In units a mapping is two
integer arrays, so coverage is a count and a device moves pages with one gather.

    expand(runs, unit_nbytes)   # (local unit, canonical unit) of every moved block

A page that is spread over planes is their pages end to end (`Envelope.plane_starts`).
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from kvmem.canonical.runs import CopyRun
from kvmem.geometry.envelope import Envelope

__all__ = ["check_tiling", "common_unit", "expand", "index", "payload"]


def common_unit(
    envelopes: Iterable[Envelope], runs: Iterable[CopyRun], record_nbytes: int
) -> int:
    """Return the bytes of the largest block that nothing cuts."""
    unit = record_nbytes
    for env in envelopes:
        unit = math.gcd(unit, *(plane.page_stride for plane in env.planes))
        for e in env.entries:
            unit = math.gcd(unit, e.offset, e.slot_stride, e.nbytes)
    for run in runs:
        unit = math.gcd(unit, run.nbytes, run.local_offset, run.canonical_offset)
        if run.count > 1:
            unit = math.gcd(unit, run.local_stride, run.canonical_stride)
    return unit


def expand(
    runs: Iterable[CopyRun], unit_nbytes: int, plane_starts: Sequence[int] = (0,)
) -> tuple[np.ndarray, np.ndarray]:
    """Return (local unit i64[N], canonical unit i64[N]) of every moved block."""
    local, canonical = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for run in runs:
        fragment = np.arange(run.count, dtype=np.int64)[:, None]
        block = np.arange(run.nbytes // unit_nbytes, dtype=np.int64)[None, :]
        for units, offset, stride in (
            (local, plane_starts[run.plane] + run.local_offset, run.local_stride),
            (canonical, run.canonical_offset, run.canonical_stride),
        ):
            start = (offset + fragment * stride) // unit_nbytes
            units.append((start + block).reshape(-1))
    return np.concatenate(local), np.concatenate(canonical)


def index(of: np.ndarray, to: np.ndarray, num_of: int, null: int) -> np.ndarray:
    """Return i32[num_of] with entry of[i] = to[i], and `null` where nothing moves."""
    table = np.full(num_of, null, np.int32)
    table[of] = to
    return table


def payload(env: Envelope, unit_nbytes: int) -> np.ndarray:
    """Return bool[units]: whether a unit of the page belongs to an entry."""
    owned = np.zeros(env.nbytes // unit_nbytes, bool)
    slots = np.arange(env.page_size)[:, None]
    for e in env.entries:
        block = np.arange(e.nbytes // unit_nbytes)[None, :]
        first = env.plane_starts[env.planes.index(e.plane)] + e.offset
        start = (first + slots * e.slot_stride) // unit_nbytes
        owned[start + block] = True
    return owned


def check_tiling(
    envelopes: Sequence[Envelope],
    runs: Sequence[Iterable[CopyRun]],
    writers: Sequence[Iterable[CopyRun]],
    record_nbytes: int,
    page_tokens: int,
) -> tuple[str, ...]:
    """Return why runs do not tile each page, or writers the canonical page.

    Args:
        envelopes, runs, writers: one item a rank.
    """
    every = [run for by_rank in (*runs, *writers) for run in by_rank]
    strays = [
        f"rank {rank} has a run outside of its planes: {run}"
        for rank, env in enumerate(envelopes)
        for run in (*runs[rank], *writers[rank])
        if not _inside(run, env)
    ]
    if strays:
        return tuple(strays)
    unit = common_unit(envelopes, every, record_nbytes)
    whole = np.ones(page_tokens * record_nbytes // unit, bool)
    broken: list[str] = []
    elected = []
    for rank, env in enumerate(envelopes):
        local, canonical = expand(runs[rank], unit, env.plane_starts)
        broken += _coverage(f"the page of rank {rank}", local, payload(env, unit), unit)
        held = local * whole.size + canonical
        local, canonical = expand(writers[rank], unit, env.plane_starts)
        if not np.isin(local * whole.size + canonical, held).all():
            broken.append(f"rank {rank} is elected for bytes that it does not hold")
        elected.append(canonical)
    written = np.concatenate(elected)
    broken += _coverage("the writers' canonical page", written, whole, unit)
    return tuple(broken)


def _inside(run: CopyRun, env: Envelope) -> bool:
    """Say whether every fragment of a run lies in the page of its plane.

    Where there is one plane, coverage says more: which byte is not there.
    """
    if not 0 <= run.plane < len(env.planes):
        return False
    if len(env.planes) == 1:
        return True
    last = run.local_offset + (run.count - 1) * run.local_stride
    low, high = sorted((run.local_offset, last))
    return low >= 0 and high + run.nbytes <= env.planes[run.plane].page_stride


def _coverage(
    where: str, units: np.ndarray, expected: np.ndarray, unit_nbytes: int
) -> list[str]:
    """Compare how often each unit is covered with how often it should be."""
    outside = (units < 0) | (units >= expected.size)
    broken = [f"{where} has no byte {int(u) * unit_nbytes}" for u in units[outside][:1]]
    covered = np.bincount(units[~outside], minlength=expected.size)
    for word, wrong in (
        ("left out", expected & (covered == 0)),
        ("covered twice", expected & (covered > 1)),
        ("padding that is written", ~expected & (covered > 0)),
    ):
        if wrong.any():
            first, many = int(wrong.argmax()), int(wrong.sum())
            broken.append(
                f"{many * unit_nbytes} bytes of {where} are {word}, "
                f"first byte {first * unit_nbytes}"
            )
    return broken
