"""How long a hit is when several lifecycle groups must all have their pages.

A text's pages are counted from its beginning. For a hit of n pages full attention needs
all of them; a window only those that the next query reads, and its sink pages; index
keys all, as their latent does (both or none); a recurrent state a snapshot that stands
after exactly n pages, never one token further. The law: the hit is the longest n that
suits every group; it is where shortening for one group after the other comes to rest
(the fixed point of TensorRT-LLM's cache manager V2).

    hit_pages((FULL, Lifecycle("window", 8)), 4, (np.ones(5, bool), windows))
"""

from collections.abc import Sequence

import numpy as np

from kvmem.geometry.lifecycle import Lifecycle

__all__ = ["goes_on", "hit_pages"]


def hit_pages(
    lives: Sequence[Lifecycle], page_size: int, present: Sequence[np.ndarray]
) -> int:
    """Return how many first pages of a text every group can go on from.

    Args:
        lives: of each group.
        page_size: tokens of a page, the same in all groups.
        present: bool[m] a group: whether it has page i; of a state, whether it has a
            snapshot after page i. Pages behind the end of a list are absent.
    """
    lengths = np.arange(max(map(len, present), default=0) + 1)
    suits = np.ones(lengths.size, bool)
    for life, has in zip(lives, present, strict=True):
        has = np.concatenate([has, np.zeros(lengths.size - 1 - len(has), bool)])
        suits &= goes_on(life, page_size, has, lengths * page_size)
    return int(np.flatnonzero(suits)[-1])


def goes_on(
    life: Lifecycle, page_size: int, has: np.ndarray, histories: np.ndarray
) -> np.ndarray:
    """Return bool[n]: whether a group can go on after so many tokens of a text.

    Args:
        life: of the group.
        page_size: tokens of a page.
        has: bool[m], as `present` of `hit_pages`.
        histories: i[n] tokens before the next query, of the first m pages at most; one
            that ends inside a page reads that page too.
    """
    pages = -(-histories // page_size)
    if life.kind == "state":
        stands = np.concatenate([[True], has])[histories // page_size]
        return stands & (histories % page_size == 0)
    absent = np.concatenate([[0], np.cumsum(~has)])  # among the first n pages
    if life.kind == "full":
        return absent[pages] == 0
    start = np.minimum(pages, life.sink_pages(page_size))
    end = (histories + 1 - life.window) // page_size  # Lifecycle.stale's
    end = np.maximum(start, end)
    return (absent[start] == 0) & (absent[pages] == absent[end])
