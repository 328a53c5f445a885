"""bench_moves runs as a whole on its smoke config, and its parts see breaks."""

import json
import pathlib

import jax
import numpy as np
import pytest

import experiments.__main__ as command
from experiments import bench_moves, book_race, page_race, record_race
from experiments.harness import Rounds
from experiments.record_race import Layout


def test_the_smoke_config_runs_every_part(repo_root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    smoke = repo_root / "configs" / "smoke" / "bench_moves.toml"
    assert command.main(["run", str(smoke), "--debug"]) == 0
    data = json.loads(pathlib.Path("runs/smoke-bench_moves/record.json").read_text())
    assert {record["name"] for record in data["records"]} == {
        "moved_records",
        "records_against_memcpy",
        "moved_pages_and_rows",
        "pages_and_rows_against_memcpy",
        "handout_books",
        "zeroed_pages",
        "written_rows",
        "host_books",
    }
    assert len(data["checks"]) == 2 + 4 + 1 + 4 + 2 + 1 + 2


@pytest.fixture
def case():
    specs = bench_moves.Geometry(layers=2, kv_heads=2, head_dim=8).specs()
    (made,) = record_race.make_cases(specs, (Layout(2, "head_major", 0.3),), 40, 4)
    return made


def test_a_record_that_moved_wrongly_is_named(case):
    assert record_race.objections(case) == ()
    raw = np.array(case.pages)
    raw[1, case.page_ids[3], 5] ^= 1
    case.pages = jax.device_put(raw, case.pages.sharding)
    (found,) = record_race.objections(case)
    assert "layers.0" in found


def test_what_is_timed_moves_every_record(case):
    jobs = record_race.jobs([case], (1,))
    case.out[...] = 0
    jobs["tp2_head_major_export_threads_1"]()
    assert (case.out == case.records).all()
    case.records = case.records[::-1].copy()
    jobs["tp2_head_major_import_threads_1"]()
    assert record_race.objections(case) == ()


def test_pages_and_rows_that_moved_wrongly_are_named():
    cases = page_race.make_cases(3, 64, page_race.Row(2, 128, 4), rows=21)
    assert page_race.objections(cases) == ()
    for job in page_race.jobs(cases).values():
        job()
    cases.records = cases.records[::-1].copy()
    assert page_race.objections(cases) == ("blocked-scale rows are not what was put",)
    cases.gather = lambda: None
    cases.page_rows[...] = 0
    assert "gathered pages are not those of the list" in page_race.objections(cases)


def test_cleared_pages_are_the_same_on_both_sides():
    jobs = book_race.zero_jobs(64, 3)
    cleared = np.asarray(jobs[book_race.ZERO]())[0]
    jobs[book_race.MEMSET_PAGES]()
    plain = jobs[book_race.MEMSET_PAGES].__closure__
    pages = next(
        c.cell_contents for c in plain if isinstance(c.cell_contents, np.ndarray)
    )
    assert (cleared == pages).all()
    assert (cleared.sum(axis=1) == 0).sum() == 3


def test_handouts_come_back_so_that_a_pool_never_runs_dry():
    jobs = book_race.handout_jobs((8,), sequences=8, calls=3)
    assert jobs["handout_8_pages"]().seconds > 0


def test_a_cost_that_grows_fails_its_check():
    timed = Rounds({"small": (1.0, 1.0), "large": (1.3, 1.4)})
    assert not bench_moves._does_not_grow("x", timed, "small", "large", 1.25).ok
    assert bench_moves._does_not_grow("x", timed, "small", "small", 1.25).ok


def test_a_missed_target_fails_its_check_with_the_ratio():
    check = bench_moves._at_least("x", 0.39, 0.4, "of memcpy")
    assert not check.ok and check.detail == "0.39 of memcpy, at least 0.4"
    assert bench_moves._at_least("x", 0.4, 0.4, "of memcpy").ok


def test_the_full_config_asks_for_what_was_promised(repo_root):
    from kvmem import settings

    path = repo_root / "configs" / "bench_moves.toml"
    config = settings.read(bench_moves.Config, path).value
    targets = {(lay.tp, lay.order): lay.targets for lay in config.layouts}
    assert targets == {
        (1, "token_major"): (0.4, 0.4),
        (1, "head_major"): (0.4, 0.4),
        (3, "token_major"): (0.3, 0.4),
        (3, "head_major"): (0.3, 0.4),
    }
    assert config.record_tokens * 46_080 >= 64_000_000
    assert config.targets == bench_moves.Targets()
    assert config.rounds == 9 and config.publish
