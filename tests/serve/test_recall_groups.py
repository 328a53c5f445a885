"""Between pages of several groups and a store of parts: all of a text, or nothing."""

import random
import shutil

import numpy as np
import pytest

from kvmem import errors, geometry, store
from kvmem.canonical import format_id
from kvmem.serve import SamplingParams, landing

KINDS = ("window", "indexer", "state")
CHUNK = 4
LONG = pytest.mark.long


def text(seed, length):
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def greedy(count):
    return SamplingParams(max_tokens=count, ignore_eos=True)


@pytest.fixture
def open_parts(tmp_path, hybrid_model):
    """Open the parts of a hybrid on one root; every store is closed at the end."""
    made = []

    def open_(kind, chunk=CHUNK, **options):
        model = hybrid_model(kind)
        groups = geometry.group_layers(model.spec.layer_specs("float32"), 16)
        parts, ids = store.parts_of(groups), (model.model_id, format_id(groups))
        root = tmp_path / f"root{chunk}"
        made.append(store.PartedStore.open(root, *ids, parts, chunk, **options))
        return made[-1]

    yield open_
    for each in made:
        each.close()


@pytest.mark.cover(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 5, 31, 32])
def test_a_text_is_resumed_by_an_engine_that_never_saw_it(
    hybrid_engine, hybrid_dense, open_parts, kind, length
):
    """At lengths of k chunks and one less, where vLLM #51094 went a token too far."""
    prompt = text(length, length)
    with open_parts(kind) as kept:
        (first,) = hybrid_engine(kind, store=kept).generate(prompt, greedy(20))
    longer = [*prompt, *first.output_ids]
    assert first.output_ids == hybrid_dense(kind, prompt, 20)
    with open_parts(kind, read_only=True) as kept:
        made = hybrid_engine(kind, store=kept, prefix_cache=False)
        for known in (prompt, longer):
            (again,) = made.generate(known, greedy(6))
            assert again.stored_tokens == (len(known) - 1) // CHUNK * CHUNK
            assert again.output_ids == hybrid_dense(kind, known, 6)
    assert made.accounts.in_use == 0


@pytest.mark.parametrize(
    ("kind", "tp", "page_size"),
    [
        ("window", 4, 8),
        pytest.param("state", 2, 16, marks=LONG),
        pytest.param("window", 1, 2, marks=LONG),
        pytest.param("indexer", 4, 8, marks=LONG),
    ],
)
def test_every_topology_and_page_size_reads_what_another_wrote(
    hybrid_engine, hybrid_dense, open_parts, kind, tp, page_size
):
    prompt = text(60, 37)
    with open_parts(kind) as kept:
        made = hybrid_engine(kind, tp=2, store=kept, executor="vmap")
        (first,) = made.generate(prompt, greedy(12))
    longer, pages = [*prompt, *first.output_ids], 512 // page_size
    with open_parts(kind, read_only=True) as kept:
        reader = hybrid_engine(
            kind, tp=tp, page_size=page_size, pages=pages, store=kept, executor="vmap"
        )
        (again,) = reader.generate(longer, greedy(8))
        assert again.stored_tokens == 48
        assert again.output_ids == hybrid_dense(kind, longer, 8)
        (cached,) = reader.generate([*longer, *again.output_ids], greedy(4))
        want = hybrid_dense(kind, [*longer, *again.output_ids], 4)
        assert cached.output_ids == want


@pytest.mark.case("LAY-11")
@pytest.mark.parametrize("kind", ["window", "state"])
def test_a_part_that_is_not_there_refuses_the_whole_hit(
    hybrid_engine, hybrid_dense, open_parts, tmp_path, kind
):
    """As LMCache PR #5010: where one plane is missing, no plane is used."""
    prompt = text(61, 30)
    with open_parts(kind) as kept:
        hybrid_engine(kind, store=kept).generate(prompt, greedy(5))
        name = kept.parts[1].name
    (folder,) = (tmp_path / f"root{CHUNK}").glob(f"*/*.{name}")
    shutil.rmtree(folder)
    with open_parts(kind) as kept:
        made = hybrid_engine(kind, store=kept)
        (again,) = made.generate(prompt, greedy(5))
        assert again.stored_tokens == 0
        assert f"in the store: {name}: not_found" in again.miss_reason
        assert again.output_ids == hybrid_dense(kind, prompt, 5)
        # what was missing is put beside the base that stayed
        assert kept.stores["base"].stats().written == 0
        made = hybrid_engine(kind, store=kept)
        assert made.generate(prompt, greedy(5))[0].stored_tokens == 28


def test_a_window_keeps_what_is_read_at_a_texts_ends_and_no_more(
    hybrid_engine, open_parts
):
    """As LMCache #4071 asks: all of full attention, trailing chunks of a window."""
    with open_parts("window") as kept:
        hybrid_engine("window", store=kept).generate(text(62, 41), greedy(24))
        base, window = kept.parts
        assert kept.stores["base"].stats().num_chunks == 16
        most = len({*window.needed(10, CHUNK), *window.needed(16, CHUNK)})
        assert kept.stores[window.name].stats().num_chunks == most < 8


def test_a_state_is_kept_where_it_has_a_snapshot_and_nothing_behind_it(
    hybrid_engine, open_parts
):
    with open_parts("state") as kept:
        hybrid_engine("state", store=kept).generate(text(63, 21), greedy(13))
        keys = hybrid_keys(kept, text(63, 21))
        assert kept.holds("state", keys).tolist() == [False] * 4 + [True]
        stats = kept.stats()
        assert (stats.written, stats.parts["state"].written) == (8, 2)


def hybrid_keys(kept, tokens, chunk=CHUNK):
    namespace = f"{kept.facts.model_id}/{kept.facts.format_id}"
    return store.chain_keys(namespace, tokens, chunk)


@pytest.mark.parametrize("kind", KINDS)
def test_pages_of_this_process_come_before_the_store(
    hybrid_engine, hybrid_dense, open_parts, kind
):
    stem, tail = text(64, 24), text(65, 20)
    with open_parts(kind) as kept:
        hybrid_engine(kind, store=kept).generate([*stem, *tail], greedy(4))
    with open_parts(kind) as kept:
        made = hybrid_engine(kind, store=kept)
        made.recall, recall = None, made.recall
        made.generate(stem, greedy(4))
        made.recall = recall
        (found,) = made.generate([*stem, *tail], greedy(9))
        assert (
            found.cached_tokens >= 20
            and found.cached_tokens + found.stored_tokens == 40
        )
        assert found.output_ids == hybrid_dense(kind, [*stem, *tail], 9)
        (cached,) = made.generate([*stem, *tail], greedy(9))
        assert cached.cached_tokens + cached.stored_tokens == 40
        assert cached.output_ids == found.output_ids


@pytest.mark.parametrize("kind", KINDS)
def test_under_pressure_texts_come_and_go_through_the_store_unchanged(
    hybrid_engine, hybrid_dense, open_parts, kind
):
    prompts = [text(70 + i, 18) for i in range(4)]
    # what windows and states have passed may have been evicted before a text ended
    with open_parts(kind) as kept:
        made = hybrid_engine(kind, store=kept)
        for _ in range(2):
            outputs = made.generate(prompts, greedy(30))
            for prompt, output in zip(prompts, outputs, strict=True):
                assert output.output_ids == hybrid_dense(kind, prompt, 30)
            made.reset(made.scheduler.weights_epoch)
        assert made.scheduler.num_preempted > 0
        assert kept.stats().hits > 0
    assert made.accounts.in_use == made.accounts.evictable == 0


def test_without_room_for_what_windows_read_a_text_is_computed_again(
    hybrid_engine, hybrid_dense, open_parts, monkeypatch
):
    prompt = text(66, 40)
    with open_parts("window") as kept:
        hybrid_engine("window", store=kept).generate(prompt, greedy(4))
    with open_parts("window", read_only=True) as kept:
        made = hybrid_engine("window", store=kept, prefix_cache=False)
        monkeypatch.setattr(landing, "prepare", lambda *_: False)
        (found,) = made.generate(prompt, greedy(6))
        assert found.stored_tokens == 0 and "no room" in found.miss_reason
        assert found.output_ids == hybrid_dense("window", prompt, 6)


def test_a_page_that_the_store_fills_in_part_serves_its_sequence_alone(
    hybrid_engine, hybrid_dense, open_parts
):
    """A window's page of 16 tokens of which 4-token chunks are there from the 28th."""
    prompt = text(67, 38)
    with open_parts("window") as kept:
        hybrid_engine("window", store=kept).generate(prompt, greedy(1))
    with open_parts("window", read_only=True) as kept:
        made = hybrid_engine("window", page_size=16, pages=32, store=kept)
        request_id = made.add(prompt, greedy(6))
        made.step()
        (sequence,) = made.scheduler.running
        assert sequence.is_mixed and sequence.num_computed == 38
        while made.has_work:
            made.step()
        assert made.accounts.evictable == 0
        want = hybrid_dense("window", prompt, 6)
        assert made.take_output(request_id).output_ids == want


@pytest.mark.parametrize("kind", [pytest.param("window", marks=LONG), "state"])
def test_records_of_every_group_are_the_same_bytes_on_every_topology(
    hybrid_engine, kind
):
    prompt, found = text(68, 22), []
    for tp, page_size in ((1, 4), (2, 8)):
        made = hybrid_engine(
            kind,
            tp=tp,
            page_size=page_size,
            pages=64,
            executor="vmap",
        )
        request_id = made.add(prompt, greedy(3))
        while not made.scheduler.running or made.scheduler.running[0].num_left > 1:
            made.step()
        found.append(made.records(request_id))
        made.abort(request_id)
    assert set(found[0]) == {group.name for group in made.groups}
    for name, one in found[0].items():
        other = found[1][name]
        if name.startswith("window"):  # it holds whole pages of trailing tokens
            count = min(len(one), len(other))
            one, other = one[-count:], other[-count:]
        assert one.shape == other.shape and len(one)
        np.testing.assert_allclose(
            one.view(np.float32), other.view(np.float32), rtol=1e-3, atol=1e-4
        )


def test_what_could_not_be_kept_is_refused_in_words(hybrid_engine, open_parts):
    with open_parts("state", chunk=8) as kept:
        with pytest.raises(errors.IncompatiblePlan) as met:
            hybrid_engine("state", store=kept, prefix_cache=False)
    for words in ("do not end where chunks of 8 do", "out of the prefix cache"):
        assert words in str(met.value)
    with open_parts("state", chunk=8, read_only=True) as kept:
        hybrid_engine("state", store=kept, prefix_cache=False)  # it keeps nothing
    with open_parts("state", chunk=2) as kept:
        made = hybrid_engine("state", store=kept)
        made.generate(text(69, 13), greedy(2))
        # a snapshot stands after whole pages, 12 tokens; the live state after 14
        keys = hybrid_keys(kept, text(69, 12), chunk=2)
        assert kept.holds("state", keys).tolist() == [False] * 5 + [True]
        assert (kept.stats().written, kept.stats().parts["state"].written) == (7, 2)
        with pytest.raises(errors.IncompatiblePlan, match="in parts beside"):
            hybrid_engine("state", store=kept.stores["base"])


@LONG
@pytest.mark.parametrize("kind", ["window", "state"])
def test_engines_that_come_and_go_answer_as_if_none_had_ever_ended(
    hybrid_engine, hybrid_dense, open_parts, kind
):
    """Random texts of three stems, over one root, by engines of two page sizes."""
    rng = random.Random(7)
    stems, stored = [text(seed, 40) for seed in (80, 81, 82)], 0
    for turn in range(4):
        with open_parts(kind) as kept:
            size = (4, 8)[turn % 2]
            made = hybrid_engine(kind, page_size=size, pages=256 // size, store=kept)
            lengths = [rng.randrange(9, 40) for _ in range(3)]
            prompts = [
                [*rng.choice(stems)[:length], rng.randrange(256)] for length in lengths
            ]
            outputs = made.generate(prompts, greedy(6))
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.output_ids == hybrid_dense(kind, prompt, 6)
            stored += output.stored_tokens
    assert stored > 0
