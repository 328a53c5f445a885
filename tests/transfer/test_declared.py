"""Pools of other engines, declared axis by axis, through certified records and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem import canonical, transfer
from kvmem.geometry import LayerSpec, Topology, declare, group_layers, np_dtype

HEADS, DIM, PAGE = 8, 16, 4
# Pairs that other canonical forms refuse or keep to themselves: axes and topology.
PAIRS = {
    "split token-major": ("rank page field token head dim", Topology(2)),
    "split head-major": ("rank page field head token dim", Topology(4)),
    "packed token-major": ("rank page token head field dim", Topology(8)),
    "packed head-major": ("rank page head token field dim", Topology(2)),
    "tokens before keys and values": (
        "rank page token field head dim",
        Topology(4),
    ),
    "keys before pages": ("rank field page token head dim", Topology(2)),
    "one slab for all layers": (
        "rank page layer field token head dim",
        Topology(2),
    ),
    "layers before pages": ("rank layer page field token head dim", Topology(2)),
    "arrays of keys and of values": ("rank page token head dim", Topology(2)),
    "token shards beside divided heads": (
        "rank page field token head dim",
        Topology.nested(4, 2),
    ),
    "token shards with an interleave": (
        "rank page field token head dim",
        Topology.nested(4, 4, interleave=2),
    ),
    "replicas twice the heads": ("rank page field token head dim", Topology(16)),
    "replicas and token shards": (
        "rank page token head field dim",
        Topology.nested(32, 2, interleave=4),
    ),
    "a replica of a prefill-context group": (
        "rank page field token head dim",
        Topology.nested(2, pcp=2),
    ),
}


def group(dtype="bfloat16"):
    specs = [
        LayerSpec(f"layers.{i}", i, kv_heads=HEADS, head_dim=DIM, dtype=dtype)
        for i in range(2)
    ]
    (made,) = group_layers(specs, page_size=PAGE)
    return made


def whole_model(oracle, dtype, num_tokens):
    """Return {(layer, field): [token, head, dim]} of finite, aperiodic elements."""
    item = np_dtype(dtype).itemsize
    made = {}
    for layer in range(2):
        for field in ("k", "v"):
            raw = oracle.stream(num_tokens * HEADS * DIM * item, f"{layer}/{field}")
            raw = raw & 0x3F  # no NaN: their bits are not kept by every cast
            shape = (num_tokens, HEADS, DIM)
            made[layer, field] = raw.view(np_dtype(dtype)).reshape(shape)
    return made


def engine_arrays(oracle, axes, topology, dtype, num_pages):
    """Return an engine's arrays, element by element out of the model."""
    whole = whole_model(oracle, dtype, num_pages * PAGE * topology.dcp)
    tokens = np.arange(num_pages * PAGE * topology.dcp)
    full = []
    for rank in range(topology.ranks):
        mine = tokens // topology.interleave % topology.dcp == rank % topology.dcp
        heads = oracle.heads(HEADS, topology.tp, rank // topology.dcp)
        cells = np.stack(
            [
                np.stack([whole[la, f][mine][:, heads] for f in ("k", "v")])
                for la in (0, 1)
            ]
        )  # [layer, field, token, head, dim]
        full.append(cells.reshape(2, 2, num_pages, PAGE, len(heads), DIM))
    full = np.stack(full)  # [rank, layer, field, page, token, head, dim]
    names = ["rank", "layer", "field", "page", "token", "head", "dim"]
    own = axes.split()
    apart = [name for name in ("layer", "field") if name not in own]
    turned = full.transpose([names.index(name) for name in (*apart, *own)])
    arrays = turned.reshape(-1, *turned.shape[len(apart) :])
    records = np.concatenate(
        [
            whole[la, f][:, h].view(np.uint8)
            for la in (0, 1)
            for h in range(HEADS)
            for f in ("k", "v")
        ],
        axis=1,
    )
    return [jnp.asarray(array) for array in arrays], records


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_a_declared_pool_is_served(oracle, pair, dtype):
    axes, topology = PAIRS[pair]
    arrays, expected = engine_arrays(oracle, axes, topology, dtype, num_pages=2)
    declared = declare(group(dtype), topology, axes, arrays)
    plan = canonical.plan(
        group(dtype), topology, declared.order, num_pages=declared.num_pages
    )
    pages = transfer.as_bytes(arrays, plan)
    records = transfer.export_records(pages, [0, 1], plan, plan.page_tokens * 2)
    assert np.array_equal(records, expected)
    blank = jax.tree.map(jnp.zeros_like, pages)
    filled = transfer.import_records(blank, [0, 1], records, plan)
    for found, want in zip(transfer.from_bytes(filled, arrays), arrays, strict=True):
        assert found.dtype == want.dtype
        assert np.array_equal(found.view(jnp.uint8), want.view(jnp.uint8))
