"""Builders for the canonical room: groups by sizes, and runs applied byte by byte."""

import dataclasses
import hashlib

import numpy as np
import pytest

from kvmem.geometry import LayerSpec, group_layers


@dataclasses.dataclass(frozen=True)
class Builders:
    """Small groups, and the slowest possible executor."""

    @staticmethod
    def group(
        layers: int = 1, heads: int = 8, dim: int = 16, page_size: int = 4, **spec
    ):
        specs = [
            LayerSpec(f"layers.{i}", i, kv_heads=heads, head_dim=dim, **spec)
            for i in range(layers)
        ]
        (group,) = group_layers(specs, page_size=page_size)
        return group

    @staticmethod
    def gather(runs, page: bytes, canonical: bytearray) -> None:
        """Copy runs out of a rank's page."""
        for run in runs:
            for local, whole, nbytes in run.fragments():
                canonical[whole : whole + nbytes] = page[local : local + nbytes]

    @staticmethod
    def scatter(runs, canonical: bytes, page: bytearray) -> None:
        """Copy runs into a rank's page."""
        for run in runs:
            for local, whole, nbytes in run.fragments():
                page[local : local + nbytes] = canonical[whole : whole + nbytes]

    @staticmethod
    def digest(data: bytes | np.ndarray) -> str:
        return hashlib.sha256(bytes(data)).hexdigest()[:12]


@pytest.fixture(scope="session")
def build() -> Builders:
    return Builders()
