"""Every GPU kernel compiled to H200 machine code, by each jax, without a GPU.

The CUDA plugin of jax compiles for a device that is only described. Each program of
`pallas_kernels.specs` must come out with no register spilled, its pool aliased and not
copied, no memory beyond what is stated, and page offsets of 64 bits: whole pages,
tokens, records, blocks and rotations at the sizes of published models, over ranks by
vmap, and over eight devices by shard_map.

    make test-kernels    # makes the environments
    python -m experiments run configs/kernels_offline.toml
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Iterator

from experiments.harness import Check, Record, RunConfig
from kvmem import errors
from pallas_kernels import offline

__all__ = ["Config", "compiled", "run"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """The whole truth of a run.

    Args:
        environments: folders of virtual environments that have jax's CUDA plugin.
    """

    environments: tuple[str, ...] = (".venvs/cuda", ".venvs/cuda-floor")


def run(config: Config) -> Iterator[Record]:
    """Yield what each environment's jax compiles the kernels to."""
    for environment in config.environments:
        yield compiled(pathlib.Path(environment).absolute() / "bin" / "python")


def compiled(python: pathlib.Path) -> Record:
    """Compile every program in a process of `python`, and judge each.

    Raises:
        ConfigError: that Python has no CUDA plugin of jax, or is not there.
    """
    found = _found(python)
    version = found["jax"]
    programs = found["programs"]
    return Record(
        f"compiled_by_jax_{version}",
        "correctness",
        "every kernel compiles for an H200 that is described and not there",
        "mosaic_gpu",
        checks=tuple(
            Check(f"jax {version}, {name}", not program["wrong"], _detail(program))
            for name, program in programs.items()
        ),
        device="NVIDIA H200, described and not there",
        versions={"jax": version},
        facts={
            f"programs_of_jax_{version}": {
                name: {"registers": p["registers"], "temp_nbytes": p["temp_nbytes"]}
                for name, p in programs.items()
            }
        },
    )


def _found(python: pathlib.Path) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "found.json"
        try:
            done = subprocess.run(
                [str(python), "-m", "pallas_kernels.offline", str(path)],
                env=os.environ | offline.environment(folder),
                capture_output=True,
                text=True,
            )
        except FileNotFoundError as error:
            raise _no_compiler(python, "there is no such file") from error
        if not path.exists():
            last = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
            raise _no_compiler(python, last)
        return json.loads(path.read_text())


def _no_compiler(python: pathlib.Path, why: str) -> errors.ConfigError:
    return errors.ConfigError(
        errors.say(
            f"kernels compiled by {python}",
            why,
            "Make the environments by make test-kernels, or name others",
        )
    )


def _detail(program: dict) -> str:
    if program["wrong"]:
        return "; ".join(program["wrong"])
    return (
        f"{', '.join(map(str, program['registers']))} registers, none spilled; "
        f"{program['alias_nbytes']:,} B aliased, {program['temp_nbytes']:,} B of "
        f"temporary memory of {program['allowed_nbytes']:,} B stated"
    )
