"""Scales travel with their values: by every path, over what another page left."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem import canonical, config, errors, transfer
from kvmem.geometry import LayerSpec, Topology, group_layers, kinds, np_dtype, quantise
from kvmem.pool import moves
from kvmem.store import PageStore, chain_keys
from pallas_kernels import move_pages

KINDS = {
    "index keys": kinds.indexer("a.index", 0, dim=128),
    "keys and values": kinds.mxfp8(LayerSpec("a", 0, kv_heads=2, head_dim=64)),
    "latents": kinds.latent("a", 0, rank=128, rope_dim=8, scale=1.0, fp8=True),
}
TOKENS = 8


def group_of(name):
    layers = [KINDS[name]]
    if name == "index keys":
        layers.append(kinds.latent("a", 0, rank=128, rope_dim=8, scale=1.0))
    return group_layers(layers, page_size=4)[-1]


def filled(group, scale, seed):
    """Return records of random values, every scale being `scale`."""
    rng, columns = np.random.default_rng(seed), []
    for entry in canonical.canonical_envelope(group, 1).entries:
        field = entry.field
        if field.is_scale:
            count = field.head_nbytes // np_dtype(field.dtype).itemsize
            rows = np.full((TOKENS, count), scale, np.float32)
        else:
            count = field.head_nbytes // np_dtype(field.dtype).itemsize
            rows = rng.standard_normal((TOKENS, count)).astype(np.float32)
        columns.append(rows.astype(np_dtype(field.dtype)).view(np.uint8))
    return np.concatenate(columns, axis=1)


def numbers(group, records):
    """Return every quantised row of records as the numbers that it stands for."""
    found, entries = [], canonical.canonical_envelope(group, 1).entries
    for value, scale in zip(entries, entries[1:], strict=False):
        if scale.field.is_scale and not value.field.is_scale:
            cells = [
                np.ascontiguousarray(records[:, e.offset : e.offset + e.nbytes]).view(
                    np_dtype(e.field.dtype)
                )
                for e in (value, scale)
            ]
            found.append(quantise.dequantise(*cells))
    assert found
    return np.concatenate(found, axis=1)


def pool_of(group):
    """Return a pool whose pages another owner left with scales of 64."""
    plan = canonical.plan(group, Topology())
    shape = (1, 6, plan.page_nbytes)
    pages, old = jnp.zeros(shape, jnp.uint8), filled(group, 64.0, seed=9)
    for ids in ([0, 1], [2, 3], [4, 5]):
        pages = transfer.import_records(pages, ids, old, plan)
    return pages, plan


def through_copies(pages, plan, records, tmp_path):
    pages = transfer.import_records(pages, [0, 1], records, plan)
    pair = jnp.asarray([0, 1]), jnp.asarray([4, 3])
    copy = jax.jit(move_pages.reference, donate_argnums=0)
    pages = copy(pages[0], *pair)[None]
    return transfer.export_records(pages, [4, 3], plan, TOKENS)


def through_moves(pages, plan, records, tmp_path):
    pages = transfer.import_records(pages, [0, 1], records, plan)
    pair = jnp.asarray([0, 1]), jnp.asarray([4, 3])
    pages = jax.jit(moves.move, donate_argnums=0)(pages, *pair, 2)
    return transfer.export_records(pages, [4, 3], plan, TOKENS)


def through_slots(pages, plan, records, tmp_path):
    slots = np.array([9, 20, 3, 14, 15, 0, 23, 7])
    pages = transfer.put_slots(pages, slots, records, plan)
    return transfer.take_slots(pages, slots, plan)


def through_records(pages, plan, records, tmp_path, each="host"):
    pages = transfer.import_records(pages, [5, 2], records, plan, implementation=each)
    return transfer.export_records(pages, [5, 2], plan, TOKENS, implementation=each)


def through_a_store(pages, plan, records, tmp_path):
    group, tokens = plan.group, np.arange(TOKENS, dtype=np.int32)
    facts = "weights", canonical.format_id((group,))
    keys = chain_keys("/".join(facts), tokens, 4)
    sizes = {"record_nbytes": group.record_nbytes, "chunk_tokens": 4}
    with PageStore.open(tmp_path, *facts, **sizes) as store:
        store.put(keys, tokens, records)
    with PageStore.open(tmp_path, *facts, **sizes) as store:
        found = store.get(keys, tokens)
    return through_records(pages, plan, found.records, tmp_path)


def after_a_trim(pages, plan, records, tmp_path):
    """Cut inside a page, then the rest again: what was cut is another's no more."""
    pages = transfer.import_records(pages, [5, 2], records[:5], plan)
    pages = transfer.import_records(pages, [5, 2], records[5:], plan, first_token=5)
    head = transfer.export_records(pages, [5, 2], plan, 5)
    tail = transfer.export_records(pages, [5, 2], plan, TOKENS - 5, first_token=5)
    return np.concatenate([head, tail])


PATHS = {
    "a copy of pages": through_copies,
    "a move of pages": through_moves,
    "rows by slot": through_slots,
    "records on the host": through_records,
    "records on the device": functools.partial(through_records, each="device"),
    "a store": through_a_store,
    "a trim": after_a_trim,
}


@pytest.mark.case("QNT-01")
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("path", PATHS)
def test_quantised_rows_mean_the_same_wherever_they_went(name, path, tmp_path):
    group = group_of(name)
    records = filled(group, 0.5, seed=1)
    pages, plan = pool_of(group)
    found = PATHS[path](pages, plan, records, tmp_path)
    assert np.array_equal(found, records)
    assert np.array_equal(numbers(group, found), numbers(group, records))


def test_values_without_their_scales_would_mean_something_else():
    group = group_of("index keys")
    mine, theirs = filled(group, 0.5, seed=1), filled(group, 64.0, seed=9)
    left = np.concatenate([mine[:, :128], theirs[:, 128:]], axis=1)
    assert np.abs(numbers(group, left) - numbers(group, mine)).max() > 10


@pytest.mark.case("QNT-06")
def test_a_scale_that_nothing_would_use_is_refused(repo_root):
    """Scales are computed a block; there is no setting that could be left unused."""
    path = str(repo_root / "configs" / "models" / "smollm2.toml")
    for setting in ("model.kv_scale=0.04", "pool.kv_scales=0.04"):
        with pytest.raises(errors.ConfigError, match="unknown key"):
            config.load(path, [setting])
