"""A chain is followed back as far as it goes, and that ends on any data."""

import numpy as np
import pytest

from kvmem.store import chain_file
from kvmem.store.page_key import PageKey

KEYS = [PageKey(bytes([n]) * 32) for n in range(1, 4)]
TOKENS = np.arange(4, dtype=np.int32)


@pytest.mark.parametrize("parents", [(0,), (1, 0), (1, 2, 0), (1, 2, 1), (1, 2, 2)])
def test_a_chain_that_goes_in_circles_ends(parents):
    links = {
        KEYS[at]: chain_file.Link(TOKENS + at, KEYS[above])
        for at, above in enumerate(parents)
    }
    found = chain_file.chain_to(links.get, KEYS[0])
    assert found.keys == tuple(reversed(KEYS[: len(parents)]))
    assert found.tokens.shape == (len(parents), 4)


def test_a_chain_ends_where_a_parent_is_not_held():
    links = {KEYS[0]: chain_file.Link(TOKENS, KEYS[1])}
    assert chain_file.chain_to(links.get, KEYS[0]).keys == (KEYS[0],)
