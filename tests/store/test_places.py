"""Where keys are, without an object for each."""

import gc
from pathlib import Path

import numpy as np
import pytest

from kvmem.store.places import Place, Places
from kvmem.store.segment import Facts, Segment

FACTS = Facts("m", "f", 4, 96)


def made(name: str, num: int, seed: int = 0) -> Segment:
    """Return a segment that is nowhere on a disk."""
    random = np.random.default_rng(seed)
    keys = tuple(random.bytes(32) for _ in range(num))
    tokens = random.integers(0, 100, (num, 4), np.int64).astype(np.int32)
    sums = tuple(random.bytes(16) for _ in range(num))
    parents = (None, *keys[:-1])
    return Segment(Path(name), FACTS, keys, parents, tokens, sums, 0.0, num, 0, 0)


def test_a_key_is_where_its_segment_has_it():
    places, one, two = Places(), made("1", 3), made("2", 2, seed=1)
    places.add(one)
    places.add(two)
    assert places == {
        **{key: Place(one, row) for row, key in enumerate(one.keys)},
        **{key: Place(two, row) for row, key in enumerate(two.keys)},
    }
    place = places[two.keys[1]]
    assert (place.parent, place.checksum) == (two.keys[0], two.checksums[1])
    assert place.tokens == two.tokens[1].tobytes()
    with pytest.raises(KeyError):
        places[bytes(32)]
    assert bytes(32) not in places and places.get(bytes(32)) is None


def test_the_segment_that_came_last_counts():
    places, one, two = Places(), made("1", 3), made("2", 3)
    places.add(one)
    places.add(two)
    assert {place.segment for place in places.values()} == {two}
    places[one.keys[0]] = Place(one, 0)
    assert places[one.keys[0]].segment is one and len(places) == 3


def test_a_forgotten_segment_is_held_no_longer():
    places, one = Places(), made("1", 2)
    places.add(one)
    for key in one.keys:
        del places[key]
    places.forget(one)
    places.forget(one)
    assert len(places) == 0 and places._segments == {} == places._numbers


def test_the_collector_has_nothing_to_walk_over_but_the_segments():
    places = Places()
    places.add(made("1", 1000))
    rows = [*places.codes, *places.codes.values()]
    assert not any(map(gc.is_tracked, rows))
