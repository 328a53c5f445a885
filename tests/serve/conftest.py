"""Builders of this room's tests: host books, sequences, a decoder of a few thousand
parameters."""

import functools
import hashlib
import itertools

import numpy as np
import pytest
import tokenizers

from kvmem import budget, geometry
from kvmem import pool as pools
from kvmem.geometry import Topology
from kvmem.model.loaded import LoadedModel
from kvmem.model.spec import ModelSpec
from kvmem.model.tokenizer import Tokenizer
from kvmem.prefix import PrefixCache
from kvmem.serve import engine as engines
from kvmem.serve import loop as loops
from kvmem.serve.buckets import ServeConfig
from kvmem.serve.page_table import PageTable
from kvmem.serve.request import SamplingParams, Sequence
from kvmem.serve.scheduler import Scheduler


class Letters:
    """A text stream whose token t is the letter t: enough for the host's half."""

    def push(self, token):
        return chr(97 + token % 26)

    def finish(self):
        return ""


@pytest.fixture
def page_table():
    def make(num_pages=8, page_size=4):
        return PageTable(pools.Ledger(num_pages), PrefixCache(page_size))

    return make


@pytest.fixture
def new_sequence():
    ids = itertools.count()

    def make(prompt, sample=0, **sampling):
        params = SamplingParams(**{"max_tokens": 4, **sampling})
        return Sequence(next(ids), sample, tuple(prompt), params, Letters())

    return make


@pytest.fixture
def scheduler(page_table):
    def make(num_pages=8, page_size=4, max_batch=4, chunk=8, max_length=256):
        return Scheduler(
            page_table(num_pages, page_size),
            max_batch=max_batch,
            prefill_chunk=chunk,
            max_length=max_length,
        )

    return make


VOCAB = 257  # every byte, and an end of text
EOS = 256


@pytest.fixture(scope="session")
def byte_tokenizer():
    """Token t is byte t; 256 ends a text."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    symbol = {byte: chr(byte) for byte in plain}
    symbol |= {byte: chr(256 + at) for at, byte in enumerate(others)}
    vocab = {symbol[byte]: byte for byte in range(256)}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens(["<eos>"])
    return Tokenizer(core, {"eos_token": "<eos>"}, (EOS,), None, "bytes")


@pytest.fixture(scope="session")
def tiny_model(byte_tokenizer):
    """A random decoder of two layers with 8 query and 4 or 8 KV heads."""

    @functools.cache
    def make(kv_heads=4, seed=0):
        spec = ModelSpec(
            name="tiny",
            hidden=32,
            mlp=48,
            layers=2,
            heads=8,
            kv_heads=kv_heads,
            head_dim=8,
            vocab=VOCAB,
            norm_eps=1e-5,
            tie_embeddings=True,
            max_position=512,
            eos_ids=(EOS,),
        )
        rng = np.random.default_rng(seed)
        params = {
            name: np.ones(shape, np.float32)
            if name.endswith("norm.weight")
            else rng.normal(0, 0.4, shape).astype(np.float32)
            for name, shape in spec.parameters().items()
        }
        digest = hashlib.sha256(params["model.embed_tokens.weight"]).hexdigest()
        return LoadedModel(spec, params, byte_tokenizer, f"tiny {digest[:8]}")

    return make


@pytest.fixture(scope="session")
def shared_steps():
    """Steps compiled once for all tests that do not count traces."""
    return functools.cache(loops.Stepper)


@pytest.fixture
def engine(tiny_model, shared_steps, monkeypatch, request):
    """An engine of a tiny model on a poisoned pool in checked mode.

    Engines of one shape share their compiled steps, unless the test is marked
    `own_steps` because it counts traces.
    """
    if not request.node.get_closest_marker("own_steps"):
        monkeypatch.setattr(loops, "Stepper", shared_steps)

    def make(
        tp=1,
        pages=64,
        page_size=4,
        order="head_major",
        kv_dtype="float32",
        kv_heads=4,
        store=None,
        certified=False,
        executor="auto",
        **serve,
    ):
        model = tiny_model(kv_heads)
        layers = model.spec.layer_specs(kv_dtype)
        (group,) = geometry.group_layers(layers, page_size)
        topology = Topology(tp)
        nbytes = geometry.envelope.build(group, topology, 0, order).nbytes
        solved = budget.solve(
            (group,), topology, [budget.limit("memory", pages * nbytes)], order=order
        )
        config = {"max_batch": 4, "max_length": 128, "prefill_chunk": 16}
        config |= {"batches": (4,), "chunks": (16,), **serve}
        return engines.Engine(
            model,
            group,
            solved,
            topology,
            order=order,
            config=ServeConfig(**config),
            store=store,
            poison=True,
            checked=True,
            certified=certified,
            executor=executor,
        )

    return make
