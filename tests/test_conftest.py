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
    assert pathlib.Path(folder) == repo_root / ".cache" / "jax"
    jax.jit(lambda x: x * 3 + 1)(jnp.arange(7)).block_until_ready()
    assert any(pathlib.Path(folder).iterdir())


def test_processes_that_a_test_starts_are_strict_too():
    assert "device_count=8" in os.environ["XLA_FLAGS"]
    assert os.environ["JAX_NUMPY_RANK_PROMOTION"] == "raise"
