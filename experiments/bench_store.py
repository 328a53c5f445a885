"""How fast the page store is: batches put and got, small chunks, misses, opening.

A put is held against TensorStore writing the same array uncompressed in row chunks, a
get against TensorStore reading it, a conversation of many chunks against Orbax saving
one stacked array, misses against plain dict look-ups. The law: sides run in turns on
one disk, every side's bytes are on it when its time stops, and a target is a check with
the ratio that was measured.

    python -m experiments run configs/bench_store.toml
"""

import dataclasses
import pathlib
import tempfile
from collections.abc import Iterator

from experiments import store_race
from experiments.harness import Check, Record, RunConfig, interleave
from experiments.store_race import Sizes

__all__ = ["Config", "Targets", "run"]


@dataclasses.dataclass(frozen=True)
class Targets:
    """What must be reached, each a check.

    Args:
        put: bytes a second over TensorStore's writing.
        get: bytes a second over TensorStore's reading.
        conversation: a put of many chunks takes less than so many stacked arrays.
        misses: looking up missing keys takes less than so many dict look-ups.
        open_s: seconds in which the largest root opens.
        growth: of the time to open over that of the chunks; one but for noise.
    """

    put: float = 0.8
    get: float = 0.9
    conversation: float = 5.0
    misses: float = 20.0
    open_s: float = 2.0
    growth: float = 1.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """The whole truth of a run.

    Args:
        batch: chunks that are put and got at once.
        conversation: many small chunks of one text.
        open_chunks: chunks of the roots that are opened, smallest first.
        open_segment_chunks: chunks of a segment there.
        lookups: keys that all miss.
        targets: what must be reached.
        rounds: turns of every comparison.
    """

    batch: Sizes = Sizes(chunks=91, record_nbytes=46_080)
    conversation: Sizes = Sizes(chunks=2000, record_nbytes=1024)
    open_chunks: tuple[int, ...] = (5_000, 50_000)
    open_segment_chunks: int = 50
    lookups: int = 1000
    targets: Targets = Targets()
    rounds: int = 9


def run(config: Config) -> Iterator[Record]:
    """Yield what putting, getting, missing and opening cost."""
    with tempfile.TemporaryDirectory(prefix="bench_store-") as top:
        folder = pathlib.Path(top)
        yield from _batches(config, folder / "batch")
        yield _conversation(config, folder / "conversation")
        yield _misses(config, folder / "misses")
        yield _opening(config, folder / "opening")


def _batches(config: Config, folder: pathlib.Path) -> Iterator[Record]:
    """Put and get a batch, beside TensorStore on the same array."""
    race = store_race.BatchRace(config.batch, folder)
    timed = interleave(race.jobs(), config.rounds, warm_up=2)
    nbytes = config.batch.nbytes
    yield Record(
        "same_batch",
        "correctness",
        f"a batch of {nbytes:,} B is what was put, on either side",
        "orbax and tensorstore",
        checks=tuple(
            Check(f"bytes of {side}", equal, "equal" if equal else "they differ")
            for side, equal in race.equal.items()
        ),
    )
    put = timed.ratio("tensorstore_write", "store_put")
    as_stored = timed.ratio("tensorstore_write_as_stored", "store_put")
    got = timed.ratio("tensorstore_read", "store_get")
    digest_s = timed.median("checksums")
    yield Record(
        "batches_against_tensorstore",
        "measurement",
        f"{config.batch.chunks} chunks of {config.batch.row_nbytes:,} B put through "
        "Orbax, sealed and durable, and got with every checksum compared, over "
        "TensorStore writing and reading the array in uncompressed row chunks",
        "orbax and tensorstore",
        repetitions=config.rounds,
        checks=(
            _at_least("put of a batch", put, config.targets.put, "of TensorStore"),
            _at_least("get of a batch", got, config.targets.get, "of TensorStore"),
        ),
        measurements={
            "batch_bytes": nbytes,
            "put_ratio": round(put, 3),
            "get_ratio": round(got, 3),
            # TensorStore alone, given the few large files that a segment has.
            "put_ratio_to_the_same_files": round(as_stored, 3),
            # A put digests the rows and the files of them while Orbax writes.
            "checksums_share_of_put": round(
                2 * digest_s / timed.median("store_put"), 4
            ),
            "checksums_share_of_get": round(digest_s / timed.median("store_get"), 4),
        }
        | {
            f"{side}_gb_per_s": round(nbytes / timed.median(side) / 1e9, 3)
            for side in timed.seconds
        },
    )


def _conversation(config: Config, folder: pathlib.Path) -> Record:
    """Put many small chunks in one call, beside one stacked array of their bytes."""
    jobs = store_race.conversation_jobs(config.conversation, folder)
    timed = interleave(jobs, config.rounds, warm_up=2)
    ratio = timed.ratio("put_of_chunks", "orbax_stacked")
    most = config.targets.conversation
    return Record(
        "conversation_against_one_array",
        "measurement",
        f"{config.conversation.chunks:,} chunks of {config.conversation.row_nbytes:,} "
        "B of one conversation, over Orbax saving their bytes as one array",
        "orbax",
        repetitions=config.rounds,
        checks=(
            Check(
                f"put of {config.conversation.chunks:,} chunks",
                ratio < most,
                f"{ratio:.2f} stacked arrays, under {most:g}",
            ),
        ),
        measurements={
            f"{side}_ms": round(timed.median(side) * 1e3, 2) for side in timed.seconds
        }
        | {"conversation_ratio": round(ratio, 3)},
    )


def _misses(config: Config, folder: pathlib.Path) -> Record:
    """Look up keys of which none is held, beside as many look-ups in a dict."""
    sizes = dataclasses.replace(config.conversation, record_nbytes=64)
    jobs = store_race.miss_jobs(sizes, config.lookups, folder)
    timed = interleave(jobs, 20 * config.rounds, warm_up=20)
    ratios = {
        side: timed.ratio(side, "dict_lookups")
        for side in timed.seconds
        if side != "dict_lookups"
    }
    most = config.targets.misses
    return Record(
        "misses_against_a_dict",
        "measurement",
        f"{config.lookups:,} keys that all miss, over as many look-ups in a dict",
        "host",
        repetitions=timed.num_rounds,
        checks=tuple(
            Check(side, ratio < most, f"{ratio:.1f} dict look-ups, under {most:g}")
            for side, ratio in ratios.items()
        ),
        measurements={
            f"{side}_us": round(timed.median(side) * 1e6, 1) for side in timed.seconds
        }
        | {f"{side}_ratio": round(ratio, 2) for side, ratio in ratios.items()},
    )


def _opening(config: Config, folder: pathlib.Path) -> Record:
    """Open roots of two sizes: the index is rebuilt from their segments."""
    jobs = store_race.open_jobs(config.open_chunks, config.open_segment_chunks, folder)
    timed = interleave(jobs, config.rounds)
    small, large = list(jobs)[0], list(jobs)[-1]
    took_s = timed.median(large)
    chunks = config.open_chunks[-1] / config.open_chunks[0]
    growth = timed.ratio(large, small) / chunks
    targets = config.targets
    return Record(
        "opening_a_root",
        "measurement",
        f"roots opened whose segments hold {config.open_segment_chunks} chunks each: "
        "manifests and chunk tables read and verified",
        "host",
        repetitions=config.rounds,
        checks=(
            Check(
                f"opening {config.open_chunks[-1]:,} chunks",
                took_s < targets.open_s,
                f"{took_s:.2f} s, under {targets.open_s:g} s",
            ),
            Check(
                "opening grows with the chunks and no faster",
                growth < targets.growth,
                f"{growth:.2f} times the growth of the chunks, under "
                f"{targets.growth:g}",
            ),
        ),
        measurements={
            f"{side}_s": round(timed.median(side), 4) for side in timed.seconds
        },
    )


def _at_least(name: str, ratio: float, least: float, unit: str) -> Check:
    return Check(name, ratio >= least, f"{ratio:.2f} {unit}, at least {least}")
