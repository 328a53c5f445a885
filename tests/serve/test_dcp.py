"""Engines whose ranks keep different tokens: the same tokens out, the same bytes kept.

A topology is (tp, dcp, interleave).
"""

import contextlib
import dataclasses

import numpy as np
import pytest

from kvmem import errors, geometry, store
from kvmem import pool as pools
from kvmem.canonical import format_id
from kvmem.config import Config, ModelConfig, PoolConfig, StoreConfig
from kvmem.geometry import Spread, Topology
from kvmem.model import attention
from kvmem.prefix import PrefixCache
from kvmem.serve import SamplingParams, ServeConfig
from kvmem.serve.page_table import PageTable

PAGE, CHUNK = 4, 4
LONG = pytest.mark.long


def text(seed, length):
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def greedy(count, **more):
    return SamplingParams(max_tokens=count, ignore_eos=True, **more)


def on(topology):
    """The arguments of an engine on a topology."""
    return dict(zip(("tp", "dcp", "interleave"), topology, strict=True))


PROMPTS = [text(seed, length) for seed, length in enumerate((1, 16, 17, 40))]
PAGES = 13  # too few for all prompts at once; of one number, so that steps are shared
TOPOLOGIES = [
    (2, 2, 2),
    pytest.param((1, 4, 4), marks=LONG),
    pytest.param((1, 2, 1), marks=LONG),
    pytest.param((2, 4, 1), marks=LONG),
    pytest.param((4, 2, 2), marks=LONG),
]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_greedy_tokens_are_those_of_one_rank(engine, topology):
    alone = engine().generate(PROMPTS, greedy(24))
    made, page = engine(**on(topology), pages=PAGES), PAGE * topology[1]
    outputs = made.generate(PROMPTS, greedy(24))
    assert [o.output_ids for o in outputs] == [o.output_ids for o in alone]
    assert (made.scheduler.num_preempted > 0) == (page == 8)
    (again,) = made.generate(PROMPTS[3], greedy(24))
    assert again.output_ids == alone[3].output_ids
    assert again.cached_tokens == 39 // page * page
    assert made.accounts.in_use == 0


def test_samples_of_a_prompt_on_token_shards_do_not_touch_each_other(engine):
    params = greedy(9, temperature=1.2, seed=3, n=3)
    (alone,) = engine().generate(text(17, 18), params)
    made = engine(**on((2, 2, 2)), pages=PAGES)
    (output,) = made.generate(text(17, 18), params)
    ids = [completion.output_ids for completion in output.completions]
    assert ids == [completion.output_ids for completion in alone.completions]
    assert len(set(ids)) == 3


@LONG
def test_token_shards_are_certified_at_start_and_a_wrong_rule_is_named(
    engine, monkeypatch
):
    engine(**on((2, 2, 2)), pages=PAGES, certified=True)
    wrong = attention.writer(Spread(2, 1))
    monkeypatch.setattr(attention, "writer", lambda spread: wrong)
    with pytest.raises(errors.IncompatiblePlan, match="every layer is certified"):
        engine(**on((2, 2, 2)), pages=PAGES, certified=True)


@pytest.mark.parametrize(
    ("kind", "topology"),
    [
        ("window", (1, 2, 2)),
        ("state", (1, 2, 4)),
        pytest.param("indexer", (1, 2, 1), marks=LONG),
        pytest.param("window", (2, 4, 1), marks=LONG),
        pytest.param("indexer", (2, 2, 4), marks=LONG),
        pytest.param("state", (2, 2, 1), marks=LONG),
    ],
    ids=str,
)
def test_a_hybrid_is_served_as_on_one_rank(hybrid_engine, hybrid_dense, kind, topology):
    made = hybrid_engine(kind, **on(topology), pages=50)
    prompts, page = [text(s, n) for s, n in enumerate((1, 17, 50))], PAGE * topology[1]
    for _ in range(2):
        outputs = made.generate(prompts, greedy(14))
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.output_ids == hybrid_dense(kind, prompt, 14)
    found = [output.cached_tokens for output in outputs]
    assert found == [known // page * page for known in (0, 16, 49)]
    assert made.accounts.in_use == 0


def test_records_of_a_hybrid_are_those_of_one_rank(hybrid_engine):
    """Of a window the last tokens: as many as its pages hold, which are wider here."""
    prompt, found = text(18, 43), []
    for more in ({}, on((1, 2, 2)) | {"pages": 50}):
        made = hybrid_engine("window", **more)
        request_id = made.add(prompt, greedy(4))
        while not made.scheduler.running or made.scheduler.running[0].num_left > 1:
            made.step()
        records = made.records(request_id)
        found.append({name: rows.view(np.float32) for name, rows in records.items()})
        made.abort(request_id)
    one, shards = found
    assert len(one["full"]) == len(shards["full"]) >= 42
    for rows, page in ((one["window10"], PAGE), (shards["window10"], 2 * PAGE)):
        assert 9 <= len(rows) < 10 + page
    for name, rows in one.items():
        np.testing.assert_allclose(shards[name][-len(rows) :], rows, atol=1e-4)


@pytest.fixture
def open_store(tmp_path, tiny_model):
    """The store of the tiny model."""

    def make(**options):
        model = tiny_model()
        groups = geometry.group_layers(model.spec.layer_specs("float32"), PAGE)
        ids = model.model_id, format_id(groups)
        sizes = dict(record_nbytes=groups[0].record_nbytes, chunk_tokens=CHUNK)
        return store.PageStore.open(tmp_path / "root", *ids, **sizes, **options)

    return make


def records_after_one_step(made, prompt):
    """Return what is in the pages of a prompt whose start comes from the store."""
    request_id = made.add(prompt, greedy(4))
    made.step()
    records = made.records(request_id)
    stored = made.scheduler.running[0].stored_tokens
    made.abort(request_id)
    return records, stored


@pytest.mark.parametrize(
    ("wrote", "reads"),
    [
        ((2, 2, 2), (1, 1, 1)),
        ((1, 1, 1), (2, 2, 2)),
        pytest.param((1, 4, 4), (2, 2, 2), marks=LONG),
        pytest.param((2, 2, 2), (1, 4, 4), marks=LONG),
    ],
    ids=str,
)
def test_pages_of_one_topology_are_read_at_another_in_equal_bytes(
    engine, open_store, wrote, reads
):
    prompt = text(30, 37)
    with open_store() as kept:
        made = engine(store=kept, **on(wrote), pages=PAGES)
        request_id = made.add(prompt, greedy(8))
        while not made.scheduler.running or made.scheduler.running[0].num_left > 1:
            made.step()
        written = made.records(request_id)
        while made.has_work:
            made.step()
        output = made.take_output(request_id)
    with open_store(read_only=True) as kept:
        reader = engine(store=kept, **on(reads), pages=PAGES, prefix_cache=False)
        found, stored = records_after_one_step(reader, prompt)
        assert stored == 36
        np.testing.assert_array_equal(found[:stored], written[:stored])
        (again,) = reader.generate(prompt, greedy(8))
    assert again.output_ids == output.output_ids


@pytest.fixture
def open_parts(tmp_path, hybrid_model):
    """The parts of a hybrid on one root."""

    @contextlib.contextmanager
    def make(kind, chunk=CHUNK, **options):
        model = hybrid_model(kind)
        groups = geometry.group_layers(model.spec.layer_specs("float32"), PAGE)
        ids = model.model_id, format_id(groups)
        parts, root = store.parts_of(groups), tmp_path / f"root{chunk}"
        with store.PartedStore.open(root, *ids, parts, chunk, **options) as kept:
            yield kept

    return make


@pytest.mark.parametrize(
    ("kind", "shards_write"),
    [
        ("window", True),
        ("state", False),
        pytest.param("window", False, marks=LONG),
        pytest.param("state", True, marks=LONG),
        pytest.param("indexer", True, marks=LONG),
        pytest.param("indexer", False, marks=LONG),
    ],
)
def test_every_part_of_a_hybrid_crosses_between_token_shards_and_one_rank(
    hybrid_engine, hybrid_dense, open_parts, kind, shards_write
):
    interleave = {"window": 2, "indexer": 1, "state": 4}[kind]
    shards, one = {**on((1, 2, interleave)), "pages": 50}, {}
    prompt = text(60, 37)
    with open_parts(kind) as kept:
        made = hybrid_engine(kind, store=kept, **(shards if shards_write else one))
        (first,) = made.generate(prompt, greedy(12))
    assert first.output_ids == hybrid_dense(kind, prompt, 12)
    longer = [*prompt, *first.output_ids]
    with open_parts(kind, read_only=True) as kept:
        made = hybrid_engine(kind, store=kept, **(one if shards_write else shards))
        (again,) = made.generate(longer, greedy(6))
    # a text ends in the store where the writer's states stood: at its virtual pages
    assert again.stored_tokens == 48
    assert again.output_ids == hybrid_dense(kind, longer, 6)


def config_of(model, dcp, nbytes):
    return Config(
        model=ModelConfig(facts=model.spec.facts, seed=1, kv_dtype="float32"),
        topology=Topology(dcp=dcp, interleave=2),
        pool=PoolConfig(page_size=PAGE, memory=nbytes, checked=True),
        serve=ServeConfig(max_batch=1, max_length=400, prefill_chunk=16),
    )


@pytest.mark.parametrize("kind", ["indexer", "window"])
def test_ranks_take_the_bytes_of_the_plan_and_hold_more_tokens(hybrid_model, kind):
    """Everything of the one is spread; of the other half the layers are windows."""
    model, nbytes, held = hybrid_model(kind), 200_000, []
    for dcp in (1, 2, 4):
        made = config_of(model, dcp, nbytes)
        solved, engine = made.budget(), made.engine()
        shards = [shard.data.nbytes for shard in engine.pool.pages.addressable_shards]
        assert shards == [solved.used_nbytes] * dcp
        assert solved.used_nbytes <= nbytes
        table = engine.table.needs
        assert table.num_vpages[0] == solved.pools[0].num_vpages[0]
        # a text of all that the plan promises is admitted, and of a page more is not
        page, most = table.page_size, table.num_vpages[0] * table.page_size
        assert page == PAGE * dcp
        assert solved.groups[0].tokens <= most
        needed = table.peak(solved.groups[0].tokens, 16)
        assert not table.never_fits(needed)
        assert table.never_fits(table.peak(most + page, 16))
        held.append(solved.groups[0].tokens)
    if kind == "indexer":
        assert held == [held[0], 2 * held[0], 4 * held[0]]
    assert held[0] < held[1] < held[2]


def test_a_text_that_one_rank_cannot_hold_is_served_by_two(hybrid_model):
    model = hybrid_model("indexer")
    one, two = (config_of(model, dcp, 40_000).engine() for dcp in (1, 2))
    prompt = text(40, 50)
    with pytest.raises(errors.OutOfPages, match="the pool has"):
        one.add(prompt, greedy(8))
    assert two.add(prompt, greedy(8)) == 0
    two.abort(0)


@LONG
def test_a_config_serves_token_shards_and_keeps_what_one_rank_resumes(
    hybrid_model, tmp_path
):
    prompt, outputs = text(42, 30), []
    for dcp in (2, 1):
        made = config_of(hybrid_model("indexer"), dcp, 100_000)
        serve = dataclasses.replace(
            made.serve, max_length=64, batches=(1,), chunks=(16,), widths=(64,)
        )
        kept = StoreConfig(root=str(tmp_path / "root"), chunk_tokens=CHUNK)
        made = dataclasses.replace(made, serve=serve, store=kept)
        with made.engine() as engine:
            outputs += engine.generate(prompt, greedy(8))
    assert outputs[1].output_ids == outputs[0].output_ids
    assert [output.stored_tokens for output in outputs] == [0, 28]


def test_two_pieces_of_one_wide_page_are_given_back_once():
    """sglang #38941: pages of 64 on 8 token shards; 576 tokens end inside a page."""
    table = PageTable(pools.Ledger(4), PrefixCache(64 * 8))
    tokens = text(41, 900)
    held = table.begin(table.match(tokens), tokens)
    assert [len(column) for column in held.columns] == [2]
    cut, computed = table.roll_back(held, tokens, 576)
    assert (computed, table.accounts().in_use) == (576, 2)
    table.give_back(cut)
    assert table.accounts() == (4, 0, 0, 4)
    assert table.objections(()) == ()


def test_a_store_of_windows_wants_chunks_that_end_where_wide_pages_do(
    hybrid_engine, open_parts
):
    with open_parts("window", chunk=6) as kept:
        words = "pages of 8 tokens do not end where chunks of 6 do"
        with pytest.raises(errors.IncompatiblePlan, match=words):
            hybrid_engine("window", store=kept, **on((1, 2, 2)), pages=50)
