"""What is kept while a model writes is what it thinks of the text read as a whole."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments import draft_texts
from experiments.draft_texts import Writing
from kvmem import config, errors
from kvmem.model.decoder import Decoder

PROMPTS = [[5, 9, 2, 77], [5, 9, 31, 8, 60, 12]] * 2


@pytest.fixture(scope="module")
def written(tiny_model, tmp_path_factory):
    """A folder, and what was written into it in batches of two."""
    folder = tmp_path_factory.mktemp("texts")
    writing = Writing(length=14, temperature=0.9, kept=5, batch=2, seed=3)
    return folder, writing, draft_texts.read(tiny_model[1], PROMPTS, writing, folder)


def test_rows_and_likelihoods_are_those_of_the_text_read_again(tiny_model, written):
    _, model = tiny_model
    *_, lessons = written
    decoder = Decoder.from_params(model.spec, model.params)
    rows = decoder.rows(lessons.tokens)
    said = np.asarray(jax.nn.log_softmax(decoder.head(rows)))
    np.testing.assert_allclose(lessons.rows, rows, atol=2e-4)
    best = np.sort(said, axis=-1)[..., ::-1][..., :5]
    np.testing.assert_allclose(lessons.logprobs, best, atol=2e-4)
    found = np.take_along_axis(said, lessons.likely, axis=-1)
    np.testing.assert_allclose(found, lessons.logprobs, atol=2e-4)


def test_texts_begin_with_their_prompts_and_go_on_with_what_was_likely(written):
    *_, lessons = written
    assert lessons.tokens.shape == (4, 14)
    for text, likely, prompt in zip(
        lessons.tokens, lessons.likely, PROMPTS, strict=True
    ):
        assert text[: len(prompt)].tolist() == prompt
        for place in range(len(prompt), len(text)):
            assert text[place] in likely[place - 1]
    assert (lessons.tokens[0, 6:] != lessons.tokens[2, 6:]).any()  # of another batch


def test_without_a_temperature_the_likeliest_follows(tiny_model, tmp_path):
    writing = Writing(length=12, temperature=0.0, kept=2)
    lessons = draft_texts.read(tiny_model[1], PROMPTS[:1], writing, tmp_path)
    np.testing.assert_array_equal(lessons.tokens[0, 4:], lessons.likely[0, 3:-1, 0])


def test_a_batch_that_was_written_is_not_written_again(tiny_model, written):
    folder, writing, lessons = written
    first, second = sorted(folder.iterdir())
    before = first.stat().st_mtime_ns
    second.unlink()
    again = draft_texts.read(tiny_model[1], PROMPTS, writing, folder)
    assert first.stat().st_mtime_ns == before and second.exists()
    for mine, theirs in zip(again, lessons, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    "changed",
    [{"length": 15}, {"temperature": 0.8}, {"kept": 4}, {"seed": 4}, {"prompts": 1}],
    ids=str,
)
def test_texts_of_something_else_are_not_read(tiny_model, written, changed):
    folder, writing, _ = written
    prompts = [[6, 9, 2, 77], *PROMPTS[1:]] if "prompts" in changed else PROMPTS
    if prompts is PROMPTS:
        writing = dataclasses.replace(writing, **changed)
    with pytest.raises(errors.ConfigError, match=r"000000\.npz: .*other prompts"):
        draft_texts.read(tiny_model[1], prompts, writing, folder)


def test_a_model_whose_layers_differ_writes_no_texts(tiny_model, repo_root, tmp_path):
    path = repo_root / "configs" / "models" / "qwen3_next_tiny.toml"
    spec = config.load(path, (), {}).spec
    hybrid = dataclasses.replace(tiny_model[1], spec=spec)
    with pytest.raises(errors.IncompatiblePlan, match="layers that are all alike"):
        draft_texts.read(hybrid, PROMPTS, Writing(length=14), tmp_path)


def test_a_prompt_leaves_room_for_an_answer():
    assert draft_texts.room(PROMPTS, 14) == 8
    with pytest.raises(errors.ConfigError, match="6 tokens behind a prompt of 6"):
        draft_texts.room(PROMPTS, 6)
