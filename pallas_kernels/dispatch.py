"""Which implementation of each operation runs, and why.

Law: nothing falls back in silence. A choice carries its reason, asking for an
implementation that cannot run is an error with the reason, and records of experiments
carry the same words.

    choice = choose("gather_pages", pages, ids)    # reference: arrays on cpu: XLA's ...
    rows = run("gather_pages", pages, ids, implementation="mosaic_gpu")

Each operation of this house has a reference in jax.numpy, which says what is right, a
host version in numpy, and a Mosaic GPU kernel. On a GPU "auto" takes a kernel only once
a device has checked and timed it (`SEEN_ON_A_DEVICE`); until then XLA's program runs,
and a kernel runs where it is asked for.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from pallas_kernels import (
    append_tokens,
    blocks_of_rows,
    export_records,
    gather_pages,
    import_records,
    import_turned,
    move_pages,
    rerope,
    rows_of_blocks,
    scatter_pages,
    zero_pages,
)
from pallas_kernels.limits import Unsupported

__all__ = ["IMPLEMENTATIONS", "OPERATIONS", "SEEN_ON_A_DEVICE", "Choice", "choices"]
__all__ += ["choose", "run"]

IMPLEMENTATIONS = ("auto", "reference", "host", "mosaic_gpu")

OPERATIONS = {
    "gather_pages": gather_pages,
    "scatter_pages": scatter_pages,
    "zero_pages": zero_pages,
    "move_pages": move_pages,
    "append_tokens": append_tokens,
    "export_records": export_records,
    "import_records": import_records,
    "import_turned": import_turned,
    "rows_of_blocks": rows_of_blocks,
    "blocks_of_rows": blocks_of_rows,
    "rerope": rerope,
}
_NEW_ARRAY = ("gather_pages", "rows_of_blocks")  # the others donate their first

# Operations that `configs/device_moves.toml` found right and fast enough on a device.
SEEN_ON_A_DEVICE: frozenset[str] = frozenset()

# What kvmem's rooms compile themselves: no operation of this house, listed beside them.
_OF_KVMEM = {
    "attend": ("xla", "attention over pages through block tables, in jax.numpy"),
    "handout": ("xla", "pages off the free list, cleared one by one in a loop"),
    "release": ("xla", "references dropped and pages returned by a donated scatter"),
    "write_tokens": ("xla", "bytes written to slots by a donated u8 scatter"),
    "read_tokens": ("xla", "bytes read from slots by a gather"),
    "transfer.export_records": ("host", "pages to token records, strided numpy copies"),
    "transfer.import_records": ("host", "token records to pages, strided numpy copies"),
}


@dataclasses.dataclass(frozen=True)
class Choice:
    """One operation, the implementation that runs it, and the reason in words."""

    operation: str
    implementation: str
    reason: str


def choose(
    operation: str,
    *arrays: Any,
    implementation: str = "auto",
    platform: str | None = None,
    **facts: Any,
) -> Choice:
    """Answer which implementation serves these arrays, and why; nothing runs.

    Args:
        arrays: the operation's arrays, or their `jax.ShapeDtypeStruct`s.
        platform: where they are, "cpu" or "gpu"; None: looked up.

    Raises:
        Unsupported: an unknown operation or implementation, or one that cannot run;
            more pages than the pool's array has.
    """
    if operation not in OPERATIONS or implementation not in IMPLEMENTATIONS:
        raise Unsupported(
            f"{operation!r} by {implementation!r}: this house has the operations "
            f"{', '.join(OPERATIONS)} by {', '.join(IMPLEMENTATIONS)}. Use one of each."
        )
    _require_pages(operation, arrays, facts)
    on_host = all(isinstance(array, np.ndarray | np.generic) for array in arrays)
    platform = platform or ("host" if on_host else _platform(arrays))
    refusals = {
        "reference": None,
        "host": None if on_host else f"arrays of jax on {platform}, not of numpy",
        "mosaic_gpu": _kernel_refusal(operation, arrays, facts, platform),
    }
    if implementation == "auto":
        return _auto(operation, platform, on_host, refusals["mosaic_gpu"])
    if refusals[implementation] is not None:
        able = [name for name, refusal in refusals.items() if refusal is None]
        raise Unsupported(
            f"{operation} by {implementation!r}: {refusals[implementation]}. Use "
            f"{' or '.join(able)}, or auto."
        )
    return Choice(operation, implementation, "asked for")


def _require_pages(operation: str, arrays, facts) -> None:
    """Refuse a number of pages that the pool has not: ids up to it would be let in."""
    num_pages = facts.get("num_pages")
    held = arrays[operation == "export_records"].shape[0]  # records come before it
    if num_pages is not None and not 0 <= num_pages <= held:
        raise Unsupported(
            f"{operation} of num_pages = {num_pages} in an array of {held}: what is "
            f"behind an array is nobody's. Give at most {held}."
        )


def _auto(operation: str, platform: str, on_host: bool, refusal: str | None) -> Choice:
    """Choose: numpy for numpy's arrays, a kernel that was seen to run, else XLA."""
    if on_host:
        return Choice(operation, "host", "arrays of numpy: copied where they lie")
    if refusal is not None:
        return Choice(operation, "reference", f"XLA's program: {refusal}")
    if operation not in SEEN_ON_A_DEVICE:
        return Choice(
            operation,
            "reference",
            "XLA's program: the kernel compiles for this device, and none has checked "
            "and timed it yet; mosaic_gpu runs it, configs/device_moves.toml checks it",
        )
    return Choice(operation, "mosaic_gpu", "a device found the kernel right and fast")


def _kernel_refusal(operation: str, arrays, facts, platform: str) -> str | None:
    if platform not in ("gpu", "cuda"):
        return f"Mosaic GPU kernels need a CUDA device, these arrays are on {platform}"
    return OPERATIONS[operation].supports(*arrays, **facts)


def _platform(arrays) -> str:
    """Return where jax's arrays are; traced ones are where jax compiles by default."""
    for array in arrays:
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
            return next(iter(array.devices())).platform
    return jax.default_backend()


def run(operation: str, *arrays: Any, implementation: str = "auto", **facts: Any):
    """Run an operation by the implementation that `choose` answers.

    Donates the first array where the operation changes it; numpy's change in place.

    Raises:
        Unsupported: as `choose` does.
    """
    choice = choose(operation, *arrays, implementation=implementation, **facts)
    if choice.implementation == "host":
        return OPERATIONS[operation].host(*arrays, **facts)
    named = tuple(sorted(facts.items()))
    return _compiled(operation, choice.implementation, named)(*arrays)


@functools.lru_cache(maxsize=256)
def _compiled(operation: str, implementation: str, facts: tuple):
    module = OPERATIONS[operation]
    call = module.kernel if implementation == "mosaic_gpu" else module.reference
    donated = () if operation in _NEW_ARRAY else (0,)
    return jax.jit(functools.partial(call, **dict(facts)), donate_argnums=donated)


def choices(platform: str) -> tuple[Choice, ...]:
    """Answer what runs each operation on arrays of `platform`, in a fixed order.

    Sizes decide too, and are not known here: a choice of "mosaic_gpu" may be refused
    for a width that no copy serves.
    """
    found = [_of_kvmem(operation, platform) for operation in _OF_KVMEM]
    for operation in OPERATIONS:
        refusal = None
        if platform not in ("gpu", "cuda"):
            refusal = f"its kernel needs a CUDA device, and this is {platform}"
        found.append(_auto(operation, platform, on_host=False, refusal=refusal))
    return tuple(found)


def _of_kvmem(operation: str, platform: str) -> Choice:
    implementation, what = _OF_KVMEM[operation]
    if implementation == "host":
        return Choice(operation, "host", f"{what}; read in place")
    return Choice(operation, "xla", f"{what}; XLA compiles it for {platform}")
