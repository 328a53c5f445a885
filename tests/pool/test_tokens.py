"""Token rows: written in place at (page, byte), dropped or zero where no row is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from kvmem import errors
from kvmem.pool import tokens

P = 6


def reference(pages, entry, page_ids, slots, values, page_size):
    """Write row by row, in words of numpy."""
    pages = pages.copy()
    for page, slot, row in zip(page_ids, slots, values, strict=True):
        if 0 <= page < len(pages) and 0 <= slot < page_size:
            start = entry.address(slot)
            pages[page, start : start + entry.nbytes] = row
    return pages


@pytest.mark.parametrize("index", range(4))
def test_rows_land_at_the_address_that_the_entry_says(index, token_major, shake):
    entry, before = token_major.entries[index], shake(P, token_major.nbytes)
    page_ids, slots = np.int32([3, 0, 5, 3, 1]), np.int32([2, 0, 3, 1, 3])
    values = shake(5, entry.nbytes)
    expected = reference(before, entry, page_ids, slots, values, 4)
    after = tokens.write(jnp.array(before), entry, page_ids, slots, values, page_size=4)
    assert np.array_equal(np.asarray(after), expected)
    rows = tokens.read(after, entry, page_ids, slots, page_size=4)
    assert np.array_equal(np.asarray(rows), values)


@pytest.mark.case("IDX-02")
@pytest.mark.case("IDX-03")
@pytest.mark.parametrize("null", [P, -1, P + 5, 2**31 - 1, -(2**31)])
def test_a_padded_row_is_dropped_and_no_live_row_changes(null, token_major, shake):
    entry, before = token_major.entries[1], shake(P, token_major.nbytes)
    page_ids, slots = np.int32([4, null, 2, null]), np.int32([1, 3, 0, 0])
    values = shake(4, entry.nbytes)
    expected = reference(before, entry, page_ids, slots, values, 4)
    after = tokens.write(jnp.array(before), entry, page_ids, slots, values, page_size=4)
    assert np.array_equal(np.asarray(after), expected)


@pytest.mark.case("IDX-02")
@pytest.mark.parametrize("slot", [-1, 4, 5, 2**31 - 1, -(2**31), 2**27])
def test_a_slot_outside_the_page_writes_nothing_and_reads_zeros(
    slot, token_major, shake
):
    entry, before = token_major.entries[1], shake(P, token_major.nbytes)
    values = shake(1, entry.nbytes)
    for page_size in (4, None):
        if page_size is None and 0 <= slot <= 5:
            continue  # without a page size, only the page's end bounds a slot
        after = tokens.write(
            jnp.array(before), entry, [2], [slot], values, page_size=page_size
        )
        assert np.array_equal(np.asarray(after), before)
        rows = tokens.read(after, entry, [2], [slot], page_size=page_size)
        assert not np.asarray(rows).any()


@pytest.mark.case("IDX-01")
def test_a_read_past_the_end_is_zero_and_never_the_last_page(token_major, shake):
    pages = jnp.array(shake(P, token_major.nbytes))
    entry = token_major.entries[0]
    rows = np.asarray(tokens.read(pages, entry, [1, 2, 6], [0, 0, 0]))
    assert rows[:2].any()
    assert not rows[2].any()


@pytest.mark.case("IDX-01")
@pytest.mark.parametrize("bad", [6, -1, 99])
def test_a_checked_read_names_the_id_and_the_size(bad, token_major, shake):
    pages = jnp.array(shake(P, token_major.nbytes))
    entry = token_major.entries[0]
    with pytest.raises(errors.InvalidId, match=rf"page id {bad} of 6"):
        tokens.checked_read(pages, entry, [1, 2, bad], [0, 0, 0], page_size=4)
    with pytest.raises(errors.InvalidId, match="slot 4 of 4"):
        tokens.checked_read(pages, entry, [1], [4], page_size=4)
    rows = tokens.checked_read(pages, entry, [1, 2], [0, 3], page_size=4)
    assert np.asarray(rows).any(axis=1).all()


@pytest.mark.case("IDX-06")
@pytest.mark.parametrize("page_ids", [[3, 3, 3], [3, 2, 3]])
def test_a_checked_write_refuses_two_rows_at_one_address(page_ids, token_major, shake):
    entry, before = token_major.entries[0], shake(P, token_major.nbytes)
    pages, values = jnp.array(before), shake(3, entry.nbytes)
    with pytest.raises(errors.InvalidId, match="page 3 slot 1 more than once"):
        tokens.checked_write(pages, entry, page_ids, [1, 1, 1], values, page_size=4)
    assert np.array_equal(np.asarray(pages), before)
    with pytest.raises(errors.InvalidId, match="page id -1, 9 of 6"):
        tokens.checked_write(pages, entry, [9, 0, -1], [0, 0, 0], values, page_size=4)


@pytest.mark.case("IDX-06")
def test_repeated_padding_is_no_duplicate_and_claims_nothing(token_major, shake):
    entry, before = token_major.entries[0], shake(P, token_major.nbytes)
    page_ids, slots, values = [P, 3, P, P], [0, 1, 0, 0], shake(4, entry.nbytes)
    after = tokens.checked_write(
        jnp.array(before), entry, page_ids, slots, values, page_size=4
    )
    expected = reference(before, entry, page_ids, slots, values, 4)
    assert np.array_equal(np.asarray(after), expected)
    jaxpr = jax.make_jaxpr(tokens.write_rows)(
        before, np.int32(page_ids), np.int32(slots), values
    )
    text = str(jaxpr)
    assert "unique_indices=False" in text
    assert "indices_are_sorted=False" in text


@pytest.mark.case("IDX-05")
def test_a_page_id_that_int32_would_wrap_is_refused(token_major, shake):
    entry = token_major.entries[0]
    pages = jnp.array(shake(P, token_major.nbytes))
    with pytest.raises(ValueError, match="page_ids holding 4294967301"):
        tokens.read(pages, entry, np.int64([4_294_967_301]), [0])


def test_values_that_are_not_the_bytes_of_the_entry_are_refused(token_major, shake):
    entry = token_major.entries[0]
    pages = jnp.array(shake(P, token_major.nbytes))
    for wrong in (shake(2, entry.nbytes - 1), np.zeros((2, entry.nbytes), np.int8)):
        with pytest.raises(errors.FormatMismatch, match="bytes a token"):
            tokens.write(pages, entry, [0, 1], [0, 0], wrong)


@pytest.mark.case("JAX-01")
@pytest.mark.case("JAX-03")
def test_fifty_steps_and_equal_entries_are_one_trace(token_major, traced, shake):
    entry = token_major.entries[0]

    def step(pages, entry, page_ids, slots, rows):
        return tokens.write(pages, entry, page_ids, slots, rows, page_size=4)

    write = traced(step, static_argnums=1)
    pages = jnp.zeros((P, token_major.nbytes), jnp.uint8)
    for position in range(50):
        ids, slots = np.int32([position // 4 % P]), np.int32([position % 4])
        equal = dataclasses.replace(entry)
        pages = write(pages, equal, ids, slots, shake(1, entry.nbytes))
    assert write.traces == 1


def test_all_entries_of_one_shape_share_one_program(token_major, shake):
    pages = jnp.zeros((P, token_major.nbytes), jnp.uint8)
    tokens.write(pages, token_major.entries[0], [0], [0], shake(1, 32), page_size=4)
    before = tokens._write._cache_size()
    for entry in token_major.entries:
        pages = jnp.zeros((P, token_major.nbytes), jnp.uint8)
        tokens.write(pages, entry, [0], [0], shake(1, 32), page_size=4)
    assert tokens._write._cache_size() == before


@pytest.mark.case("JAX-06")
@pytest.mark.parametrize("ranks", [None, 1, 3])
@pytest.mark.parametrize("num_rows", [1, 2, 9])
def test_a_write_copies_no_pool_alone_or_under_vmap(num_rows, ranks, copies_of):
    num_pages, page_nbytes, nbytes = 64, 8192, 128
    ids, rows = jnp.zeros(num_rows, jnp.int32), jnp.zeros((num_rows, nbytes), jnp.uint8)
    shape, write = (num_pages, page_nbytes), tokens.write_rows
    if ranks is not None:
        shape, write = (ranks, *shape), jax.vmap(write, in_axes=(0, None, None, None))
    pages = jnp.zeros(shape, jnp.uint8)
    compiled = jax.jit(write, donate_argnums=0).lower(pages, ids, ids, rows).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pages.nbytes
    assert memory.temp_size_in_bytes < page_nbytes
    assert copies_of(compiled, "u8", *shape) == []


@pytest.mark.case("JAX-06")
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_each_rank_writes_its_own_rows_under_shard_map(
    axis_type, sharding_of, token_major, shake
):
    sharding = sharding_of(8, axis_type)
    entry, before = token_major.entries[2], shake(8, P, token_major.nbytes)
    page_ids, slots, values = np.int32([4, P]), np.int32([3, 0]), shake(8, 2, 32)

    def local(pages, values):
        return tokens.write(pages[0], entry, page_ids, slots, values[0])[None]

    spec = PartitionSpec("tp")
    mapped = jax.shard_map(
        local, mesh=sharding.mesh, in_specs=(spec, spec), out_specs=spec
    )
    pages = jax.device_put(before, sharding)
    after = jax.jit(mapped, donate_argnums=0)(pages, jax.device_put(values, sharding))
    assert after.sharding.is_equivalent_to(sharding, 3)
    after = np.asarray(after)
    for rank in range(8):
        expected = reference(before[rank], entry, page_ids, slots, values[rank], 4)
        assert np.array_equal(after[rank], expected)
