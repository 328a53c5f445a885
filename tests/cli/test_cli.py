"""The console: verbs, exit codes, messages in three beats, and what --help says."""

import dataclasses
import importlib
import json
import re
import shlex
import subprocess
import sys
import time

import pytest

from kvmem import cli, console, errors


def run(*argv: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "kvmem.cli", *argv],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_help_lists_every_verb_with_its_first_line(capsys):
    assert cli.main(["--help"]) == 0
    page = capsys.readouterr().out
    for verb, line in cli.VERBS.items():
        module = importlib.import_module(f"kvmem.cli.{verb}")
        assert module.__doc__.splitlines()[0] == line
        assert module.Arguments.__doc__.splitlines()[0] == line
        assert f"{verb} " in page and line in page


def test_help_comes_at_once_and_loads_no_room():
    code = (
        "import sys; from kvmem import cli; cli.main(['--help']);"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in "
        "('jax', 'numpy', 'tyro', 'rich', 'cattrs')))"
    )
    took = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        took.append(time.perf_counter() - start)
    assert done.stdout.splitlines()[-1] == "[]"
    assert min(took) < 0.3


def test_no_verb_at_all_is_a_question_for_help(capsys):
    assert cli.main([]) == 0
    assert "usage: kvmem VERB" in capsys.readouterr().out


def test_an_unknown_verb_is_bad_input(capsys):
    assert cli.main(["plane"]) == 2
    assert "'plane': kvmem has no such verb. Use one of plan" in capsys.readouterr().err


def test_the_version_is_the_packages(capsys):
    assert cli.main(["--version"]) == 0
    assert re.fullmatch(r"kvmem \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_a_bad_flag_is_bad_input():
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", "x.toml", "--page-size", "many"])
    assert stopped.value.code == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("a: b. c."), 2),
        (errors.IncompatiblePlan("a: b. c."), 2),
        (errors.OutOfPages("a: b. c."), 2),
        (FileNotFoundError(2, "No such file", "x"), 2),
        (errors.CorruptPage("a: b. c."), 1),
        (ZeroDivisionError("x"), 1),
        (KeyboardInterrupt(), 1),
    ],
)
@pytest.mark.parametrize("debug", [False, True])
def test_an_error_has_its_exit_code_and_its_traceback_only_with_debug(
    error, code, debug, capsys
):
    def job() -> int:
        raise error

    assert console.guard(job, debug) == code
    said = capsys.readouterr().err
    assert ("Traceback" in said) == debug
    assert said.splitlines()[-1].startswith("kvmem: ")


def test_a_fault_of_our_own_is_not_blamed_on_the_input(capsys):
    console.guard(lambda: [][1], debug=False)
    assert "IndexError" in (said := capsys.readouterr().err)
    assert "a fault of kvmem, not of its input" in said and "--debug" in said


def test_a_reader_that_has_seen_enough_is_no_error():
    done = subprocess.run(
        f"{shlex.quote(sys.executable)} -m kvmem.cli doctor --json | head -n 1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "{\n" and done.stderr == ""


@pytest.mark.case("CFG-04")
@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_default_of_help_is_the_codes(verb, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "400")
    module = importlib.import_module(f"kvmem.cli.{verb}")
    with pytest.raises(SystemExit):
        cli.main([verb, "--help"])
    said = _defaults(capsys.readouterr().out)
    owners = getattr(module, "SETTINGS", {})
    for field in dataclasses.fields(module.Arguments):
        flag = f"--{field.name.replace('_', '-')}"
        if field.default is dataclasses.MISSING:
            continue
        assert said[flag] == _spelled(field, owners.get(field.name)), flag


def _defaults(page: str) -> dict[str, str]:
    """Return flag -> what the help page says of its default."""
    rows = [line.strip("│| ") for line in page.splitlines()]
    found = {}
    for row in rows:
        if not re.match(r"--[a-z]", row):
            continue
        said = re.search(r"\((default: .*|repeatable|required)\)$", row)
        assert said, row
        found[row.split()[0]] = said[1]
    return found


def _spelled(field: dataclasses.Field, owner) -> str:
    """Return how help must spell the default that the code has."""
    if field.default == ():
        return "repeatable"
    if owner is None:
        plain = field.default is not None
        return f"default: {field.default}" if plain else "default: the config's"
    room, name = owner
    (default,) = [f.default for f in dataclasses.fields(room) if f.name == name]
    tail = "" if default is None else f", else {default}"
    return f"default: the config's{tail}"


def test_a_wrong_default_of_help_would_be_seen():
    page = "│ --tp N   head shards. (default: the config's, else 2)   │"
    assert _defaults(page) == {"--tp": "default: the config's, else 2"}


def test_config_shows_values_and_sources(repo_root, capsys):
    path = str(repo_root / "configs" / "models" / "smollm2.toml")
    assert cli.main(["config", path, "--set", "topology.tp=3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["topology.tp"] == {"value": 3, "source": "--set"}
    assert found["model.source"]["source"] == f"file {path}"
    assert cli.main(["config", path, "--set", "topology.tq=3"]) == 2
    assert "nearest known key is topology.tp" in capsys.readouterr().err


def test_doctor_says_devices_versions_and_why(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert len(facts["devices"]) == 8 and facts["platform"] == "cpu"
    assert {"kvmem", "python", "jax", "jaxlib"} <= set(facts["versions"])
    runs = {row["operation"]: row for row in facts["implementations"]}
    assert runs["attend"]["implementation"] == "xla"
    assert "no kernel exists yet" in runs["attend"]["reason"]
    assert runs["export_records"]["implementation"] == "host"
    assert cli.main(["doctor"]) == 0
    assert "operations" in capsys.readouterr().out


def test_the_command_runs_as_a_module_too():
    done = run("plan", "nowhere.toml")
    assert done.returncode == 2
    assert done.stderr.startswith("kvmem: config nowhere.toml: No such file")
    assert "Traceback" not in done.stderr
