"""What one request leaves to another: never across identities, never stale, and why
not."""

import dataclasses
import hashlib

import numpy as np
import pytest

from kvmem import errors, geometry, store
from kvmem.canonical import format_id
from kvmem.serve import Identity, Image, SamplingParams

CAT, DOG = (hashlib.sha256(name).digest() for name in (b"cat", b"dog"))


def text(seed, length):
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def greedy(count, **more):
    return SamplingParams(max_tokens=count, ignore_eos=True, **more)


@pytest.fixture
def open_store(tmp_path, tiny_model):
    """Stores of the tiny model on one root, in chunks of 8 tokens."""

    def make(**options):
        model = tiny_model()
        groups = geometry.group_layers(model.spec.layer_specs("float32"), 4)
        return store.PageStore.open(
            tmp_path / "root",
            model.model_id,
            format_id(groups),
            record_nbytes=groups[0].record_nbytes,
            chunk_tokens=8,
            **options,
        )

    return make


IDENTITIES = {
    "plain": Identity(),
    "adapter math 1": Identity(adapter=("math", 1)),
    "adapter math reloaded": Identity(adapter=("math", 2)),
    "adapter arts": Identity(adapter=("arts", 1)),
    "adapter math, salt arts": Identity(adapter=("math", 1), salt="arts"),
    "adapter arts, salt math": Identity(adapter=("arts", 1), salt="math"),
    "salt": Identity(salt="math"),
    "salt of bytes": Identity(salt=b"math"),
    "tenant": Identity(tenant="math"),
    "cat": Identity(images=(Image(CAT, 0, 4),)),
    "dog": Identity(images=(Image(DOG, 0, 4),)),
    "cat, elsewhere": Identity(images=(Image(CAT, 1, 4),)),
}


@pytest.mark.case("PFX-03")
@pytest.mark.case("PFX-04")
def test_identities_that_differ_share_nothing_in_memory_or_on_disk(engine, open_store):
    prompt = text(0, 20)
    with open_store() as kept:
        made = engine(store=kept, pages=256)
        for name, identity in IDENTITIES.items():
            (output,) = made.generate(prompt, greedy(3), identity)
            assert (output.cached_tokens, output.stored_tokens) == (0, 0), name
            assert output.miss_reason is not None, name
        # 12 identities, two chunks of 8 each
        assert kept.stats().written == 2 * len(IDENTITIES)
        for name, identity in IDENTITIES.items():
            (output,) = made.generate(prompt, greedy(3), identity)
            assert (output.cached_tokens, output.miss_reason) == (16, None), name
        assert made.stats().hits == len(IDENTITIES) == made.stats().admitted / 2
    with open_store(read_only=True) as kept:
        made = engine(store=kept, prefix_cache=False)
        for name, identity in IDENTITIES.items():
            (output,) = made.generate(prompt, greedy(3), identity)
            assert (output.cached_tokens, output.stored_tokens) == (0, 16), name


@pytest.mark.case("PFX-01")
def test_text_before_an_image_is_shared_and_pages_that_touch_it_are_not(
    engine, open_store
):
    one, two = b"\x01" * 30 + b"\xab\xcd", b"\x02" * 30 + b"\xab\xcd"
    prompt = text(1, 33)
    with open_store() as kept:
        made = engine(store=kept)
        first, second = (Identity(images=(Image(d, 18, 8),)) for d in (one, two))
        made.generate(prompt, greedy(2), first)
        (other,) = made.generate(prompt, greedy(2), second)
        assert (other.cached_tokens, other.stored_tokens) == (16, 0)
        (same,) = made.generate(prompt, greedy(2), first)
        assert same.cached_tokens == 32
        (plain,) = made.generate(prompt, greedy(2))
        assert plain.cached_tokens == 16


@pytest.mark.parametrize("position", range(17, 33, 5))
def test_an_image_behind_a_shared_beginning_is_served(engine, position):
    """The mark of a page that the shared text does not reach is no end of it."""
    made, stem = engine(), text(1, 16)
    made.generate([*stem, *text(2, 24)], greedy(2))
    prompt = [*stem, *text(3, 22)]
    identity = Identity(images=(Image(CAT, position, 4),))
    (output,) = made.generate(prompt, greedy(2), identity)
    assert output.cached_tokens == 16
    (again,) = made.generate(prompt, greedy(2), identity)
    assert again.output_ids == output.output_ids and again.cached_tokens == 36


def test_an_image_beyond_the_prompt_is_refused_and_nothing_runs(engine):
    made = engine()
    with pytest.raises(errors.ConfigError, match="within the prompt, of 6 tokens"):
        made.generate(text(2, 6), greedy(2), Identity(images=(Image(CAT, 4, 4),)))
    assert not made.has_work


def test_each_prompt_may_have_an_identity_of_its_own(engine):
    made = engine()
    prompts = [text(3, 12)] * 2
    whose = [Identity(tenant="a"), Identity(tenant="b")]
    made.generate(prompts, greedy(2), whose)
    assert made.stats().cached_tokens == 0
    outputs = made.generate(prompts, greedy(2), whose)
    assert [o.cached_tokens for o in outputs] == [8, 8]
    list(made.stream(prompts[0], greedy(2), Identity(tenant="c")))
    assert made.stats().misses == {"nothing is cached under this identity": 3}


@pytest.mark.case("PFX-07")
@pytest.mark.parametrize(("length", "hit"), [(15, 0), (16, 0), (32, 16), (33, 32)])
def test_one_token_is_left_when_everything_is_cached(engine, length, hit):
    made = engine(page_size=16, pages=16)
    prompt = text(4, 48)
    (whole,) = made.generate(prompt, greedy(1))
    (output,) = made.generate(prompt[:length], greedy(4))
    assert output.cached_tokens == hit
    (fresh,) = engine(page_size=16, pages=16).generate(prompt[:length], greedy(4))
    assert output.output_ids == fresh.output_ids


@pytest.mark.case("PFX-10")
def test_every_request_without_a_hit_has_a_reason(engine, open_store):
    made = engine(page_size=32, pages=8)
    for _ in range(2):
        (output,) = made.generate(text(5, 30), greedy(1))
        assert output.miss_reason == "shorter than one page"
    made.generate(text(6, 32), greedy(1))
    made.generate(text(6, 32), greedy(1))
    made.generate([*text(6, 32), 1], greedy(1))
    made.generate(text(7, 40), greedy(1))
    stats = made.stats()
    assert stats.misses == {
        "shorter than one page": 2,
        "one page exactly, and one token is always left to compute": 2,
        "no cached text of this identity begins with its first page": 1,
    }
    assert stats.hits + sum(stats.misses.values()) == stats.admitted == 6
    assert (stats.prompt_tokens, stats.cached_tokens) == (30 * 2 + 32 * 2 + 73, 32)
    with open_store() as kept:
        made = engine(store=kept, prefix_cache=False)
        made.generate(text(8, 7), greedy(1))
        made.generate(text(8, 20), greedy(1))
        (hit,) = made.generate(text(8, 20), greedy(1))
        assert made.stats().misses == {
            "the prefix cache is off; in the store: shorter than a chunk": 1,
            "the prefix cache is off; in the store: not_found": 1,
        }
        assert hit.miss_reason is None and made.stats().stored_tokens == 16


def test_a_preempted_request_is_counted_once(engine):
    made = engine(pages=16)
    outputs = made.generate([text(50 + i, 14) for i in range(4)], greedy(20))
    stats = made.stats()
    assert stats.preempted > 0 and stats.evicted_pages > 0
    assert (stats.admitted, stats.finished, stats.hits) == (4, 4, 0)
    assert [o.cached_tokens for o in outputs] == [0] * 4
    assert stats.output_tokens == 80


@pytest.mark.case("PFX-08")
def test_a_change_of_weights_leaves_no_hit_and_says_what_is_in_use(engine, open_store):
    prompt, other = text(9, 20), text(10, 20)
    with open_store() as kept:
        made = engine(store=kept)
        made.generate(prompt, greedy(4))
        live = made.add(other, greedy(12))
        waiting = [made.add(text(20 + i, 20), greedy(4)) for i in range(4)]
        for _ in range(3):
            made.step()
        (running, *_) = made.scheduler.running
        written = kept.stats().written
        report = made.reset(weights_epoch=7)
        assert report.weights_epoch == made.stats().weights_epoch == 7
        assert report.num_freed > 0 and live in report.running
        assert set(running.vpages) <= set(report.still_in_use)
        assert made.accounts.in_use == len(report.still_in_use)
        assert made.accounts.evictable == 0
        is_running = [i for i in (live, *waiting) if i in report.running]
        while made.has_work:
            made.step()
        (again,) = made.generate(prompt, greedy(4))
        assert (again.cached_tokens, again.stored_tokens) == (0, 0)
        (mixed,) = made.generate(other, greedy(4))
        assert (mixed.cached_tokens, mixed.stored_tokens) == (0, 0)
        # Of the requests before the reset only those that waited are kept: 2 chunks.
        kept_after = 4 + 1 - len(is_running)
        assert kept.stats().written == written + 2 * (kept_after + 2)
        assert made.generate(prompt, greedy(4))[0].cached_tokens == 16
        evictable = made.accounts.evictable
        back = made.reset(weights_epoch=0)
        assert (back.num_freed, back.still_in_use) == (evictable, ())
        (old,) = made.generate(prompt, greedy(4))
        assert (old.cached_tokens, old.stored_tokens) == (0, 16)


def test_a_reset_counts_on_and_refuses_what_is_no_epoch(engine):
    made = engine()
    assert made.reset().weights_epoch == 1
    assert made.reset() == dataclasses.replace(made.reset(2), weights_epoch=2)
    with pytest.raises(errors.ConfigError, match="an int from 0"):
        made.reset(weights_epoch=-1)
    made.add(text(11, 5), greedy(1), Identity(epoch=2))
    with pytest.raises(errors.ConfigError, match="weights here are of epoch 2"):
        made.add(text(11, 5), greedy(1), Identity(epoch=1))


@pytest.mark.case("PFX-08")
@pytest.mark.parametrize("read_only", [False, True])
def test_a_reset_beside_a_store_says_which_weights(engine, open_store, read_only):
    """Two processes count their resets alike, and their weights are not."""
    prompt = text(15, 20)
    open_store().close()
    with open_store(read_only=read_only) as kept:
        made = engine(store=kept)
        made.generate(prompt, greedy(4))
        evictable = made.accounts.evictable
        with pytest.raises(errors.ConfigError, match="same weights in every process"):
            made.reset()
        assert made.stats().weights_epoch == 0
        assert made.accounts.evictable == evictable > 0
        assert made.reset(weights_epoch=7).weights_epoch == 7


def test_a_reset_with_the_same_weights_only_forgets(engine):
    made = engine()
    request_id = made.add(text(12, 20), greedy(4))
    for _ in range(3):
        made.step()
    made.reset(weights_epoch=0)
    while made.has_work:
        made.step()
    made.take_output(request_id)
    assert made.generate(text(12, 20), greedy(1))[0].cached_tokens == 16


def test_what_is_disowned_is_answered_and_neither_cached_nor_stored(engine, open_store):
    with open_store() as kept:
        made = engine(store=kept)
        (alone,) = made.generate(text(14, 20), greedy(4))
        made.reset(weights_epoch=0)
        written, request_id = kept.stats().written, made.add(text(12, 20), greedy(4))
        for _ in range(3):
            made.step()
        made.reset(weights_epoch=0)
        made.disown()
        while made.has_work:
            made.step()
        assert len(made.take_output(request_id).output_ids) == 4
        assert kept.stats().written == written
        assert made.accounts.evictable == 0
        (again,) = made.generate(text(14, 20), greedy(4))  # later ones are kept again
        assert (again.output_ids, again.stored_tokens) == (alone.output_ids, 16)
        assert made.accounts.evictable > 0


def test_nothing_is_published_before_its_pages_are_filled(engine):
    made = engine(prefill_chunk=16)
    prompt = text(13, 40)
    made.add(prompt, greedy(2))
    for computed in (16, 32):
        made.step()
        assert made.scheduler.running[0].num_computed == computed
        assert made.table.cache.num_pages == 0
    made.step()
    assert made.table.cache.num_pages == 10


@pytest.mark.case("ALC-12")
@pytest.mark.parametrize("ends", ["finish", "abort"])
def test_pages_handed_out_again_during_a_save_change_nothing_of_it(
    engine, open_store, monkeypatch, ends
):
    prompt = text(14, 24)
    with open_store() as kept:
        made, put, saves = engine(store=kept, pages=12), kept.put, []
        monkeypatch.setattr(
            kept, "put", lambda *args, **more: saves.append((args, more))
        )
        request_id = made.add(prompt, greedy(5))
        while made.scheduler.waiting or made.scheduler.running[0].num_left > 1:
            made.step()
        expected = made.records(request_id)[:24].copy()
        sequence = made.scheduler.running[0]
        saved = made.table.ledger.translate(0, sequence.vpages[:6])  # 24 tokens
        before = np.array(made.pool.pages)[:, saved]
        if ends == "abort":
            made.recall.keep(made.pool, sequence)
            assert made.abort(request_id)
        while made.has_work:
            made.step()
        made.reset(weights_epoch=1)
        handed = set()
        for at in range(3):  # every page is handed out again and filled
            made.add(text(30 + at, 40), greedy(4))
            while made.has_work:
                made.step()
                for one in made.scheduler.running:
                    handed |= set(made.table.ledger.translate(0, one.vpages).tolist())
        assert set(saved.tolist()) <= handed
        now = np.array(made.pool.pages)[:, saved]
        assert (now != before).any(axis=(0, 2)).all()
        (args, more), *_ = saves
        monkeypatch.undo()
        put(*args, **more)  # the save ends only now
        found = kept.get(args[0], args[1].reshape(-1))
    assert found.reason is None
    assert (found.records[:24] == expected).all()


def test_the_store_is_asked_for_requests_that_run_never_for_those_that_wait(
    engine, open_store, monkeypatch
):
    """8 pages, 50 requests of 4 pages in turn: nothing is fetched that is not used."""
    texts, asked = [text(60 + t, 15) for t in range(5)], []
    with open_store() as kept:
        made, get = engine(pages=8, store=kept), kept.get
        monkeypatch.setattr(
            kept, "get", lambda *args, **more: asked.append(args) or get(*args, **more)
        )
        for number in range(50):
            made.add(texts[number % 5], greedy(1))
        before = made.table.num_evicted
        while made.has_work:
            made.step()
        stats = made.stats()
    assert (stats.admitted, stats.finished, stats.preempted) == (50, 50, 0)
    assert len(asked) <= 50 and before == 0 < stats.evicted_pages
    found = stats.cached_tokens + stats.stored_tokens
    assert found >= 45 * 8  # all but the first of each text
    assert kept.stats().written == 5


def test_the_policy_of_eviction_is_the_configs(engine):
    for name, kept in (("lru", 0), ("lfu", 16)):
        made = engine(pages=14, eviction=name)
        for _ in range(3):
            made.generate(text(70, 20), greedy(1))
        made.generate(text(71, 20), greedy(1))
        made.generate(text(72, 33), greedy(1))
        assert made.table.match(text(70, 20)[:17]).num_tokens == kept, name
    with pytest.raises(errors.ConfigError, match="eviction is one of lru, lfu"):
        engine(eviction="belady")


@pytest.mark.case("PFX-08")
def test_what_was_computed_across_a_change_is_kept_nowhere_even_if_it_is_undone(
    engine, open_store
):
    prompt = text(80, 20)
    with open_store() as kept:
        made = engine(store=kept)
        request_id = made.add(prompt, greedy(6))
        for _ in range(3):
            made.step()
        made.reset(weights_epoch=1)
        made.step()
        made.reset(weights_epoch=0)
        while made.has_work:
            made.step()
        made.take_output(request_id)
        assert made.table.cache.num_pages == 0 and kept.stats().written == 0
        (again,) = made.generate(prompt, greedy(1))
        assert (again.cached_tokens, again.stored_tokens) == (0, 0)


def test_a_preempted_request_computes_anew_with_the_weights_of_now(
    scheduler, new_sequence
):
    made = scheduler(num_pages=8, page_size=4)
    sequence = new_sequence(range(9), max_tokens=4)
    made.add(sequence)
    made.admit()
    made.advance(made.plan())
    waiting = new_sequence(range(9), max_tokens=4)
    made.add(waiting)
    made.reset(weights_epoch=3)
    assert sequence.is_mixed and sequence.identity.epoch == 0
    assert not waiting.is_mixed and waiting.identity.epoch == 3
    made.drop(waiting)
    made._preempt(sequence)
    assert not sequence.is_mixed and sequence.identity.epoch == 3
    made.admit()
    while sequence.num_left > 1:
        made.advance(made.plan())
    made.advance(made.plan())
    assert made.table.match([*range(9)], sequence.identity).num_tokens == 8
