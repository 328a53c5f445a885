"""Builders of this room's tests: decoders deep enough that a token can be left out."""

import functools

import numpy as np
import pytest

from kvmem import budget, geometry, settings
from kvmem.blend import BlendConfig
from kvmem.geometry import Rope, Topology
from kvmem.model.hybrid import random_model
from kvmem.model.loaded import LoadedModel
from kvmem.model.spec import ModelSpec
from kvmem.serve import engine as engines
from kvmem.serve.buckets import ServeConfig

VOCAB, EOS, LAYERS = 257, 256, 5
CHUNK = 4

_LATENT = {
    "model_type": "deepseek_v32",
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "eos_token_id": EOS,
    "num_hidden_layers": 3,
    "q_lora_rank": 16,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 128,
    "index_topk": 24,
}
_OTHERS = {
    "state": {
        "model_type": "qwen3_next",
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "full_attention_interval": 2,
        "head_dim": 16,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
    },
    "window": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 10,
    },
}
_SHARED = ("vocab_size", "max_position_embeddings", "hidden_size")
_SHARED += ("intermediate_size", "num_attention_heads", "eos_token_id")


@pytest.fixture(scope="session")
def deep_model():
    """A random decoder of five layers, 8 query and 4 KV heads."""

    @functools.cache
    def make():
        spec = ModelSpec(
            name="deep",
            hidden=32,
            mlp=48,
            layers=LAYERS,
            heads=8,
            kv_heads=4,
            head_dim=8,
            vocab=VOCAB,
            norm_eps=1e-5,
            tie_embeddings=True,
            max_position=512,
            rope=Rope(theta=500.0),
            eos_ids=(EOS,),
        )
        rng = np.random.default_rng(7)
        params = {
            name: np.ones(shape, np.float32)
            if name.endswith("norm.weight")
            else rng.normal(0, 0.3, shape).astype(np.float32)
            for name, shape in spec.parameters().items()
        }
        return LoadedModel(spec, params, random_model.byte_tokenizer((EOS,)), "deep")

    return make


@pytest.fixture(scope="session")
def hybrid_model():
    """A random hybrid: "latent" with index keys, "window", or "state"."""

    @functools.cache
    def make(kind):
        shared = {name: _LATENT[name] for name in _SHARED}
        facts = _LATENT if kind == "latent" else shared | _OTHERS[kind]
        return random_model.make(settings.Table(facts), seed=5)

    return make


@pytest.fixture(scope="session")
def _engines(deep_model, hybrid_model):
    """Make engines once: their programs are what takes time."""

    @functools.cache
    def make(kind, tp, page_size, order, kv_dtype, executor, check_layer, stale):
        model = deep_model() if kind == "deep" else hybrid_model(kind)
        layers = model.spec.layer_specs(kv_dtype)
        groups = geometry.group_layers(layers, page_size)
        topology = Topology(tp)
        solved = budget.solve(
            groups,
            topology,
            (),
            order=order,
            max_pages=96,
            sequences=1,
            max_length=128,
            step=64,
        )
        return engines.Engine(
            model,
            groups,
            solved,
            topology,
            order=order,
            config=ServeConfig(2, 128, 64, (2,), (16, 64), (128,)),
            poison=True,
            checked=True,
            executor=executor,
            blend=BlendConfig(check_layer=check_layer, allow_stale_selector=stale),
        )

    return make


@pytest.fixture
def blending_engine(_engines):
    """An idle engine that blends, of a tiny model on a poisoned pool in checked mode.

    Engines of one shape are one and the same; it has no texts and nothing cached.
    """

    def make(
        kind="deep",
        tp=1,
        page_size=4,
        order="head_major",
        kv_dtype="float32",
        executor="auto",
        check_layer=1,
        allow_stale_selector=False,
        **blend,
    ):
        where = kind, tp, page_size, order, kv_dtype, executor, check_layer
        engine = _engines(*where, allow_stale_selector)
        running = [*engine.scheduler.running, *engine.scheduler.waiting]
        for request_id in {sequence.request_id for sequence in running}:
            engine.abort(request_id)
            engine.take_output(request_id)
        engine.table.clear_cache()
        settings = {"chunk_tokens": CHUNK, "min_tokens": 8, "check_layer": check_layer}
        settings |= {"allow_stale_selector": allow_stale_selector, **blend}
        engine.blender.config = BlendConfig(**settings)
        engine.blender.clear()
        return engine

    return make


@pytest.fixture
def text():
    """Return n token ids; texts of different seeds share no run."""

    def make(length, seed):
        return np.random.default_rng(seed).integers(0, 256, length).tolist()

    return make
