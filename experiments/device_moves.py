"""What the kernels are worth on one GPU: every byte checked, then timed.

Each kernel is compared with its reference on the device, then timed beside a plain copy
of the same bytes and beside XLA's programs of the same operation: its reference, and
whole pages gathered, transposed and scattered. One wrong byte fails the run, a slow
kernel does not. Operations go from simple to risky, each in a process of its own: a
copy at a wrong address ends that process, and the rest goes on. Last come faults that
people met on a GPU alone (`device_reports`).

    python -m experiments run configs/device_moves.toml          # one CUDA device
    python -m experiments run configs/device_moves.toml --set mode=interpret
    python -m experiments run configs/device_moves.toml --set mode=compile

The two dry runs need no device: bodies under the interpreter at tiny sizes, and every
program compiled for a described H200.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Literal

import jax

from experiments.device_worker import Job, perform
from experiments.harness import Check, Record, RunConfig
from experiments.kernels_offline import compiled
from kvmem import console, errors
from pallas_kernels import dispatch, offline, specs

__all__ = ["Config", "run"]

_OPERATIONS = (*dispatch.OPERATIONS, "field_reports")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """The whole truth of a run.

    Args:
        mode: device, or a dry run: interpret or compile.
        operations: in this order; none: all, the simple ones first.
        models: of pallas_kernels.specs; none: all published ones (the tiny ones, for
            interpret).
        pool_mib: of a pool; above 4,096 offsets in bytes pass 2^32.
        payload_mib: bytes of a call, about.
        repetitions: calls that are timed together.
        budget_s: operations that have not begun by then are left out, and said so.
        operation_s: seconds of one operation's process.
        seed: of the bytes.
        environment: folder of the virtual environment that compiles; none: this one
            where it has jax's CUDA plugin, else .venvs/cuda of make test-kernels.
    """

    mode: Literal["device", "interpret", "compile"] = "device"
    operations: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    pool_mib: int = 16_384
    payload_mib: int = 512
    repetitions: int = 20
    budget_s: float = 420
    operation_s: float = 60
    seed: int = 11
    environment: str | None = None


def run(config: Config) -> Iterator[Record]:
    """Yield what each operation's kernel was found to be."""
    _require_known(config)
    if config.mode == "compile":
        yield compiled(_compiler(config))
        return
    if config.mode == "device":
        _require_device()
    started = time.monotonic()
    for operation in config.operations or _OPERATIONS:
        job = _job(config, operation)
        if config.mode == "interpret":
            yield _correctness(operation, list(perform(job)), None)
            continue
        left = config.budget_s - (time.monotonic() - started)
        found, failure = _in_a_process(job, min(left, config.operation_s))
        _print(operation, found, failure)
        yield _correctness(operation, found, failure)
        yield from _measurement(operation, found, config.repetitions)


def _compiler(config: Config) -> pathlib.Path:
    """Return the Python that compiles; the record says by which jax it did."""
    if config.environment is None and offline.has_plugin():
        return pathlib.Path(sys.executable)
    folder = pathlib.Path(config.environment or ".venvs/cuda").absolute()
    return folder / "bin" / "python"


def _require_known(config: Config) -> None:
    """Refuse operations and models that there are not."""
    models = {model.name for model in (*specs.MODELS, *specs.TINY)}
    for named, known in (
        (config.operations, _OPERATIONS),
        (config.models, tuple(sorted(models))),
    ):
        unknown = [name for name in named if name not in known]
        if unknown:
            raise errors.ConfigError(
                errors.say(
                    f"{unknown[0]!r} in a run of device_moves",
                    "the kernels' house has no such name",
                    f"Use some of {', '.join(known)}",
                )
            )


def _require_device() -> None:
    """Refuse a machine without a CUDA device; take none of the device's memory."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # workers inherit it too
    if jax.default_backend() != "gpu":
        raise errors.ConfigError(
            errors.say(
                f"mode=device on {jax.default_backend()}",
                "the kernels run on a CUDA device, and jax finds none here",
                "Use --set mode=interpret or --set mode=compile, which need none",
            )
        )


def _job(config: Config, operation: str) -> Job:
    interpreted = config.mode == "interpret"
    default = specs.TINY if interpreted else specs.MODELS
    return Job(
        operation=operation,
        models=config.models or tuple(model.name for model in default),
        interpreted=interpreted,
        pool_nbytes=1 << 14 if interpreted else config.pool_mib << 20,
        payload_nbytes=3 << 11 if interpreted else config.payload_mib << 20,
        repetitions=config.repetitions,
        seed=config.seed,
    )


def _in_a_process(job: Job, seconds: float) -> tuple[list[dict], str | None]:
    """Do a job in a worker; return its findings, and how it failed if it did."""
    if seconds <= 0:
        return [], "left out: the run's time was over"
    command = [sys.executable, "-m", "experiments.device_worker"]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(dataclasses.asdict(job)),
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout or b""
        said = output.decode() if isinstance(output, bytes) else output
        return _findings(said), f"cut after {seconds:.0f} s"
    failure = None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no word"]
        failure = f"exit status {done.returncode}: {lines[-1]}"
    return _findings(done.stdout), failure


def _findings(said: str) -> list[dict]:
    """Return the whole lines of a worker, the last one may be cut."""
    lines = said[: said.rfind("\n") + 1].splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def _correctness(operation: str, found: list[dict], failure: str | None) -> Record:
    """Return what was checked: every case, and that the process came to its end.

    A run that compared nothing, for every case was refused or there was none, is no
    proof of anything.
    """
    checked = [finding for finding in found if "timed" not in finding]
    checks = [_check(finding) for finding in checked]
    compared = sum("refused" not in finding for finding in checked)
    name, detail = f"{operation} came to its end", f"all {compared} cases"
    if failure is None and not compared:
        failure = "nothing was compared: no such model has a case that a kernel serves"
    checks.append(Check(name, failure is None, failure or detail))
    return Record(
        operation,
        "correctness",
        "a kernel gives every byte that its reference gives",
        "mosaic_gpu",
        checks=tuple(checks),
    )


def _check(finding: dict) -> Check:
    if "objection" in finding:
        objection = finding["objection"]
        return Check(finding["case"], objection is None, objection or "so it is")
    name = f"bytes of {finding['case']}"
    if "refused" in finding:
        return Check(name, True, f"the kernel refuses: {finding['refused']}")
    wrong, of = finding["wrong_nbytes"], finding["of_nbytes"]
    peer = finding.get("wrong_nbytes_of_transpose", 0)
    detail = f"{wrong:,} of {of:,} differ"
    if peer:
        detail += f", {peer:,} of XLA's transpose"
    return Check(name, wrong == 0 and peer == 0, detail)


def _measurement(operation: str, found: list[dict], repetitions: int):
    """Yield the figures of an operation, if it was timed."""
    timed = {f["case"]: f["timed"] for f in found if "timed" in f}
    if timed:
        yield Record(
            f"{operation}_timed",
            "measurement",
            "a kernel beside a copy of its bytes and beside XLA's program",
            "mosaic_gpu",
            repetitions=repetitions,
            measurements={
                f"{case}_{name}": value
                for case, figures in timed.items()
                for name, value in figures.items()
            },
        )


def _print(operation: str, found: list[dict], failure: str | None) -> None:
    """Show an operation's cases at once: a run that is cut has still said them."""
    shown = console.table(operation, "case", "bytes", "us", "TB/s", "of copy", "of XLA")
    for finding in found:
        if "timed" not in finding:
            shown.add_row(finding["case"], _check(finding).detail, *[""] * 4)
            continue
        t = finding["timed"]
        figures = (t["kernel_us"], t["tb_per_s"], t["of_copy"], t["of_xla"])
        shown.add_row(finding["case"], f"{t['moved_nbytes']:,}", *map(str, figures))
    console.out().print(shown)
    if failure:
        print(f"{operation}: {failure}", flush=True)
