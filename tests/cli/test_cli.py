"""The console: verbs, exit codes, messages in three beats, and what --help says."""

import dataclasses
import errno
import importlib
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import time

import pytest

from kvmem import cli, console, errors, exits


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
        (OSError(errno.ENOSPC, "No space left on device"), 2),
        (RuntimeError("Unable to initialize backend 'cuda': no such\nmore"), 2),
        (UnicodeEncodeError("ascii", "\u00e9", 0, 1, "no code"), 2),
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


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "the output, or a file without a name: No space left on device. "
            "Free space there, or give a path on another disk.",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device", "x"),
            "x: No space left on device. Free space there, or give a path on another "
            "disk.",
        ),
        (OSError("odd"), "the output, or a file without a name: odd. Mend that"),
        (FileNotFoundError(2, "No such file", "a"), "a: No such file. Give a path"),
        (FileExistsError(17, "There", "a", None, "b"), "a to b: There. Give a path"),
    ],
)
def test_what_the_machine_refuses_is_said_with_what_would_work(error, said):
    code, words = exits.verdict(error)
    assert code == 2 and words.startswith(said) and "None" not in words


VERBS_THAT_PRINT = [
    "kvmem.cli doctor --json",
    "kvmem.cli doctor",
    "kvmem.cli --help",
    "kvmem.cli plan --help",
    "experiments list",
    "experiments --help",
]


def shell(line: str, **env: str) -> subprocess.CompletedProcess:
    line = f"{shlex.quote(sys.executable)} -m {line}"
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | env,
    )


@pytest.mark.parametrize("command", VERBS_THAT_PRINT)
def test_a_reader_that_has_seen_enough_is_no_error(command):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as output:
        done = subprocess.run(
            [sys.executable, "-m", *command.split()],
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", VERBS_THAT_PRINT)
def test_output_that_finds_no_space_is_refused_in_words(command):
    done = shell(f"{command} > /dev/full")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "kvmem: the output, or a file without a name: No space left on device. Free"
    )
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_a_command_that_is_interrupted_while_it_loads_says_so(tmp_path):
    slow = tmp_path / "tyro.py"
    slow.write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    done = shell("kvmem.cli doctor", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (1, "kvmem: interrupted\n")


def test_a_platform_that_is_not_here_is_said_in_words():
    done = shell("kvmem.cli doctor", JAX_PLATFORMS="cuda")
    assert done.returncode == 2 and "fault of kvmem" not in done.stderr
    assert "JAX_PLATFORMS=cuda: jax finds no such device here" in done.stderr
    assert "Traceback" not in done.stderr


def test_characters_that_the_output_has_no_code_for_are_escaped():
    code = (
        "import sys; from kvmem import exits;"
        "sys.exit(exits.guard(lambda: print('caf\u00e9 \u2026') or 0, False))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == b"caf\\xe9 \\u2026\n"


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
        expected = _spelled(field, owners.get(field.name))
        assert said[flag] == expected, flag


def _defaults(page: str) -> dict[str, str]:
    """Return flag -> what the help page says of its default."""
    rows = [line.strip("│| ") for line in page.splitlines()]
    found = {}
    for row, below in itertools.pairwise([*rows, ""]):
        flag = re.match(r"(?:-\w [A-Z]+, )?(--[a-z][a-z-]*)", row)
        if not flag:
            continue
        # A flag that is long has its help in the line below.
        said = re.search(r"\((default: .*|repeatable|required)\)$", f"{row} {below}")
        said = re.search(r"\((default: .*|repeatable|required)\)$", row) or said
        assert said, row
        found[flag[1]] = said[1]
    return found


def _spelled(field: dataclasses.Field, owner) -> str:
    """Return how help must spell the default that the code has."""
    if field.default == ():
        return "repeatable"
    if owner is None:
        if field.default == "":
            return "default: none"
        if field.default is None:
            return "default: the config's"
        return f"default: {shlex.quote(str(field.default))}"
    room, name = owner
    (default,) = [f.default for f in dataclasses.fields(room) if f.name == name]
    tail = "" if default is None else f", else {default}"
    return f"default: the config's{tail}"


def test_a_wrong_default_of_help_would_be_seen():
    page = (
        "│ --tp N   head shards. (default: the config's, else 2)   │\n"
        "│ -o FILE, --out FILE │\n│          the file. (default: none)  │"
    )
    assert _defaults(page) == {
        "--tp": "default: the config's, else 2",
        "--out": "default: none",
    }


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
    assert "XLA compiles it for cpu" in runs["attend"]["reason"]
    assert runs["transfer.export_records"]["implementation"] == "host"
    assert runs["gather_pages"]["implementation"] == "reference"
    assert "needs a CUDA device, and this is cpu" in runs["gather_pages"]["reason"]
    assert cli.main(["doctor"]) == 0
    assert "operations" in capsys.readouterr().out


def test_the_command_runs_as_a_module_too():
    done = run("plan", "nowhere.toml")
    assert done.returncode == 2
    assert done.stderr.startswith("kvmem: config nowhere.toml: No such file")
    assert "Traceback" not in done.stderr
