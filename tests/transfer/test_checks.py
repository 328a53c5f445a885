"""What a transfer refuses: the numbers of both sides, and nothing has moved."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from kvmem import errors, transfer
from kvmem.geometry import Topology


@pytest.fixture
def side(build):
    return build.side(Topology(3))


@pytest.fixture
def refuse(side, implementation):
    """Import with one argument changed, and see it refused with the pool untouched."""

    def refused(error, match, **changes):
        arguments = {
            "pages": side.pages,
            "page_ids": side.page_ids,
            "records": side.records,
            "plan": side.plan,
        }
        before = np.array(side.pages)
        with pytest.raises(error, match=match):
            transfer.import_records(
                **(arguments | changes), implementation=implementation
            )
        assert np.array_equal(np.array(side.pages), before)

    return refused


@pytest.mark.case("LAY-06")
def test_a_peer_with_another_record_length_is_refused_with_both_numbers(
    build, side, refuse
):
    peer = build.side(Topology(3), dim=16)
    mine, theirs = side.plan.record_nbytes, peer.plan.record_nbytes
    match = f"records of {theirs} bytes a row.*a record of this model is {mine} bytes"
    refuse(errors.FormatMismatch, match, records=peer.records)


def test_records_of_another_dtype_are_never_cast(side, refuse):
    refuse(
        errors.FormatMismatch,
        "a cast would change them",
        records=side.records.astype(np.float32),
    )


def test_a_plan_for_other_ranks_is_refused(build, refuse):
    plan = build.side(Topology(1)).plan
    refuse(errors.IncompatiblePlan, "3 ranks with a plan for 1", plan=plan)


def test_pages_smaller_than_the_plans_are_refused(build, refuse):
    larger = build.side(Topology(3), page_size=8)
    refuse(
        errors.FormatMismatch,
        "pages of 512 bytes with a plan for 1024",
        plan=larger.plan,
    )


def test_pages_that_are_no_pool_are_refused(side, refuse):
    words = jax.device_put(np.zeros(side.pages.shape, np.float32))
    refuse(errors.FormatMismatch, "pages of float32", pages=words)


def test_pages_split_along_another_axis_than_ranks_are_refused(side, refuse):
    mesh = jax.make_mesh((2,), ("tp",), devices=jax.devices()[:2])
    ids = [side.page_ids[i] for i in range(12)]
    pages = np.concatenate([np.array(side.pages)] * 2, axis=1)
    split = jax.device_put(pages, NamedSharding(mesh, PartitionSpec(None, "tp")))
    refuse(errors.IncompatiblePlan, "over its ranks", pages=split, page_ids=ids)


def test_a_table_too_short_is_refused_with_its_right_length(side, refuse):
    refuse(
        errors.InvalidId,
        "tokens up to 48 from 11 pages.*a table of 12 pages",
        page_ids=side.page_ids[:11],
    )


@pytest.mark.parametrize("stray", [-1, 17, 2**31])
def test_a_page_outside_the_pool_is_refused(side, refuse, stray):
    ids = side.page_ids.copy()
    ids[4] = stray
    refuse(errors.InvalidId, rf"pages \[{stray}\]", page_ids=ids)


def test_a_page_outside_the_window_is_not_looked_at(side):
    ids = side.page_ids.copy()
    ids[0], ids[11] = -1, 17  # stale, and null
    found = transfer.export_records(
        side.pages, ids, side.plan, num_tokens=40, first_token=4
    )
    assert np.array_equal(found, side.records[4:44])


def test_one_page_at_two_positions_is_refused(side, refuse):
    ids = side.page_ids.copy()
    ids[4] = ids[5]
    refuse(errors.InvalidId, "two table positions", page_ids=ids)


@pytest.mark.parametrize("ids", [[0.0, 1.0], [[0, 1]], []])
def test_a_table_that_is_no_row_of_integers_is_refused(refuse, ids):
    refuse(errors.InvalidId, "a page table of|from 0 pages", page_ids=ids)


def test_negative_positions_are_refused(side, refuse):
    refuse(errors.InvalidId, r"tokens \[-4, 44\)", first_token=-4)
    with pytest.raises(errors.InvalidId, match="not negative"):
        transfer.export_records(side.pages, side.page_ids, side.plan, -1)


def test_an_out_that_cannot_be_filled_is_refused(side):
    out = np.zeros((48, 2 * side.plan.record_nbytes), np.uint8)
    for wrong, match in [
        (out, "out of"),
        (out[:, ::2], "strided"),
        (side.records[:47], "out of"),
    ]:
        with pytest.raises(errors.FormatMismatch, match=match):
            transfer.export_records(side.pages, side.page_ids, side.plan, 48, out=wrong)


def test_nothing_is_moved_without_tokens(side, implementation):
    found = transfer.export_records(
        side.pages, [], side.plan, 0, implementation=implementation
    )
    assert found.shape == (0, side.plan.record_nbytes)
    pages = transfer.import_records(
        side.pages, [], found, side.plan, implementation=implementation
    )
    assert np.array_equal(np.array(pages), np.array(side.pages))


@pytest.mark.parametrize("threads", [0, -2])
def test_an_import_by_no_thread_is_refused(refuse, threads):
    refuse(errors.ConfigError, f"threads = {threads}", threads=threads)


def test_pages_and_records_that_are_no_arrays_are_refused_in_words(side, refuse):
    pages, records = np.array(side.pages), side.records
    refuse(errors.FormatMismatch, "pages as a ndarray: a pool is a jax", pages=pages)
    refuse(errors.FormatMismatch, "pages as a str", pages="pages")
    refuse(errors.FormatMismatch, "records as a list", records=records.tolist())
    refuse(errors.FormatMismatch, "records as a bytes", records=records.tobytes())


@pytest.mark.parametrize("number", [4.0, True, "4", None])
def test_windows_of_no_whole_numbers_are_refused_in_words(
    side, refuse, implementation, number
):
    law = "tokens are counted in whole numbers"
    refuse(errors.InvalidId, law, first_token=number)
    given = (side.pages, side.page_ids, side.plan)
    options = {"implementation": implementation}
    with pytest.raises(errors.InvalidId, match=law):
        transfer.export_records(*given, number, **options)
    whole = transfer.export_records(*given, np.int64(3), np.int32(1), **options)
    assert np.array_equal(whole, side.records[1:4])
