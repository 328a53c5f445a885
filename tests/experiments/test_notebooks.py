"""Notebooks run from top to bottom, and stand in the checkout as they ran.

To renew one: `.venv/bin/jupyter execute --inplace experiments/notebooks/NAME.ipynb`.
"""

import itertools
import pathlib
import re

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = pathlib.Path(__file__).parents[2] / "experiments" / "notebooks"
# A slash that begins a word, then a folder: no relative path, no URL, no fraction.
_ABSOLUTE = re.compile(r"(?<![\w.:/…<>*-])(?:/[\w.@-]+){2,}|\b[A-Z]:\\\w+|~/\w+")


def texts_of(cell) -> list[str]:
    """Return everything readable in a cell and its outputs; pictures are not."""
    found = [cell.source]
    for output in cell.get("outputs", ()):
        found.append(output.get("text", ""))
        found += output.get("traceback", ())
        for kind, value in output.get("data", {}).items():
            if not kind.startswith("image/"):
                found.append(str(value))
    return found


def kinds_of(cell) -> list[tuple[str, str | None]]:
    """Return what a cell put out, in order; how a stream was cut is chance."""
    kinds = [(each.output_type, each.get("name")) for each in cell.get("outputs", ())]
    return [kind for kind, _ in itertools.groupby(kinds)]


def faults_of(notebook) -> list[str]:
    """Say why a notebook is not one that ran cleanly and may be published."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in code for output in cell.outputs]
    counts = [cell.execution_count for cell in code]
    faults = []
    if counts != list(range(1, len(code) + 1)):
        faults.append(f"cells ran in the order {counts}")
    if not any("image/png" in output.get("data", {}) for output in outputs):
        faults.append("no picture")
    faults += [f"error {o.ename}" for o in outputs if o.output_type == "error"]
    faults += [f"stderr: {o.text}" for o in outputs if o.get("name") == "stderr"]
    for cell in notebook.cells:
        for text in texts_of(cell):
            faults += [f"path {path}" for path in _ABSOLUTE.findall(text)]
    return faults


@pytest.fixture(params=sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def notebook(request):
    return nbformat.read(request.param, as_version=4)


def test_there_is_a_notebook():
    assert [path.name for path in NOTEBOOKS.glob("*.ipynb")]


def test_a_notebook_stands_as_it_ran_and_names_no_path_of_a_machine(notebook):
    nbformat.validate(notebook)
    assert faults_of(notebook) == []


@pytest.mark.long
def test_a_notebook_runs_from_top_to_bottom(notebook, tmp_path):
    had = [kinds_of(cell) for cell in notebook.cells]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    assert faults_of(notebook) == []
    assert [kinds_of(cell) for cell in notebook.cells] == had
    assert list(tmp_path.iterdir()) == []  # it leaves nothing where it ran


@pytest.fixture
def clean():
    """A notebook of two cells that ran."""
    new = nbformat.v4
    said = new.new_output("stream", text="read a/b/c of 3/4, see https://x.org/a/b")
    picture = new.new_output("display_data", data={"image/png": "/9j/4AAQ/Sk/"})
    cells = [
        new.new_code_cell("1", outputs=[said], execution_count=1),
        new.new_code_cell("2", outputs=[picture], execution_count=2),
    ]
    return new.new_notebook(cells=cells)


def test_a_clean_notebook_has_no_fault(clean):
    assert faults_of(clean) == []


@pytest.mark.parametrize(
    "text",
    ["/home/me/x.py", "in '/tmp/a/b': 1", "(/Users/me)", r"C:\Users", "~/.cache/x"],
)
def test_a_path_of_a_machine_would_be_seen(clean, text):
    if text == "(/Users/me)":
        clean.cells[0].source = text
    else:
        clean.cells[0].outputs[0].text = text
    assert any(fault.startswith("path ") for fault in faults_of(clean))


def test_what_did_not_run_cleanly_would_be_seen(clean):
    new = nbformat.v4
    clean.cells[1].execution_count = 5
    clean.cells[1].outputs = [
        new.new_output("error", ename="ValueError", evalue="no", traceback=[]),
        new.new_output("stream", name="stderr", text="a warning"),
    ]
    assert faults_of(clean) == [
        "cells ran in the order [1, 5]",
        "no picture",
        "error ValueError",
        "stderr: a warning",
    ]
