"""What a compiled decode step does to its pool, read from the program itself.

The law: a step in steady state copies no pool. Its donated pool is aliased with its
result, its temporary memory stays under a page a sequence plus activations, and no
instruction copies an array of the pool's size. Timing could not show this: a copy of a
small pool hides in the noise.

    objections(compiled_decode(engine, rows=1, length=128), spare_nbytes=...)   # ()
"""

import math
import re
from typing import NamedTuple

import jax

from experiments.harness import Check
from kvmem.serve import Engine

__all__ = ["Footprint", "check", "footprint", "objections"]

_ITEM_NBYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "u16": 2, "s16": 2}
_ITEM_NBYTES |= {"s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
_SMALL_NBYTES = 1 << 16  # ids, positions, angles: whatever the size of the model
_COPY = re.compile(r"= \(?(\w+)\[([\d,]*)\]\S* (?:copy|copy-start)\(")


class Footprint(NamedTuple):
    """Bytes of a compiled step, and its copies of arrays as large as the pages."""

    pool_nbytes: int  # pages and books
    pages_nbytes: int
    aliased_nbytes: int
    temporary_nbytes: int
    allowed_nbytes: int  # of temporary memory
    copies: tuple[str, ...]


def footprint(engine: Engine, rows: int, length: int) -> Footprint:
    """Compile the decode step of `rows` sequences of `length`, and look at it."""
    bucket = engine.buckets.decode(rows, length)
    batch = engine.stepper.pack((), bucket)
    compiled = engine.stepper.lower(engine.pool, batch).compile()
    memory = compiled.memory_analysis()
    pages = engine.pool.pages.nbytes
    spec = engine.model.spec
    seen = 2 * bucket.pages * engine.table.page_size * spec.kv_heads * spec.head_dim
    # Of a row: its logits twice, a layer's hidden states, and the keys and values that
    # one layer reads.
    activations = 4 * bucket.rows * (2 * spec.vocab + 8 * spec.mlp + seen)
    return Footprint(
        pool_nbytes=sum(leaf.nbytes for leaf in jax.tree.leaves(engine.pool)),
        pages_nbytes=pages,
        aliased_nbytes=memory.alias_size_in_bytes,
        temporary_nbytes=memory.temp_size_in_bytes,
        allowed_nbytes=bucket.rows * engine.pool.page_nbytes
        + activations
        + _SMALL_NBYTES,
        copies=copies_of(compiled.as_text(), pages),
    )


def copies_of(program: str, nbytes: int) -> tuple[str, ...]:
    """Return the lines of a compiled program that copy arrays of `nbytes`, or more."""
    found = []
    for line in program.splitlines():
        made = _COPY.search(line)
        if made is None:
            continue
        sides = [int(side) for side in made[2].split(",") if side]
        if math.prod(sides) * _ITEM_NBYTES.get(made[1], 1) >= nbytes:
            found.append(line.strip())
    return tuple(found)


def objections(found: Footprint) -> tuple[str, ...]:
    """Return what is wrong with a step, () when its pool stays in place."""
    said = [f"copy of a pool: {line}" for line in found.copies]
    if found.aliased_nbytes < found.pool_nbytes:
        said.append(f"{found.aliased_nbytes:,} of {found.pool_nbytes:,} B aliased")
    if found.temporary_nbytes > found.allowed_nbytes:
        said.append(
            f"{found.temporary_nbytes:,} temporary B, {found.allowed_nbytes:,} allowed"
        )
    return tuple(said)


def check(engine: Engine, rows: int, length: int) -> Check:
    """Hold the decode step of `rows` sequences to the law."""
    found = footprint(engine, rows, length)
    detail = (
        f"{found.aliased_nbytes:,} of {found.pool_nbytes:,} B aliased, "
        f"{found.temporary_nbytes:,} temporary of {found.allowed_nbytes:,} allowed, "
        f"{len(found.copies)} copies of a pool"
    )
    return Check(
        f"a decode step of batch {rows} copies no pool", not objections(found), detail
    )
