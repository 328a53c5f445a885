"""Builders of this room's tests: a tiny engine of a checkpoint on disk."""

import pytest

from experiments import tiny_decoder
from kvmem import config as configs
from kvmem.config import ModelConfig, PoolConfig, StoreConfig
from kvmem.serve import ServeConfig


@pytest.fixture
def tiny_engine(tmp_path, monkeypatch):
    """An engine with a store, of the decoder that smoke configs use."""
    monkeypatch.chdir(tmp_path)
    model, loaded = tiny_decoder.load(ModelConfig("tiny", kv_dtype="float32"))
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
