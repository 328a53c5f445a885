"""Say devices, versions, and which implementations would run, and why."""

import dataclasses
import importlib.metadata
import json
import os
import platform
from typing import Any

import jax

import kvmem
from kvmem import console
from pallas_kernels import dispatch

__all__ = ["Arguments", "run"]

_PACKAGES = ("jax", "jaxlib", "flax", "orbax-checkpoint", "tensorstore", "numpy")


@dataclasses.dataclass(frozen=True)
class Arguments(console.Common):
    """Say devices, versions, and which implementations would run, and why.

    Args:
        json: print the same facts as JSON.
    """

    json: bool = False


def run(arguments: Arguments) -> int:
    """Print the facts of this machine."""
    facts = {
        "versions": _versions(),
        "platform": jax.default_backend(),
        "devices": [f"{d.id}: {d.device_kind} ({d.platform})" for d in jax.devices()],
        "cores": os.cpu_count(),
        "implementations": [
            dataclasses.asdict(choice)
            for choice in dispatch.choices(jax.default_backend())
        ],
    }
    if arguments.json:
        print(json.dumps(facts, indent=2))
    else:
        _show(facts)
    return console.DONE


def _versions() -> dict[str, str]:
    found = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"kvmem": kvmem.__version__, "python": platform.python_version()} | found


def _show(facts: dict[str, Any]) -> None:
    out = console.out()
    versions = console.table("versions", "package", "version")
    for name, version in facts["versions"].items():
        versions.add_row(name, version)
    out.print(versions)
    print(f"{len(facts['devices'])} device(s), {facts['cores']} host cores")
    for device in facts["devices"]:
        print(f"  {device}")
    print()
    runs = console.table("operations", "operation", "runs as", "why")
    for choice in facts["implementations"]:
        runs.add_row(choice["operation"], choice["implementation"], choice["reason"])
    out.print(runs)
