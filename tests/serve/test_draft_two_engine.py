"""A draft model with a pool of its own: beside the target, and never in its way."""

import dataclasses

import numpy as np
import pytest

from kvmem import errors
from kvmem.model import cut
from kvmem.serve import Identity, SamplingParams
from kvmem.serve.draft import chain, rejection


def text(seed, length):
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def greedy(count, **more):
    return SamplingParams(max_tokens=count, ignore_eos=True, **more)


@pytest.mark.parametrize(
    "kind",
    [
        "full",
        pytest.param("window", marks=pytest.mark.long),
        pytest.param("indexer", marks=pytest.mark.long),
        pytest.param("state", marks=pytest.mark.long),
    ],
)
def test_greedy_tokens_beside_a_draft_model_are_those_without(made, draft_of, kind):
    prompts = [text(seed, 9 + 5 * seed) for seed in range(4)]
    plain = made(kind).generate(prompts, greedy(17))
    drafted = made(kind, draft_of())
    outputs = drafted.generate(prompts, greedy(17))
    assert [o.output_ids for o in outputs] == [o.output_ids for o in plain]
    stats = drafted.stats().drafting
    assert stats.drafted > 0 and not stats.faults
    pages = drafted.verifier.proposer.pages
    assert pages.table.accounts().in_use == 0


def test_a_draft_that_is_the_target_is_always_right(made, tiny_model, draft_of):
    drafted = made("full", draft_of(tiny_model()))
    drafted.generate([text(seed, 9 + 7 * seed) for seed in range(4)], greedy(17))
    stats = drafted.stats().drafting
    assert (stats.accept_rate, stats.tokens_per_step) == (1, 4)


def test_a_window_of_the_draft_is_read_as_it_moves(made, hybrid_model, draft_of):
    target = hybrid_model("window")
    drafted = made("window", draft_of(target))
    drafted.generate([text(seed, 9 + 7 * seed) for seed in range(4)], greedy(17))
    assert drafted.stats().drafting.accept_rate == 1


def test_the_first_layers_of_a_model_draft_for_it(made, tiny_model, draft_of):
    model = tiny_model()
    first = cut.first_layers(model, 1)
    prompts = [text(seed, 12) for seed in range(3)]
    plain = made("full").generate(prompts, greedy(12))
    outputs = made("full", draft_of(first)).generate(prompts, greedy(12))
    assert [o.output_ids for o in outputs] == [o.output_ids for o in plain]


def tables_of(made):
    """The target's table and the draft's."""
    return made.table, made.verifier.proposer.pages.table


def test_a_sequence_begins_in_both_pools_or_in_none(made, draft_of):
    """The draft's pool holds one of the two: the second waits with nothing held."""
    prompts = [text(seed, 18) for seed in (31, 32)]
    plain = made("full").generate(prompts, greedy(8))
    drafted = made("full", draft_of(pages=8))
    begun = [drafted.add(prompt, greedy(8)) for prompt in prompts]
    most = 0
    while drafted.has_work:
        drafted.step()
        running = drafted.scheduler.running
        most = max(most, len(running))
        of_target, of_draft = (table.accounts().in_use for table in tables_of(drafted))
        assert (of_target > 0) == (of_draft > 0) == bool(running)
    outputs = [drafted.take_output(each) for each in begun]
    assert [o.output_ids for o in outputs] == [o.output_ids for o in plain]
    assert most == 1
    assert drafted.stats().drafting.drafted > 0


def test_a_draft_too_small_for_any_text_leaves_the_target_alone(made, draft_of):
    prompts = [text(seed, 18) for seed in (31, 32)]
    plain = made("full").generate(prompts, greedy(8))
    drafted = made("full", draft_of(pages=2))
    outputs = drafted.generate(prompts, greedy(8))
    assert [o.output_ids for o in outputs] == [o.output_ids for o in plain]
    stats = drafted.stats().drafting
    assert stats.drafted == 0
    assert set(stats.faults) == {"the draft's pool has no room"}


@pytest.mark.case("SPC-04")
def test_behind_the_longest_text_of_the_draft_the_target_goes_on_alone(made, draft_of):
    """Draft max 32, target max 64, sequence at 33."""
    drafted = made("full", draft_of(max_length=32), max_length=64)
    prompt = text(33, 28)
    (plain,) = made("full", max_length=64).generate(prompt, greedy(20))
    drafted.add(prompt, greedy(20))
    pages = drafted.verifier.proposer.pages
    with pytest.warns(UserWarning, match="behind 32 tokens") as warned:
        while len(drafted.scheduler.running or [0]) and not warned.list:
            drafted.step()
        (sequence,) = drafted.scheduler.running
        assert len(sequence.tokens) > 32
        before = np.asarray(pages.pool.pages).copy()
        proposed = drafted.stats().drafting.drafted
        for _ in range(3):
            drafted.step()
        np.testing.assert_array_equal(np.asarray(pages.pool.pages), before)
        while drafted.has_work:
            drafted.step()
    assert len(warned.list) == 1
    assert drafted.stats().drafting.drafted == proposed > 0
    assert drafted.take_output(0).output_ids == plain.output_ids


@pytest.mark.case("PFX-11")
def test_one_tenants_text_is_in_neither_cache_of_another(made, draft_of):
    drafted, prompt = made("full", draft_of()), text(34, 19)
    ours, theirs = Identity(salt="s1"), Identity(salt="s2")
    drafted.generate(prompt, greedy(4), ours)
    for table in tables_of(drafted):
        assert table.match(prompt, ours).num_tokens == 16
        assert table.match(prompt, theirs).num_tokens == 0
    (output,) = drafted.generate(prompt, greedy(4), theirs)
    assert output.cached_tokens == 0


def test_what_is_forgotten_is_in_neither_cache(made, draft_of):
    """One text has ended, and one is going on, whose pages are its own."""
    drafted, ended, going = made("full", draft_of()), text(40, 19), text(41, 19)
    drafted.generate(ended, greedy(4))
    drafted.add(going, greedy(12))
    (drafted.step(), drafted.step(), drafted.step(), drafted.step())
    free = [table.accounts().free for table in tables_of(drafted)]
    drafted.disown()
    report = drafted.reset(weights_epoch=0)
    freed = [table.accounts().free for table in tables_of(drafted)]
    assert report.num_freed == sum(freed) - sum(free)
    assert all(after > before for after, before in zip(freed, free, strict=True))
    while drafted.has_work:
        drafted.step()
    for table in tables_of(drafted):
        for forgotten in (ended, going):
            assert table.match([*forgotten, 0]).num_tokens == 0
        assert table.accounts().free == table.ledger.num_pages


def test_a_request_that_waits_for_the_drafts_room_evicts_nothing(made, draft_of):
    """The target has ten cached pages of 24; the draft's eight are held by one."""
    drafted = made("full", draft_of(pages=8), pages=24)
    drafted.generate(text(42, 40), greedy(1))
    cached = drafted.accounts.evictable
    drafted.add(text(43, 26), greedy(8))
    (drafted.step(), drafted.step())
    drafted.add(text(44, 30), greedy(8))
    drafted.step()
    assert len(drafted.scheduler.waiting) == len(drafted.scheduler.running) == 1
    assert drafted.table.num_evicted == 0 and drafted.accounts.evictable >= cached > 0
    while drafted.has_work:
        drafted.step()
    assert drafted.table.num_evicted > 0


@pytest.mark.case("NAN-02")
def test_rows_that_pad_a_batch_write_no_page_of_target_or_draft(made, draft_of):
    """Three rows in a bucket of four: every page that nobody holds is still poison."""
    drafted = made("full", draft_of(), prefix_cache=False)
    for seed in range(3):
        drafted.add(text(35 + seed, 9), greedy(12))
    while drafted.has_work:
        drafted.step()
        pages = drafted.verifier.proposer.pages
        for pool in (drafted.table.apply(drafted.pool), pages.pool):
            free = np.asarray(pool.free)[: int(pool.num_free)]
            assert (np.asarray(pool.pages)[:, free] == 0xFF).all()
    assert drafted.stats().drafting.drafted > 0


def test_a_draft_of_nan_is_a_fault_and_no_accept_rate(made, tiny_model, draft_of):
    broken = tiny_model(seed=1)
    params = {name: np.full_like(w, np.nan) for name, w in broken.params.items()}
    broken = type(broken)(broken.spec, params, broken.tokenizer, "broken")
    prompts = [text(seed, 12) for seed in range(2)]
    plain = made("full").generate(prompts, greedy(6))
    drafted = made("full", draft_of(broken))
    outputs = drafted.generate(prompts, greedy(6))
    assert [o.output_ids for o in outputs] == [o.output_ids for o in plain]
    stats = drafted.stats().drafting
    assert (stats.drafted, stats.accept_rate) == (0, 0)
    assert stats.faults == {"the draft's logits are no numbers": 2 * 4}


@pytest.mark.parametrize("scale", [8e37, np.nan])
def test_a_draft_without_probabilities_is_a_fault_and_ends_no_step(
    made, first_layers, draft_of, scale
):
    """Logits of infinity are no NaN, and what is drawn from them has no chances."""
    small = first_layers()
    norm = small.params["model.norm.weight"] * np.float32(scale)
    params = small.params | {"model.norm.weight": norm}
    broken = dataclasses.replace(small, params=params)
    warm = greedy(8, temperature=0.9, seed=4)
    plain = made("full").generate(text(39, 12), warm)
    drafted = made("full", draft_of(broken, acceptance="rejection"))
    outputs = drafted.generate(text(39, 12), warm)
    assert outputs[0].output_ids == plain[0].output_ids
    stats = drafted.stats().drafting
    assert stats.drafted == 0
    assert stats.faults == {"the draft's logits are no numbers": 6}


def test_a_draft_of_another_kind_is_refused(made, tiny_model, hybrid_model, draft_of):
    with pytest.raises(errors.IncompatiblePlan, match="recurrent state cannot forget"):
        made("full", draft_of(hybrid_model("state")))
    with pytest.raises(errors.IncompatiblePlan, match="pages have 8 tokens"):
        made("full", draft_of(page_size=8))


def test_samples_of_one_prompt_share_the_drafts_pages_of_it(made, draft_of):
    params = SamplingParams(max_tokens=9, temperature=1.2, seed=3, n=3, ignore_eos=True)
    prompt = text(38, 18)
    (plain,) = made("full").generate(prompt, params)
    drafted = made("full", draft_of())
    (output,) = drafted.generate(prompt, params)
    assert output.completions == plain.completions
    assert all(table.accounts().in_use == 0 for table in tables_of(drafted))


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_a_sampled_draft_that_is_the_target_is_always_right(
    made, tiny_model, draft_of, acceptance
):
    drafted = made("full", draft_of(tiny_model(), acceptance=acceptance))
    warm = greedy(13, temperature=1.0, top_k=40, seed=4, logprobs=2)
    outputs = drafted.generate([text(seed, 9) for seed in range(2)], warm)
    assert drafted.stats().drafting.accept_rate == 1
    for output in outputs:
        (completion,) = output.completions
        assert len(completion.logprobs) == 13
        assert all(each.logprob > -20 for each in completion.logprobs)
    with pytest.raises(errors.ConfigError, match="coupled or rejection"):
        draft_of(acceptance="greedy")


@pytest.mark.own_steps
def test_warming_up_leaves_nothing_to_trace_of_target_or_draft(made, draft_of):
    drafted = made("full", draft_of(), widths=(128,))
    drafted.warm_up()
    target, draft = dict(drafted.num_traces), drafted.verifier.proposer.num_traces
    assert set(target) == set(drafted.buckets.all())
    drafted.generate([text(seed, 9 + 11 * seed) for seed in range(4)], greedy(14))
    assert drafted.num_traces == target == dict.fromkeys(target, 1)
    assert drafted.verifier.proposer.num_traces == draft == dict.fromkeys(draft, 1)


def test_warming_up_leaves_nothing_to_trace_of_exact_rejection(
    made, draft_of, first_layers
):
    """One to four sequences, of texts that leave room for one drafted token or all."""
    small = (chain._probabilities, rejection._gather, rejection.accept_sampled)
    for each in small:
        each.clear_cache()
    drafted = made("full", draft_of(first_layers(), acceptance="rejection"))
    drafted.warm_up()
    warm = [each._cache_size() for each in small]
    assert min(warm) > 0
    for count in (1, 2, 4):
        asked = [greedy(3 + 2 * n, temperature=0.9, seed=n) for n in range(count)]
        drafted.generate([text(45 + n, 9 + n) for n in range(count)], asked)
    assert drafted.stats().drafting.drafted > 0
    assert [each._cache_size() for each in small] == warm
