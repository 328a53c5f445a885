"""The harness: what an experiment yields, and how it becomes a record on disk.

The law: a record says what it supports and nothing more. A correctness record holds
checks and no word of speed; a measurement record holds figures, with the device, the
versions, the load and the machine's own speed beside them. Measurements of a busy
machine are marked so, and are not published unless a person says so.

    yield Record("handoff", "correctness", "TP=9 continues what TP=3 wrote", "xla",
                 checks=(Check("tokens equal", True, "64 of 64"),))

A run writes runs/<name>/record.json; one whose config says `publish = true` also writes
experiments/records/<name>.json.
"""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import jax

import kvmem
from experiments.measure import (
    Calibration,
    Load,
    Rounds,
    Timed,
    calibrate,
    interleave,
    observe_load,
)
from kvmem import errors
from kvmem.settings import Setting

__all__ = ["Calibration", "Check", "Load", "Record", "Rounds", "RunConfig", "Timed"]
__all__ += ["calibrate", "execute", "interleave", "observe_load"]

RUNS = pathlib.Path("runs")
RECORDS = pathlib.Path("experiments") / "records"

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "orbax-checkpoint", "tensorstore")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SPEED = re.compile(
    r"(_s|_ms|_us|per_s|/s)\b|\b(seconds|milliseconds|fast|slow|speed|quick|latency"
    r"|throughput)",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Base of an experiment's config.

    Args:
        publish: write the records to experiments/records/ too.
    """

    publish: bool = False


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that must hold, whether it does, and with which numbers."""

    name: str
    ok: bool
    detail: str


def _device() -> str:
    kinds = sorted({d.device_kind for d in jax.devices()})
    return f"{jax.device_count()} x {', '.join(kinds)}, {os.cpu_count()} host cores"


def _versions() -> dict[str, str]:
    found = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"kvmem": kvmem.__version__, "python": platform.python_version()} | found


@dataclasses.dataclass(frozen=True)
class Record:
    """What one part of a run supports.

    Args:
        name: unique in the run.
        kind: "correctness" (checks, no figures of speed) or "measurement".
        supports: the claim, in words.
        implementation: which one ran ("xla", "host", ...).
        repetitions: how often each figure was taken.
        checks: what must hold; a failed one fails the run.
        measurements: figures, units in their names.
        facts: anything else; `store_root` and such stand at the top of record.json.

    Raises:
        ConfigError: a correctness record that speaks of speed.
    """

    name: str
    kind: Literal["correctness", "measurement"]
    supports: str
    implementation: str
    repetitions: int = 1
    checks: tuple[Check, ...] = ()
    measurements: Mapping[str, float | int] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    device: str = dataclasses.field(default_factory=_device)
    versions: Mapping[str, str] = dataclasses.field(default_factory=_versions)

    def __post_init__(self):
        if self.kind == "measurement":
            return
        said = [self.supports, *self.measurements, *self.facts]
        said += [word for check in self.checks for word in (check.name, check.detail)]
        spoken = [text for text in said if _SPEED.search(text)]
        if spoken:
            raise errors.ConfigError(
                errors.say(
                    f"correctness record {self.name!r} says {spoken[0]!r}",
                    "a correctness record carries no word of speed",
                    'Put figures of time into a record of kind "measurement"',
                )
            )


def execute(
    name: str,
    config: object,
    records: Iterable[Record],
    settings: Sequence[Setting] = (),
    allow_busy: bool = False,
) -> dict[str, Any]:
    """Run an experiment to its end and write its records; return record.json's data.

    Args:
        name: of the run's folder, runs/<name>/.
        config: the experiment's config; a `RunConfig` may ask to be published.
        records: what the experiment yields; consuming it runs the experiment.
        settings: the effective config, kept in the record.
        allow_busy: publish measurements of a busy machine, marked as such.

    Raises:
        ConfigError: a name that is no single folder's.
        Busy: the run is to be published and the machine is busy, before or after.
    """
    if not _NAME.fullmatch(name):
        raise errors.ConfigError(
            errors.say(
                f"run {name!r}",
                "it names one folder in runs/, and a record",
                "Use letters, digits, - _ and ., first a letter or digit",
            )
        )
    publish = isinstance(config, RunConfig) and config.publish
    folder = RUNS / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "record.json").unlink(missing_ok=True)
    before = observe_load()
    if publish and not allow_busy:
        _require_quiet(before)
    started = datetime.datetime.now(datetime.UTC)
    found = list(records)
    after = observe_load()
    data = _summary(name, found, settings, started) | _conditions(found, before, after)
    _write(folder / "record.json", data)
    if publish:
        if not allow_busy:
            _require_quiet(after)
        RECORDS.mkdir(parents=True, exist_ok=True)
        _write(RECORDS / f"{name}.json", data)
    return data


def _require_quiet(load: Load) -> None:
    if load.busy is not None:
        raise errors.Busy(
            errors.say(
                "publishing measurements",
                f"the machine is busy: {load.busy}",
                "Wait until it is quiet, or give --busy to publish records marked so",
            )
        )


def _summary(
    name: str,
    records: Sequence[Record],
    settings: Sequence[Setting],
    started: datetime.datetime,
) -> dict[str, Any]:
    """Return what the records say together."""
    checks = [check for record in records for check in record.checks]
    wall = datetime.datetime.now(datetime.UTC) - started
    summary = {
        "name": name,
        "ok": all(check.ok for check in checks),
        "checks": [dataclasses.asdict(check) for check in checks],
        "measurements": _merged(records, "measurements"),
        "records": [dataclasses.asdict(record) for record in records],
        "config": {s.key: {"value": s.value, "source": s.source} for s in settings},
        "started": started.isoformat(timespec="seconds"),
        "wall_s": round(wall.total_seconds(), 3),
    }
    facts = _merged(records, "facts")
    assert not facts.keys() & summary.keys(), facts.keys() & summary.keys()
    return facts | summary


def _merged(records: Sequence[Record], part: str) -> dict[str, Any]:
    """Join one mapping of every record; no name may be said twice."""
    merged: dict[str, Any] = {}
    for record in records:
        mapping = getattr(record, part)
        twice = merged.keys() & mapping.keys()
        assert not twice, f"{sorted(twice)} stand in two records"
        merged |= mapping
    return merged


def _conditions(records: Sequence[Record], before: Load, after: Load) -> dict[str, Any]:
    """Return what stands beside figures: load, calibration, and whether it was busy."""
    if all(record.kind == "correctness" for record in records):
        return {}
    return {
        "busy": before.busy or after.busy,
        "load_before": dataclasses.asdict(before),
        "load_after": dataclasses.asdict(after),
        "calibration": dataclasses.asdict(calibrate()),
    }


def _write(path: pathlib.Path, data: Mapping[str, Any]) -> None:
    """Replace a JSON file as a whole."""
    draft = path.with_suffix(".tmp")
    text = json.dumps(data, indent=2, default=_plain)
    draft.write_text(text + "\n")
    draft.replace(path)


def _plain(value: Any) -> Any:
    """Spell what JSON has no word for: paths, dataclasses, numpy scalars."""
    if isinstance(value, pathlib.PurePath):
        return value.as_posix()
    if dataclasses.is_dataclass(value):
        return dataclasses.asdict(value)
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} in a record")
