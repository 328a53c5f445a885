"""Builders of this room's tests: members of models that mix lifecycles."""

import dataclasses
from collections.abc import Callable

import pytest

from kvmem.geometry import (
    Envelope,
    LayerSpec,
    LifecycleGroup,
    Topology,
    group_layers,
    kinds,
)
from kvmem.manage import Member, members_of


@dataclasses.dataclass(frozen=True)
class Mix:
    """Layers of each lifecycle, GPT-OSS's row (8 heads of 64, bf16) unless said."""

    full: int = 12
    windowed: int = 12
    window: int = 128
    sinks: int = 0
    states: int = 0
    page_size: int = 32
    kv_heads: int = 8
    head_dim: int = 64
    max_length: int | None = None
    domain: str = "target"

    def layers(self) -> list[LayerSpec]:
        """Windowed and full layers in turn, states behind them."""
        row = dict(kv_heads=self.kv_heads, head_dim=self.head_dim, dtype="bfloat16")
        windowed = dict(window=self.window, sinks=self.sinks, **row)
        made = [LayerSpec(f"w{i}", 2 * i, **windowed) for i in range(self.windowed)]
        made += [LayerSpec(f"f{i}", 2 * i + 1, **row) for i in range(self.full)]
        return made + [
            kinds.mamba2(
                f"s{i}", 200 + i, heads=4, head_dim=16, groups=1, state=16,
                conv_kernel=4,
            )
            for i in range(self.states)
        ]  # fmt: skip

    def groups(self):
        """The lifecycle groups of the layers."""
        return group_layers(
            self.layers(), self.page_size, self.domain, max_length=self.max_length
        )


@pytest.fixture(scope="session")
def members() -> Callable[..., tuple[Member, ...]]:
    """Make members: of one pool if `unified`, else of one a size of page."""

    def make(*mixes: Mix, unified: bool = False, **changes) -> tuple[Member, ...]:
        mixes = mixes or (Mix(**changes),)
        groups = [group for mix in mixes for group in mix.groups()]
        kind = "unified" if unified else "split"
        return members_of(groups, Topology(), "head_major", kind)

    return make


@pytest.fixture(scope="session")
def bare() -> Callable[..., Member]:
    """Make a member of a lifecycle, from what its pages take."""

    def make(life, page_nbytes: int, extents: int = 1, pool: int = 0, domain="target"):
        group = LifecycleGroup(life.name, domain, life, (), 16)
        page = Envelope((), group.slots, "head_major", page_nbytes * extents, extents)
        return Member(group, page, pool)

    return make


@pytest.fixture(scope="session")
def mix() -> type[Mix]:
    """The record of a mix, to change."""
    return Mix
