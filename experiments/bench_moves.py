"""How fast bytes and books move: records, pages, rows, handouts, zeros, writes.

Each part runs its sides in turns, with the plain operation that it is held against in
the same turns: one memcpy of the same bytes, one donated scatter of 256 rows, memset.
The law: a target is a check with the ratio that was measured.

    python -m experiments run configs/bench_moves.toml
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator

import jax

from experiments import book_race, page_race, record_race
from experiments.harness import Check, Record, Rounds, RunConfig, interleave
from experiments.measure import scatter_job
from experiments.page_race import PAGE_COPY, ROW_COPY, Row
from experiments.record_race import MEMCPY, Layout
from kvmem.geometry import LayerSpec, Topology, envelope, group_layers

__all__ = ["Config", "Geometry", "Targets", "run"]

SCATTER = "scatter_256_rows"


@dataclasses.dataclass(frozen=True)
class Geometry:
    """What the cache keeps of a token, and in which pages.

    Args:
        layers: of the model.
        kv_heads: of a layer.
        head_dim: elements of a head.
        dtype: of keys and values.
        page_size: tokens of a page.
    """

    layers: int = 30
    kv_heads: int = 3
    head_dim: int = 64
    dtype: str = "float32"
    page_size: int = 16

    def specs(self) -> tuple[LayerSpec, ...]:
        """Return the layers."""
        return tuple(
            LayerSpec(
                f"layers.{index}",
                index,
                "gqa",
                self.kv_heads,
                self.head_dim,
                dtype=self.dtype,
            )
            for index in range(self.layers)
        )


@dataclasses.dataclass(frozen=True)
class Targets:
    """What books, zeroing and writes must reach, each a check.

    Args:
        handout_scatters: a handout takes at most this many calibrated scatters ...
        handout_ms: ... and these milliseconds.
        zero: bytes a second over memset's.
        pages: bytes a second of whole pages over memcpy's.
        blocked_rows: those of blocked-scale rows.
        growth: the largest pool's time over the smallest one's, for handouts and
            writes; one but for noise.
    """

    handout_scatters: float = 3.0
    handout_ms: float = 0.3
    zero: float = 0.5
    pages: float = 0.5
    blocked_rows: float = 0.3
    growth: float = 1.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """The whole truth of a run.

    Args:
        layouts: pages that records are moved out of and into, with their targets.
        geometry: of the records and pages.
        targets: of the other parts.
        rounds: turns of every comparison.
        record_tokens: records that are moved.
        threads: of the host executor; each has a target in every layout.
        pool_pages: sizes of the pools whose books are timed.
        sequences: that get a page each; and tokens that are written.
        handouts: of a turn; the turn's figure is their median.
        zero_pages: pages that are cleared.
        moved_pages: whole pages that are gathered and scattered.
        blocked_row: what a blocked-scale row is.
        blocked_rows: rows that are taken out of slots and put back.
        write_pools_mib: sizes of the pools that are written to.
        write_page_size: tokens of a page there.
    """

    layouts: tuple[Layout, ...]
    geometry: Geometry = Geometry()
    targets: Targets = Targets()
    rounds: int = 9
    record_tokens: int = 2048
    threads: tuple[int, ...] = (1, 2)
    pool_pages: tuple[int, ...] = (1024, 4096, 16384, 65536)
    sequences: int = 256
    handouts: int = 16
    zero_pages: int = 96
    moved_pages: int = 96
    blocked_row: Row = Row()
    blocked_rows: int = 8192
    write_pools_mib: tuple[int, ...] = (64, 256)
    write_page_size: int = 16


def run(config: Config) -> Iterator[Record]:
    """Yield what moving records, books, zeros and rows costs."""
    _ask_for_devices(max(layout.tp for layout in config.layouts))
    yield from _records(config)
    yield from _pages_and_rows(config)
    yield _books(config)
    yield _zeroing(config)
    yield _writes(config)
    yield _host(config)


def _ask_for_devices(count: int) -> None:
    """Let jax split the host's CPU into a device a rank, unless others have decided."""
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    with contextlib.suppress(RuntimeError):  # jax has begun; too few is the mesh's word
        jax.config.update("jax_num_cpu_devices", count)


def _records(config: Config) -> Iterator[Record]:
    """Move records out of pages and back, beside one memcpy."""
    cases = record_race.make_cases(
        config.geometry.specs(),
        config.layouts,
        config.record_tokens,
        config.geometry.page_size,
    )
    nbytes = cases[0].records.nbytes
    timed = interleave(record_race.jobs(cases, config.threads), config.rounds)
    wrong = {case.layout.name: record_race.objections(case) for case in cases}
    yield Record(
        "moved_records",
        "correctness",
        "records put into pages and taken out again are the same",
        "host",
        checks=tuple(
            Check(f"records of {name}", not found, "; ".join(found) or "equal bytes")
            for name, found in wrong.items()
        ),
    )
    figures = {"record_bytes": nbytes}
    figures["memcpy_gb_per_s"] = round(nbytes / timed.median(MEMCPY) / 1e9, 2)
    for name in timed.seconds:
        if name != MEMCPY:
            figures[f"{name}_ratio"] = round(timed.ratio(MEMCPY, name), 3)
    yield Record(
        "records_against_memcpy",
        "measurement",
        "bytes a second of records over one memcpy of the same bytes",
        "host",
        repetitions=config.rounds,
        checks=tuple(
            _at_least(
                f"{verb} at {case.layout.name}, threads: {count}",
                timed.ratio(MEMCPY, f"{case.layout.name}_{verb}_threads_{count}"),
                target,
                "of memcpy",
            )
            for case in cases
            for verb in ("export", "import")
            for count, target in zip(config.threads, case.layout.targets, strict=True)
        ),
        measurements=figures,
    )


def _pages_and_rows(config: Config) -> Iterator[Record]:
    """Move whole pages and blocked-scale rows, each beside one memcpy."""
    (group,) = group_layers(config.geometry.specs(), config.geometry.page_size)
    cases = page_race.make_cases(
        config.moved_pages,
        envelope.build(group, Topology(), 0).nbytes,
        config.blocked_row,
        config.blocked_rows,
    )
    timed = interleave(page_race.jobs(cases), config.rounds)
    wrong = page_race.objections(cases)
    yield Record(
        "moved_pages_and_rows",
        "correctness",
        "pages and blocked-scale rows that were moved are what they were",
        "host",
        checks=(Check("pages and rows", not wrong, "; ".join(wrong) or "equal bytes"),),
    )
    targets = config.targets
    sides = {
        "pages_gather": (PAGE_COPY, targets.pages),
        "pages_scatter": (PAGE_COPY, targets.pages),
        "blocked_rows_take": (ROW_COPY, targets.blocked_rows),
        "blocked_rows_put": (ROW_COPY, targets.blocked_rows),
    }
    ratios = {side: timed.ratio(copy, side) for side, (copy, _) in sides.items()}
    yield Record(
        "pages_and_rows_against_memcpy",
        "measurement",
        "bytes a second of whole pages and of blocked-scale rows over one memcpy of "
        "the same bytes, one thread",
        "host",
        repetitions=config.rounds,
        checks=tuple(
            _at_least(side, ratios[side], least, "of memcpy")
            for side, (_, least) in sides.items()
        ),
        measurements={f"{side}_ratio": round(r, 3) for side, r in ratios.items()}
        | {
            "page_bytes": cases.page_rows.nbytes,
            "row_bytes": cases.records.nbytes,
            "record_bytes_a_token": cases.records.shape[1],
        },
    )


def _books(config: Config) -> Record:
    """Hand out one page to each sequence, in pools of every size."""
    jobs = book_race.handout_jobs(config.pool_pages, config.sequences, config.handouts)
    timed = interleave({SCATTER: scatter_job()} | jobs, config.rounds)
    first, last = list(jobs)[0], list(jobs)[-1]
    scatter_ms, took_ms = timed.median(SCATTER) * 1e3, timed.median(last) * 1e3
    targets = config.targets
    allowed_ms = targets.handout_scatters * scatter_ms + targets.handout_ms
    return Record(
        "handout_books",
        "measurement",
        f"one page to each of {config.sequences} sequences: references counted, "
        "shortage flagged, bytes apart",
        "xla",
        repetitions=config.rounds,
        checks=(
            Check(
                f"handout of {config.sequences} out of {config.pool_pages[-1]:,} pages",
                took_ms < allowed_ms,
                f"{took_ms:.3f} ms, under {targets.handout_scatters:g} scatters of "
                f"{scatter_ms:.3f} ms and {targets.handout_ms} ms: {allowed_ms:.3f} ms",
            ),
            _does_not_grow("a handout", timed, first, last, targets.growth),
        ),
        measurements=_milliseconds(timed),
    )


def _zeroing(config: Config) -> Record:
    """Clear the pages of a handout, beside memset."""
    (group,) = group_layers(config.geometry.specs(), config.geometry.page_size)
    page_nbytes = envelope.build(group, Topology(), 0).nbytes
    jobs = book_race.zero_jobs(page_nbytes, config.zero_pages)
    timed = interleave(jobs, config.rounds)
    zero, pages, one = book_race.ZERO, book_race.MEMSET_PAGES, book_race.MEMSET_ONE
    ratio = timed.ratio(pages, zero)
    nbytes = config.zero_pages * page_nbytes
    return Record(
        "zeroed_pages",
        "measurement",
        f"{config.zero_pages} pages of {page_nbytes:,} B cleared, over memset of the "
        "same pages in the same order",
        "xla",
        repetitions=config.rounds,
        checks=(
            _at_least("zeroing of pages", ratio, config.targets.zero, "of memset"),
        ),
        measurements={
            "zero_ratio": round(ratio, 3),
            "zero_over_one_contiguous_memset": round(timed.ratio(one, zero), 3),
        }
        | {
            f"{side}_gb_per_s": round(nbytes / timed.median(side) / 1e9, 2)
            for side in (zero, pages, one)
        },
    )


def _writes(config: Config) -> Record:
    """Write a token of each sequence into pools of every size."""
    sizes = [mib << 20 for mib in config.write_pools_mib]
    jobs = book_race.write_jobs(sizes, config.sequences, config.write_page_size)
    timed = interleave(jobs, config.rounds, warm_up=2)
    low, high = (f"{config.write_pools_mib[at]}_mib_pool" for at in (0, -1))
    return Record(
        "written_rows",
        "measurement",
        f"{config.sequences} tokens of 4 KiB in bf16 written into pools of two sizes",
        "xla",
        repetitions=config.rounds,
        checks=tuple(
            _does_not_grow(
                f"{verb} of {config.sequences} tokens",
                timed,
                f"{verb}_{low}",
                f"{verb}_{high}",
                config.targets.growth,
            )
            for verb in ("tokens_write", "attention_write")
        ),
        measurements=_milliseconds(timed),
    )


def _host(config: Config) -> Record:
    """Time the host's ledger and prefix index; they have no target here."""
    jobs = {
        "ledger_cycle_64_pages": book_race.ledger_job(config.pool_pages[-1], 64),
        "prefix_match_1024_tokens": book_race.prefix_job(256, 1024, 512, 16),
    }
    timed = interleave(jobs, 100 * config.rounds, warm_up=100)
    return Record(
        "host_books",
        "measurement",
        "the ledger's handout and release, and a prefix of 1,024 tokens found",
        "host",
        repetitions=timed.num_rounds,
        measurements={
            f"{name}_per_s": round(1 / timed.median(name)) for name in timed.seconds
        },
    )


def _at_least(name: str, ratio: float, least: float, unit: str) -> Check:
    return Check(name, ratio >= least, f"{ratio:.2f} {unit}, at least {least}")


def _does_not_grow(
    name: str, timed: Rounds, small: str, large: str, most: float
) -> Check:
    ratio = timed.ratio(large, small)
    low, high = (timed.median(side) * 1e3 for side in (small, large))
    detail = f"{high:.3f} ms in {large}, {low:.3f} in {small}: {ratio:.2f} x"
    return Check(f"{name} does not grow with the pool", ratio < most, detail)


def _milliseconds(timed: Rounds) -> dict[str, float]:
    return {f"{name}_ms": round(timed.median(name) * 1e3, 4) for name in timed.seconds}
