"""The clock stands around an engine's own verbs and leaves it idle."""

import pytest

from experiments import resume_race
from experiments.engine_clock import EngineClock

PROMPTS = [list(range(20)), list(range(40, 60))]


@pytest.mark.parametrize("batch", [1, 2])
def test_every_timed_step_has_the_whole_batch(tiny_engine, batch):
    seconds = EngineClock(tiny_engine).decode(PROMPTS[:batch], steps=4, warm_up=1)
    assert len(seconds) == 4 and all(took > 0 for took in seconds)
    assert not tiny_engine.has_work
    assert tiny_engine.accounts.in_use == 0


def test_a_first_token_is_that_of_the_engine(tiny_engine):
    seconds, output = EngineClock(tiny_engine).first_token(PROMPTS[0])
    assert seconds >= output.first_token_s > 0
    assert len(output.output_ids) == 1
    tiny_engine.table.clear_cache()
    (again,) = tiny_engine.generate([PROMPTS[0]])
    assert again.output_ids[:1] == output.output_ids


def test_the_resumed_side_reads_the_store_at_every_turn(tiny_engine):
    race = resume_race.run(tiny_engine, 70, (72, 8), rounds=2, seed=0)
    assert race.stored_tokens == race.known_tokens == 64
    assert race.same_token
    assert race.best in ("chunk 8", "chunk 72")
    assert race.rounds.num_rounds == 2
    assert not tiny_engine.recall.store.writable
    assert tiny_engine.scheduler.prefill_chunk == 72


def test_the_prefilled_side_reads_by_the_chunks_it_is_offered(tiny_engine, monkeypatch):
    counts, held = [], tiny_engine.scheduler.plan

    def watch():
        work = held()
        counts.append(work.rows[0].count)
        return work

    monkeypatch.setattr(tiny_engine.scheduler, "plan", watch)
    resume_race.run(tiny_engine, 70, (72, 40), rounds=1, seed=0)
    turn = [6, 70, 40, 30]  # resumed: what lies beyond the last whole chunk
    assert counts == [70] + 2 * turn


def test_a_resume_that_misses_the_store_is_seen(tiny_engine, monkeypatch):
    held = tiny_engine.recall.store.get

    def forgets(keys, tokens):
        return held(keys[:3], tokens[: 3 * 8])

    monkeypatch.setattr(tiny_engine.recall.store, "get", forgets)
    race = resume_race.run(tiny_engine, 70, (72,), rounds=1, seed=0)
    assert race.stored_tokens == 24 < race.known_tokens
