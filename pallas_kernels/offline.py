"""Offline: a kernel compiled to H200 machine code on a machine without a GPU.

The CUDA plugin of jax holds the whole compiler, and compiles for a device that is only
described. No array is made, so a pool of 34 GB costs nothing. What it says is read
here: registers and spills of each kernel, bytes of temporary memory, whether the pool
is aliased, and whether page offsets have 64 bits.

    python -m pallas_kernels.offline found.json    # in `environment(folder)`
    report = offline.compile_for(offline.described(), run, *shapes, page_nbytes=4096)

The law is `objections(report, ...)`: empty, or what is wrong with numbers.
"""

import dataclasses
import functools
import importlib.util
import json
import math
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from pallas_kernels import dispatch, ptx, specs

__all__ = ["POOL_NBYTES", "Report", "compile_for", "described", "environment"]
__all__ += ["has_plugin", "objections", "programs", "ranked", "unavailable"]

# Above 2^32 words: page offsets in words need more than 32 bits, too.
POOL_NBYTES = 32 << 30
_RANKS = 8
_MANY = 4_096  # pages of a call
_AS_MANY = ("move_pages", "append_tokens")  # the same program whatever the entries
# Models whose cases run over ranks and with many pages, and which; (): all they have.
_RANKED = {
    "llama3_8b_tp8_page16": (),
    "deepseek_v32_beside": (),
    "deepseek_v32_indexer": ("rows_of_blocks", "blocks_of_rows"),
}
_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")

# Numbers of the public data sheet of an H200 SXM and of the CUDA programming guide.
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150754820096 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H200"
"""


@dataclasses.dataclass(frozen=True)
class Report:
    """What the compiler said of one program."""

    registers: tuple[int, ...]  # of each kernel of ours
    spilled_nbytes: int
    alias_nbytes: int
    temp_nbytes: int
    copied: tuple[str, ...]  # shapes that the program copies as a whole
    wide_offsets: int  # multiplications by a page's size that have 64 bits
    wrapping_offsets: int  # those that have 32, of any number, and become an address


def environment(folder: str) -> dict[str, str]:
    """Return the variables that must stand before jax is imported."""
    return {
        "JAX_PLATFORMS": "cpu",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_PTX": "1",
        "MOSAIC_GPU_DUMP_TO": folder,
    }


def has_plugin() -> bool:
    """Answer whether this Python has jax's CUDA plugin."""
    for name in _PLUGINS:
        try:
            if importlib.util.find_spec(name) is not None:
                return True
        except ModuleNotFoundError:
            continue
    return False


def unavailable() -> str | None:
    """Say why nothing can be compiled here, None when it can."""
    if not has_plugin():
        return "jax's CUDA plugin is not installed here (make test-kernels brings it)"
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        return "the plugin compiles without a GPU only under JAX_PLATFORMS=cpu"
    if "MOSAIC_GPU_DUMP_TO" not in os.environ:
        return "MOSAIC_GPU_DUMP_TO was not set before jax was imported"
    return None


@functools.cache
def described(devices: int = 1):
    """Return `devices` H200s that are described and not there."""
    found = topologies.get_topology_desc(
        "h200", platform="cuda", topology=f"1x1x{devices}", target_config=_H200
    )
    return tuple(found.devices)


def compile_for(
    devices, run: Callable, *shapes, page_nbytes: int, donate: bool = True
) -> Report:
    """Compile `run` for the first device, or as its shapes' shardings say.

    Args:
        page_nbytes: of the pool whose offsets are looked for.
        donate: give the first array away.
    """
    folder = pathlib.Path(os.environ["MOSAIC_GPU_DUMP_TO"])
    before = set(folder.iterdir())
    one = SingleDeviceSharding(devices[0])
    placed = [
        shape
        if getattr(shape, "sharding", None) is not None
        else jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=one)
        for shape in shapes
    ]
    donated = (0,) if donate else ()
    lowered = jax.jit(run, donate_argnums=donated).trace(*placed).lower()
    was_on = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)  # it would say nothing
    try:
        compiled = lowered.compile()
    finally:
        jax.config.update("jax_enable_compilation_cache", was_on)
    return _read(compiled, page_nbytes, sorted(set(folder.iterdir()) - before))


def _read(compiled, page_nbytes: int, dumped: list[pathlib.Path]) -> Report:
    said = "".join(p.read_text() for p in dumped if p.suffix == ".ptxas")
    programs = [p.read_text() for p in dumped if p.suffix == ".ptx"]
    memory = compiled.memory_analysis()
    return Report(
        registers=tuple(int(n) for n in re.findall(r"Used (\d+) registers", said)),
        spilled_nbytes=sum(map(int, re.findall(r"(\d+) bytes spill stores", said))),
        alias_nbytes=memory.alias_size_in_bytes,
        temp_nbytes=memory.temp_size_in_bytes,
        copied=tuple(re.findall(r"= (\S+?)(?:\{[^}]*\})? copy\(", compiled.as_text())),
        wide_offsets=sum(ptx.wide(page_nbytes, text) for text in programs),
        wrapping_offsets=sum(ptx.wrapping(page_nbytes, text) for text in programs),
    )


def objections(report: Report, pool_nbytes: int, staging_nbytes: int) -> list[str]:
    """Return what is wrong with a program, [] when it is what it should be."""
    found = [f"{shape} is copied" for shape in report.copied]
    if not report.registers:
        found.append("no kernel of ours is in it")
    if report.spilled_nbytes:
        found.append(f"{report.spilled_nbytes} B of registers spilled")
    if report.alias_nbytes != pool_nbytes:
        found.append(f"{report.alias_nbytes:,} B aliased of {pool_nbytes:,} B")
    if report.temp_nbytes > staging_nbytes:
        found.append(f"{report.temp_nbytes:,} B of memory above {staging_nbytes:,} B")
    if not report.wide_offsets:
        found.append("no offset of 64 bits in the PTX")
    if report.wrapping_offsets:
        found.append(f"{report.wrapping_offsets} offsets that wrap in the PTX")
    return found


def programs(pool_nbytes: int, entries: int) -> Iterator[tuple[str, dict]]:
    """Yield each program of the models: its name, and what it was found to be."""
    # These come first: what jax has compiled before it does not dump again, and the
    # rest holds some of the same kernels.
    for case in ranked(pool_nbytes, _MANY):
        if case.operation not in _AS_MANY:
            yield f"{_MANY}-{case.name}", _found(case, described(), case.structs())
    for model in specs.MODELS:
        for case in specs.cases(model, pool_nbytes, entries):
            yield case.name, _found(case, described(), case.structs())
    for case in ranked(pool_nbytes, entries):
        yield f"vmap-{case.name}", _found(case, described(), *_batched(case, 3))
        yield f"shard_map-{case.name}", _found(case, *_sharded(case))


def ranked(pool_nbytes: int, entries: int) -> Iterator[specs.Case]:
    """Yield cases that are compiled otherwise, too: every operation, and by words."""
    for model in specs.MODELS:
        if model.name not in _RANKED:
            continue
        for case in specs.cases(model, pool_nbytes, entries):
            if case.operation in _RANKED[model.name] or not _RANKED[model.name]:
                yield case


def _call(case: specs.Case) -> Callable:
    """Return the kernel of a case with its facts, and the variant it is of."""
    variant = {"variant": case.variant} if case.variant else {}
    kernel = dispatch.OPERATIONS[case.operation].kernel
    return functools.partial(kernel, **case.facts, **variant)


def _batched(case: specs.Case, ranks: int):
    """Return the case over an axis of ranks: each has its first array, and new ones."""
    axes = [0 if argument.kind == "bytes" else None for argument in case.arguments]
    shapes = [
        jax.ShapeDtypeStruct((ranks, *s.shape), s.dtype) if axis == 0 else s
        for s, axis in zip(case.structs(), axes, strict=True)
    ]
    return shapes, jax.vmap(_call(case), in_axes=axes)


def _sharded(case: specs.Case):
    """Return devices, shapes and program of a case with a rank on each device."""
    devices = described(_RANKS)
    mesh = jax.sharding.Mesh(np.array(devices), ("rank",))
    shapes, batched = _batched(case, _RANKS)
    ranked = [argument.kind == "bytes" for argument in case.arguments]
    parts = [PartitionSpec("rank") if own else PartitionSpec() for own in ranked]
    run = jax.shard_map(
        batched,
        mesh=mesh,
        in_specs=tuple(parts),
        out_specs=PartitionSpec("rank"),
        check_vma=False,  # references to pools may not vary over a mesh's axis
    )
    placed = [
        jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, part))
        for s, part in zip(shapes, parts, strict=True)
    ]
    return devices, placed, run


def _found(case: specs.Case, devices, shapes, run: Callable | None = None) -> dict:
    """Compile a case and judge it."""
    report = compile_for(
        devices,
        run or _call(case),
        *shapes,
        page_nbytes=case.model.page_nbytes,
        donate=case.in_place,
    )
    ranks = math.prod(shapes[0].shape) // math.prod(case.arguments[0].shape)
    here = ranks if len(devices) == 1 else 1  # sizes are those of one device
    donated = math.prod(case.arguments[0].shape) * here if case.in_place else 0
    # Lists that are settled: which entry of each page wins, and a bit more.
    rows = max(a.shape[0] for a in case.arguments if a.kind == "bytes")
    allowed = here * (case.staging_nbytes + 8 * rows + (64 << 10))
    wrong = objections(report, donated, allowed)
    return dataclasses.asdict(report) | {"allowed_nbytes": allowed, "wrong": wrong}


def main(argv: list[str]) -> int:
    """Compile every program; write what was found to the file that is named."""
    (path,) = argv
    refusal = unavailable()
    if refusal is not None:
        print(refusal, file=sys.stderr)
        return 2
    found = dict(programs(POOL_NBYTES, entries=64))
    text = json.dumps({"jax": jax.__version__, "programs": found}, indent=1)
    pathlib.Path(path).write_text(text)
    return int(any(program["wrong"] for program in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
