"""Specs: every kernel at the sizes of real models, as one list for tests and runs.

A `Model` says what a page of one device holds; `cases` gives each operation on it: the
arrays' shapes, the static facts, and what the compiled program may take. Arrays are
made from the same list (`fillings`): what compiles offline is what runs on a device.

    for case in cases(LLAMA_3_8B_TP8, pool_nbytes=32 << 30, entries=64): ...

Sizes are those of the published configurations; pages are laid down row by row, as
kvmem's order "layer head field token" does.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from pallas_kernels import blocked, peers
from pallas_kernels.append_tokens import Run
from pallas_kernels.records import Layout

__all__ = ["MODELS", "TINY", "Argument", "Case", "Model", "cases"]

_MANY = 4_096  # pairs that move by way of a buffer, of 8 GiB together
_TOKENS = 64  # appended in a step


@dataclasses.dataclass(frozen=True)
class Model:
    """A page of one device: `layers` x `rows` rows of `row_nbytes` a slot."""

    name: str
    layers: int
    rows: int  # of a layer
    row_nbytes: int
    slots: int
    rope: tuple[str, int, int] | None = None  # style, pairs, byte where they begin
    shape: blocked.Shape | None = None  # blocked scales: row_nbytes is V + S
    record_nbytes: int | None = None  # other rows stand between; None: end to end

    @property
    def page_nbytes(self) -> int:
        """Bytes of a page."""
        return self.layers * self.rows * self.row_nbytes * self.slots

    @property
    def layout(self) -> Layout:
        """How each row lies in its slots."""
        return Layout(self.row_nbytes, self.row_nbytes, self.slots)

    @property
    def num_runs(self) -> int:
        """Rows of a token."""
        return self.layers * self.rows

    @property
    def record_width(self) -> int:
        """Bytes of a token's record, rows that stand between among them."""
        return self.record_nbytes or self.num_runs * self.row_nbytes

    @property
    def num_keys(self) -> int:
        """Rows of a token that turn: of keys and values every other, of latents all."""
        return self.num_runs // (2 if self.rope[0] == "half" else 1)

    def table(self) -> np.ndarray:
        """Return i32[K, 2]: where each row begins in a page, and in a record."""
        row = np.arange(self.num_runs)
        at = row * (self.record_width // self.num_runs)
        return np.stack([row * self.row_nbytes * self.slots, at], axis=1).astype(
            np.int32
        )


_HALF_128, _HALF_64 = ("half", 64, 0), ("half", 32, 0)
_LATENT = ("interleaved", 32, 1024)

MODELS = (
    Model("llama3_8b_tp1_page16", 32, 16, 256, 16, _HALF_128),
    Model("llama3_8b_tp1_page64", 32, 16, 256, 64, _HALF_128),
    Model("llama3_8b_tp8_page16", 32, 2, 256, 16, _HALF_128),
    Model("llama3_8b_tp8_page64", 32, 2, 256, 64, _HALF_128),
    Model("deepseek_v32_latent", 61, 1, 1152, 64, _LATENT),
    Model("deepseek_v32_beside", 61, 1, 1152, 64, _LATENT, record_nbytes=61 * 1284),
    Model("deepseek_v32_indexer", 61, 1, 132, 64, shape=blocked.Shape(64, 128, 4)),
    Model("gpt_oss_120b", 18, 16, 128, 16, _HALF_64),
)

# The same ways through every kernel, small enough for the interpreter.
TINY = (
    Model("tiny_half", 1, 2, 64, 16, ("half", 16, 0)),
    Model("tiny_latent", 2, 1, 96, 16, ("interleaved", 16, 32)),
    Model("tiny_beside", 2, 1, 64, 16, ("interleaved", 8, 32), record_nbytes=2 * 68),
    Model("tiny_blocked", 1, 1, 132, 16, shape=blocked.Shape(16, 128, 4)),
)


@dataclasses.dataclass(frozen=True)
class Argument:
    """One array: its kind says how it is filled."""

    kind: str  # bytes, ids, distinct, slots, table, offsets, first, cosine, sine
    dtype: str
    shape: tuple[int, ...]
    high: int = 0  # ids are below it, and hostile ones beside them

    def struct(self) -> jax.ShapeDtypeStruct:
        """Return the shape without the array."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation on one model: arguments, facts, and what it moves and may take."""

    operation: str
    model: Model
    arguments: tuple[Argument, ...]
    facts: Mapping[str, Any]
    moved_nbytes: int  # payload, once
    in_place: bool = True
    staging_nbytes: int = 0  # beyond the lists of ids
    variant: str = ""

    @property
    def name(self) -> str:
        """The name of the case: operation, variant, model."""
        return "-".join(filter(None, (self.operation, self.variant, self.model.name)))

    def structs(self) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of the arguments."""
        return [argument.struct() for argument in self.arguments]

    @property
    def peer(self) -> Callable | None:
        """XLA's own program of the case, None where the reference is it already."""
        return peers.of(self.operation, self.even, **self.facts)

    @property
    def even(self) -> peers.Even:
        """How far apart the runs stand that the case moves or turns."""
        turns = self.operation in ("rerope", "import_turned")
        count = self.model.num_keys if turns else self.model.num_runs
        page, record = self.model.page_nbytes, self.model.record_width
        return peers.Even(count, page // count, record // count)


def cases(model: Model, pool_nbytes: int, entries: int) -> Iterator[Case]:
    """Yield every operation that a model's pages have, on a pool of about that size."""
    num_pages = max(pool_nbytes // model.page_nbytes, 1)
    pool = Argument("bytes", "uint8", (num_pages, model.page_nbytes))
    n = min(entries, num_pages)
    if model.record_nbytes is not None:  # its pages are another model's
        yield from _records(model, pool, n)
        return
    yield from _whole_pages(model, pool, n)
    if model.shape is None:
        yield _append(model, pool)
        yield from _records(model, pool, n)
    else:
        yield from _blocks(model, pool, n)
    if model.rope is not None:
        yield _rerope(model, pool, n)


def _ids(n: int, pool: Argument, kind: str = "ids") -> Argument:
    return Argument(kind, "int32", (n,), high=pool.shape[0])


def _whole_pages(model: Model, pool: Argument, n: int) -> Iterator[Case]:
    """Yield gather, scatter, zero, and both ways to move."""
    nbytes, rows = n * model.page_nbytes, Argument("bytes", "uint8", (n, pool.shape[1]))
    ids = _ids(n, pool)
    yield Case("gather_pages", model, (pool, ids), {}, nbytes, in_place=False)
    yield Case("scatter_pages", model, (pool, ids, rows), {}, nbytes)
    yield Case("zero_pages", model, (pool, ids), {}, nbytes)
    few = min(n, 64)
    pairs = _ids(few, pool), _ids(few, pool)
    moved = few * model.page_nbytes
    yield Case("move_pages", model, (pool, *pairs), {}, moved, variant="slabs")
    many = min(_MANY, pool.shape[0], max(n, (8 << 30) // model.page_nbytes))
    pairs = _ids(many, pool), _ids(many, pool)
    moved = many * model.page_nbytes
    yield Case(
        "move_pages",
        model,
        (pool, *pairs),
        {},
        moved,
        staging_nbytes=moved,
        variant="staged",
    )


def _append(model: Model, pool: Argument) -> Case:
    """Return a step's tokens of one layer: keys and values of every head."""
    nbytes = model.row_nbytes
    runs = tuple(
        Run(nbytes * model.slots * row, nbytes, nbytes * row, nbytes)
        for row in range(model.rows)
    )
    tokens = min(_TOKENS, 4 * model.slots)
    arguments = (
        pool,
        _ids(tokens, pool),
        Argument("slots", "int32", (tokens,), high=model.slots),
        Argument("bytes", "uint8", (tokens, model.rows * nbytes)),
    )
    facts = {"runs": runs, "page_slots": model.slots}
    moved = tokens * model.rows * nbytes
    staging = 2 * moved + 64 * tokens + 4096  # sorted keys of the tokens, in pairs
    return Case("append_tokens", model, arguments, facts, moved, True, staging)


def _records(model: Model, pool: Argument, n: int) -> Iterator[Case]:
    """Yield export and import of every row but the first and last few tokens."""
    tokens = n * model.slots - 3
    rows = Argument("bytes", "uint8", (tokens, model.record_width))
    table = Argument("table", "int32", (model.num_runs, 2))
    first = Argument("first", "int32", ())
    facts = {"layout": model.layout}
    moved = tokens * model.num_runs * model.row_nbytes
    out = (rows, pool, _ids(n, pool), table, first)
    into = (pool, _ids(n, pool), table, rows, first)
    yield Case("export_records", model, out, facts, moved)
    yield Case("import_records", model, into, facts, moved)
    if model.rope is not None:
        yield _turned(model, into)


def _turned(model: Model, into: tuple[Argument, ...]) -> Case:
    """Return an import of every key, turned on its way."""
    style, pairs, offset = model.rope
    pool, ids, _, rows, first = into
    keys = Argument("table", "int32", (model.num_keys, 2))
    angles = (*ids.shape, model.slots, pairs)
    tables = Argument("cosine", "float32", angles), Argument("sine", "float32", angles)
    facts = {
        "layout": model.layout,
        "style": style,
        "dtype": "bfloat16",
        "window_offset": offset,
    }
    arguments = (pool, ids, keys, rows, first, *tables)
    moved = rows.shape[0] * model.num_keys * model.row_nbytes
    staging = 8 * math.prod(angles) + 4096  # tables by columns
    return Case("import_turned", model, arguments, facts, moved, True, staging)


def _blocks(model: Model, pool: Argument, n: int) -> Iterator[Case]:
    """Yield rows out of blocked-scale areas of every layer, and back."""
    offsets = Argument("offsets", "int32", (model.layers,))
    shape = (n, model.layers, model.slots, model.row_nbytes)
    rows = Argument("bytes", "uint8", shape)
    facts, moved = {"shape": model.shape}, n * model.page_nbytes
    ids = _ids(n, pool)
    yield Case(
        "rows_of_blocks", model, (pool, ids, offsets), facts, moved, in_place=False
    )
    yield Case("blocks_of_rows", model, (pool, ids, offsets, rows), facts, moved)


def _rerope(model: Model, pool: Argument, n: int) -> Case:
    """Return the rotation of every key of the pages: of every other row, or of all."""
    style, pairs, _ = model.rope
    count = model.num_keys
    table = (n, model.slots, pairs)
    arguments = (
        pool,
        _ids(n, pool),
        Argument("offsets", "int32", (count,)),
        Argument("cosine", "float32", table),
        Argument("sine", "float32", table),
    )
    facts = {"style": style, "dtype": "bfloat16", "slot_stride": model.row_nbytes}
    moved = n * model.slots * count * pairs * 4
    staging = 8 * math.prod(table) + 4096  # tables by columns
    return Case("rerope", model, arguments, facts, moved, True, staging)
