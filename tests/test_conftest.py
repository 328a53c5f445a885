"""The harness is as strict as it says."""

import os
import pathlib
import warnings

import jax
import jax.numpy as jnp
import pytest


def test_eight_host_devices_are_seen():
    assert jax.device_count() == 8


def test_rank_promotion_raises():
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.ones((2, 3)) + jnp.ones((3,))


def test_a_warning_is_an_error():
    with pytest.raises(UserWarning):
        warnings.warn("anything", UserWarning, stacklevel=1)


def test_compiled_programs_are_kept_in_the_checkout(repo_root: pathlib.Path):
    folder = jax.config.jax_compilation_cache_dir
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    assert pathlib.Path(folder) == repo_root / ".cache" / "jax" / worker
    jax.jit(lambda x: x * 3 + 1)(jnp.arange(7)).block_until_ready()
    assert any(pathlib.Path(folder).iterdir())


def test_processes_that_a_test_starts_are_strict_too():
    assert "device_count=8" in os.environ["XLA_FLAGS"]
    assert os.environ["JAX_NUMPY_RANK_PROMOTION"] == "raise"


def test_programs_are_compiled_lightly_unless_it_is_asked(pytestconfig):
    asked = any(map(pytestconfig.getoption, ("--optimised", "--long")))
    assert jax.config.values["jax_disable_most_optimizations"] == (not asked)
    assert os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == str(int(not asked))


@pytest.mark.parametrize("first", range(7))
@pytest.mark.parametrize("second", "abc")
@pytest.mark.parametrize("third, fourth", [(0, "x"), (1, "y")])
@pytest.mark.cover(2)
def test_each_two_values_of_a_product_meet(first, second, third, fourth, request):
    nodes = request.session.items
    mine = [n for n in nodes if n.function is request.function]
    met = [n.callspec.params for n in mine]
    assert len({(p["first"], p["second"]) for p in met}) == 21
    assert len({(p["first"], p["third"]) for p in met}) == 14
    assert len({(p["second"], p["fourth"]) for p in met}) == 6
    if not request.config.getoption("--long"):
        assert len(mine) == 21  # of 42


def test_a_cover_of_more_values_than_there_are_parameters_is_refused(pytestconfig):
    plugins = pytestconfig.pluginmanager.get_plugins()
    (cover,) = {p.cover for p in plugins if hasattr(p, "Oracle")}
    assert cover([{"a": 1, "b": 2}, {"a": 1, "b": 3}], 1) == {0, 1}
    with pytest.raises(pytest.UsageError, match="fewer parameters"):
        cover([{"a": 1}, {"a": 2}], 2)
