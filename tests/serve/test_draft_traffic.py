"""Drafting under random traffic: checked mode counts every page's holders, of target
and draft, at every step."""

import itertools
import random

import pytest

from kvmem.serve import Identity, SamplingParams

WHOSE = (Identity(), Identity(adapter=("a", 1)), Identity(salt="s"))
CASES = {
    "ngram": ("full", 26),
    "ngram on a window": ("window", None),
    "ngram on a state": ("state", None),
    "frozen_kv": ("full", 26),
    "two_engine": ("full", 26),
    "mtp": ("full", 26),
    "dspark": ("full", 26),
}
LAYERED = ("mtp", "dspark", "dflash")


def requests(rng):
    """Texts of few letters, so that they repeat; stems that several share."""
    stems = [[rng.randrange(6) for _ in range(30)] for _ in range(3)]
    while True:
        prompt = rng.choice(stems)[: rng.randrange(2, 28)] + [rng.randrange(6)]
        params = SamplingParams(
            max_tokens=rng.randrange(1, 24),
            temperature=rng.choice((0.0, 0.0, 1.0)),
            top_k=6,
            seed=rng.randrange(9),
            n=rng.choice((1, 1, 3)),
            ignore_eos=True,
        )
        yield prompt, params, rng.choice(WHOSE)


@pytest.mark.parametrize(
    "name", [*list(CASES)[:-1], pytest.param("dspark", marks=pytest.mark.long)]
)
def test_pages_add_up_at_every_step_and_nobody_is_sent_back_thrice(drafted, name):
    """No request is sent back more than twice before another ends."""
    kind, pages = CASES[name]
    rng = random.Random(len(name))
    engine = drafted(name.split()[0], kind=kind, pages=pages, draft_pages=30)
    coming, going, seen = requests(rng), [], {"forked": 0, "aborted": 0, "reset": 0}
    for _ in range(150):
        if len(engine.scheduler.waiting) < 3:
            going.append(engine.add(*next(coming)))
        engine.step()  # raises where a law of either pool is broken
        free, evictable, in_use, total = engine.accounts
        assert free + evictable + in_use == total
        counts = [s.num_retracted for s in engine.scheduler.waiting]
        assert max(counts, default=0) <= 2
        for sequence in engine.scheduler.running:
            held, known = sequence.held, len(sequence.tokens)
            assert len(held.columns[0]) <= -(-known // 4)
        seen["forked"] += any(s.sample for s in engine.scheduler.running)
        if rng.random() < 0.08:
            seen["aborted"] += engine.abort(rng.choice(going))
        if rng.random() < 0.03:
            engine.reset(engine.stats().weights_epoch + rng.randrange(2))
            seen["reset"] += 1
    stats = engine.stats()
    drafting = stats.drafting
    assert min(*seen.values(), stats.evicted_pages, drafting.drafted) > 0
    if kind != "state":  # whose pages end too soon for long drafts
        assert stats.hits > 0
        assert drafting.accepted > 0 or name in LAYERED  # which nobody has trained
    assert drafting.emitted == drafting.steps + drafting.accepted
    for request_id in going:
        engine.abort(request_id)
    assert (engine.accounts.in_use, engine.has_work) == (0, False)
    engine.reset()
    assert engine.accounts.free == engine.accounts.total
    assert engine.verifier.proposer.objections() == ()


@pytest.mark.parametrize(
    "name", ["ngram", "frozen_kv", "two_engine", "mtp", "dspark", "dflash"]
)
def test_each_request_of_drafted_traffic_is_answered_as_alone(drafted, name):
    """24 prompts, as they come, of texts that share pages and pages that run short."""
    rng = random.Random(7)
    asked = list(itertools.islice(requests(rng), 24))
    plain = drafted(None, pages=64)
    want = [plain.generate(list(prompt), params)[0] for prompt, params, _ in asked]
    engine = drafted(name, pages=26, draft_pages=30)
    begun = [engine.add(*each) for each in asked]
    while engine.has_work:
        engine.step()
    found = [engine.take_output(each) for each in begun]
    assert [o.completions for o in found] == [o.completions for o in want]
