"""Random operations on a pool: the device, the ledger and plain Python agree.

After each operation the books of the device equal the ledger's bit for bit, no law is
broken with every holder shown, and bytes and holders equal those of a model written
with lists and dicts. Operations that cannot be done are part of the sequences: then the
ledger raises, the device flags, and nothing changes but what the model says.
"""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmem import errors
from kvmem import pool as kvpool

RANKS, PAGES, NBYTES = 2, 6, 16
VPAGES = (8, 5)
SEQUENCES, COLUMNS, LANES = 3, 3, 5

_REFUSED = (errors.OutOfPages, errors.InvalidId, errors.ConfigError)


class Model:
    """A pool in plain words: who holds what, and what each page contains."""

    def __init__(self):
        self.refs = [collections.Counter() for _ in VPAGES]
        self.place = [{} for _ in VPAGES]
        self.vfree = [list(reversed(range(count))) for count in VPAGES]
        self.free = list(reversed(range(PAGES)))
        self.bytes = np.full((RANKS, PAGES, NBYTES), kvpool.POISON, np.uint8)

    def take(self, group, fill):
        vpage, page = self.vfree[group].pop(), self.free.pop()
        self.refs[group][vpage], self.place[group][vpage] = 1, page
        self.bytes[:, page] = fill
        return vpage

    def has(self, group, count):
        return count <= min(len(self.free), len(self.vfree[group]))

    def handout(self, group, want):
        wrong = any(not 0 <= count <= COLUMNS for count in want)
        if wrong or not self.has(group, sum(want)):
            return None
        rows = [[self.take(group, 0) for _ in range(count)] for count in want]
        return [row + [VPAGES[group]] * (COLUMNS - len(row)) for row in rows]

    def release(self, group, ids):
        named = [v for v in ids if v < VPAGES[group]]
        bad = {v for v in named if named.count(v) > self.refs[group][v]}
        for vpage in dict.fromkeys(v for v in named if v not in bad):
            self.refs[group][vpage] -= named.count(vpage)
            if not self.refs[group][vpage]:
                self.vfree[group].append(vpage)
                self.free.append(self.place[group].pop(vpage))
                self.bytes[:, self.free[-1]] = kvpool.POISON
        return [v in bad for v in ids]

    def retain(self, group, ids):
        bad = {v for v in ids if v < VPAGES[group] and not self.refs[group][v]}
        for vpage in ids:
            if vpage < VPAGES[group] and vpage not in bad:
                self.refs[group][vpage] += 1
        return [v in bad for v in ids]

    def fork(self, group, ids, copied):
        null = VPAGES[group]
        unheld = any(v < null and not self.refs[group][v] for v in ids)
        copies = copied < len(ids)
        if unheld or copied < 0 or (copies and ids[copied] >= null):
            return None
        if copies and not self.has(group, 1):
            return None
        child = [min(v, null) for v in ids]
        if copies:
            source = self.bytes[:, self.place[group][ids[copied]]].copy()
            child[copied] = self.take(group, source)
        for column, vpage in enumerate(child):
            if column != copied and vpage < null:
                self.refs[group][vpage] += 1
        return child

    def holders(self):
        return [[list(refs.elements())] for refs in self.refs]


_VERBS = {
    "handout": jax.jit(kvpool.handout, static_argnums=(1, 3), donate_argnums=0),
    "release": jax.jit(kvpool.release, static_argnums=1, donate_argnums=0),
    "retain": jax.jit(kvpool.retain, static_argnums=1, donate_argnums=0),
    "fork": jax.jit(kvpool.fork, static_argnums=1, donate_argnums=0),
}


class Trio:
    """The device pool, the ledger and the model, driven by the same operations."""

    def __init__(self):
        self.pool = kvpool.init(PAGES, NBYTES, RANKS, num_vpages=VPAGES, poison=True)
        self.ledger = kvpool.Ledger(PAGES, VPAGES)
        self.model = Model()

    def handout(self, group, want):
        expected = self.model.handout(group, want)
        args = (group, np.int32(want), COLUMNS)
        self.pool, vpages, ok = _VERBS["handout"](self.pool, *args)
        assert bool(ok) == (expected is not None)
        if expected is None:
            assert (np.asarray(vpages) == VPAGES[group]).all()
            with pytest.raises(_REFUSED):
                self.ledger.handout(*args)
        else:
            assert np.asarray(vpages).tolist() == expected
            assert self.ledger.handout(*args).tolist() == expected

    def release(self, group, ids):
        self._lanes("release", group, ids)

    def retain(self, group, ids):
        self._lanes("retain", group, ids)

    def _lanes(self, verb, group, ids):
        expected = getattr(self.model, verb)(group, ids)
        self.pool, rejected = _VERBS[verb](self.pool, group, np.int32(ids))
        assert np.asarray(rejected).tolist() == expected
        ask = getattr(self.ledger, verb)
        if any(expected):
            with pytest.raises(errors.InvalidId):
                ask(group, ids)
        ask(group, [v for v, bad in zip(ids, expected, strict=True) if not bad])

    def fork(self, group, ids, copied):
        expected = self.model.fork(group, ids, copied)
        args = (group, np.int32(ids), np.int32(copied))
        self.pool, child, ok = _VERBS["fork"](self.pool, *args)
        assert bool(ok) == (expected is not None)
        if expected is None:
            assert (np.asarray(child) == VPAGES[group]).all()
            with pytest.raises(_REFUSED):
                self.ledger.fork(group, ids, copied)
        else:
            assert np.asarray(child).tolist() == expected
            assert self.ledger.fork(group, ids, copied).tolist() == expected

    def fill(self, page, byte):
        pages = self.pool.pages.at[:, page].set(jnp.uint8(byte))
        self.pool = dataclasses.replace(self.pool, pages=pages)
        self.model.bytes[:, page] = byte

    def agree(self):
        assert self.ledger.differences(self.pool) == ()
        holders = self.model.holders()
        assert kvpool.check(self.pool, holders=holders) == ()
        assert kvpool.check(self.ledger, holders=holders) == ()
        assert np.array_equal(np.asarray(self.pool.pages), self.model.bytes)
        assert int(self.pool.num_free) == len(self.model.free)


def _ids(group):
    return st.integers(-1, VPAGES[group] + 1)


def _operation(group):
    lanes = st.lists(_ids(group), min_size=LANES, max_size=LANES)
    wants = st.lists(
        st.integers(-1, COLUMNS + 1) | st.integers(0, 2),
        min_size=SEQUENCES,
        max_size=SEQUENCES,
    )
    held = st.lists(
        st.integers(0, 3) | st.just(VPAGES[group]), min_size=COLUMNS, max_size=COLUMNS
    )
    few = st.lists(
        st.integers(0, 3) | st.just(VPAGES[group]), min_size=LANES, max_size=LANES
    )
    return st.one_of(
        st.tuples(st.just("handout"), st.just(group), wants),
        st.tuples(st.just("release"), st.just(group), lanes | few),
        st.tuples(st.just("retain"), st.just(group), lanes | few),
        st.tuples(st.just("fork"), st.just(group), held, st.integers(-1, COLUMNS + 1)),
        st.tuples(st.just("fill"), st.integers(0, PAGES - 1), st.integers(1, 254)),
    )


@settings(max_examples=60)
@given(st.lists(_operation(0) | _operation(1), max_size=30))
def test_device_ledger_and_model_agree_after_every_operation(operations):
    trio = Trio()
    trio.agree()
    for name, *args in operations:
        getattr(trio, name)(*args)
        trio.agree()
    assert [verb._cache_size() <= len(VPAGES) for verb in _VERBS.values()] == [True] * 4


@settings(max_examples=30)
@given(st.lists(_operation(0) | _operation(1), max_size=30))
def test_when_every_holder_lets_go_every_page_is_free(operations):
    trio = Trio()
    for name, *args in operations:
        getattr(trio, name)(*args)
    for group, (held,) in enumerate(trio.model.holders()):
        for vpage in held:
            trio.release(group, [vpage, *[VPAGES[group]] * (LANES - 1)])
    trio.agree()
    assert trio.ledger.num_free == PAGES
    assert [group.num_vfree for group in trio.ledger.groups] == list(VPAGES)
