"""Interpret mode: a kernel's body on the host, block by block, with races detected.

It proves what it can: every byte of a result, every wait and every fence. It cannot see
an index out of bounds (it reads zeros or the last page), nor an unaligned copy; the
first is shown with poison behind `num_pages`, the second is `supports`' to refuse.

    rows = interpret.run(gather_pages.kernel, pages, ids)
"""

from collections.abc import Callable

import jax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = ["Race", "params", "reset", "run"]


class Race(RuntimeError):
    """Two accesses of one place with no order between them."""


def params() -> plgpu.InterpretGPUParams:
    """Return the mode itself, for a kernel's `interpret` argument."""
    return plgpu.InterpretGPUParams(detect_races=True)


def reset() -> None:
    """Forget what an interpreted kernel left behind when it raised."""
    gpu_callbacks.reset_gpu_interpret_mode_state()


def run(kernel: Callable, *arrays, **facts):
    """Run `kernel(*arrays, **facts)` under interpret mode.

    Raises:
        Race: the body has a race. jax 0.12 says so by an error of its own, 0.11 only
            sets a flag; both come out as this.
    """
    mode = params()
    try:
        result = jax.jit(lambda *a: kernel(*a, **facts, interpret=mode))(*arrays)
        result = jax.block_until_ready(result)
        races = gpu_callbacks._races  # None: an empty list, and no body ran
        if races is not None and races.races_found:
            raise Race(f"{kernel.__module__}: the detector of races has found one")
    except Exception as error:
        reset()
        if "race" in str(error).lower():
            raise Race(str(error)) from error
        raise
    return result
