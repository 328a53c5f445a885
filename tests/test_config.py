"""A config becomes groups and a budget, with no device and no weights."""

import dataclasses
import gc
import pathlib

import numpy as np
import pytest

from kvmem import canonical, config, errors, store
from kvmem.config import Config, ModelConfig, PoolConfig, StoreConfig
from kvmem.geometry import Topology
from kvmem.serve import ServeConfig

GIB = 1 << 30


def make(source: str, *overrides: str) -> Config:
    return config.load(None, [f"model.source={source}", *overrides], {})


@pytest.mark.case("BUD-01")
def test_a_draft_shares_the_budget(llama_config):
    draft = llama_config("draft", num_hidden_layers=2)
    made = make(llama_config(), "pool.memory=1000000000", f"draft.source={draft}")
    solved = made.budget()
    assert [t.bytes_per_token for t in solved.terms] == [131_072, 8_192]
    assert (solved.groups[0].pages, solved.groups[0].tokens) == (448, 7_168)
    assert (solved.draft_pages, solved.used_nbytes) == (448, 998_244_352)


@pytest.mark.case("BUD-11")
@pytest.mark.parametrize(
    ("cap", "binding", "nbytes"),
    [("20GiB", "memory", 20 * GIB), ("50GiB", "fraction", 36 * GIB)],
)
def test_the_smaller_of_fraction_and_bytes_wins(llama_config, cap, binding, nbytes):
    source = llama_config()
    weights = make(source).weight_nbytes
    made = make(
        source,
        f"pool.memory={cap}",
        f"pool.device_memory={40 * GIB + weights}",
        "pool.fraction=0.9",
    )
    solved = made.budget()
    assert (solved.binding_limit, solved.pool_nbytes) == (binding, nbytes)


@pytest.mark.case("BUD-04")
def test_a_total_is_divided_by_the_ranks(llama_config):
    solved = make(llama_config(), "topology.tp=4", "pool.memory_total=50GiB").budget()
    assert solved.pool_nbytes == 13_421_772_800
    assert "53,687,091,200 B in all, over 4 ranks" in solved.limits[0].reason


@pytest.mark.case("BUD-04")
def test_bytes_a_rank_beyond_the_machine_are_refused_with_the_product(
    llama_config,
):
    made = make(
        llama_config(),
        "topology.tp=4",
        "pool.memory=50GiB",
        "pool.machine_memory=128GiB",
    )
    with pytest.raises(
        errors.IncompatiblePlan, match="53,687,091,200 x 4 = 214,748,364"
    ):
        made.budget()


def test_device_memory_pays_for_weights_and_reserve_first(llama_config):
    source = llama_config()
    made = make(
        source, "topology.tp=8", "pool.device_memory=80GiB", "pool.reserve=2GiB"
    )
    # Llama-3.1-8B: 8,030,261,248 elements; norms stand on every rank.
    norms = (2 * 32 + 1) * 4096
    assert made.weight_nbytes == 2 * ((8_030_261_248 - norms) // 8 + norms)
    assert made.budget().pool_nbytes == 78 * GIB - made.weight_nbytes


def test_token_shards_hold_the_same_weights(llama_config):
    source = llama_config()
    one, two = make(source), make(source, "topology.dcp=2")
    assert one.weight_nbytes == two.weight_nbytes


@pytest.mark.parametrize(
    ("declared", "override", "dtype"),
    [
        ({}, (), "bfloat16"),
        ({"torch_dtype": "float16"}, (), "float16"),
        ({"torch_dtype": None, "dtype": "float32"}, (), "float32"),
        ({"torch_dtype": None}, (), "bfloat16"),
        ({}, ("model.kv_dtype=float8_e5m2",), "float8_e5m2"),
    ],
)
def test_the_cache_dtype_is_given_or_declared_or_bfloat16(
    llama_config, declared, override, dtype
):
    made = make(llama_config(**declared), *override)
    assert made.groups()[0].fields[0].dtype == dtype


def test_the_pool_can_be_sized_in_pages_alone(llama_config):
    solved = make(llama_config(), "pool.pages=10").budget()
    assert solved.groups[0].pages == 10
    assert solved.left_nbytes == 0
    assert solved.binding_limit == "pages"


def test_a_pool_without_a_size_is_refused(llama_config):
    with pytest.raises(errors.ConfigError, match="a pool without a size"):
        make(llama_config()).budget()


def test_a_setting_that_would_do_nothing_is_refused():
    with pytest.raises(errors.ConfigError, match="reserve, fraction alone"):
        PoolConfig(reserve=1, fraction=0.5, memory=GIB)
    with pytest.raises(errors.ConfigError, match="machine_memory alone"):
        PoolConfig(machine_memory=GIB)
    with pytest.raises(errors.ConfigError, match="memory_total and device_memory"):
        PoolConfig(machine_memory=GIB, pages=4)


@pytest.mark.case("BUD-04")
@pytest.mark.parametrize(
    ("limits", "machine", "fits"),
    [
        (dict(memory=GIB), 3 * GIB, True),
        (dict(memory=GIB), 3 * GIB - 1, False),
        (dict(memory=GIB, memory_total=GIB), 2 * GIB, True),
        (dict(memory_total=2 * GIB), 2 * GIB, True),
        (dict(memory_total=3 * GIB), 2 * GIB, False),
        (dict(memory_by_rank=(GIB, 9 * GIB, GIB)), 3 * GIB, True),
        (dict(memory_by_rank=(GIB, 9 * GIB, GIB)), 2 * GIB, False),
        (dict(device_memory=4 * GIB), 12 * GIB, True),
        (dict(device_memory=4 * GIB, reserve=GIB), 12 * GIB - 1, False),
        (dict(device_memory=4 * GIB, memory=GIB), 3 * GIB, True),
        (dict(device_memory=4 * GIB, fraction=0.5), 8 * GIB, True),
        (dict(device_memory=4 * GIB, fraction=0.5), 6 * GIB, False),
    ],
)
def test_the_smallest_limit_of_any_kind_is_held_against_the_machine(
    limits, machine, fits
):
    made, topology = PoolConfig(machine_memory=machine, **limits), Topology(tp=3)
    if fits:
        plain = PoolConfig(**limits).limits(topology, GIB)
        assert made.limits(topology, GIB) == plain
        return
    with pytest.raises(errors.IncompatiblePlan, match=f"{machine:,} B of this machine"):
        made.limits(topology, GIB)


def test_counts_start_at_one_and_are_refused_together():
    with pytest.raises(errors.ConfigError, match="page_size = 0, pages = -1: counts"):
        PoolConfig(page_size=0, pages=-1)
    with pytest.raises(errors.ConfigError, match="chunk_tokens = 0"):
        StoreConfig(chunk_tokens=0)


def test_configs_made_in_python_keep_the_types_that_toml_has():
    assert PoolConfig(memory="1MiB") == PoolConfig(memory=1 << 20)
    assert type(PoolConfig(pages=np.int32(3)).pages) is int
    for wrong in (
        lambda: PoolConfig(pages=2.5),
        lambda: PoolConfig(memory=1.5e6),
        lambda: PoolConfig(device_memory=GIB, reserve=-1),
        lambda: PoolConfig(page_size=True),
        lambda: PoolConfig(poison=1),
        lambda: ModelConfig(3),
        lambda: ModelConfig("a", dtype="int8"),
        lambda: StoreConfig(chunk_tokens=16.0),
        lambda: StoreConfig(root=3),
        lambda: Config("smollm2"),
        lambda: Topology(tp=2.0),
        lambda: Topology(dcp=True),
        lambda: ServeConfig(max_batch=2.5),
        lambda: ServeConfig(prefill_chunk=4.0),
        lambda: ServeConfig(batches=(1.5, 8)),
    ):
        with pytest.raises(errors.ConfigError):
            wrong()


@pytest.mark.parametrize("source", ["", " "])
def test_a_model_without_a_source_is_refused(source):
    with pytest.raises(errors.ConfigError, match="a model comes from somewhere"):
        make(source)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_weights_in_eight_bits_are_refused_when_they_are_asked_for(dtype):
    with pytest.raises(errors.ConfigError, match=f"model.dtype: '{dtype}' is none of"):
        make("x", f"model.dtype={dtype}")
    assert make("x", f"model.kv_dtype={dtype}").model.cache_dtype() == dtype


def test_a_page_order_is_checked_when_it_is_set():
    with pytest.raises(errors.ConfigError, match="page order 'sideways'"):
        PoolConfig(order="sideways")


def test_two_equal_configs_are_one_key():
    made = {Config(ModelConfig("a")): 1}
    assert made[Config(ModelConfig("a"), topology=Topology(tp=1))] == 1


def test_the_config_of_the_demo_model_plans(repo_root: pathlib.Path):
    path = repo_root / "configs" / "models" / "smollm2.toml"
    made = config.load(path, env={})
    (group,) = made.groups()
    assert group.record_nbytes == 46_080
    assert made.budget().used_nbytes <= 256 << 20


@pytest.mark.case("CFG-01")
def test_the_effective_config_says_each_source(repo_root: pathlib.Path):
    path = repo_root / "configs" / "models" / "smollm2.toml"
    found = config.explain(path, ["topology.tp=3"], {"KVMEM_POOL__PAGES": "9"})
    sources = {s.key: (s.value, s.source) for s in found}
    assert sources["topology.tp"] == (3, "--set")
    assert sources["pool.pages"] == (9, "env KVMEM_POOL__PAGES")
    assert sources["model.kv_dtype"] == ("float32", f"file {path}")
    assert sources["store.chunk_tokens"] == (16, "default")


def test_every_config_of_the_repository_is_understood(repo_root: pathlib.Path):
    models = sorted((repo_root / "configs" / "models").glob("*.toml"))
    assert models
    for path in models:
        config.load(path, env={})


class Model:
    """All that a store asks of a loaded model."""

    model_id = "a" * 64
    facts = {"scheme": "a test's"}


class Made:
    """Stands for an engine: all that matters is that it can be gone."""

    def __init__(self, *_, **__):
        pass


def test_an_engine_is_given_everything_that_the_config_says(
    llama_config, monkeypatch, tmp_path
):
    given = {}

    def engine(*args, **named):
        names = ("model", "groups", "budget", "topology")
        given.update(zip(names, args, strict=True), **named)
        return Made()

    monkeypatch.setattr("kvmem.serve.Engine", engine)
    made = make(
        llama_config(),
        *("topology.tp=2", "pool.pages=10", "pool.order=token_major"),
        *("pool.poison=true", "pool.checked=true", "serve.max_batch=3"),
        "pool.certified=true",
        *(f"store.root={tmp_path / 'store'}", "store.chunk_tokens=8"),
    )
    made.engine(Model())
    kept = given.pop("store")
    assert (kept.facts.model_id, kept.facts.chunk_tokens) == ("a" * 64, 8)
    assert kept.facts.record_nbytes == 131_072
    assert isinstance(given.pop("model"), Model)
    assert given == {
        "groups": made.groups(),
        "budget": made.budget(),
        "topology": Topology(tp=2),
        "order": "token_major",
        "config": made.serve,
        "poison": True,
        "checked": True,
        "certified": True,
        "manager": made.manager(),
        "rebalance": made.pool.rebalance,
        "blend": None,
        "draft": None,
    }
    kept.close()


def test_an_engine_loads_its_model_in_the_dtype_that_was_planned(
    llama_config, monkeypatch
):
    loaded = []
    monkeypatch.setattr("kvmem.serve.Engine", lambda *args, **named: None)
    monkeypatch.setattr("kvmem.model.presets.load", lambda *args: loaded.append(args))
    source = llama_config(torch_dtype="float16")
    make(source, "pool.pages=1").engine()
    make(source, "pool.pages=1", "model.dtype=float32").engine()
    assert loaded == [(source, "float16"), (source, "float32")]


@pytest.mark.parametrize(
    ("overrides", "declared", "said"),
    [
        (["model.kv_dtype=float8_e4m3fn"], {}, "values in float8_e4m3fn: attention "),
        ([], {"torch_dtype": "float8_e5m2"}, "weights in float8_e5m2"),
        (
            ["serve.max_length=8193"],
            {},
            "max_length = 8193: target knows positions up to 8192. Set "
            "serve.max_length to 8192 or less",
        ),
        ([], {"max_position_embeddings": 128}, "max_length = 2048.* up to 128"),
    ],
)
def test_what_is_planned_and_not_run_is_refused_before_weights_and_devices(
    llama_config, monkeypatch, overrides, declared, said
):
    monkeypatch.setattr("kvmem.model.presets.load", None)
    monkeypatch.setattr("kvmem.serve.Engine", None)
    made = make(llama_config(**declared), "pool.pages=4", *overrides)
    assert made.budget().groups[0].pages == 4
    with pytest.raises(errors.IncompatiblePlan, match=said):
        made.engine()


def test_all_that_is_not_run_is_refused_at_once(llama_config):
    made = make(
        llama_config(),
        *("pool.pages=1", "model.kv_dtype=float8_e5m2"),
        *("serve.max_length=9000", f"draft.source={llama_config('d')}"),
    )
    with pytest.raises(errors.IncompatiblePlan) as refused:
        made.engine()
    for said in ("draft.source", "float8_e5m2", "9000", "8192"):
        assert said in str(refused.value)


def test_an_interleave_that_cuts_a_page_is_refused_by_plan_and_engine(llama_config):
    made = make(llama_config(), "pool.pages=4", "topology.dcp=2")
    made = dataclasses.replace(made, topology=Topology(dcp=2, interleave=3))
    for ask in (made.budget, made.engine):
        with pytest.raises(errors.IncompatiblePlan, match="Use interleave 1, 2, 4, 8"):
            ask()


def test_a_draft_that_no_algorithm_runs_is_planned_alone(llama_config):
    made = make(llama_config(), "pool.pages=1", f"draft.source={llama_config('d')}")
    with pytest.raises(errors.IncompatiblePlan, match="proposes by an algorithm"):
        made.engine()


@pytest.mark.case("BUD-04")
def test_a_host_tier_is_claimed_once_for_all_ranks(llama_config):
    made = make(
        llama_config(),
        *("topology.tp=4", "pool.memory=1GiB", "store.host_memory=50GiB"),
        "pool.machine_memory=54GiB",
    )
    solved = made.budget()
    (term,) = solved.host_terms
    assert (term.name, term.owner) == ("host tier", "store")
    assert (term.fixed_bytes, term.bytes_per_token) == (13_421_772_800, 0)
    assert solved.used_nbytes <= GIB  # the pools are not paid from it


@pytest.mark.case("BUD-04")
def test_pools_and_host_tier_beyond_the_machine_are_refused_with_the_sum(llama_config):
    made = make(
        llama_config(),
        *("topology.tp=4", "pool.memory=2GiB", "store.host_memory=50GiB"),
        "pool.machine_memory=57GiB",
    )
    words = (
        r"8,589,934,592 B of pools, 2,147,483,648 x 4 \(target\).* together "
        "62,277,025,792 > 61,203,283,968 B of this machine's memory"
    )
    with pytest.raises(errors.IncompatiblePlan, match=words):
        made.budget()


def opened(llama_config, *overrides):
    made = make(llama_config(num_hidden_layers=1), "pool.pages=1", *overrides)
    (group,) = made.groups()
    return made.store.open(Model(), (group,)), group


def test_ram_stands_in_front_of_the_root(llama_config, tmp_path):
    kept, group = opened(
        llama_config, f"store.root={tmp_path / 's'}", "store.host_memory=1MiB"
    )
    assert isinstance(kept, store.TieredStore)
    assert kept.host.max_nbytes == 1 << 20
    assert kept.host.stats().memory == "pageable"
    assert kept.facts.record_nbytes == group.record_nbytes
    assert kept.facts == kept.host.facts
    kept.close()


def test_ram_alone_is_a_store(llama_config):
    kept, group = opened(
        llama_config, "store.host_memory=1MiB", "store.host_kind=pinned_host"
    )
    assert isinstance(kept, store.HostTier) and kept.writable
    assert kept.stats().memory == "pinned_host"
    assert kept.facts.model_id == "a" * 64


def test_without_settings_nothing_is_stored(llama_config):
    assert opened(llama_config)[0] is None


def test_a_root_says_what_its_ids_stand_for(llama_config, tmp_path):
    root = tmp_path / "s"
    kept, group = opened(llama_config, f"store.root={root}", "store.max_nbytes=1GiB")
    kept.close()
    ids = kept.facts.model_id, kept.facts.format_id
    said = store.read_facts(root, *ids)
    assert said.model == Model.facts
    assert canonical.format.id_of(said.format) == ids[1]
    reader, _ = opened(llama_config, f"store.root={root}", "store.read_only=true")
    assert not reader.writable


def test_a_store_that_cannot_be_explained_is_not_left_open(
    llama_config, tmp_path, monkeypatch
):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "explain", fail)
    for _ in range(2):  # the second is not locked out by the first
        with pytest.raises(OSError, match="No space left"):
            opened(llama_config, f"store.root={tmp_path / 's'}")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"host_kind": "pinned_host"}, "host_kind = 'pinned_host' alone"),
        ({"host_memory": 0}, "host_memory = 0"),
        ({"root": "gs://bucket/x"}, "the one scheme that is tested"),
        ({"root": "x", "region": "r"}, "only an s3:// root"),
        ({"max_nbytes": 5}, "without a root"),
    ],
)
def test_store_settings_without_a_meaning_are_refused(settings, words):
    with pytest.raises(errors.ConfigError, match=words):
        StoreConfig(**settings)


def test_the_store_of_an_engine_that_could_not_be_made_is_closed(
    llama_config, tmp_path, monkeypatch
):
    def fail(*_, **__):
        raise errors.IncompatiblePlan("no device for rank 1")

    made = make(llama_config(), "pool.pages=1", f"store.root={tmp_path / 's'}")
    monkeypatch.setattr("kvmem.serve.Engine", fail)
    for _ in range(2):  # the second is not locked out by the first
        with pytest.raises(errors.IncompatiblePlan, match="no device"):
            made.engine(Model())


def test_the_store_of_an_engine_that_is_gone_is_closed(
    llama_config, tmp_path, monkeypatch
):
    made = make(llama_config(), "pool.pages=1", f"store.root={tmp_path / 's'}")
    monkeypatch.setattr("kvmem.serve.Engine", Made)
    first = made.engine(Model())
    with pytest.raises(errors.StoreLocked):
        made.engine(Model())
    del first
    gc.collect()
    made.engine(Model())
