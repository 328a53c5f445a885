"""One operation's kernels, checked and timed: what a worker process does for a run.

The law: a kernel is compared with its reference on the device, on fresh bytes, every
byte of the result, before it is timed. A copy that stands at a wrong address ends the
process it runs in, so each operation has a process of its own.

    python -m experiments.device_worker < job.json    # a line of JSON a case
"""

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from experiments import device_reports
from pallas_kernels import dispatch, fillings, interpret, specs
from pallas_kernels.specs import Case

__all__ = ["Job", "perform"]

_WARM_UPS = 5
_PATIENCE_S = 0.5


@dataclasses.dataclass(frozen=True)
class Job:
    """What a worker does: cases of one operation, and how.

    Args:
        operation: of `pallas_kernels.dispatch`, or "field_reports".
        models: names of `pallas_kernels.specs`.
        interpreted: run bodies on the host, and time nothing.
        pool_nbytes: about the size of a pool.
        payload_nbytes: bytes of a call, about.
        repetitions: calls that are timed together.
        seed: of the bytes.
    """

    operation: str
    models: tuple[str, ...]
    interpreted: bool
    pool_nbytes: int
    payload_nbytes: int
    repetitions: int
    seed: int


def perform(job: Job) -> Iterator[dict]:
    """Yield a finding a case: bytes that are wrong, then how long it took."""
    if job.operation == "field_reports":
        yield from device_reports.answers(job.interpreted)
        return
    known = {model.name: model for model in (*specs.MODELS, *specs.TINY)}
    for name in job.models:
        for case in _cases(job, known[name]):
            module = dispatch.OPERATIONS[case.operation]
            refusal = module.supports(*case.structs(), **case.facts)
            if refusal is not None:
                yield {"case": case.name, "refused": refusal}
                continue
            kernel, xla = _program(_kernel(case), case), _xla(case)
            yield {"case": case.name} | _checked(job, case, kernel, xla)
            if not job.interpreted:
                yield {"case": case.name, "timed": _timed(job, case, kernel, xla)}


def _cases(job: Job, model: specs.Model) -> Iterator[Case]:
    """Yield the operation's cases, of calls as large as asked."""
    entries = max(1, job.payload_nbytes // model.page_nbytes)
    for case in specs.cases(model, job.pool_nbytes, entries):
        if case.operation == job.operation:
            yield case


def _kernel(case: Case) -> Callable:
    variant = {"variant": case.variant} if case.variant else {}
    kernel = dispatch.OPERATIONS[case.operation].kernel
    return functools.partial(kernel, **case.facts, **variant)


def _xla(case: Case) -> dict[str, Callable]:
    """Return XLA's programs: the reference, and gather, transpose, scatter of pages."""
    reference = dispatch.OPERATIONS[case.operation].reference
    found = {"reference": functools.partial(reference, **case.facts)}
    if case.peer is not None:
        found["transpose"] = case.peer
    return {name: _program(call, case) for name, call in found.items()}


def _program(call: Callable, case: Case) -> Callable:
    return jax.jit(call, donate_argnums=(0,) if case.in_place else ())


def _checked(job: Job, case: Case, kernel: Callable, xla: dict[str, Callable]) -> dict:
    """Compare every program with the reference, byte for byte, on fillings alike."""
    expected = xla["reference"](*fillings.fill(case, job.seed))
    others = {name: call for name, call in xla.items() if name != "reference"}
    found = {"wrong_nbytes": 0, "of_nbytes": expected.size}
    for name, program in ({"": kernel} | others).items():
        arrays = fillings.fill(case, job.seed)
        if job.interpreted and not name:
            result = interpret.run(_kernel(case), *arrays)
        else:
            jnp.full(expected.size, 0xC1, jnp.uint8).block_until_ready()  # dirties it
            result = program(*arrays)
        key = f"wrong_nbytes_of_{name}" if name else "wrong_nbytes"
        found[key] = int(_count(expected, result))
    return found


@jax.jit
def _count(expected: jax.Array, found: jax.Array) -> jax.Array:
    return (expected != found).sum(dtype=jnp.uint32)


def _timed(job: Job, case: Case, kernel: Callable, xla: dict[str, Callable]) -> dict:
    """Time a kernel, XLA's programs of the operation, and one copy of the bytes."""
    seconds = {
        "kernel": _seconds(job, case, kernel),
        "copy": _copy_seconds(job, case.moved_nbytes),
        **{name: _seconds(job, case, program) for name, program in xla.items()},
    }
    best = min(xla, key=seconds.get)
    figures = {f"{name}_us": round(s * 1e6, 2) for name, s in seconds.items()}
    return figures | {
        "moved_nbytes": case.moved_nbytes,
        "tb_per_s": round(2 * case.moved_nbytes / seconds["kernel"] / 1e12, 3),
        "of_copy": round(seconds["copy"] / seconds["kernel"], 3),
        "of_xla": round(seconds[best] / seconds["kernel"], 3),
    }


def _seconds(job: Job, case: Case, program: Callable) -> float:
    """Return a call's time: many in a row, each on what the one before left."""
    first, *rest = fillings.fill(case, job.seed)
    return _elapsed(job, program, first, rest, case.in_place)


def _copy_seconds(job: Job, nbytes: int) -> float:
    return _elapsed(job, jax.jit(jnp.copy), jnp.zeros(nbytes, jnp.uint8), [], False)


def _elapsed(job: Job, run: Callable, first, rest: list, in_place: bool) -> float:
    """Return seconds a call; the device works while the host asks for the next.

    A program that would take seconds in all, as one that finds each byte by an index
    may, is called less often.
    """
    counts, seconds = [1, _WARM_UPS, job.repetitions], 0.0
    for turn, count in enumerate(counts):
        if turn and seconds * count > _PATIENCE_S:
            count = max(1, int(_PATIENCE_S / seconds))
        started = time.perf_counter()
        for _ in range(count):
            result = run(first, *rest)
            first = result if in_place else first
        jax.block_until_ready(result)
        seconds = (time.perf_counter() - started) / count
    return seconds


def main() -> int:
    """Do the job that stands on stdin."""
    job = Job(**json.load(sys.stdin))
    for found in perform(dataclasses.replace(job, models=tuple(job.models))):
        print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
