"""Faults that a GPU alone shows are asked of one; their twins are found anywhere."""

import jax
import jax.numpy as jnp
import pytest

from experiments import device_reports, device_worker


@pytest.mark.gpu
@pytest.mark.case("NAN-05")
def test_on_a_device_pages_are_cleared_before_they_are_written():
    found = device_reports.clears_first(device_reports.kernels(), rounds=1000)
    assert found["wrong_nbytes"] == 0


@pytest.mark.gpu
@pytest.mark.case("NAN-06")
def test_on_a_device_a_partial_block_moves_its_own_rows():
    found = device_reports.masks_its_last_block(device_reports.kernels())
    assert found["wrong_nbytes"] == 0


@pytest.mark.gpu
@pytest.mark.case("JAX-11")
def test_on_a_device_a_restored_pool_is_held_once(tmp_path):
    moves = device_reports.kernels()
    peaks = device_reports.restored_peaks(tmp_path, moves, nbytes=1 << 28)
    assert device_reports.peak_objection(*peaks) is None


@pytest.mark.case("NAN-05")
def test_what_is_written_survives_and_a_late_clearing_is_found():
    right = device_reports.references()
    assert device_reports.clears_first(right, rounds=20)["wrong_nbytes"] == 0

    def late(pages, ids, slots, rows, **facts):
        return right.zero(right.append(pages, ids, slots, rows, **facts), ids)

    wrong = right._replace(append=late)
    assert device_reports.clears_first(wrong, rounds=1)["wrong_nbytes"] > 700


@pytest.mark.case("NAN-06")
def test_the_interpreter_masks_a_partial_block_and_a_block_without_mask_is_found(
    monkeypatch,
):
    moves = device_reports.kernels(interpreted=True)
    assert device_reports.masks_its_last_block(moves)["wrong_nbytes"] == 0

    def whole(pages, ids, slots, rows, **facts):
        pad = jnp.zeros(2, jnp.int32), jnp.array([2, 3], jnp.int32)
        more = [jnp.concatenate(pair) for pair in zip((ids, slots), pad, strict=True)]
        more[0] = more[0].at[10:].set(ids[-1])
        behind = jnp.full((2, rows.shape[1]), 0xFF, jnp.uint8)  # as the interpreter
        return right.append(pages, *more, jnp.concatenate([rows, behind]), **facts)

    right = device_reports.references()
    wrong = right._replace(append=whole)
    assert device_reports.masks_its_last_block(wrong)["wrong_nbytes"] > 2 * 60


@pytest.fixture
def held_pools():
    """Bytes of the pools of 16 pages that are alive, in place of a device's peak."""
    shape = (16, 4096)

    def alive() -> int:
        return sum(array.nbytes for array in jax.live_arrays() if array.shape == shape)

    before = alive()
    return lambda: alive() - before


@pytest.mark.case("JAX-11")
@pytest.mark.parametrize("donates", [True, False])
def test_a_restored_pool_is_donated_and_one_that_is_held_twice_is_found(
    donates, held_pools, tmp_path, monkeypatch
):
    compiled = jax.jit
    if not donates:
        monkeypatch.setattr(jax, "jit", lambda call, **facts: compiled(call))
    peaks = device_reports.restored_peaks(
        tmp_path, device_reports.references(), 16 * 4096, peak=held_pools
    )
    objection = device_reports.peak_objection(*peaks)
    assert (objection is None) == donates
    assert donates or "131,072 B at most with a restored pool, 65,536 B" in objection


def test_a_run_asks_every_question_under_the_interpreter_but_that_of_memory():
    job = device_worker.Job("field_reports", (), True, 0, 0, 0, 0)
    found = list(device_worker.perform(job))
    assert [each["case"].split()[0] for each in found] == ["NAN-05", "NAN-06"]
    assert all(each["wrong_nbytes"] == 0 for each in found)
