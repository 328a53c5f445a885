"""What the README says is what the code does."""

import dataclasses
import pathlib
import re
import subprocess
import sys

import pytest

from kvmem import cli, settings
from kvmem.config import Config
from kvmem.serve import SamplingParams


@pytest.fixture(scope="module")
def readme(repo_root: pathlib.Path) -> str:
    return (repo_root / "README.md").read_text()


def known_defaults() -> dict[str, object]:
    """Return every setting of a config, and every sampling parameter."""
    found = {}
    for asks_for_blending in ("blend.gate=z", "blend.ratio=1.0"):  # none by default
        overrides = ["model.source=x", "draft.source=y", asks_for_blending]
        loaded = settings.read(Config, None, overrides)
        found |= {s.key: s.value for s in loaded.settings if s.source == "default"}
    sampling = dataclasses.asdict(SamplingParams())
    return found | {f"sampling.{name}": value for name, value in sampling.items()}


def documented_defaults(text: str) -> dict[str, str]:
    """Return key -> default of every table whose header names a default column."""
    found, column = {}, None
    for line in text.splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]
        if not line.lstrip().startswith("|"):
            column = None
        elif column is None:
            column = cells.index("default") if "default" in cells else -1
        elif column > 0 and not set(line) <= set("|-: "):
            found[cells[0]] = cells[column]
    return found


def spelled(value: object) -> str:
    """Return how a table spells a default."""
    if isinstance(value, str):
        return f'"{value}"'
    if value is None or value == ():
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


@pytest.mark.case("CFG-04")
def test_every_default_in_the_readme_is_the_codes(readme):
    known = known_defaults()
    documented = documented_defaults(readme)
    assert documented
    for key, said in documented.items():
        assert key in known, f"the README documents {key}, which is no setting"
        assert said == spelled(known[key]), key


def undocumented(text: str) -> set[str]:
    """Return the settings that stand in no table; a draft's are the model's."""
    known = {key for key in known_defaults() if not key.startswith("sampling.")}
    known = {key for key in known if not key.startswith("draft.")}
    return known - documented_defaults(text).keys()


@pytest.mark.case("CFG-04")
def test_every_setting_stands_in_the_readme(readme):
    assert undocumented(readme) == set()
    assert "`model.source` has no default" in readme


def test_a_setting_that_the_readme_forgets_would_be_seen(readme):
    assert "pool.page_size" in undocumented("")
    row = next(line for line in readme.splitlines() if "`pool.page_size`" in line)
    assert undocumented(readme.replace(row, "| `x` | 1 | y |")) == {"pool.page_size"}


def test_a_wrong_or_unknown_default_would_be_seen():
    table = (
        "| setting | default | what |\n|---|---|---|\n"
        "| `pool.page_size` | `17` | x |\n| `pool.memory` | none | x |\n\n"
        "| other | what |\n|---|---|\n| `pool.pages` | 3 |\n"
    )
    found = documented_defaults(table)
    assert found == {"pool.page_size": "17", "pool.memory": "none"}
    known = known_defaults()
    assert spelled(known["pool.page_size"]) == "16" != found["pool.page_size"]
    assert spelled(known["pool.memory"]) == "none"
    assert spelled(known["pool.order"]) == '"head_major"'
    assert spelled(known["pool.poison"]) == "false"


def code_of(text: str) -> str:
    """Return what stands in fences, in indented blocks and between backticks."""
    fences = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^    (.*)$", text, re.MULTILINE)
    return "\n".join([*fences, *indented, *re.findall(r"`([^`\n]+)`", text)])


def test_every_command_in_the_readme_exists(readme, repo_root):
    makefile = (repo_root / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    code = code_of(readme)
    named = set(re.findall(r"^(?:\$ )?make ([a-z-]+)", code, re.MULTILINE))
    assert {"demo", "test"} <= named <= targets
    verbs = re.findall(r"^(?:\$ )?kvmem ([a-z]+)", code, re.MULTILINE)
    assert {"plan", "generate", "doctor"} <= set(verbs) <= set(cli.VERBS)


def test_every_file_that_the_readme_names_exists(readme, repo_root):
    named = re.findall(r"`((?:configs|experiments|kvmem|tests)/[\w./-]+)`", readme)
    named += re.findall(r"\]\((?!http)([\w./-]+)\)", readme)
    assert len(named) > 10
    missing = [name for name in named if not (repo_root / name).exists()]
    assert missing == []


def python_blocks(text: str) -> list[str]:
    """Return the code of every ```python block."""
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_every_python_block_of_the_readme_runs(readme, repo_root):
    blocks = python_blocks(readme)
    assert blocks
    for block in blocks:
        done = subprocess.run(
            [sys.executable, "-c", block],
            cwd=repo_root,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{block}\n{done.stderr}"


def test_a_python_block_is_found_where_it_stands():
    text = "a\n```python\nx = 1\n```\n```toml\ny = 2\n```\n```python\nz\n```\n"
    assert python_blocks(text) == ["x = 1\n", "z\n"]
