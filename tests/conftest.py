"""Strict for everyone, and the shared builders of tests.

Eight host devices, rank promotion raises, warnings are errors (pyproject.toml), and
compiled programs are kept in a folder of the checkout. jax reads these when it is
imported, so they stand in the environment before that: processes that a test starts
inherit them.

Most of the suite's time is XLA's, and a third of that its optimiser's of machine code,
which is left out: HLO passes, aliases and fusions stay. `--optimised` has it, and so
has `--long`, for every program.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import signal
import sys

_ROOT = pathlib.Path(__file__).resolve().parent.parent

# Devices that share two busy cores may miss the default terminate timeout (40 s).
_XLA_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
)
# jax writes a kept program in place: two processes that run at once keep their own.
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
_STRICT = {
    "XLA_FLAGS": " ".join(_XLA_FLAGS),
    "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"),
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_COMPILATION_CACHE_DIR": str(_ROOT / ".cache" / "jax" / _WORKER),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "KVMEM_CACHE": str(_ROOT / ".cache" / "kvmem"),  # nothing is written at home
}

if "jax" in sys.modules:
    raise RuntimeError("jax was imported before tests/conftest.py could configure it")
# A test's effective config holds what the test says, not what a shell exports.
for _name in [name for name in os.environ if name.startswith("KVMEM_")]:
    del os.environ[_name]
os.environ.update(_STRICT)
if _WORKER:  # workers are started deaf to Ctrl-C, and so would be what a test starts
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

# How long an example takes says how busy the machine is, and nothing of kvmem.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

_MOST_AREAS = 25_000  # mapped by a process when a module ends
_ON_A_GPU = "only a CUDA device shows it: asked of one by configs/device_moves.toml"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long",
        action="store_true",
        help="also run tests marked long, and whole products (minutes); optimised",
    )
    parser.addoption(
        "--optimised",
        action="store_true",
        help="compile programs as users do: a quarter slower",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip(_ON_A_GPU)


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    if config.getoption("--long"):
        return
    left_out = {id(item) for item in items if item.get_closest_marker("long")}
    products: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("cover") and id(item) not in left_out:
            products.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for product in products.values():
        (strength,) = product[0].get_closest_marker("cover").args
        chosen = cover([item.callspec.params for item in product], strength)
        left_out |= {id(product[i]) for i in range(len(product)) if i not in chosen}
    if left_out:
        config.hook.pytest_deselected(items=[i for i in items if id(i) in left_out])
        items[:] = [item for item in items if id(item) not in left_out]


def cover(rows: list[dict[str, object]], strength: int) -> set[int]:
    """Choose rows in which each `strength` values of different parameters meet.

    Greedy: the row that brings most meetings that no earlier one has, the first of
    equals. What meets in no row cannot be chosen, as where a test is parametrised by
    pairs.
    """
    if any(len(row) < strength for row in rows):
        raise pytest.UsageError(f"cover({strength}) of fewer parameters: {rows[0]}")
    values = ([(name, id(value)) for name, value in row.items()] for row in rows)
    meetings = [set(itertools.combinations(row, strength)) for row in values]
    missing, chosen = set().union(*meetings), set()
    while missing:
        brings = [len(met & missing) for met in meetings]
        best = brings.index(max(brings))
        chosen.add(best)
        missing -= meetings[best]
    return chosen


@pytest.fixture(scope="module", autouse=True)
def _programs_that_fit():
    """Compiled programs are given up between modules, before Linux refuses more.

    XLA maps about seven areas of memory a program, a process may have 65,530
    (vm.max_map_count), and behind that XLA aborts. A program that is asked for again
    comes from the folder of compiled programs.
    """
    yield
    areas = pathlib.Path("/proc/self/maps")
    if areas.exists() and areas.read_bytes().count(b"\n") > _MOST_AREAS:
        jax.clear_caches()


_REAL = ("test_docs", "test_generate", "test_smollm2")  # computes more than it compiles


@pytest.fixture(scope="module", autouse=True)
def _compiled_lightly(request):
    """Compile a module's programs without LLVM's optimiser, unless it is asked for.

    So are those of processes that its tests start. Files that run the real model always
    have it: there it pays.
    """
    asked = any(map(request.config.getoption, ("--optimised", "--long")))
    light = not asked and request.path.stem not in _REAL
    jax.config.update("jax_disable_most_optimizations", light)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(light))


@pytest.fixture(scope="session")
def repo_root() -> pathlib.Path:
    """The checkout's top folder."""
    return _ROOT


@pytest.fixture
def llama_config(tmp_path: pathlib.Path):
    """Write a llama config.json: Llama-3.1-8B's sizes, 131,072 B a cached token."""

    def write(name: str = "target", **changes) -> str:
        facts = {
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "torch_dtype": "bfloat16",
        }
        path = tmp_path / name / "config.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(facts | changes))
        return str(path)

    return write


_ORDERS = {  # page orders in words, spelled out again on purpose
    "head_major": "layer head field token",
    "token_major": "layer field token head",
    "split_hnd": "layer field head token",
    "packed_nhd": "layer token head field",
    "packed_hnd": "layer head token field",
    "slot_major": "token layer head field",
}


class Oracle:
    """Token records and pages sliced out of a logical array, without any mapping.

    Fills are SHAKE-128 streams: aperiodic, so that no two places hold equal bytes.
    """

    @staticmethod
    def stream(nbytes: int, seed: str = "kvmem-canon-v1") -> np.ndarray:
        """Return u8[nbytes] of the golden stream."""
        digest = hashlib.shake_128(seed.encode()).digest(nbytes)
        return np.frombuffer(digest, np.uint8)

    def logical(self, group, num_tokens: int, seed: str = "kvmem-canon-v1") -> dict:
        """Return {(layer, field): u8[token, head, bytes]}."""
        return {
            (f.layer, f.name): self.stream(
                num_tokens * f.heads * f.head_nbytes, f"{seed}/{f.layer}/{f.name}"
            ).reshape(num_tokens, f.heads, f.head_nbytes)
            for f in group.fields
        }

    @staticmethod
    def records(group, logical: dict) -> np.ndarray:
        """Return u8[token, record]: layer, head, field (k, v), bytes."""
        parts = [
            logical[layer.name, field][:, head]
            for layer in group.layers
            for head in range(layer.kv_heads)
            for field in ("k", "v")
        ]
        return np.concatenate(parts, axis=1)

    @staticmethod
    def heads(num_heads: int, tp: int, tp_index: int) -> list[int]:
        """Return the global heads of a head shard."""
        if tp >= num_heads:
            return [int(np.repeat(np.arange(num_heads), tp // num_heads)[tp_index])]
        return np.split(np.arange(num_heads), tp)[tp_index].tolist()

    def page(self, group, logical, topology, rank, order, number=0, **only) -> bytes:
        """Return page `number` of a rank, laid down axis by axis.

        `only` cuts an axis, as in `layer=["layers.1"]`: the pages of one plane.
        """
        shards, mine = topology.dcp, rank % topology.dcp
        tokens = range(number * group.page_size * shards, len(logical[_any(logical)]))
        owned = [t for t in tokens if t // topology.interleave % shards == mine]
        heads = self.heads(group.layers[0].kv_heads, topology.tp, rank // shards)
        axes = _ORDERS.get(order, order).split()
        values = {
            "layer": [layer.name for layer in group.layers],
            "field": ["k", "v"],
            "head": [heads] if axes[-1] == "head" else [[head] for head in heads],
            "token": owned[: group.page_size],
        } | only
        page = b""
        for place in itertools.product(*(values[axis] for axis in axes)):
            at = dict(zip(axes, place, strict=True))
            cell = logical[at["layer"], at["field"]][at["token"]]
            row = b"".join(cell[head].tobytes() for head in at["head"])
            page += row + bytes(-len(row) % 16)
        return page

    def pages(self, group, logical, topology, order, **only) -> np.ndarray:
        """Return u8[rank, page, bytes] of every whole page of the logical array."""
        num_tokens = len(logical[_any(logical)])
        num_pages = num_tokens // (group.page_size * topology.dcp)
        pages = [
            [
                self.page(group, logical, topology, rank, order, number, **only)
                for number in range(num_pages)
            ]
            for rank in range(topology.ranks)
        ]
        return np.array([[np.frombuffer(p, np.uint8) for p in r] for r in pages])


def _any(logical: dict) -> tuple:
    return next(iter(logical))


class Mutants:
    """Wrong plans that tile every page: only bytes tell them from the right one."""

    @staticmethod
    def rotated(plan):
        """Rank r uses the rows of shard r + 1."""
        turn = plan.topology.dcp
        return dataclasses.replace(plan, held=(*plan.held[turn:], *plan.held[:turn]))

    @staticmethod
    def reversed_page(plan):
        """Slot s is taken for slot page_size - 1 - s."""

        def turn(run):
            last = run.local_offset + (run.count - 1) * run.local_stride
            return dataclasses.replace(
                run, local_offset=last, local_stride=-run.local_stride
            )

        held = tuple(tuple(map(turn, runs)) for runs in plan.held)
        return dataclasses.replace(plan, held=held)


@pytest.fixture(scope="session")
def mutants() -> Mutants:
    """The two mutants that every check of tiling lets live."""
    return Mutants()


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    """Records and pages by slicing a logical array: the judge of every mapping."""
    return Oracle()
