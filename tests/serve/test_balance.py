"""The manager of a running engine: who it is, what it grants, how it follows texts."""

import itertools
import logging

import numpy as np
import pytest

from kvmem import budget, config, errors, geometry, manage
from kvmem import pool as pools
from kvmem.config import Config, ModelConfig, PoolConfig
from kvmem.geometry import LayerSpec, Topology, kinds
from kvmem.geometry.lifecycle import FULL, STATE
from kvmem.manage import Knobs, Plan, Selection
from kvmem.prefix import Hit, PrefixCache
from kvmem.serve import SamplingParams, ServeConfig, balance
from kvmem.serve.page_table import PageTable

EAGER = Knobs(recompute_every=2, min_samples=4, min_interval_s=0)


def greedy(count):
    return SamplingParams(max_tokens=count, ignore_eos=True)


def text(seed, length):
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


@pytest.fixture(scope="module")
def groups():
    """Full attention, a window of four pages, a state."""
    row = dict(kv_heads=2, head_dim=16, dtype="float32")
    layers = [LayerSpec("full", 0, **row), LayerSpec("window", 1, window=16, **row)]
    sizes = dict(heads=4, head_dim=16, groups=1, state=16, conv_kernel=4)
    return geometry.group_layers([*layers, kinds.mamba2("state", 2, **sizes)], 4)


@pytest.fixture
def balanced(groups):
    """Make the balance of a pool of 200 pages, texts of up to 4,096 tokens."""

    def make(name="grouped", selection=None, only=3, knobs=EAGER):
        mine = groups[:only]
        solved = budget.solve(mine, Topology(), (), max_pages=200, sequences=4)
        members = manage.members_of(mine, Topology(), "head_major", "unified")
        solved = manage.divide(solved, members, name)
        config = ServeConfig(max_length=4_096)
        order = "head_major"
        return balance.of(mine, Topology(), order, solved, config, selection, knobs)

    return make


class Text:
    """A sequence that has ended, of so many tokens."""

    def __init__(self, length, found=0):
        self.tokens = [0] * length
        self.num_computed = length - 1
        self.cached_tokens, self.stored_tokens = found, 0


class Kept:
    """Where a balance leaves the manager of a room."""

    manager = None


def test_shares_are_those_of_the_longest_text_before_any_has_ended(balanced, groups):
    made = balanced()
    state = made.manager.quotas[2].extents
    # 1,024 pages of full attention; 16 tokens of a window straddle five pages, and at
    # 4,095 tokens lie in four
    assert [q.share for q in made.manager.quotas] == pytest.approx(
        [count / (1_024 + 4 + state) for count in (1_024, 4, state)]
    )
    # whatever the shares, every group may hold any page
    assert [q.pages for q in made.manager.quotas] == [200, 200, 200 // state]


def test_token_shards_make_full_attention_cheaper_beside_windows(groups):
    topology, mine = Topology(dcp=2), groups[:2]
    solved = budget.solve(mine, topology, (), max_pages=200, sequences=4)
    config = ServeConfig(max_length=4_096)
    made = balance.of(mine, topology, "head_major", solved, config)
    # 512 pages of 4 tokens on each of 2 ranks; of the window two of 8, whole on both
    assert [q.extents for q in made.manager.quotas] == [1, 2]
    assert [q.share for q in made.manager.quotas] == pytest.approx([512 / 516, 4 / 516])


def test_shares_follow_the_texts_that_ended_once_nothing_runs(balanced):
    made, room = balanced(), Kept()
    for _ in range(4):
        made.observe(Text(16, found=4))
    before = made.manager
    with pytest.raises(errors.Busy, match="1 sequences hold pages"):
        made.settle(room, holding=1)
    assert made.manager is before and room.manager is None
    assert made.settle(room, holding=0) and room.manager is made.manager
    state = before.quotas[2].extents
    assert [q.share for q in made.manager.quotas] == pytest.approx(
        [count / (4 + 4 + state) for count in (4, 4, state)]
    )
    assert [q.pages for q in made.manager.quotas] == [q.pages for q in before.quotas]
    assert not made.settle(room, holding=0) and made.num_rebalanced == 1


def test_a_few_texts_or_little_time_change_nothing(balanced):
    few, room = balanced(), Kept()
    for _ in range(3):
        few.observe(Text(16))
    assert not few.settle(room, holding=0)
    now = itertools.count(0, 60)
    knobs = Knobs(recompute_every=1, min_samples=1, min_interval_s=120)
    slow = balanced(knobs=knobs)
    timed = balance.Balance(
        slow.selection, slow.manager, slow._members, knobs, lambda: next(now)
    )
    timed.observe(Text(16))
    assert not timed.settle(room, holding=0)  # after 60 s
    assert timed.settle(room, holding=0)  # after 120
    timed.observe(Text(4_096))
    assert not timed.settle(room, holding=0)


def test_shares_are_looked_at_as_often_as_said(balanced):
    knobs = Knobs(recompute_every=3, min_samples=1, min_interval_s=0)
    made, room = balanced(knobs=knobs), Kept()
    changed = []
    for _ in range(3):
        made.observe(Text(16))
        changed.append(made.settle(room, holding=0))
    assert changed == [False, False, True]


@pytest.mark.parametrize("made", [{"name": "static_split"}, {"only": 1}])
def test_walls_stay_where_they_were_put(balanced, made):
    it, room = balanced(**made), Kept()
    for _ in range(8):
        it.observe(Text(16))
    before = it.manager
    assert not it.settle(room, holding=0)
    assert it.manager is before and it.seen.samples == 0


@pytest.mark.case("CFG-03")
@pytest.mark.parametrize(
    ("selection", "level"),
    [
        (manage.select(None, "grouped", Plan("a model")), logging.INFO),
        (manage.select("grouped", None, Plan("a model")), logging.INFO),
        (manage.select(None, "grouped", Plan("a model", "two")), logging.WARNING),
    ],
)
def test_the_log_says_which_manager_serves_and_why(balanced, caplog, selection, level):
    with caplog.at_level(logging.INFO, "kvmem.serve.balance"):
        balanced(selection.name, selection)
    (record,) = caplog.records
    assert record.levelno == level
    for word in (selection.name, selection.provenance, selection.reason):
        assert word in record.getMessage()


def test_a_manager_that_nobody_names_is_that_of_the_budget(balanced):
    said = {name: balanced(name).selection for name in ("grouped", "static_split")}
    assert {name: each.name for name, each in said.items()} == {
        "grouped": "grouped",
        "static_split": "static_split",
    }
    assert "its own pages" in said["static_split"].reason


class TestWhatSharesDo:
    """A pool full of two texts, each with one snapshot that it has moved past."""

    STATE_PAGES = 3

    @pytest.fixture
    def full(self):
        def make(share):
            lives, extents = (FULL, STATE), (1, self.STATE_PAGES)
            pool = budget.PoolPages(1, 31, (0, 1), (31, 10), extents)
            manager = manage.as_built("grouped", ("full", "state"), pool)
            manager = manager.with_shares((1 - share, share))
            ledger = pools.Ledger(31, (31, 10), extents)
            table = PageTable(ledger, PrefixCache(4), lives, manager)
            for seed in (1, 2):
                tokens = text(seed, 32)
                held = table.begin(Hit(0, ()), tokens, step=8)
                for end in (16, 32):
                    assert table.snapshot(tokens[:end], held)
                table.give_back(held)
            assert table.accounts() == (3, 28, 0, 31)  # 16 pages, and four snapshots
            return table

        return make

    def found(self, table):
        """Tokens of each text that are found again, cut behind every page."""
        return [
            [
                table.match([*text(seed, 32)[:end], 999]).num_tokens
                for end in (16, 24, 32)
            ]
            for seed in (1, 2)
        ]

    @pytest.mark.parametrize("share", [0.5, 0.3])  # 0.3: one snapshot is beyond it
    def test_within_its_share_a_group_goes_by_age(self, full, share):
        table = full(share)
        assert self.found(table) == [[16, 16, 32]] * 2
        assert table.begin(Hit(0, ()), text(3, 24), step=24) is not None
        # 6 pages were short: the older text went, and the younger is whole
        assert self.found(table) == [[0, 0, 0], [16, 16, 32]]

    def test_beyond_its_share_it_gives_what_texts_have_moved_past(self, full):
        table = full(share=0.2)
        assert table.begin(Hit(0, ()), text(3, 24), step=24) is not None
        # both snapshots in the middle went, and neither text's end
        assert self.found(table) == [[0, 0, 32]] * 2

    def test_a_text_that_runs_keeps_what_it_has_moved_past(self, full):
        table = full(share=0.2)
        longer = [*text(2, 32), 999]
        assert table.begin(table.match(longer), longer) is not None
        assert table.begin(Hit(0, ()), text(3, 24), step=24) is not None
        assert self.found(table)[1] == [16, 16, 32]


def test_an_engine_follows_its_texts_between_them(hybrid_engine, hybrid_dense):
    made = hybrid_engine("window")
    made.balance.knobs = EAGER
    before = made.stats().manager
    assert (before.name, before.provenance, before.observed) == ("grouped", "unset", 0)
    assert [each.quota for each in before.groups] == [44, 44]
    made.add(text(1, 20), greedy(70))
    for seed in range(2, 8):
        made.add(text(seed, 5), greedy(2))
    while made.stats().finished < 6:
        made.step()
    during = made.stats().manager
    assert during.observed == 6 and during.rebalanced == 0
    assert [g.share for g in during.groups] == [g.share for g in before.groups]
    while made.has_work:
        made.step()
    after = made.stats().manager
    assert (after.observed, after.rebalanced) == (7, 1)
    assert after.groups[1].share > 1.25 * before.groups[1].share
    assert [each.quota for each in after.groups] == [44, 44]
    assert sum(each.cached for each in after.groups) == made.accounts.evictable
    want = hybrid_dense("window", text(9, 40), 6)
    assert made.generate(text(9, 40), greedy(6))[0].output_ids == want


FACTS = {
    "model_type": "gpt_oss",
    "vocab_size": 257,
    "max_position_embeddings": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 10,
}


@pytest.mark.case("CFG-03")
def test_the_choice_of_a_config_is_in_the_engines_stats():
    model = ModelConfig(facts=FACTS, seed=0, kv_dtype="float32")
    serve = ServeConfig(max_batch=2, max_length=64)
    for manager in (None, "static_split"):
        knobs = EAGER if manager is None else Knobs()
        pool = PoolConfig(page_size=4, pages=60, manager=manager, rebalance=knobs)
        made = Config(model, pool=pool, serve=serve)
        engine = made.engine()
        stats = engine.stats().manager
        said = stats.name, stats.reason, stats.provenance, stats.is_fallback
        assert Selection(*said) == made.manager()
        assert engine.balance.knobs == knobs


def test_when_shares_follow_is_a_setting(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text('[model]\nsource = "m"\n[pool.rebalance]\nmin_samples = 7\n')
    assert config.load(path, env={}).pool.rebalance == Knobs(min_samples=7)
    path.write_text('[model]\nsource = "m"\n[pool.rebalance]\ndecay = 2.0\n')
    with pytest.raises(errors.ConfigError, match="decay lies in"):
        config.load(path, env={})


def test_shares_that_follow_nothing_have_no_setting():
    model, serve = ModelConfig(facts=FACTS, seed=0), ServeConfig(max_length=64)
    walls = PoolConfig(pages=60, manager="static_split", rebalance=EAGER)
    whole = PoolConfig(pages=60, rebalance=EAGER)
    short = ServeConfig(max_length=8)  # where a window of 10 is full attention
    for pool, served in ((walls, serve), (whole, short)):
        with pytest.raises(errors.ConfigError, match="walls stay where"):
            Config(model, pool=pool, serve=served).budget()
    assert Config(model, pool=whole, serve=serve).budget()
