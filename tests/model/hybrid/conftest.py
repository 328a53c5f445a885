"""Tiny hybrids, and texts read over the pages of all their groups."""

import functools

import jax
import numpy as np
import pytest

from kvmem import settings
from kvmem.geometry import Topology, envelope, group_layers
from kvmem.model import parallel
from kvmem.model.hybrid import random_model
from kvmem.model.hybrid.decoder import HybridDecoder
from kvmem.pool.table import GroupTable

_SIZES = {
    "vocab_size": 259,
    "max_position_embeddings": 512,
    "hidden_size": 32,
    "intermediate_size": 50,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 256,
}
_GEMMA = {
    "model_type": "gemma3_text",
    "head_dim": 8,
    "sliding_window": 8,
    "query_pre_attn_scalar": 12,
}
FACTS = {
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 2,
        "head_dim": 8,
        "sliding_window": 6,
    },
    "gemma3": _GEMMA | {"num_hidden_layers": 3, "sliding_window_pattern": 3},
    "gemma3 shared": _GEMMA
    | {
        "num_hidden_layers": 4,
        "sliding_window_pattern": 2,
        "num_kv_shared_layers": 2,
    },
    "deepseek_v32": {
        "model_type": "deepseek_v32",
        "num_hidden_layers": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "index_n_heads": 16,  # few heads score many tokens zero, a tie
        "index_head_dim": 128,
        "index_topk": 7,
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        "num_hidden_layers": 2,
        "full_attention_interval": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
    },
}


def facts(family: str, **changes) -> dict:
    """Return the fields of a tiny config."""
    fields = _SIZES | FACTS[family] | changes
    if family == "deepseek_v32":  # its rows are the same for every head
        del fields["num_key_value_heads"]
    return fields


@pytest.fixture(scope="session")
def facts_of():
    """Return the fields of a tiny config, by family; changes by keyword."""

    def make(family: str, **changes) -> settings.Table:
        return settings.Table(facts(family, **changes))

    return make


@pytest.fixture(scope="session")
def model_of(facts_of):
    """Draw a tiny hybrid, once a session."""

    @functools.cache
    def make(family: str, **changes):
        return random_model.make(facts_of(family, **changes), seed=3, name=family)

    return make


@pytest.fixture(scope="session")
def texts() -> np.ndarray:
    """Three texts of 24 tokens."""
    return np.random.default_rng(7).integers(0, 256, (3, 24)).astype(np.int32)


@pytest.fixture(scope="session")
def dense_of(model_of, texts):
    """Logits [3, 24, V] of the three texts without a cache."""

    @functools.cache
    def compute(family: str, kv_dtype: str = "float32") -> np.ndarray:
        model = model_of(family)
        decoder = HybridDecoder.from_params(model.spec, model.params)
        run = jax.jit(functools.partial(decoder.dense, kv_dtype=kv_dtype))
        return np.asarray(run(texts))

    return compute


@functools.cache
def compiled(envelopes, mesh):
    return jax.jit(parallel.make_step(envelopes, mesh), donate_argnums=1)


class Texts:
    """Texts that grow in the pages of every group; what is not held is poison.

    Pages are never zeroed: a handed-out page still holds 0xFF where nothing was
    written. Stale pages are given back as the texts grow, and poisoned again.
    """

    def __init__(
        self, model, page_size, tp=1, mesh=None, kv_dtype="float32", seqs=3, longest=24
    ):
        self.topology, self.mesh = Topology(tp), mesh
        layers = model.spec.layer_specs(kv_dtype)
        self.groups = group_layers(layers, page_size, max_length=longest)
        built = [envelope.build(group, self.topology, 0) for group in self.groups]
        size = max(
            e.nbytes for e, g in zip(built, self.groups, strict=True) if not g.is_state
        )
        self.envelopes = tuple(envelope.cut(each, size) for each in built)
        self.weights = parallel.load(
            model.spec, model.params, self.topology, mesh, model.dtype
        )
        self.longest = longest
        self.num_pages = seqs * sum(
            env.extents if group.is_state else -(-longest // page_size) + 1
            for env, group in zip(self.envelopes, self.groups, strict=True)
        )
        self.pages = np.full((tp, self.num_pages, size), 0xFF, np.uint8)
        self.free = np.random.default_rng(5).permutation(self.num_pages).tolist()
        self.lengths = np.zeros(seqs, np.int32)
        self.held = [[{} for _ in range(seqs)] for _ in self.groups]

    def read(self, tokens, counts, table_lengths=None) -> np.ndarray:
        """Read tokens [S, Q], counts [S] of them real; logits [S, V]."""
        counts = np.asarray(counts, np.int32)
        tables = tuple(
            self._table(at, self.lengths + counts, tokens.shape[1])
            for at in range(len(self.groups))
        )
        step = compiled(self.envelopes, self.mesh)
        pages = jax.device_put(self.pages, parallel.page_sharding(self.mesh))
        pages, logits = step(
            self.weights, pages, tokens, self.lengths.copy(), counts, tables
        )
        self.pages = np.array(pages)
        self.lengths = self.lengths + counts
        return np.asarray(logits)

    def give_back(self, seq: int) -> None:
        """End a text: its pages become poison."""
        for held in self.held:
            self._free(list(held[seq].values()))
            held[seq] = {}
        self.lengths[seq] = 0

    def num_held(self, group: int, seq: int) -> int:
        """Return how many pages a text holds in a group."""
        return len(self.held[group][seq])

    def _table(self, at: int, lengths: np.ndarray, steps: int) -> GroupTable:
        """Hold what the texts need, give back what is stale; the group's table."""
        group, envelope_ = self.groups[at], self.envelopes[at]
        size = group.page_size
        if group.is_state:
            for held, length in zip(self.held[at], lengths, strict=True):
                if length and not held:
                    held |= {k: self.free.pop() for k in range(envelope_.extents)}
            return self._columns(at, np.zeros_like(lengths), envelope_.extents)
        firsts = []
        for held, old, new in zip(self.held[at], self.lengths, lengths, strict=True):
            stale = group.lifecycle.stale(int(old), size)
            self._free([held.pop(ordinal) for ordinal in stale if ordinal in held])
            for ordinal in range(stale.stop, -(-int(new) // size)):
                held.setdefault(ordinal, None)
                if held[ordinal] is None:
                    held[ordinal] = self.free.pop()
            firsts.append(stale.stop)
        width = group.lifecycle.peak(self.longest + 1, size, step=steps)
        return self._columns(at, np.array(firsts, np.int32), width)

    def _columns(self, at: int, firsts: np.ndarray, width: int) -> GroupTable:
        table = np.full((len(firsts), width), self.num_pages, np.int32)
        for row, (held, first) in enumerate(zip(self.held[at], firsts, strict=True)):
            for ordinal, page in held.items():
                table[row, ordinal - first] = page
        return GroupTable(table, firsts)

    def _free(self, pages: list[int]) -> None:
        self.pages[:, pages] = 0xFF
        self.free = pages + self.free


@pytest.fixture(scope="session")
def make_texts():
    """Open texts over a model's pages; see `Texts`."""
    return Texts


@pytest.fixture(scope="session")
def texts_of(model_of):
    """Open texts over a tiny hybrid's pages; see `Texts`."""

    def make(family: str, page_size: int = 4, **options) -> Texts:
        return Texts(model_of(family), page_size, **options)

    return make
