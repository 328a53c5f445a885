"""The host executor's contract: in place, donated by the runtime, nobody surprised."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem import transfer
from kvmem.geometry import Topology

PLACES = ["one device", "3 auto", "3 explicit"]


def addresses(pages):
    return [s.data.unsafe_buffer_pointer() for s in pages.addressable_shards]


def load(side, records, **options):
    return transfer.import_records(
        side.pages, side.page_ids, records, side.plan, **options
    )


@pytest.fixture(params=PLACES)
def sides(request, build):
    full = build.side(Topology(3), place=request.param)
    return full, build.side(Topology(3), place=request.param, filled=False)


def test_an_import_writes_in_place_and_consumes_the_old_handle(sides):
    full, blank = sides
    before = addresses(blank.pages)
    pages = load(blank, full.records)
    assert addresses(pages) == before
    assert blank.pages.is_deleted()
    assert pages.sharding == full.pages.sharding


def test_an_export_keeps_nothing_that_would_make_a_later_donation_copy(sides):
    full, _ = sides
    step = jax.jit(
        lambda p: p + jnp.uint8(1), donate_argnums=0, out_shardings=full.pages.sharding
    )
    pages = step(full.pages)
    before = addresses(pages)
    transfer.export_records(pages, full.page_ids, full.plan, 7)
    assert addresses(step(pages)) == before


def test_a_view_of_the_old_bytes_keeps_the_old_bytes(sides):
    full, blank = sides
    views = [np.asarray(shard.data) for shard in blank.pages.addressable_shards]
    copies = [view.copy() for view in views]
    pages = load(blank, full.records)
    assert all(map(np.array_equal, views, copies))
    found = transfer.export_records(pages, full.page_ids, full.plan, 48)
    assert np.array_equal(found, full.records)


def test_a_numpy_array_that_lent_its_memory_to_a_pool_never_changes(build):
    full = build.side(Topology(3))
    raw = np.zeros(full.pages.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    lent = raw[start : start + full.pages.nbytes].reshape(full.pages.shape)
    pages = jax.device_put(lent)
    assert pages.unsafe_buffer_pointer() == lent.ctypes.data
    pages = transfer.import_records(pages, full.page_ids, full.records, full.plan)
    assert not lent.any()
    found = transfer.export_records(pages, full.page_ids, full.plan, 48)
    assert np.array_equal(found, full.records)


def test_an_array_that_was_read_before_an_import_is_not_stale_after_it(sides):
    full, blank = sides
    np.asarray(blank.pages)  # jax keeps this copy with the handle
    pages = load(blank, full.records)
    table = np.s_[:, blank.page_ids]
    assert np.array_equal(np.asarray(pages)[table], np.asarray(full.pages)[table])


def test_steps_that_still_read_the_pool_see_it_before_the_import(build):
    full = build.side(Topology(1))
    blank = build.side(Topology(1), filled=False)
    expected = np.array(blank.pages).sum(dtype=np.int64)
    slow = jax.jit(lambda p: jnp.sort(p.reshape(-1)).sum(dtype=jnp.int32))
    pending = slow(blank.pages)
    load(blank, full.records)
    assert int(pending) == expected


def test_import_and_step_alternate_without_losing_a_byte(sides):
    full, blank = sides
    flip = jax.jit(
        lambda p: p ^ jnp.uint8(255),
        donate_argnums=0,
        out_shardings=blank.pages.sharding,
    )
    pages = blank.pages
    for first in range(0, 48, 7):
        rows = full.records[first : first + 7]
        pages = transfer.import_records(
            pages, full.page_ids, rows, full.plan, first_token=first
        )
        pages = flip(flip(pages))
    found = transfer.export_records(pages, full.page_ids, full.plan, 48)
    assert np.array_equal(found, full.records)
