"""Tokens and records: appended, exported, imported, by copies and by words."""

import numpy as np
import pytest

from pallas_kernels import append_tokens, export_records, import_records, interpret
from pallas_kernels.append_tokens import Run
from pallas_kernels.records import Layout

NUM_PAGES = 6
IDS = np.array([0, 0, 5, 6, -1, 2, 0], np.int32)
SLOTS = np.array([0, 1, 3, 0, 0, 4, 0], np.int32)  # slot 4 is none of a page of 4
KEYS_VALUES = (Run(0, 64, 0, 64), Run(256, 64, 64, 64))
VALUES_SCALES = (Run(0, 64, 0, 64), Run(256, 4, 64, 4))
TABLE = np.array([[0, 64], [256, 0]], np.int32)
FACTS = {"layout": Layout(64, 64, 4), "num_pages": NUM_PAGES}


def appended(pages, rows, runs) -> np.ndarray:
    """Write token after token, as the contract says it."""
    pages = pages.copy()
    for page, slot, row in zip(IDS, SLOTS, rows, strict=True):
        if 0 <= page < NUM_PAGES and 0 <= slot < 4:
            for at, stride, in_row, nbytes in runs:
                start = at + slot * stride
                pages[page, start : start + nbytes] = row[in_row : in_row + nbytes]
    return pages


@pytest.mark.parametrize(
    ("runs", "width"),
    [(KEYS_VALUES, 128), (VALUES_SCALES, 68)],
    ids=["keys and values", "values and scales"],
)
def test_tokens_go_to_their_slots_and_the_last_of_equals_wins(prove, runs, width):
    pages, rows = prove.bytes(NUM_PAGES + 2, 512), prove.bytes(IDS.size, width)
    facts = {"runs": runs, "page_slots": 4, "num_pages": NUM_PAGES}
    found = prove.equal(append_tokens, (pages, IDS, SLOTS, rows), **facts)
    np.testing.assert_array_equal(found, appended(pages, rows, runs))


def test_no_token_appends_nothing(prove):
    pages, none = prove.bytes(2, 512), np.zeros(0, np.int32)
    arrays = pages, none, none, np.zeros((0, 128), np.uint8)
    found = prove.equal(append_tokens, arrays, runs=KEYS_VALUES, page_slots=4)
    np.testing.assert_array_equal(found, pages)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (Run(0, 24, 0, 24), "run of 24 B"),
        (Run(8, 64, 0, 64), "offset in a page of 8 B"),
        (Run(0, 72, 0, 64), "slot stride of 72 B"),
        (Run(0, 64, 4, 64), "offset in a row of 4 B"),
        (Run(0, 6, 0, 4), "a word stands at"),
        (Run(384, 64, 0, 64), "256 B from offset 384 on, in a page of 512 B"),
        (Run(0, 64, 80, 64), "64 B from offset 80 on, in a row of 128 B"),
    ],
)
def test_a_run_that_no_copy_serves_is_refused_with_numbers(prove, run, words):
    shapes = (
        prove.shape("uint8", 8, 512),
        *(prove.shape("int32", 3),) * 2,
        prove.shape("uint8", 3, 128),
    )
    assert words in append_tokens.supports(*shapes, runs=(run,), page_slots=4)


def exported(into, pages, ids, first) -> np.ndarray:
    into = into.copy()
    for row in range(len(into)):
        entry, slot = divmod(first + row, 4)
        if 0 <= entry < len(ids) and 0 <= ids[entry] < NUM_PAGES:
            for at, in_record in TABLE:
                start = at + 64 * slot
                part = pages[ids[entry], start : start + 64]
                into[row, in_record : in_record + 64] = part
    return into


PAGES_OF = np.array([3, 7, 0, -1], np.int32)


def test_records_of_tokens_in_cut_pages_are_exported_and_others_kept(prove):
    pages, into = prove.bytes(8, 512), prove.bytes(11, 128)
    arrays = into, pages, PAGES_OF, TABLE, np.int32(2)
    found = prove.equal(
        export_records, arrays, tuning={"blocks": 3, "stages": 2}, **FACTS
    )
    np.testing.assert_array_equal(found, exported(into, pages, PAGES_OF, 2))


def test_records_are_imported_into_the_slots_of_their_tokens_alone(prove):
    pages, rows = prove.bytes(8, 512), prove.bytes(11, 128)
    arrays = pages, PAGES_OF, TABLE, rows, np.int32(2)
    found = prove.equal(
        import_records, arrays, tuning={"blocks": 3, "stages": 2}, **FACTS
    )
    assert (found[3, :128] == pages[3, :128]).all()  # tokens before the first
    again = exported(rows, found, PAGES_OF, 2)
    np.testing.assert_array_equal(again, rows)


@pytest.mark.parametrize("first", [-1, -6, -4 * 4, 2**31 - 2])
def test_tokens_before_the_table_or_far_behind_it_are_nobodys(prove, first):
    """A table is no ring: what is -1 of it is not its last page."""
    pages, rows = prove.bytes(8, 512), prove.bytes(11, 128)
    arrays = rows, pages, PAGES_OF, TABLE, np.int32(first)
    found = prove.equal(export_records, arrays, **FACTS)
    np.testing.assert_array_equal(found, exported(rows, pages, PAGES_OF, first))
    arrays = pages, PAGES_OF, TABLE, rows, np.int32(first)
    filled = prove.equal(import_records, arrays, **FACTS)
    again = exported(np.zeros_like(rows), filled, PAGES_OF, first)
    named = exported(np.zeros_like(rows), np.ones_like(pages), PAGES_OF, first) == 1
    np.testing.assert_array_equal(again, np.where(named, rows, 0))
    others = [page for page in range(8) if page not in (0, 3)]
    np.testing.assert_array_equal(filled[others], pages[others])


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ([[272, 0]], "256 B from offset 272 on, in a page of 512 B"),
        ([[-16, 0]], "256 B from offset -16 on, in a page"),
        ([[0, 80]], "64 B from offset 80 on, in a record of 128 B"),
    ],
)
def test_a_run_that_leaves_its_page_or_record_is_refused(prove, table, words):
    """A copy would take its neighbour's bytes, and no interpreter sees it."""
    pages, rows = prove.bytes(8, 512), prove.bytes(4, 128)
    table, first = np.array(table, np.int32), np.int32(0)
    assert words in export_records.supports(rows, pages, IDS, table, first, **FACTS)
    assert words in import_records.supports(pages, IDS, table, rows, first, **FACTS)


def test_of_entries_of_one_page_the_last_is_imported(prove):
    pages, rows = prove.bytes(8, 512), prove.bytes(12, 128)
    ids = np.array([3, 1, 3], np.int32)
    found = prove.equal(import_records, (pages, ids, TABLE, rows, np.int32(0)), **FACTS)
    np.testing.assert_array_equal(found[3, :64], rows[8, 64:])
    np.testing.assert_array_equal(found[1, :64], rows[4, 64:])


def test_no_page_no_run_and_no_record_move_nothing(prove):
    pages, rows, zero = prove.bytes(8, 512), prove.bytes(3, 128), np.int32(0)
    none = np.zeros(0, np.int32), np.zeros((0, 2), np.int32), np.zeros((0, 128), "u1")
    for ids, table, some in (
        (none[0], TABLE, rows),
        (PAGES_OF, none[1], rows),
        (PAGES_OF, TABLE, none[2]),
    ):
        kept = prove.equal(import_records, (pages, ids, table, some, zero), **FACTS)
        np.testing.assert_array_equal(kept, pages)
        kept = prove.equal(export_records, (some, pages, ids, table, zero), **FACTS)
        np.testing.assert_array_equal(kept, some)


WORDS = np.array([[0, 68], [1024, 4]], np.int32)
IN_WORDS = {"layout": Layout(64, 64, 8), "num_pages": NUM_PAGES}


def test_records_at_multiples_of_4_bytes_move_by_words_both_ways(prove):
    pages, ids = prove.bytes(8, 2048), np.array([4, 9, 1], np.int32)
    rows = prove.bytes(18, 136 + 4)
    out = rows, pages, ids, WORDS, np.int32(3)
    tuning = {"blocks": 2, "stages": 2}
    found = prove.equal(export_records, out, tuning=tuning, **IN_WORDS)
    back = pages, ids, WORDS, found, np.int32(3)
    same = prove.equal(import_records, back, tuning={"blocks": 2}, **IN_WORDS)
    np.testing.assert_array_equal(same, pages)
    assert (found[:, :4] == rows[:, :4]).all()  # bytes of no run


def test_a_record_of_16_bytes_whose_runs_are_not_is_refused_unless_it_is_said(prove):
    shapes = (
        prove.shape("uint8", 8, 4 * 1284),
        prove.shape("uint8", 9, 4 * 1152 * 64),
        prove.shape("int32", 2),
        np.array([[0, 0], [1152 * 64, 1284]], np.int32),
        prove.shape("int32"),
    )
    said, aligned = (Layout(1152, 1152, 64, alignment) for alignment in (4, 16))
    refusal = export_records.supports(*shapes, layout=Layout(1152, 1152, 64))
    assert "offset 1,284 in a record" in refusal
    assert export_records.supports(*shapes, layout=said) is None
    odd = prove.shape("uint8", 8, 2 * 1284 + 4), *shapes[1:]
    refusal = export_records.supports(*odd, layout=aligned)
    assert refusal == "records of 2,572 B, said to be multiples of 16"


@pytest.mark.parametrize(
    ("nbytes", "record", "words"),
    [
        (24, 128, "run of 24 B"),
        (64, 66, "records of 66 B"),
        (16, 20, "no tile of them is a multiple of 128 words"),
    ],
)
def test_records_that_no_kernel_moves_are_refused_with_numbers(
    prove, nbytes, record, words
):
    shapes = (
        prove.shape("uint8", 8, record),
        prove.shape("uint8", 9, 512),
        prove.shape("int32", 2),
        prove.shape("int32", 2, 2),
        prove.shape("int32"),
    )
    layout = Layout(nbytes, nbytes, 4)
    assert words in export_records.supports(*shapes, layout=layout)


def test_a_tile_that_is_overwritten_while_it_is_read_is_a_race(
    prove, monkeypatch, race
):
    from pallas_kernels import ring

    monkeypatch.setattr(ring.plgpu, "commit_smem", lambda: None)
    monkeypatch.setattr(ring.plgpu, "wait_smem_to_gmem", lambda *a, **k: None)
    pages, ids = prove.bytes(8, 2048), np.arange(3, dtype=np.int32)
    arrays = pages, ids, WORDS, prove.bytes(24, 140), np.int32(0)
    with pytest.raises(race):
        interpret.run(import_records.kernel, *arrays, **IN_WORDS, blocks=1)


@pytest.mark.parametrize("op", [append_tokens, export_records, import_records])
def test_pages_of_nobody_would_be_seen_without_the_guard(prove, op, monkeypatch):
    pages, ids = prove.bytes(8, 512), np.array([7], np.int32)
    one, zero = np.array([0], np.int32), np.int32(0)
    rows = prove.bytes(4, 128)
    arrays, facts = {
        append_tokens: (
            (pages, ids, one, rows[:1]),
            {"runs": KEYS_VALUES, "page_slots": 4, "num_pages": NUM_PAGES},
        ),
        export_records: ((rows, pages, ids, TABLE, zero), FACTS),
        import_records: ((pages, ids, TABLE, rows, zero), FACTS),
    }[op]
    assert prove.unguarded_differs(op, monkeypatch, *arrays, **facts)
