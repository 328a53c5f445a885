"""Pools of 8 GiB a rank, from shapes alone: nothing is addressed by a flat byte."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem import pool as kvpool
from kvmem.geometry import Entry, Field, Plane
from kvmem.pool import compaction, moves, tokens, verbs

P, E = 1 << 20, 1 << 13  # 2**33 bytes
N = 4


def shape(*sizes, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(sizes, dtype)


PAGES = shape(1, P, E, dtype=jnp.uint8)
ONE_RANK = shape(P, E, dtype=jnp.uint8)
IDS, COUNT = shape(N), shape()
ROWS = shape(N, 256, dtype=jnp.uint8)


def wide_pool():
    """Return the shapes of a pool of 2**33 bytes, with states of five parts."""
    small = jax.eval_shape(lambda: kvpool.init(1, 1))
    sizes = {"num_vpages": (P, 1 << 10), "extents": (1, 5)}
    books = tuple(
        kvpool.GroupBooks(shape(V, K), shape(V), shape(V), shape(V), COUNT)
        for V, K in zip(*sizes.values(), strict=True)
    )
    return dataclasses.replace(
        small, pages=PAGES, p2v=shape(P, 2), free=shape(P), groups=books
    )


_place = np.int32([0, 256, E // 256])
PROGRAMS = {
    "zero": (moves.zero, (PAGES, IDS, COUNT, COUNT)),
    "move": (moves.move, (PAGES, IDS, IDS, COUNT)),
    "compact": (compaction._compact, (wide_pool(),)),
    "handout": (lambda *a: verbs._handout(*a[:1], 1, a[1], 2), (wide_pool(), IDS)),
    "fork": (lambda *a: verbs._fork(a[0], 1, *a[1:]), (wide_pool(), IDS, COUNT)),
    "write": (
        lambda *a: tokens._write(*a, _place),
        (ONE_RANK, IDS, IDS, ROWS),
    ),
    "read": (lambda *a: tokens._read(*a, _place, 256), (ONE_RANK, IDS, IDS)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_move_in_a_pool_of_eight_gibibytes_compiles_in_place(name):
    function, arguments = PROGRAMS[name]
    donated = () if name == "read" else 0
    compiled = jax.jit(function, donate_argnums=donated).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    if name != "read":
        assert memory.alias_size_in_bytes >= P * E
    books = 8 * 4 * P * (name == "compact")
    assert memory.temp_size_in_bytes < 16 * E + 2 * books


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_program_lowers_for_a_gpu(name):
    function, arguments = PROGRAMS[name]
    traced = jax.jit(function, donate_argnums=()).trace(*arguments)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert f"{P}x{E}xui8" in text
    assert f"{P * E}xui8" not in text  # nobody flattens the pool


@pytest.mark.case("IDX-04")
def test_the_last_row_of_the_largest_page_has_an_exact_address():
    stride, nbytes = 655_360, 576
    page_nbytes = 2**31 - 16
    field = Field("l", "k", 1, nbytes, "float8_e4m3fn")
    entry = Entry(field, 64, stride, 0, 1, Plane(0, 0, page_nbytes))
    last = tokens._num_slots(entry, page_nbytes, None) - 1
    assert last == 3_276
    place = np.int32([entry.offset, stride, last + 1])
    slots = np.int32([0, last - 1, last, last + 1, 2**31 - 1, -1])
    pages, starts = tokens._addresses(jnp.arange(6), slots, place, 99)
    assert pages.tolist() == [0, 1, 2, 99, 99, 99]
    exact = [entry.address(slot) for slot in (0, last - 1, last)]
    assert starts[:3].tolist() == exact
    assert exact[-1] + nbytes <= page_nbytes
    # One slot further, a flat 32-bit address would have wrapped.
    assert entry.address(last + 1) > np.iinfo(np.int32).max


@pytest.mark.case("IDX-04")
def test_a_page_id_is_never_multiplied():
    # Of the three, each id times its stride is beyond int32; as pairs they are exact.
    for page, stride in ((3_277, 655_360), (2_066, 1_039_680), (65_536, 65_536)):
        assert page * stride > np.iinfo(np.int32).max
        program = jax.jit(lambda *a: tokens._write(*a, _place), donate_argnums=0)
        pages = shape(page + 1, stride, dtype=jnp.uint8)
        lowered = program.lower(pages, IDS, IDS, ROWS).as_text()
        assert f"{page + 1}x{stride}xui8" in lowered
        multiplied = [line for line in lowered.splitlines() if "multiply" in line]
        # slots times their stride, which stays inside a page; nothing else
        assert len(multiplied) == 1


@pytest.mark.long
def test_the_last_page_of_eight_gibibytes_holds_what_was_written(shake):
    num_pages, page_nbytes = (1 << 17) + 3, 1 << 16  # beyond 2**33 bytes
    field = Field("l", "k", 1, 256, "bfloat16")
    entry = Entry(field, 0, 256, 0, 1, Plane(0, 0, page_nbytes))
    pool = kvpool.init(num_pages, page_nbytes)
    pool, _, ok = kvpool.handout(pool, 0, [num_pages], num_pages)
    assert bool(ok)
    ids, starts = np.int32([num_pages - 1, 1 << 16]), np.int32([65_280, 768])
    rows = shake(2, 256)
    write = jax.vmap(tokens.write_rows, in_axes=(0, None, None, None))
    pages = jax.jit(write, donate_argnums=0)(pool.pages, ids, starts, rows)
    pool = dataclasses.replace(pool, pages=pages)
    pool, _ = kvpool.release(pool, 0, [0, 5])
    pool, moved = kvpool.compact(pool)
    assert int(moved) == 2
    places = np.asarray(kvpool.translate(pool, 0, ids))
    assert places.tolist() == [5, 1 << 16]
    read = jax.vmap(
        lambda pages: tokens.read(pages, entry, places, starts // 256, page_size=256)
    )
    assert np.array_equal(np.asarray(jax.jit(read)(pool.pages))[0], rows)
