"""Rows are cut into arrays and files without a byte of padding."""

import pytest

from kvmem.store import row_files


@pytest.mark.parametrize("num", [*range(1, 40), 91, 97, 2000])
@pytest.mark.parametrize("nbytes", [1, 300, 999, 1000, 5000])
def test_every_row_is_in_one_file_of_one_array(monkeypatch, num, nbytes):
    monkeypatch.setattr(row_files, "FILE_NBYTES", 1000)
    per_file = row_files.rows_per_file(num, nbytes)
    parts = row_files.cut(num, per_file)
    files = [file for part in parts for file in part.files()]
    covered = [row for _, start, stop in files for row in range(start, stop)]
    assert covered == list(range(num))
    assert len({name for name, _, _ in files}) == len(files) == -(-num // per_file)
    assert [part.name for part in parts] == ["records", "rest"][: len(parts)]
    assert max(stop - start for _, start, stop in files) * nbytes <= max(1000, nbytes)


def test_files_are_as_even_as_they_can_be():
    assert row_files.rows_per_file(91, 737_280) == 5
    assert [part.num_files for part in row_files.cut(91, 5)] == [18, 1]
    assert row_files.cut(4, 4) == (row_files.Part("records", 0, 4, 4),)


def test_a_row_is_found_where_its_array_has_it():
    whole, rest = row_files.cut(7, 3)
    assert whole.span(4, 2, 10) == slice(40, 60)
    assert rest.span(6, 1, 10) == slice(0, 10)
