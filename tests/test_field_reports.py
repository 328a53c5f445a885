"""Every field report has a line, and every line has a test."""

import collections
import pathlib
import re

import pytest

_LINE = re.compile(r"\| ([A-Z]{3}-\d\d) \| ([^|]*\S) \| ([^|]*\S) \|")


def lines_of(text: str) -> dict[str, tuple[str, str]]:
    """Return id -> (source, fault) of a field report table."""
    found = _LINE.findall(text)
    counts = collections.Counter(case for case, _, _ in found)
    assert max(counts.values()) == 1, f"{counts.most_common(1)} has two lines"
    return {case: (source, fault) for case, source, fault in found}


def cited_in(text: str) -> set[str]:
    """Return the ids that a test file's markers carry."""
    marks = re.findall(r"mark\.case\(([^)]*)\)", text)
    return {case for mark in marks for case in re.findall(r"[A-Z]{3}-\d\d", mark)}


@pytest.fixture(scope="module")
def cited(repo_root: pathlib.Path) -> set[str]:
    files = sorted((repo_root / "tests").rglob("test_*.py"))
    here = pathlib.Path(__file__).name
    return set().union(*(cited_in(f.read_text()) for f in files if f.name != here))


@pytest.fixture(scope="module")
def lines(repo_root: pathlib.Path) -> dict[str, tuple[str, str]]:
    return lines_of((repo_root / "tests" / "field_reports.md").read_text())


def test_every_case_that_a_test_carries_has_a_line(cited, lines):
    assert sorted(cited - set(lines)) == []


def test_every_line_has_a_test_that_carries_its_id(cited, lines):
    assert sorted(set(lines) - cited) == []


def test_every_source_names_a_project_and_a_number(lines):
    vague = [
        case for case, (source, _) in lines.items() if not re.search(r"\w.*#\d", source)
    ]
    assert vague == []


def test_a_marker_and_a_line_are_seen_where_they_stand():
    marker = (
        "@pytest.mark." + 'case("XYZ-01")\n@pytest.mark.' + 'case("XYZ-02", "XYZ-03")'
    )
    assert cited_in(marker) == {"XYZ-01", "XYZ-02", "XYZ-03"}
    assert lines_of("| XYZ-01 | some #1 | a fault |") == {
        "XYZ-01": ("some #1", "a fault")
    }
    with pytest.raises(AssertionError, match="two lines"):
        lines_of("| XYZ-01 | a #1 | b |\n| XYZ-01 | a #1 | c |")
