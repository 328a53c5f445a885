"""Weights, each described once: its shape, how ranks share it, how it is drawn.

The law: a rank's share follows from the description alone. Heads are never cut: ranks
divide them, or are a multiple of them and hold replicas; rows without heads are dealt
evenly, with zero rows behind the last where they do not divide.

    q = Weight((64, 32), axis=0, heads=4)          # 4 heads of 16 rows
    q.share(Topology(tp=2), array, rank=1)         # heads 2 and 3
"""

from typing import Literal, NamedTuple

import numpy as np

from kvmem.geometry import Topology

__all__ = ["Drawn", "Weight"]

Drawn = Literal["matrix", "norm", "zero norm", "bias", "rate"]


class Weight(NamedTuple):
    """One tensor of a model, `[out, in]`."""

    shape: tuple[int, ...]
    axis: int | None = None  # that ranks share out; None: all of it on every rank
    heads: int | None = None  # along the axis; None: single rows
    drawn: Drawn = "matrix"

    def rank_shape(self, topology: Topology) -> tuple[int, ...]:
        """Return the shape of any rank's share."""
        if self.axis is None:
            return self.shape
        shape = list(self.shape)
        shape[self.axis] = self._rows(topology)
        return tuple(shape)

    def share(self, topology: Topology, array: np.ndarray, rank: int) -> np.ndarray:
        """Return one rank's share of the whole tensor."""
        if self.axis is None:
            return array
        rows, index = self._rows(topology), topology.tp_index(rank)
        if self.heads is not None and topology.tp > self.heads:
            index //= topology.tp // self.heads
        part = array.take(
            range(index * rows, min((index + 1) * rows, self.shape[self.axis])),
            axis=self.axis,
        )
        missing = [(0, 0)] * part.ndim
        missing[self.axis] = (0, rows - part.shape[self.axis])
        return np.pad(part, missing)

    def _rows(self, topology: Topology) -> int:
        """Return how much of the axis a rank holds."""
        size = self.shape[self.axis]
        if self.heads is None:
            return -(-size // topology.tp)
        return size // self.heads * max(1, self.heads // topology.tp)
