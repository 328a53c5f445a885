"""Groups of the shapes that budgets are tried with."""

import pytest

from kvmem.geometry import LayerSpec, group_layers, kinds


@pytest.fixture
def gqa():
    """Make groups of plain layers; `window` layers of them have one."""

    def make(
        page_size=1, *, full=32, windows=0, heads=4, dim=64, window=128, domain="target"
    ):
        layers = [
            LayerSpec(
                f"layers.{i}",
                i,
                kv_heads=heads,
                head_dim=dim,
                dtype="bfloat16",
                window=window if i < windows else None,
            )
            for i in range(full + windows)
        ]
        return group_layers(layers, page_size, domain)

    return make


@pytest.fixture
def hybrid():
    """Make groups of full attention, a window and states, of several page sizes."""

    def make(page_size=4, *, full=2, windows=1, states=2, indexers=False):
        layers = [
            kinds.gated_delta(
                f"state.{i}",
                i,
                key_heads=4,
                value_heads=8,
                key_dim=16,
                value_dim=16,
                conv_kernel=4,
            )
            for i in range(states)
        ]
        for i in range(states, states + full + windows):
            window = 8 if i >= states + full else None
            if indexers and window is None:
                layers.append(
                    kinds.latent(f"mla.{i}", i, rank=128, rope_dim=16, scale=0.1)
                )
                layers.append(kinds.indexer(f"indexer.{i}", i, dim=128))
            else:
                layers.append(
                    LayerSpec(
                        f"gqa.{i}",
                        i,
                        kv_heads=4,
                        head_dim=16,
                        dtype="bfloat16",
                        window=window,
                    )
                )
        return group_layers(layers, page_size)

    return make
