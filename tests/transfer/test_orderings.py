"""What is computed, exported, imported and saved happens in the order it was asked for.

Steps of a device run behind Python's back, and a save runs behind the step. In other
systems a store read pages before they were computed, a load overwrote pages that were
still read, and zeroing wiped a load (vLLM #45704, #47282, #31341, #50696). Here order
is data flow: a pool is donated from verb to verb, 150 times each.
"""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem import canonical, transfer
from kvmem.geometry import Topology
from kvmem.store import Disk, PageStore, chain_keys

ROUNDS = 150
PAGE, CHUNK = 4, 4


@pytest.fixture(params=["one device", "3 auto"])
def side(request, build):
    return build.side(Topology(3), num_tokens=16, place=request.param, filled=False)


def step(side, body):
    """Return a jitted, donated step on the pool, slow enough to be still running."""

    def run(pages, value):
        busy = jnp.sort(pages[:, 0].reshape(-1)).astype(jnp.int32).sum()
        return body(pages, value + (busy * 0).astype(jnp.uint8))

    return jax.jit(run, donate_argnums=0, out_shardings=side.pages.sharding)


def test_an_export_waits_for_the_step_that_writes(side, implementation):
    write = step(side, lambda pages, value: pages * 0 + value)
    pages = side.pages
    for number in range(ROUNDS):
        pages = write(pages, np.uint8(number))
        found = transfer.export_records(
            pages, side.page_ids, side.plan, 16, implementation=implementation
        )
        assert (found == number).all()


def test_an_export_keeps_what_later_steps_overwrite(side, implementation):
    write = step(side, lambda pages, value: pages * 0 + value)
    pages, kept = side.pages, []
    for number in range(ROUNDS):
        pages = write(pages, np.uint8(number))
        found = transfer.export_records(
            pages, side.page_ids, side.plan, 16, implementation=implementation
        )
        kept.append(found)
    assert all((found == number).all() for number, found in enumerate(kept))


def test_an_import_waits_for_the_step_that_reads(side, implementation):
    table = np.asarray(side.page_ids)

    @jax.jit
    def read(pages):
        own = jnp.sort(pages[:, table].reshape(-1))
        return own[0].astype(jnp.int32), own[-1].astype(jnp.int32)

    records = np.zeros((16, side.plan.record_nbytes), np.uint8)
    pages = transfer.import_records(side.pages, table, records, side.plan)
    for number in range(1, ROUNDS):
        pending = read(pages)
        records = np.full_like(records, number)
        pages = transfer.import_records(
            pages, table, records, side.plan, implementation=implementation
        )
        assert [int(value) for value in pending] == [number - 1] * 2
    found = transfer.export_records(pages, table, side.plan, 16)
    assert (found == ROUNDS - 1).all()


def test_zeroing_comes_before_the_import_that_follows_it(side, implementation):
    zero = step(side, lambda pages, value: pages * value)
    pages = side.pages
    others = np.setdiff1d(np.arange(pages.shape[1]), side.page_ids)
    random = np.random.default_rng(0)
    for _ in range(ROUNDS):
        records = random.integers(1, 256, (16, side.plan.record_nbytes), np.uint8)
        pages = zero(pages, np.uint8(0))
        pages = transfer.import_records(
            pages, side.page_ids, records, side.plan, implementation=implementation
        )
        found = transfer.export_records(pages, side.page_ids, side.plan, 16)
        assert np.array_equal(found, records)
    assert not np.array(pages)[:, others].any()


class Gated(Disk):
    """A disk on which a save waits before Orbax writes."""

    def __init__(self):
        self.open, self.reached = threading.Event(), threading.Event()

    def perform(self, step, action):
        if step.verb == "orbax":
            self.reached.set()
            assert self.open.wait(30)
        return action()


@pytest.mark.case("ALC-12")
def test_a_page_that_is_reused_during_its_save_is_saved_as_it_was(
    build, implementation, tmp_path
):
    """Page 3 holds 7s, its save begins, it is released, handed out, filled with 9s."""
    side = build.side(Topology(3), num_tokens=PAGE, filled=False)
    fill = jax.jit(lambda pages, v: pages.at[:, 3].set(v), donate_argnums=0)
    pages, disk = fill(side.pages, np.uint8(7)), Gated()
    tokens = np.arange(PAGE, dtype=np.int32)
    keys = chain_keys("m/f", tokens, CHUNK)
    with PageStore.open(
        tmp_path,
        "m",
        canonical.format_id((side.plan.group,)),
        record_nbytes=side.plan.record_nbytes,
        chunk_tokens=CHUNK,
        io=disk,
    ) as store:
        records = transfer.export_records(
            pages, [3], side.plan, PAGE, implementation=implementation
        )
        save = store.put_async(keys, tokens, records)
        assert disk.reached.wait(30)
        del records
        pages = fill(pages, np.uint8(9))
        assert (np.asarray(pages)[:, 3] == 9).all() and not save.done()
        disk.open.set()
        assert save.result().written == 1
        found = store.get(keys, tokens)
        assert found.num_hit == 1 and (found.records == 7).all()
        assert (np.asarray(pages)[:, 3] == 9).all()
