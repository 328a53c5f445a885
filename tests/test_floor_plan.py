"""The floor plan is executable: every import is read and compared with the floors.

A room imports rooms on lower floors only, and rooms on one floor are strangers. Rooms
of arithmetic and files load no jax. Nothing is imported inside a function, except that
a console verb imports its room when it runs, and the table `LATE`, each with a reason.
"""

import ast
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import pytest

FLOORS = {
    "pallas_kernels": 0,  # a separate house: it imports nothing of kvmem
    "kvmem": 0,  # the package's own __init__: its version
    "kvmem.errors": 0,
    "kvmem.exits": 1,
    "kvmem.geometry": 1,
    "kvmem.settings": 1,
    "kvmem.budget": 2,
    "kvmem.mesh": 2,
    "kvmem.speculative": 2,
    "kvmem.pool": 3,
    "kvmem.canonical": 3,
    "kvmem.manage": 4,
    "kvmem.store": 4,
    "kvmem.session": 4,
    "kvmem.model": 5,
    "kvmem.transfer": 5,
    "kvmem.prefix": 5,
    "kvmem.blend": 6,
    "kvmem.serve": 7,
    "kvmem.conversation": 8,
    "kvmem.handoff": 8,
    "kvmem.config": 9,
    "kvmem.console": 9,
    "kvmem.cli": 10,
    "experiments": 10,
}
JAX_FREE_ROOMS = (
    "kvmem",
    "kvmem.errors",
    "kvmem.exits",
    "kvmem.geometry",
    "kvmem.settings",
    "kvmem.budget",
    "kvmem.speculative",
    "kvmem.canonical",
    "kvmem.manage",
    "kvmem.session",
    "kvmem.prefix",
    "kvmem.config",
    "kvmem.console",
)
# Files of other rooms that hold facts and read checkpoints: `kvmem plan` uses them.
JAX_FREE_FILES = (
    "kvmem/model/__init__.py",
    "kvmem/model/chat_template.py",
    "kvmem/model/config_fields.py",
    "kvmem/model/config_hf.py",
    "kvmem/model/gguf_tokenizer.py",
    "kvmem/model/hybrid/__init__.py",
    "kvmem/model/hybrid/families.py",
    "kvmem/model/hybrid/mixers.py",
    "kvmem/model/hybrid/partition.py",
    "kvmem/model/hybrid/random_model.py",
    "kvmem/model/hybrid/spec.py",
    "kvmem/model/hybrid/weights.py",
    "kvmem/model/load_gguf.py",
    "kvmem/model/load_safetensors.py",
    "kvmem/model/loaded.py",
    "kvmem/model/page_rows.py",
    "kvmem/model/partition.py",
    "kvmem/model/partitions.py",
    "kvmem/model/presets.py",
    "kvmem/model/spec.py",
    "kvmem/model/tensor_file.py",
    "kvmem/model/tokenizer.py",
    "kvmem/model/weights_cache.py",
    "kvmem/serve/__init__.py",
    "kvmem/serve/buckets.py",
    "kvmem/store/__init__.py",
    "kvmem/store/page_store.py",
)
BRINGS_JAX = ("jax", "jaxlib", "flax", "orbax", "optax", "chex")
LATE = {
    ("kvmem/store/host_memory.py", "jax"): "only pinned memory is the backend's",
    ("kvmem/store/orbax_save.py", "orbax"): "a store is read without loading jax",
}
HOUSES = ("kvmem", "pallas_kernels", "experiments")


class Import(NamedTuple):
    module: str
    line: int
    late: bool  # inside a function
    typing_only: bool  # under `if TYPE_CHECKING:`


def imports_of(text: str) -> Iterator[Import]:
    """Yield every module that a file imports, `from a import b` as a.b."""

    def walk(node: ast.AST, late: bool, typing_only: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for name in child.names:
                    yield Import(name.name, child.lineno, late, typing_only)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"relative import on line {child.lineno}"
                for name in child.names:
                    module = f"{child.module}.{name.name}"
                    yield Import(module, child.lineno, late, typing_only)
            else:
                inside = late or isinstance(
                    child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
                )
                guarded = typing_only or (
                    isinstance(child, ast.If)
                    and "TYPE_CHECKING" in ast.dump(child.test)
                )
                yield from walk(child, inside, guarded)

    yield from walk(ast.parse(text), False, False)


def room_of(module: str) -> str | None:
    """Return the room that a module belongs to, None for other people's modules."""
    if module.split(".")[0] not in HOUSES:
        return None
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in FLOORS and (end > 1 or parts[0] != "kvmem"):
            return ".".join(parts[:end])
    return "kvmem" if module in ("kvmem", "kvmem.__version__") else f"no room: {module}"


def room_of_file(path: str) -> str:
    module = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    return room_of(module) or f"no room: {path}"


def violations(sources: Mapping[str, str]) -> list[str]:
    """Return everything in the sources that breaks the plan, in words."""
    found = []
    for path, text in sources.items():
        room = room_of_file(path)
        if room not in FLOORS:
            found.append(f"{path}: not on the floor plan")
            continue
        for each in imports_of(text):
            found += [f"{path}:{each.line}: {w}" for w in _faults(path, room, each)]
    return found


def _faults(path: str, room: str, each: Import) -> Iterator[str]:
    other = room_of(each.module)
    if other is not None and other != room:
        if other not in FLOORS:
            yield f"{other} is not on the floor plan"
        elif FLOORS[other] >= FLOORS[room] and other != "kvmem":
            yield (
                f"{room} (floor {FLOORS[room]}) imports {other} (floor {FLOORS[other]})"
            )
    is_free = room in JAX_FREE_ROOMS or path in JAX_FREE_FILES
    if is_free and not each.typing_only and each.module.split(".")[0] in BRINGS_JAX:
        yield f"{room} imports {each.module}, and is arithmetic and files"
    is_verb = room == "kvmem.cli"
    if each.late and not is_verb and (path, _named(each)) not in LATE:
        yield f"{each.module} is imported inside a function"


def _named(each: Import) -> str:
    """Return the room of an import, or the package of other people's."""
    return room_of(each.module) or each.module.split(".")[0]


def all_sources(root: pathlib.Path) -> dict[str, str]:
    return {
        path.relative_to(root).as_posix(): path.read_text()
        for house in HOUSES
        for path in sorted((root / house).rglob("*.py"))
    }


def test_every_import_points_down_the_floor_plan(repo_root: pathlib.Path):
    sources = all_sources(repo_root)
    assert "kvmem/errors.py" in sources
    assert violations(sources) == []


def test_every_late_import_of_the_table_still_exists(repo_root: pathlib.Path):
    for path, name in LATE:
        late = [i for i in imports_of((repo_root / path).read_text()) if i.late]
        assert name in {_named(i) for i in late}, (path, name)


@pytest.mark.parametrize(
    ("path", "text", "complaint"),
    [
        ("kvmem/geometry/x.py", "from kvmem import pool", "imports kvmem.pool"),
        ("kvmem/geometry/x.py", "import kvmem.pool.state as s", "imports kvmem.pool"),
        ("kvmem/pool/x.py", "from kvmem import canonical", "imports kvmem.canonical"),
        ("kvmem/pool/x.py", "from kvmem.canonical import plan", "(floor 3)"),
        ("kvmem/store/x.py", "from kvmem.session import ledger", "(floor 4)"),
        ("kvmem/cli/x.py", "from experiments import harness", "imports experiments"),
        ("kvmem/pool/x.py", "import experiments.harness", "imports experiments"),
        ("pallas_kernels/x.py", "from kvmem import errors", "imports kvmem.errors"),
        ("kvmem/canonical/x.py", "import jax.numpy as jnp", "arithmetic and files"),
        ("kvmem/config/__init__.py", "from flax import nnx", "arithmetic and files"),
        ("kvmem/model/spec.py", "import jax", "arithmetic and files"),
        ("kvmem/pool/x.py", "def f():\n  import json", "inside a function"),
        (
            "kvmem/config/__init__.py",
            "def f():\n  from kvmem import store",
            "inside a function",
        ),
        ("kvmem/pool/x.py", "from kvmem import nowhere", "kvmem.nowhere is not on"),
        ("kvmem/nowhere.py", "", "not on the floor plan"),
        ("elsewhere/x.py", "", "not on the floor plan"),
    ],
)
def test_a_breach_of_the_plan_is_seen(path: str, text: str, complaint: str):
    found = violations({path: text})
    assert len(found) == 1 and complaint in found[0], found


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("kvmem/pool/x.py", "import jax\nfrom kvmem import errors, geometry"),
        ("kvmem/pool/x.py", "from kvmem.pool import state"),
        ("kvmem/transfer.py", "from kvmem import canonical, pool"),
        ("kvmem/cli/x.py", "def run():\n  from kvmem import serve"),
        ("kvmem/cli/x.py", "from kvmem import __version__\nimport kvmem"),
        ("kvmem/store/orbax_save.py", "def f():\n  import orbax.checkpoint"),
        ("kvmem/geometry/x.py", "if TYPE_CHECKING:\n  import jax"),
        ("kvmem/model/decoder.py", "import jax"),
        ("experiments/x.py", "from experiments import harness\nimport kvmem.config"),
    ],
)
def test_what_the_plan_allows_is_allowed(path: str, text: str):
    assert violations({path: text}) == []


@pytest.mark.parametrize("module", ["kvmem", "kvmem.config", "kvmem.budget"])
def test_rooms_of_arithmetic_load_no_jax_through_others_either(module: str):
    code = f"import sys, {module}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
