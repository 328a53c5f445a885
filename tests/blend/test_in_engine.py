"""Texts found again in an engine: what is exact, what is refused, who may share."""

import numpy as np
import pytest

from kvmem import errors
from kvmem.blend import BlendConfig, gate
from kvmem.geometry import Topology, rerotate
from kvmem.serve import Identity, SamplingParams
from kvmem.serve.blending import Blender
from kvmem.serve.reading import Reader

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


def answer(engine, tokens, identity=None):
    (output,) = engine.generate([tokens], GREEDY, identity or Identity())
    return output


@pytest.fixture
def plain(blending_engine):
    """Return what an engine without texts answers, and its logits."""

    def ask(tokens, **engine):
        made = blending_engine(**engine)
        return answer(made, tokens).output_ids, Reader(made).logits(tokens, 4)

    return ask


def test_at_ratio_1_a_text_at_any_offset_is_as_if_computed_there(
    blending_engine, plain, text
):
    """C1: registered at offset 0, asked for at offset 7."""
    tokens = [*text(7, 3), *text(24, 1), *text(5, 4)]
    expected, logits = plain(tokens)
    engine = blending_engine(ratio=1.0)
    engine.register(text(24, 1))
    output = answer(engine, tokens)
    assert output.output_ids == expected and output.reused_tokens == 0
    np.testing.assert_array_equal(Reader(engine).logits(tokens, 4, reuse=True), logits)


def test_a_text_that_begins_the_prompt_is_exact_at_any_ratio(
    blending_engine, plain, text
):
    """C2: nothing came before it, so nothing is lost; it may be shared, too."""
    tokens = [*text(24, 1), *text(6, 4)]
    expected, logits = plain(tokens)
    engine = blending_engine(ratio=0.0)
    engine.register(text(24, 1))
    engine.table.clear_cache()
    output = answer(engine, tokens)
    assert (output.reused_tokens, output.recomputed_tokens) == (24, 0)
    assert output.output_ids == expected
    found = Reader(engine).logits(tokens, 4, reuse=True)
    np.testing.assert_allclose(found, logits, atol=1e-5)
    assert answer(engine, tokens).cached_tokens == 28, "exact pages are published"


@pytest.mark.parametrize("ratio", [0.0, 0.15, 0.5])
def test_a_prompt_of_reordered_texts_alone_is_answered(blending_engine, text, ratio):
    """C3: all tokens are found, all but the last are reused."""
    engine = blending_engine(ratio=ratio)
    for seed in (1, 2, 3):
        engine.register(text(20, seed))
    engine.table.clear_cache()
    output = answer(engine, [*text(20, 3), *text(20, 1), *text(20, 2)])
    assert len(output.output_ids) == 6
    assert output.reused_tokens == 59
    assert output.recomputed_tokens == int(39 * ratio), "the first text is exact"


def test_a_text_that_stands_twice_is_reused_twice(blending_engine, text):
    """C4."""
    engine = blending_engine()
    engine.register(text(20, 1))
    output = answer(engine, [5, *text(20, 1), 6, 7, *text(20, 1), 8])
    assert output.reused_tokens == 40


def test_a_share_of_few_tokens_is_none(blending_engine, text):
    """C5: six reused tokens at 0.15 are left as they are."""
    engine = blending_engine(ratio=0.15, min_tokens=6)
    engine.register(text(6, 1))
    output = answer(engine, [5, 6, 7, *text(6, 1), 8])
    assert (output.reused_tokens, output.recomputed_tokens) == (6, 0)


def test_fewer_tokens_than_worth_it_are_computed(blending_engine, text):
    engine = blending_engine(min_tokens=7)
    engine.register(text(6, 1))
    assert answer(engine, [5, 6, 7, *text(6, 1), 8]).reused_tokens == 0


def test_records_of_another_engine_are_as_good_as_its_own(blending_engine, text):
    """Records know no topology: what TP 1 computed is found on another one."""
    writer = blending_engine()
    writer.register(text(20, 1))
    kept = writer.blender._libraries[Identity(epoch=0)].texts[0].kept
    engine = blending_engine(page_size=8, order="slot_major")
    number = engine.blender.add(text(20, 1), kept)
    assert engine.blender.texts() == (number,)
    assert answer(engine, [5, *text(20, 1), 6]).reused_tokens == 20


def test_records_that_are_given_are_copied(blending_engine, text):
    engine = blending_engine(ratio=0.0)
    engine.register(text(20, 1))
    (kept,) = engine.blender._libraries[Identity(epoch=0)].texts[0].kept.items()
    name, rows = kept[0], kept[1].copy()
    engine.blender.clear()
    number = engine.blender.add(text(20, 1), {name: rows})
    rows[...] = 0xAA
    held = engine.blender._libraries[Identity(epoch=0)].texts[number].kept[name]
    np.testing.assert_array_equal(held, kept[1])


def test_a_text_that_begins_the_prompt_is_exact_though_a_longer_one_goes_on(
    blending_engine, plain, text
):
    document, rest = text(20, 1), text(12, 2)
    tokens = [*document, *rest[:6], 9]
    expected, _ = plain(tokens)
    engine = blending_engine(ratio=0.0)
    engine.register([*text(8, 3), *document, *rest])
    engine.register(document)
    engine.table.clear_cache()
    output = answer(engine, tokens)
    assert (output.reused_tokens, output.recomputed_tokens) == (20, 0)
    assert output.output_ids == expected


@pytest.mark.case("LAY-05")
def test_records_without_one_of_their_groups_are_no_text(blending_engine, text):
    """C6: the latent alone, or the index keys alone."""
    engine = blending_engine("latent", allow_stale_selector=True)
    kept = {
        group.name: np.zeros((8, group.record_nbytes), np.uint8)
        for group in engine.groups
    }
    assert len(kept) == 2
    for name in kept:
        part = {other: rows for other, rows in kept.items() if other != name}
        with pytest.raises(errors.FormatMismatch, match=f"{name!r} are missing"):
            engine.blender.add(text(8, 1), part)
    short = {name: rows[:7] for name, rows in kept.items()}
    with pytest.raises(errors.FormatMismatch, match=r"uint8\[7, "):
        engine.blender.add(text(8, 1), short)
    assert engine.blender.texts() == ()


def test_index_keys_that_do_not_turn_are_refused_or_stale_by_name(
    blending_engine, text
):
    """R4: what is moved keeps its old places, and says so."""
    engine = blending_engine("latent", allow_stale_selector=True, ratio=0.0)
    laws = gate.objections(engine.groups, BlendConfig())
    assert len(laws) == 1 and "allow_stale_selector" in laws[0]
    assert len(gate.stale_layers(engine.groups)) == 3
    engine.register(text(24, 1))
    tokens = [*text(5, 3), *text(24, 1), *text(4, 4)]
    request_id = engine.add(tokens, GREEDY)
    engine.step()
    found = engine.records(request_id)
    kept = engine.blender._library_of(engine.scheduler.running[0]).texts[0].kept
    for group in engine.groups:
        reused = found[group.name][5:29]
        turned = not any(rerotate.obstacle(layer) for layer in group.layers)
        assert (reused != kept[group.name]).any() == turned, group.name


def test_a_latent_model_blends_as_it_computes(
    blending_engine, plain, text, monkeypatch
):
    tokens = [*text(5, 3), *text(24, 1), *text(4, 4)]
    _, logits = plain(tokens, kind="latent", allow_stale_selector=True)
    engine = blending_engine("latent", allow_stale_selector=True, ratio=1.0)
    engine.register(text(24, 1))
    monkeypatch.setattr(BlendConfig, "recomputes_all", False)
    found = Reader(engine).logits(tokens, 4, reuse=True)
    np.testing.assert_allclose(found, logits, atol=2e-4)
    engine.blender.config = BlendConfig(
        ratio=0.25, chunk_tokens=4, min_tokens=8, allow_stale_selector=True
    )
    output = answer(engine, tokens)
    assert (output.reused_tokens, output.recomputed_tokens) == (24, 6)


@pytest.mark.parametrize(
    "kind, word", [("state", "recurrent layers"), ("window", "of a window only")]
)
def test_a_model_that_cannot_is_refused_by_its_law(blending_engine, kind, word):
    with pytest.raises(errors.IncompatiblePlan, match=word):
        blending_engine(kind)


def test_an_engine_that_drafts_does_not_blend(blending_engine):
    engine = blending_engine()
    given = BlendConfig(), engine.stepper, Topology(), "head_major", engine.table.ledger
    with pytest.raises(errors.IncompatiblePlan, match="an engine that drafts"):
        Blender(*given, drafts=True)


@pytest.mark.parametrize("ratio", [0.0, 0.04, 0.15])
def test_blended_pages_are_never_taken_for_exact_ones(blending_engine, text, ratio):
    """Whether some of their tokens were computed anew, or none."""
    engine = blending_engine(ratio=ratio)
    engine.register(text(20, 1))
    engine.table.clear_cache()
    tokens = [*text(8, 3), *text(20, 1), *text(8, 4)]
    first = answer(engine, tokens)
    again = answer(engine, tokens)
    assert first.reused_tokens == again.reused_tokens == 20
    assert again.cached_tokens == 0
    assert first.output_ids == again.output_ids


def test_a_registered_text_is_computed_exactly_whatever_is_registered(
    blending_engine, text
):
    both, kept = [*text(8, 3), *text(20, 1)], []
    for seeds in ((1,), ()):
        engine = blending_engine(ratio=0.0)
        for seed in seeds:
            engine.register(text(20, seed))
        engine.register(both)
        library = engine.blender._libraries[Identity(epoch=0)]
        kept.append(library.texts[len(seeds)].kept["full"])
    np.testing.assert_array_equal(*kept)


def test_a_cached_prefix_comes_first_and_texts_behind_it(blending_engine, text):
    engine = blending_engine(ratio=0.5)
    engine.register(text(20, 1))
    answer(engine, [*text(12, 3), 1])
    output = answer(engine, [*text(12, 3), *text(20, 1), 9])
    assert (output.cached_tokens, output.reused_tokens) == (12, 20)
    assert output.recomputed_tokens == 10


def test_a_cached_prefix_that_ends_within_a_text_takes_its_part(blending_engine, text):
    tokens, found = [*text(8, 3), *text(20, 1), 9], []
    for cached in ([], [*tokens[:12], 1]):
        engine = blending_engine(ratio=0.0)
        engine.register(text(20, 1))
        engine.table.clear_cache()
        if cached:
            answer(engine, cached)
        request_id = engine.add(tokens, GREEDY)
        engine.step()
        found.append(engine.records(request_id)[12:28])
        engine.abort(request_id)
        output = engine.take_output(request_id)
        assert output.cached_tokens + output.reused_tokens == (28 if cached else 20)
    np.testing.assert_array_equal(*found)


def test_only_equal_identities_share_texts(blending_engine, text):
    engine = blending_engine()
    mine, other = Identity(tenant="a"), Identity(tenant="b")
    number = engine.register(text(20, 1), mine)
    tokens = [5, *text(20, 1), 6]
    assert answer(engine, tokens, mine).reused_tokens == 20
    assert answer(engine, tokens, other).reused_tokens == 0
    assert answer(engine, tokens).reused_tokens == 0
    with pytest.raises(errors.InvalidId, match="text 0"):
        engine.forget_text(number, other)
    engine.forget_text(number, mine)
    assert answer(engine, tokens, mine).reused_tokens == 0


def test_other_weights_have_no_texts(blending_engine, text):
    engine = blending_engine()
    engine.register(text(20, 1))
    before = engine.scheduler.weights_epoch
    engine.reset(weights_epoch=before + 1)
    try:
        assert answer(engine, [5, *text(20, 1), 6]).reused_tokens == 0
    finally:
        engine.reset(weights_epoch=before)


def test_samples_of_one_prompt_share_its_blended_pages(blending_engine, text):
    engine = blending_engine()
    engine.register(text(20, 1))
    warm = SamplingParams(max_tokens=4, temperature=1.0, seed=3, n=2, ignore_eos=True)
    (output,) = engine.generate([[5, *text(20, 1), 6, 7]], warm)
    assert output.reused_tokens == 20 and len(output.completions) == 2
    assert engine.accounts.in_use == 0


def test_requests_that_decode_go_on_beside_a_blended_one(blending_engine, text):
    engine = blending_engine()
    alone = answer(engine, text(9, 6)).output_ids
    engine.register(text(20, 1))
    engine.table.clear_cache()
    outputs = engine.generate([text(9, 6), [5, *text(20, 1), 6]], GREEDY)
    assert outputs[0].output_ids == alone
    assert [output.reused_tokens for output in outputs] == [0, 20]


def test_what_cannot_be_found_again_is_refused_before_it_is_computed(
    blending_engine, text
):
    engine = blending_engine()
    with pytest.raises(errors.ConfigError, match="3 tokens to be found again"):
        engine.register([1, 2, 3])
    images = Identity(images=((b"d" * 16, 0, 4),))
    with pytest.raises(errors.ConfigError, match="text with images"):
        engine.register(text(20, 1), images)
    assert not engine.has_work


def test_a_text_whose_request_is_aborted_is_not_registered(
    blending_engine, text, monkeypatch
):
    engine = blending_engine()
    monkeypatch.setattr(
        engine, "step", lambda: engine.abort(engine.scheduler.waiting[0].request_id)
    )
    with pytest.raises(errors.InvalidId, match="was aborted"):
        engine.register(text(20, 1))
    assert engine.blender.texts() == () and not engine.blender._learning


@pytest.mark.parametrize("verb", ["reset", "disown"])
def test_a_text_that_two_sets_of_weights_computed_is_not_registered(
    blending_engine, text, monkeypatch, verb
):
    engine = blending_engine()
    step, turns = engine.step, []

    def interrupted():
        turns.append(step())
        if len(turns) == 1:  # of two chunks
            engine.reset(weights_epoch=1) if verb == "reset" else engine.disown()

    monkeypatch.setattr(engine, "step", interrupted)
    try:
        with pytest.raises(errors.InvalidId, match="or the weights changed"):
            engine.register(text(100, 1))
        assert engine.blender.texts() == () and not engine.blender._learning
    finally:
        engine.reset(weights_epoch=0)


def test_an_engine_that_does_not_blend_registers_nothing(blending_engine, monkeypatch):
    engine = blending_engine()
    monkeypatch.setattr(engine, "blender", None)
    with pytest.raises(errors.ConfigError, match="registering a text"):
        engine.register("some text that is long enough")


def test_a_reader_wants_an_idle_engine_and_a_longer_text(blending_engine, text):
    engine = blending_engine()
    with pytest.raises(errors.ConfigError, match="logits of 9 of 9"):
        Reader(engine).logits(text(9, 1), 9)
    request_id = engine.add(text(9, 1), GREEDY)
    with pytest.raises(errors.ConfigError, match="nothing to do"):
        Reader(engine).logits(text(9, 1), 2)
    engine.abort(request_id)
    engine.take_output(request_id)


def test_a_reader_reads_what_an_engine_says(blending_engine, text):
    engine = blending_engine()
    tokens = text(40, 1)
    output = answer(engine, tokens)
    engine.table.clear_cache()
    logits = Reader(engine).logits([*tokens, *output.output_ids[:-1]], 6)
    assert tuple(logits.argmax(-1)) == output.output_ids
    assert engine.accounts.free == engine.accounts.total
