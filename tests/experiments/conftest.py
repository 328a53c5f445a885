"""Builders of this room's tests: tiny engines of one checkpoint on disk."""

import functools

import pytest

from experiments import tiny_decoder
from kvmem import config as configs
from kvmem.config import ModelConfig, PoolConfig, StoreConfig
from kvmem.serve import ServeConfig
from kvmem.serve import loop as loops


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """The decoder that smoke configs use, with its config."""
    folder = tiny_decoder.write(tmp_path_factory.mktemp("tiny"))
    return tiny_decoder.load(ModelConfig(str(folder), kv_dtype="float32"))


@pytest.fixture(scope="session")
def shared_steps():
    """Steps compiled once for all engines of this room."""
    return functools.cache(loops.Stepper)


@pytest.fixture
def tiny_engine(tiny_model, shared_steps, tmp_path, monkeypatch):
    """An engine with a store, of the decoder that smoke configs use."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loops, "Stepper", shared_steps)
    model, loaded = tiny_model
    serve = ServeConfig(
        max_batch=2, max_length=128, prefill_chunk=72, chunks=(8, 72), widths=(128,)
    )
    config = configs.Config(
        model=model,
        pool=PoolConfig(page_size=8, pages=64),
        serve=serve,
        store=StoreConfig(str(tmp_path / "store"), chunk_tokens=8),
    )
    return config.engine(loaded)
