"""A block draft learns from what the model wrote, and drafts with what it learned."""

import json
import pathlib

import jax
import numpy as np
import pytest

import experiments.__main__ as command
from experiments import draft_texts
from experiments.dflash_training import BlockTrainer, begun
from experiments.draft_training import Learning
from kvmem.model import dflash, draft_layers
from kvmem.model.decoder import Decoder

TAUGHT, DEPTH = 12, 3


@pytest.fixture(scope="module")
def taught(tiny_model):
    """A random decoder, and texts with rows and likelihoods of its own."""
    _, model = tiny_model
    tokens = np.random.default_rng(3).integers(0, 257, (6, 20)).astype(np.int32)
    decoder = Decoder.from_params(model.spec, model.params)
    rows = decoder.rows(tokens)
    logprobs, likely = jax.lax.top_k(jax.nn.log_softmax(decoder.head(rows)), 8)
    found = (np.asarray(each) for each in (rows, likely, logprobs))
    return model, draft_texts.Lessons(tokens, *found)


@pytest.fixture(scope="module")
def trainer(taught):
    model, lessons = taught
    learning = Learning(TAUGHT, DEPTH, 1e-2, steps=8, words=200, others=20)
    return BlockTrainer(model, dflash.draw(model, 1, seed=3), lessons, learning)


def test_what_learned_nothing_is_what_it_began_with(taught, trainer):
    model, _ = taught
    drawn, same = dflash.draw(model, 1, seed=3), trainer.layers(trainer.start())
    assert same.params.keys() == drawn.params.keys()
    for name, rows in drawn.params.items():
        np.testing.assert_array_equal(same.params[name], rows)


def test_a_block_draft_begins_as_the_models_last_layers(taught):
    model, _ = taught
    found = begun(model, layers=1).params
    for name, rows in found.items():
        if name.startswith("model.layers.0."):
            last = name.replace("layers.0.", "layers.1.")
            np.testing.assert_array_equal(rows, model.params[last])
    np.testing.assert_array_equal(found["dflash.fuse.weight"], np.eye(32))
    embed = model.params["model.embed_tokens.weight"]
    np.testing.assert_allclose(found["dflash.mask.weight"], embed.mean(0), 1e-5)


def test_each_mask_learns_what_was_likely_in_its_place(taught, trainer):
    """Mask j of a block at place a stands at a + j + 1, behind what follows a + j."""
    _, lessons = taught
    anchors = np.arange(20 - TAUGHT, 20 - DEPTH + 1)

    class Blocks:
        def block_rows(self, features, tokens, begins, length):
            assert features is lessons.rows and tokens is lessons.tokens
            assert length == DEPTH
            np.testing.assert_array_equal(begins, [anchors] * 6)
            masks = np.arange(length)[None, None, :, None]
            return np.broadcast_to(masks, (*begins.shape, length, 32))

    assert len(trainer.passes(Blocks(), lessons, 1)) == 1  # of a whole block
    found = trainer.passes(Blocks(), lessons, DEPTH)
    assert len(found) == DEPTH
    for mask, each in enumerate(found):
        assert (each.rows == mask).all() and each.rows.shape[1] == len(anchors)
        np.testing.assert_array_equal(each.likely, lessons.likely[:, anchors + mask])
        want = lessons.logprobs[:, anchors + mask]
        np.testing.assert_array_equal(each.logprobs, want)


def test_a_block_draft_learns(taught, trainer):
    _, lessons = taught
    state = trainer.start()
    before, shares = trainer.held_out(state, lessons)
    assert len(shares) == DEPTH
    for step in range(8):
        state, loss = trainer.step(state, lessons, step)
    after, _ = trainer.held_out(state, lessons)
    assert after < 0.9 * before and loss < 0.95 * before
    moved = state.params["mask"] - trainer.start().params["mask"]
    assert np.abs(moved).max() > 1e-3


@pytest.mark.long
def test_a_config_trains_blocks_and_an_engine_drafts_with_them(
    repo_root, tiny_model, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    smoke = repo_root / "configs" / "smoke" / "train_draft.toml"
    asked = ["--set", "draft=dflash", "--set", "folder=runs/blocks", "--debug"]
    assert command.main(["run", str(smoke), *asked]) == 0
    data = json.loads(pathlib.Path("runs/smoke-train_draft/record.json").read_text())
    assert data["ok"] and data["measurements"]["tokens_per_step"] >= 1
    _, model = tiny_model
    layers = draft_layers.load(data["layers"], model, 1, dflash.with_params)
    first = begun(model).params["dflash.mask.weight"]
    assert np.abs(layers.params["dflash.mask.weight"] - first).max() > 1e-3
