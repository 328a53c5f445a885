"""The scheduler: refusals at once, fair turns, pages that all come back."""

import random

import pytest

from kvmem import errors
from kvmem.prefix import Hit


def run(scheduler, eos_every=None, limit=10_000):
    """Drive a scheduler with made-up tokens until it has no work; list each step."""
    steps = []
    for tick in range(limit):
        if not scheduler.has_work:
            return steps
        scheduler.admit()
        work = scheduler.plan()
        assert work is not None, "work is left and nothing runs"
        steps.append((work.kind, [row.sequence.request_id for row in work.rows]))
        for sequence in scheduler.advance(work):
            if sequence.sample == 0 and not sequence.output_ids:
                for sample in range(1, sequence.sampling.n):
                    scheduler.fork(sequence, sequence.twin(sample, Quiet()))
            accept(scheduler, sequence, tick)
        for sequence in list(scheduler.running):
            if sequence.num_left == 0:
                accept(scheduler, sequence, tick)
    raise AssertionError("the scheduler never ended")


class Quiet:
    def push(self, token):
        return ""

    def finish(self):
        return ""


def accept(scheduler, sequence, tick):
    sequence.accept(tick % 97, frozenset(), None)
    if sequence.finish_reason:
        scheduler.finish(sequence)


@pytest.mark.case("BUD-08")
def test_a_sequence_that_can_never_fit_is_refused_at_once(scheduler, new_sequence):
    made = scheduler(num_pages=8, page_size=16)
    with pytest.raises(errors.OutOfPages, match="needs 13 pages .* has 8"):
        made.add(new_sequence(range(196), max_tokens=5))
    assert not made.has_work
    made.add(new_sequence(range(100), max_tokens=28))


@pytest.mark.parametrize(
    ("prompt", "sampling", "phrase"),
    [
        (0, {}, "empty prompt"),
        (250, {"max_tokens": 7}, "at most 256 tokens"),
        (4, {"n": 5}, "4 rows"),
    ],
)
def test_requests_outside_the_limits_are_refused(
    scheduler, new_sequence, prompt, sampling, phrase
):
    made = scheduler(num_pages=100)
    with pytest.raises(errors.ConfigError, match=phrase):
        made.add(new_sequence(range(prompt), **sampling))


def test_prefill_chunks_and_decode_batches_take_turns(scheduler, new_sequence):
    made = scheduler(num_pages=32, chunk=4)
    made.add(new_sequence(range(4), max_tokens=8))
    made.add(new_sequence(range(50, 66), max_tokens=2))
    kinds = [kind for kind, _ in run(made)]
    assert kinds[:9] == ["prefill", "decode"] * 4 + ["prefill"]
    assert set(kinds[9:]) == {"decode"}


def test_a_prefix_hit_that_leaves_one_token_decodes_at_once(scheduler, new_sequence):
    made = scheduler(num_pages=32)
    made.add(new_sequence(range(9), max_tokens=1))
    assert run(made) == [("prefill", [0]), ("decode", [0])]
    made.add(new_sequence(range(9), max_tokens=1))
    assert run(made) == [("decode", [1])]


def test_a_batch_has_no_more_rows_than_it_may(scheduler, new_sequence):
    made = scheduler(num_pages=64, max_batch=3)
    for i in range(5):
        made.add(new_sequence(range(10 * i, 10 * i + 3), max_tokens=3, n=1 + i % 2))
    assert max(len(rows) for _, rows in run(made)) <= 3
    assert made.table.accounts().in_use == 0


def test_samples_of_a_prompt_share_its_pages(scheduler, new_sequence):
    made = scheduler(num_pages=64, max_batch=4)
    leader = new_sequence(range(10), n=3, max_tokens=2)
    made.add(leader)
    made.admit()
    for _ in range(2):
        made.advance(made.plan())
    for sample in (1, 2):
        made.fork(leader, leader.twin(sample, Quiet()))
    tables = [s.vpages for s in made.running]
    assert len({tuple(t[:2]) for t in tables}) == 1
    assert len({t[2] for t in tables}) == 3
    assert made.table.accounts().in_use == 5


def test_the_newest_gives_its_pages_back_when_they_run_short(scheduler, new_sequence):
    made = scheduler(num_pages=8, page_size=4, max_batch=2)
    made.add(new_sequence(range(12), max_tokens=16))
    made.add(new_sequence(range(20, 32), max_tokens=16))
    finished = [rows[0] for kind, rows in run(made) if kind == "decode"]
    assert made.num_preempted >= 1
    assert finished.index(0) < finished.index(1)
    free, evictable, in_use, total = made.table.accounts()
    assert (in_use, free + evictable) == (0, total)


@pytest.mark.case("ALC-04")
def test_a_sequence_that_ended_gives_its_pages_back_once(scheduler, new_sequence):
    made = scheduler(page_size=4)
    sequence = new_sequence(range(3), max_tokens=2)
    made.add(sequence)
    made.admit()
    made.advance(made.plan())
    accept(made, sequence, 1)
    made.plan()  # the step reserves the slot of the token that ends the sequence
    made.drop(sequence)
    assert made.table.accounts().free == 8
    with pytest.raises(errors.InvalidId, match="given back then"):
        made.drop(sequence)
    assert made.table.accounts().free == 8


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_every_page_comes_back_after_random_traffic(scheduler, new_sequence, page_size):
    rng = random.Random(page_size)
    made = scheduler(num_pages=200 // page_size, page_size=page_size, chunk=16)
    stems = [[rng.randrange(97) for _ in range(40)] for _ in range(3)]
    for _ in range(60):
        prompt = rng.choice(stems)[: rng.randrange(1, 40)] + [rng.randrange(97)]
        made.add(
            new_sequence(
                prompt, max_tokens=rng.randrange(1, 30), n=rng.choice((1, 1, 3))
            )
        )
        if rng.random() < 0.3:
            run(made)
        elif rng.random() < 0.2:
            made.admit()
            made.drop(rng.choice([*made.running, *made.waiting]))
    run(made)
    free, evictable, in_use, total = made.table.accounts()
    assert (in_use, free + evictable) == (0, total)
    made.table.clear_cache()
    assert made.table.accounts().free == total


def test_a_sequence_is_sent_back_at_most_twice_before_another_ends(
    scheduler, new_sequence
):
    """An outsider takes the free pages whenever the newer sequence has begun."""
    made = scheduler(num_pages=24)
    older, newer = (
        new_sequence(range(seed, seed + 4), max_tokens=60) for seed in (0, 40)
    )
    made.add(older)
    made.add(newer)
    begun = []
    for _ in range(3):
        begun.append([each.sequence for each in made.admit()])
        free = made.table.accounts().free
        outsider = made.table.begin(Hit(0, (), ""), [7] * (free * 4))
        before = newer.num_retracted
        while newer.held is not None and newer.num_retracted == before:
            for sequence in made.advance(made.plan()):
                sequence.accept(50, frozenset(), None)
        made.table.give_back(outsider)
        if newer.num_retracted == 2:
            break
    assert begun == [[older, newer], [newer]]
    assert (made.admit(), newer.num_retracted) == ([], 2)
    made.finish(older)
    assert [each.sequence for each in made.admit()] == [newer]
    assert newer.num_retracted == 0
