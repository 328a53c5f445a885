"""Draft layers begin with the linear guess, and learn what a model took for likely."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments import draft_begin
from experiments.draft_texts import Lessons
from experiments.draft_training import Learning, Trainer
from kvmem.model.decoder import Decoder

TAUGHT = 12


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model[1]


@pytest.fixture(scope="module")
def lessons(model):
    """Texts of a seed, with the rows and likelihoods of a random decoder."""
    tokens = np.random.default_rng(3).integers(0, 257, (40, 20)).astype(np.int32)
    decoder = Decoder.from_params(model.spec, model.params)
    rows = decoder.rows(tokens)
    logprobs, likely = jax.lax.top_k(jax.nn.log_softmax(decoder.head(rows)), 8)
    return Lessons(tokens, *map(np.asarray, (rows, likely, logprobs)))


@pytest.fixture(scope="module")
def begun(model, lessons):
    return draft_begin.begun(model, lessons, TAUGHT, layers=2)


@pytest.fixture
def trainer(model, lessons, begun):
    def make(**facts):
        learning = Learning(TAUGHT, 2, 3e-3, 6, 200, 20, 0.5)
        learning = dataclasses.replace(learning, **facts)
        return Trainer(model, begun, lessons, learning)

    return make


def test_what_learned_nothing_is_what_it_began_with(trainer, begun):
    made = trainer()
    same = made.layers(made.start())
    assert same.params.keys() == begun.params.keys()
    for name, rows in begun.params.items():
        np.testing.assert_array_equal(same.params[name], rows)


def test_first_layers_are_the_models_last_and_add_nothing(model, begun):
    for index in range(2):
        for what in ("self_attn.q_proj.weight", "mlp.up_proj.weight"):
            name = f"model.layers.{index}.{what}"
            np.testing.assert_array_equal(begun.params[name], model.params[name])
        for what in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            assert not begun.params[f"model.layers.{index}.{what}"].any()


def test_no_other_linear_guess_is_nearer_to_the_models_rows(model, lessons, begun):
    eps, embed = model.spec.norm_eps, model.params["model.embed_tokens.weight"]

    def unit(rows):
        return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + eps)

    rows = unit(lessons.rows)
    inputs = [rows[:, -TAUGHT - 1 : -1], unit(embed[lessons.tokens[:, -TAUGHT:]])]
    inputs = np.concatenate(inputs, -1).reshape(-1, 64)
    wanted = rows[:, -TAUGHT:].reshape(-1, 32)

    def miss(fuse):
        return ((inputs @ fuse.T - wanted) ** 2).mean()

    found = begun.params["mtp.fuse.weight"]
    assert miss(found) < 0.98 * (wanted**2).mean()
    rng = np.random.default_rng(0)
    for _ in range(8):
        assert miss(found) < miss(found + rng.normal(0, 0.02, found.shape))


def test_layers_learn(trainer, lessons):
    made = trainer()
    before, _ = made.held_out(made.start(), lessons)
    state = made.start()
    for number in range(6):
        state, _ = made.step(state, lessons, number)
    after, agreement = made.held_out(state, lessons)
    assert after < before and len(agreement) == 2


def test_words_and_all_others_are_all_tokens(trainer, lessons):
    """What a step weighs is then what is measured, for the likely tokens of words."""
    whole = trainer(alone=0.0, words=257, others=0)
    divergence, _ = whole.held_out(whole.start(), lessons, batch=40)
    _, loss = whole.step(whole.start(), lessons, 0)
    assert loss == pytest.approx(divergence, rel=1e-4)
    _, every = trainer(alone=0.0, others=57).step(whole.start(), lessons, 0)
    _, some = trainer(alone=0.0, others=20).step(whole.start(), lessons, 0)
    assert some == pytest.approx(every, abs=0.05)


def test_the_first_steps_learn_one_pass():
    learning = Learning(TAUGHT, depth=3, steps=10, alone=0.4)
    assert [learning.depth_at(step) for step in range(6)] == [1, 1, 1, 1, 3, 3]


def test_later_passes_learn_after_the_first_alone(trainer, lessons):
    made = trainer()
    first = made.step(made.start(), lessons, 0)[1]
    both = made.step(made.start(), lessons, 3)[1]
    assert first != pytest.approx(both, rel=1e-3)
