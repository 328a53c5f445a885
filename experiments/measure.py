"""Measuring: sides in turns, the machine's own speed beside them, and who else runs.

The law: figures are compared inside one run only, by ratios of neighbours in time. On a
shared machine the same program may take twice as long minutes later, so a figure alone
says little: it is kept with the load, and with what plain copies, dict look-ups and a
scatter took then.

    rounds = interleave({"ours": ours, "peer": peer}, rounds=9)
    rounds.ratio("peer", "ours")         # median of the rounds' own ratios
"""

import dataclasses
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["BUSY_CORES", "Calibration", "Load", "Rounds", "Timed", "calibrate"]
__all__ += ["interleave", "observe_load", "scatter_job"]

BUSY_CORES = 0.25  # cores that others may use before figures are no longer ours

_COPY_NBYTES = 64 << 20
_LOOKUPS = 1_000_000
_SCATTER_ROWS = 256
_SCATTER_TARGET = 65_536


class Timed(NamedTuple):
    """What a job returns to say how long it took, where it knows better."""

    seconds: float


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Seconds of each side, a round each, in the order they ran."""

    seconds: Mapping[str, tuple[float, ...]]

    @property
    def num_rounds(self) -> int:
        """Rounds that were kept."""
        return len(next(iter(self.seconds.values())))

    def median(self, side: str) -> float:
        """Return the median seconds of one side."""
        return statistics.median(self.seconds[side])

    def best(self, side: str) -> float:
        """Return the least seconds of one side."""
        return min(self.seconds[side])

    def ratio(self, above: str, below: str) -> float:
        """Return the median over the rounds of above / below, neighbours in time."""
        pairs = zip(self.seconds[above], self.seconds[below], strict=True)
        return statistics.median(a / b for a, b in pairs)


def interleave(
    jobs: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 1
) -> Rounds:
    """Time jobs in turns, A B A B, and wait for the arrays that they return.

    Args:
        jobs: each side's job; one that returns `Timed` is taken at its word.
        rounds: turns that are kept.
        warm_up: turns before them that are not.
    """
    seconds: dict[str, list[float]] = {side: [] for side in jobs}
    for turn in range(warm_up + rounds):
        for side, job in jobs.items():
            took = _time(job)
            if turn >= warm_up:
                seconds[side].append(took)
    return Rounds({side: tuple(values) for side, values in seconds.items()})


def _time(job: Callable[[], object]) -> float:
    start = time.perf_counter()
    made = job()
    if isinstance(made, Timed):
        return made.seconds
    jax.block_until_ready(made)
    return time.perf_counter() - start


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What this machine does now, in three measures that touch nothing of kvmem.

    `memcpy_gb_per_s` counts bytes read and written of a 64 MiB copy by one thread;
    `scatter_us` is one donated scatter of 256 rows into i32[65536].
    """

    memcpy_gb_per_s: float
    dict_lookups_per_s: float
    scatter_us: float


def calibrate(rounds: int = 9) -> Calibration:
    """Measure the machine; takes about a second."""
    source = np.arange(_COPY_NBYTES // 8, dtype=np.int64)
    target = np.empty_like(source)
    table = {n: n for n in range(_SCATTER_TARGET)}
    keys = [n % _SCATTER_TARGET for n in range(0, 7 * _LOOKUPS, 7)]
    jobs = {
        "copy": lambda: np.copyto(target, source),
        "lookup": lambda: [table[key] for key in keys][0],
        "scatter": scatter_job(),
    }
    timed = interleave(jobs, rounds)
    return Calibration(
        memcpy_gb_per_s=2 * _COPY_NBYTES / timed.median("copy") / 1e9,
        dict_lookups_per_s=_LOOKUPS / timed.median("lookup"),
        scatter_us=timed.median("scatter") * 1e6,
    )


def scatter_job() -> Callable[[], jax.Array]:
    """Return the calibrated job: 256 rows scattered into an array that it donates."""

    @jax.jit(donate_argnums=0)
    def scatter(array, at, values):
        return array.at[at].set(values, mode="drop")

    at = jnp.asarray(np.random.default_rng(0).permutation(_SCATTER_TARGET)[:256])
    values = jnp.arange(_SCATTER_ROWS, dtype=jnp.int32)
    held = [jnp.zeros(_SCATTER_TARGET, jnp.int32)]

    def job() -> jax.Array:
        held.append(scatter(held.pop(), at, values))
        return held[0]

    return job


@dataclasses.dataclass(frozen=True)
class Load:
    """Who else uses the machine.

    `others_cores` is how many cores other processes used over the last look, stolen
    time included; None where the system does not tell (no /proc/stat), and then the
    load average speaks.
    """

    average_1m: float
    cores: int
    others_cores: float | None

    @property
    def busy(self) -> str | None:
        """Say why the machine is busy, None when it is quiet."""
        if self.others_cores is None:
            if self.average_1m > self.cores / 2:
                return f"load average {self.average_1m:.2f} on {self.cores} cores"
            return None
        if self.others_cores > BUSY_CORES:
            return (
                f"other processes used {self.others_cores:.2f} of {self.cores} cores, "
                f"more than {BUSY_CORES}"
            )
        return None


def observe_load(seconds: float = 1.0) -> Load:
    """Look at the machine for a while, doing nothing.

    A machine is busy when other processes use more than a quarter of a core.
    """
    before, own_before = _cpu_seconds(), sum(os.times()[:4])
    start = time.perf_counter()
    time.sleep(seconds)
    elapsed = time.perf_counter() - start
    after, own = _cpu_seconds(), sum(os.times()[:4]) - own_before
    others = None
    if before is not None and after is not None:
        others = max(0.0, (after - before - own) / elapsed)
    return Load(os.getloadavg()[0], os.cpu_count() or 1, others)


def _cpu_seconds() -> float | None:
    """Return the seconds that all cores were not idle since start, None if unknown."""
    stat = pathlib.Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = map(
        int, stat.read_text().splitlines()[0].split()[1:]
    )
    ticks = user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")
