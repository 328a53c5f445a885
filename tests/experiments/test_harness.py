"""A run leaves a record that says what it supports, and nothing when it failed to."""

import dataclasses
import json
import pathlib

import pytest

import experiments.__main__ as command
from experiments import harness
from experiments.harness import Calibration, Check, Load, Record, RunConfig
from kvmem import errors

QUIET = Load(0.1, 2, 0.0)
NOISY = Load(3.0, 2, 1.5)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Stand in an empty folder, on a machine whose load a test decides."""
    monkeypatch.chdir(tmp_path)
    loads = [QUIET]

    def look() -> Load:
        return loads.pop(0) if len(loads) > 1 else loads[0]

    monkeypatch.setattr(harness, "observe_load", look)
    monkeypatch.setattr(harness, "calibrate", lambda: Calibration(20.0, 1e7, 100.0))
    return loads


def correct(ok: bool = True, **more) -> Record:
    checks = (Check("tokens equal", ok, "64 of 64"),)
    return Record("spine", "correctness", "tokens agree", "xla", checks=checks, **more)


def measured(**more) -> Record:
    figures = {"resume_ms": 20.0}
    return Record(
        "first token", "measurement", "a ratio", "xla", 9, measurements=figures, **more
    )


def test_a_run_writes_one_record_with_everything_beside_it(machine):
    records = [correct(facts={"store_root": "runs/x/store"}), measured()]
    data = harness.execute("x", object(), iter(records))
    written = json.loads(pathlib.Path("runs/x/record.json").read_text())
    assert written == json.loads(json.dumps(data, default=harness._plain))
    assert written["ok"] is True and written["store_root"] == "runs/x/store"
    assert written["checks"] == [
        {"name": "tokens equal", "ok": True, "detail": "64 of 64"}
    ]
    assert written["measurements"] == {"resume_ms": 20.0}
    assert written["busy"] is None
    assert written["calibration"]["memcpy_gb_per_s"] == 20.0
    first, second = written["records"]
    assert (first["kind"], second["kind"]) == ("correctness", "measurement")
    assert second["repetitions"] == 9 and second["implementation"] == "xla"
    assert "8 x cpu" in first["device"]
    assert {"kvmem", "python", "jax", "jaxlib"} <= set(first["versions"])


def test_one_failed_check_fails_the_run(machine):
    other = dataclasses.replace(correct(), name="other")
    assert harness.execute("x", object(), [other, correct(ok=False)])["ok"] is False


def test_a_run_of_correctness_alone_carries_no_figures_of_the_machine(machine):
    data = harness.execute("x", object(), [correct()])
    assert "calibration" not in data and "load_before" not in data


@pytest.mark.parametrize(
    "changes",
    [
        {"measurements": {"resume_ms": 1.0}},
        {"measurements": {"tokens_per_s": 1.0}},
        {"supports": "resume is faster"},
        {"supports": "12 tokens/s"},
        {"checks": (Check("speedup", True, ""),)},
        {"checks": (Check("fine", True, "took 3 seconds"),)},
        {"facts": {"latency_us": 3}},
    ],
)
def test_a_correctness_record_carries_no_word_of_speed(changes):
    with pytest.raises(errors.ConfigError, match="no word of speed"):
        dataclasses.replace(correct(), **changes)


def test_ordinary_words_are_not_words_of_speed():
    words = "the second reader had breakfast in 3 steps, rooms_seen"
    assert dataclasses.replace(correct(), supports=words).supports == words


def test_a_measurement_of_a_busy_machine_is_marked(machine):
    machine[:] = [QUIET, NOISY]
    data = harness.execute("x", object(), [measured()])
    assert data["busy"].startswith("other processes used 1.50 of 2 cores")


def test_a_quiet_machine_publishes(machine):
    harness.execute("x", RunConfig(publish=True), [measured()])
    published = json.loads((harness.RECORDS / "x.json").read_text())
    assert published["measurements"] == {"resume_ms": 20.0}


def test_a_busy_machine_publishes_nothing_and_does_not_even_start(machine):
    machine[:] = [NOISY]
    ran = []

    def run():
        ran.append(1)
        yield measured()

    with pytest.raises(errors.Busy, match="the machine is busy: other processes used"):
        harness.execute("x", RunConfig(publish=True), run())
    assert ran == [] and not harness.RECORDS.exists()


def test_a_machine_that_became_busy_publishes_nothing(machine):
    machine[:] = [QUIET, NOISY]
    with pytest.raises(errors.Busy):
        harness.execute("x", RunConfig(publish=True), [measured()])
    assert pathlib.Path("runs/x/record.json").exists()
    assert not harness.RECORDS.exists()


def test_a_person_may_publish_from_a_busy_machine_and_the_record_says_so(machine):
    machine[:] = [NOISY]
    harness.execute("x", RunConfig(publish=True), [measured()], allow_busy=True)
    assert json.loads((harness.RECORDS / "x.json").read_text())["busy"]


def test_a_run_that_breaks_leaves_no_record_of_an_earlier_one(machine):
    harness.execute("x", object(), [correct()])

    def broken():
        yield correct()
        raise errors.OutOfPages("a: b. c.")

    with pytest.raises(errors.OutOfPages):
        harness.execute("x", object(), broken())
    assert list(pathlib.Path("runs/x").iterdir()) == []


def test_no_figure_is_said_twice(machine):
    with pytest.raises(AssertionError, match="resume_ms"):
        harness.execute("x", object(), [measured(), measured()])


EXPERIMENT = '''"""A thing that is shown."""
import dataclasses
from experiments.harness import Check, Record

@dataclasses.dataclass(frozen=True)
class Config:
    tokens: int = 3

def run(config):
    yield Record("r", "correctness", "it holds", "host",
                 checks=(Check("three", config.tokens == 3, str(config.tokens)),))
'''


@pytest.fixture
def shelf(machine, monkeypatch, tmp_path):
    """Give `python -m experiments` one experiment, `shown`, and its config."""
    house = tmp_path / "house"
    house.mkdir()
    (house / "shown.py").write_text(EXPERIMENT)
    (house / "helper.py").write_text('"""No experiment."""\n')
    config = tmp_path / "configs" / "shown.toml"
    config.parent.mkdir()
    config.write_text("tokens = 3\n")
    monkeypatch.setattr(command, "_HOME", house)
    monkeypatch.setattr("experiments.__path__", [str(house)])
    monkeypatch.delitem(command.sys.modules, "experiments.shown", raising=False)
    return config


def test_a_config_runs_the_experiment_of_its_stem(shelf, capsys):
    assert command.main(["run", str(shelf)]) == 0
    assert "ok: runs/shown/record.json" in capsys.readouterr().out
    data = json.loads(pathlib.Path("runs/shown/record.json").read_text())
    assert data["config"]["tokens"] == {"value": 3, "source": f"file {shelf}"}


def test_a_failed_check_is_exit_code_1(shelf, capsys):
    assert command.main(["run", str(shelf), "--set", "tokens=4"]) == 1
    said = capsys.readouterr().out
    assert "FAILED" in said and "1 of 1 checks failed" in said


def test_bad_input_is_exit_code_2(shelf, capsys):
    assert command.main(["run", str(shelf), "--set", "token=4"]) == 2
    assert "nearest known key is tokens" in capsys.readouterr().err
    assert command.main(["run", "configs/other.toml"]) == 2
    assert "no experiment of that stem" in capsys.readouterr().err
    assert command.main(["walk"]) == 2


def test_the_list_names_experiments_and_not_their_helpers(shelf, capsys):
    assert command.main(["list"]) == 0
    said = capsys.readouterr().out
    assert "shown" in said and "A thing that is shown." in said
    assert "helper" not in said


def test_a_smoke_config_runs_the_same_experiment_under_a_name_of_its_own(shelf):
    smoke = shelf.parent / "smoke" / "shown.toml"
    smoke.parent.mkdir()
    smoke.write_text("")
    assert command.main(["run", str(smoke)]) == 0
    assert pathlib.Path("runs/smoke-shown/record.json").exists()


@pytest.mark.parametrize("name", ["../../x", "a/b", "", ".", "..", "/x", "-x", "a\n"])
def test_a_run_is_named_by_one_folder(name, tmp_path, monkeypatch):
    home = tmp_path / "a" / "b" / "c"
    home.mkdir(parents=True)
    monkeypatch.chdir(home)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(errors.ConfigError, match="it names one folder in runs/"):
        harness.execute(name, object(), iter(()))
    assert sorted(tmp_path.rglob("*")) == before
