"""The check: one side computes everything, the other finds texts, neither a cache."""

import numpy as np

from kvmem.blend.texts import Prompt
from kvmem.serve import SamplingParams, blend_check
from kvmem.serve.reading import Reader


def test_what_is_recomputed_finds_no_text_and_neither_side_a_cached_page(
    blending_engine, text
):
    engine = blending_engine(ratio=0.5)
    blend_check.registered(engine, {"a": text(20, 1), "b": text(24, 2)})
    tokens = [5, *text(24, 2), *text(20, 1), 7]
    for _ in range(2):
        _, blended = blend_check.first_token(engine, tokens, reuse=True)
        _, computed = blend_check.first_token(engine, tokens, reuse=False)
        assert (blended.reused_tokens, computed.reused_tokens) == (44, 0)
        assert blended.cached_tokens == computed.cached_tokens == 0
    assert len(engine.blender.texts()) == 2, "the texts are back"


def test_answers_are_those_of_an_engine_without_texts(blending_engine, text):
    tokens, count = [5, *text(24, 2), *text(20, 1), 7], 4
    plain = blending_engine(ratio=0.0)
    sampling = SamplingParams(max_tokens=count, ignore_eos=True)
    (expected,) = plain.generate([tokens], sampling)
    whole = (*tokens, *expected.output_ids[:-1])
    logits = Reader(plain).logits(whole, count)
    engine = blending_engine(ratio=0.0)
    blend_check.registered(engine, {"a": text(20, 1), "b": text(24, 2)})
    prompt = Prompt(("b", "a"), "?", tuple(tokens))
    (found,) = blend_check.answers(engine, [prompt], count)
    assert found.tokens == whole
    np.testing.assert_array_equal(found.logits, logits)
    (blended,) = engine.generate([tokens], sampling)
    assert blended.output_ids != expected.output_ids, "texts make a difference here"
    (quality,) = blend_check.compared(engine, [found])
    assert quality.agreement < 1 and quality.kl > 0
