"""A compiled step that copies its pool is told from one that does not."""

import functools

import jax
import jax.numpy as jnp
import pytest

from experiments import compiled_step
from experiments.compiled_step import Footprint, copies_of, objections

PAGES = jnp.zeros((64, 1024), jnp.uint8)
SOUND = Footprint(1000, 900, 1000, 10, 100, ())


def program(step, donate=(0,)) -> str:
    return jax.jit(step, donate_argnums=donate).lower(PAGES).compile().as_text()


def test_an_update_in_place_copies_nothing():
    text = program(lambda pages: pages.at[3, 5].set(7))
    assert copies_of(text, PAGES.nbytes) == ()


def test_a_pool_that_is_read_after_its_update_is_copied_and_seen():
    # not donated: XLA must keep the old bytes, so it copies them all
    text = program(lambda pages: pages.at[3, 5].set(7), donate=())
    assert copies_of(text, PAGES.nbytes)


def test_small_copies_are_no_copies_of_a_pool():
    line = "  %copy.1 = f32[8,4]{1,0} copy(%x)"
    assert copies_of(line, 129) == ()
    assert copies_of(line, 128) == (line.strip(),)


def test_a_sound_step_has_no_objections():
    assert objections(SOUND) == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"aliased_nbytes": 999}, "999 of 1,000 B aliased"),
        ({"temporary_nbytes": 101}, "101 temporary B, 100 allowed"),
        ({"copies": ("u8[9] copy(x)",)}, "copy of a pool"),
    ],
)
def test_each_fault_is_said(change, words):
    (said,) = objections(SOUND._replace(**change))
    assert words in said


def test_the_check_of_an_engine_fails_when_its_step_keeps_the_old_pool(
    tiny_engine, monkeypatch
):
    assert compiled_step.check(tiny_engine, 1, 20).ok
    stepper = tiny_engine.stepper
    careless = jax.jit(functools.partial(stepper._jitted.__wrapped__))
    monkeypatch.setattr(stepper, "_jitted", careless)
    found = compiled_step.check(tiny_engine, 1, 20)
    assert not found.ok and "0 of" in found.detail
