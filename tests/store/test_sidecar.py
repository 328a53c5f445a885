"""The table of chunks comes back as it was, and holds nothing for a collector."""

import gc

import numpy as np
import pytest

from kvmem.errors import CorruptPage
from kvmem.store import sidecar


def table(num: int) -> tuple:
    random = np.random.default_rng(num)
    keys = tuple(random.bytes(32) for _ in range(num))
    parents = (None, *keys[:-1])
    tokens = random.integers(-(2**31), 2**31, (num, 4), np.int64).astype(np.int32)
    return keys, parents, tokens, tuple(random.bytes(16) for _ in range(num))


@pytest.mark.parametrize("num", [1, 2, 50])
def test_what_was_packed_is_unpacked(num):
    keys, parents, tokens, checksums = table(num)
    found = sidecar.unpack(sidecar.pack(keys, parents, tokens, checksums))
    assert (found[0], found[1], found[3]) == (keys, parents, checksums)
    np.testing.assert_array_equal(found[2], tokens)


def test_a_parent_outside_the_table_is_kept_and_one_inside_shared():
    keys, _, tokens, checksums = table(3)
    above = bytes(range(32))
    data = sidecar.pack(keys, (above, keys[0], None), tokens, checksums)
    found, parents, _, _ = sidecar.unpack(data)
    assert parents == (above, keys[0], None)
    assert parents[1] is found[0]


def test_fields_that_end_in_zeros_keep_them():
    keys, parents, tokens, checksums = table(2)
    keys = (keys[0][:-3] + b"\0\0\0", keys[1])
    data = sidecar.pack(keys, parents, tokens, (bytes(15) + b"\1", b"\1" + bytes(15)))
    found = sidecar.unpack(data)
    assert found[0] == keys and found[3] == (bytes(15) + b"\1", b"\1" + bytes(15))


def test_nothing_in_the_table_is_walked_by_the_collector():
    keys, parents, _, checksums = sidecar.unpack(sidecar.pack(*table(50)))
    rows = [*keys, *parents, *checksums]
    assert not any(map(gc.is_tracked, rows))


def test_keys_of_another_width_are_refused():
    keys, _, tokens, checksums = table(2)
    short = tuple(key[:31] for key in keys)
    data = sidecar.pack(short, short, tokens, checksums)
    with pytest.raises(CorruptPage, match="rows of 31 bytes"):
        sidecar.unpack(data)
