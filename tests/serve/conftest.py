"""Builders of this room's tests: host books, sequences, a decoder of a few thousand
parameters."""

import functools
import hashlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from kvmem import budget, geometry, settings
from kvmem import pool as pools
from kvmem.budget import members
from kvmem.geometry import Topology
from kvmem.model import cut, dflash, mtp
from kvmem.model.hybrid import random_model
from kvmem.model.hybrid.decoder import HybridDecoder
from kvmem.model.loaded import LoadedModel
from kvmem.model.spec import ModelSpec
from kvmem.model.tokenizer import Tokenizer
from kvmem.prefix import PrefixCache
from kvmem.serve import engine as engines
from kvmem.serve import loop as loops
from kvmem.serve.buckets import ServeConfig
from kvmem.serve.draft import FrozenKV, NGram, TwoEngine, two_engine, virtual
from kvmem.serve.draft import mtp as mtp_draft
from kvmem.serve.draft.dflash import DFlash
from kvmem.serve.draft.dspark import DSpark
from kvmem.serve.draft.mtp import MTP
from kvmem.serve.draft.own_pages import paid_for
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
        dcp=1,
        interleave=1,
        pages=64,
        page_size=4,
        order="head_major",
        kv_dtype="float32",
        kv_heads=4,
        store=None,
        certified=False,
        executor="auto",
        kind="unified",
        draft=None,
        **serve,
    ):
        model = tiny_model(kv_heads)
        layers = model.spec.layer_specs(kv_dtype)
        (group,) = geometry.group_layers(layers, page_size)
        topology = Topology(tp, dcp, interleave)
        nbytes = geometry.envelope.build(group, topology, 0, order).nbytes
        limits = [budget.limit("memory", pages * nbytes)]
        joint = (group, *(draft.groups if draft is not None else ()))
        followers = ()
        if isinstance(draft, virtual.VirtualDraft):  # beside as many of the target
            followers, limits = draft.draft_groups, []
        solved = budget.solve(
            joint,
            topology,
            limits,
            order=order,
            kind=kind,
            max_pages=pages if followers else None,
            draft=followers,
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
            draft=draft,
            executor=executor,
        )

    return make


_SIZES = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "eos_token_id": EOS,
}
HYBRIDS = {  # every kind of memory, in as few layers as show it
    "window": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 10,
    },
    "indexer": {
        "model_type": "deepseek_v32",
        "num_hidden_layers": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "index_n_heads": 2,
        "index_head_dim": 128,
        "index_topk": 24,
    },
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
}


@pytest.fixture(scope="session")
def hybrid_model():
    """A random decoder of one or two layers that keeps more than one group."""

    @functools.cache
    def make(kind):
        return random_model.make(settings.Table(_SIZES | HYBRIDS[kind]), seed=5)

    return make


@pytest.fixture
def hybrid_engine(hybrid_model, shared_steps, monkeypatch, request):
    """An engine of a hybrid on a poisoned pool in checked mode."""
    if not request.node.get_closest_marker("own_steps"):
        monkeypatch.setattr(loops, "Stepper", shared_steps)

    def make(
        kind,
        tp=1,
        pages=None,
        page_size=4,
        executor="auto",
        store=None,
        dcp=1,
        interleave=1,
        draft=None,
        **serve,
    ):
        model = hybrid_model(kind)
        layers = model.spec.layer_specs("float32")
        groups = geometry.group_layers(layers, page_size)
        config = {"max_batch": 4, "max_length": 96, "prefill_chunk": 16}
        config |= {"batches": (4,), "chunks": (16,), "widths": (96,), **serve}
        topology = Topology(tp, dcp, interleave)
        pages = pages or (36 if kind == "state" else 44)  # few, and of one size
        solved = budget.solve(
            (*groups, *(draft.groups if draft is not None else ())),
            topology,
            (),
            max_pages=pages,
            draft=getattr(draft, "draft_groups", None),
            sequences=1,
            max_length=config["max_length"],
            step=config["prefill_chunk"],
        )
        return engines.Engine(
            model,
            groups,
            solved,
            topology,
            config=ServeConfig(**config),
            store=store,
            poison=True,
            checked=True,
            draft=draft,
            executor=executor,
        )

    return make


@pytest.fixture(scope="session")
def hybrid_dense(hybrid_model):
    """Greedy tokens of a hybrid that keeps no cache."""

    @functools.cache
    def reader(kind):
        model = hybrid_model(kind)
        decoder = HybridDecoder.from_params(model.spec, model.params)
        return jax.jit(lambda tokens: jnp.argmax(decoder.dense(tokens)[0], -1))

    def make(kind, prompt, count):
        tokens = list(prompt)
        for _ in range(count):
            padded = jnp.asarray([tokens + [0] * (96 - len(tokens))], jnp.int32)
            tokens.append(int(reader(kind)(padded)[len(tokens) - 1]))
        return tuple(tokens[len(prompt) :])

    return make


@pytest.fixture
def made(engine, hybrid_engine):
    """An engine of a kind of model: "full", or a hybrid's."""

    def make(kind, draft=None, **more):
        if kind == "full":
            return engine(draft=draft, **more)
        return hybrid_engine(kind, draft=draft, **more)

    return make


@pytest.fixture
def draft_of(tiny_model):
    """A draft model with a pool of `pages` pages: a tiny one of other weights."""

    def make(model=None, pages=64, page_size=4, topology=None, **facts):
        model, topology = model or tiny_model(seed=1), topology or Topology()
        layers = model.spec.layer_specs("float32")
        groups = geometry.group_layers(layers, page_size, domain="draft")
        page, *_ = members.members_of(groups, topology, "head_major", "unified")
        paid = paid_for(groups, pages * page.page_nbytes, topology, "head_major")
        return TwoEngine(model, groups, paid, **{"draft_tokens": 3, **facts})

    return make


@pytest.fixture(scope="session")
def layers_of(tiny_model, hybrid_model):
    """Draft layers of a tiny model that nobody has trained, and their groups.

    Their weights are large, so that what they propose depends on what they read.
    """

    @functools.cache
    def make(kind, page_size=4, seed=3, of="full"):
        target = tiny_model() if of == "full" else hybrid_model(of)
        small = kind.draw(target, 1, seed=seed)
        own = small.spec.own_parameters()
        params = {
            name: small.params[name] * (1 if name.endswith("norm.weight") else 15)
            for name in own
        }
        small = kind.with_params(target, 1, params, f"of seed {seed}")
        specs = small.spec.layer_specs("float32")
        return small, geometry.group_layers(specs, page_size, domain="draft")

    return make


@pytest.fixture(scope="session")
def first_layers(tiny_model):
    """The first layer of the tiny model, which drafts for it."""
    return functools.cache(lambda: cut.first_layers(tiny_model(), 1))


@pytest.fixture(scope="session")
def shared_drafts():
    """Steps of drafts, compiled once for all tests."""
    return {
        (mtp_draft, "Stepper"): functools.cache(mtp_draft.Stepper),
        (two_engine, "Stepper"): functools.cache(two_engine.Stepper),
        (virtual, "VirtualStepper"): functools.cache(virtual.VirtualStepper),
    }


@pytest.fixture
def drafted(made, draft_of, layers_of, first_layers, shared_drafts, monkeypatch):
    """An engine of the tiny model with any draft, by its name; None: without one.

    `small` is the draft model of "two_engine", `seed` that of draft layers.
    """
    for (module, name), shared in shared_drafts.items():
        monkeypatch.setattr(module, name, shared)

    def make(name, *, kind="full", draft_tokens=3, draft_pages=64, seed=3, **more):
        page_size = more.get("page_size", 4)
        topology = Topology(
            more.get("tp", 1), more.get("dcp", 1), more.get("interleave", 1)
        )
        if name in ("mtp", "dspark"):
            share = layers_of(mtp, page_size, seed, kind)
            draft = {"mtp": MTP, "dspark": DSpark}[name](*share, draft_tokens)
        elif name == "dflash":
            draft = DFlash(*layers_of(dflash, page_size, seed, kind), draft_tokens)
        elif name == "two_engine":
            draft = draft_of(
                more.pop("small", None) or first_layers(),
                draft_pages,
                page_size,
                topology,
                draft_tokens=draft_tokens,
            )
        else:
            proposers = {
                None: lambda: None,
                "ngram": lambda: NGram(draft_tokens),
                "frozen_kv": lambda: FrozenKV(1, draft_tokens),
            }
            draft = proposers[name]()
        return made(kind, draft, **more)

    return make
