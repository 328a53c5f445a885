"""Which executor runs is a question with an answer and a reason."""

import types

import jax
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from kvmem import errors, transfer
from kvmem.geometry import Topology


def elsewhere(platform="cuda", addressable=True):
    """Return what `choose` asks of an array, for an array we do not have here."""
    device_set = (types.SimpleNamespace(platform=platform),)
    sharding = types.SimpleNamespace(device_set=device_set)
    return types.SimpleNamespace(sharding=sharding, is_fully_addressable=addressable)


def test_a_pool_in_this_process_is_served_by_the_host(build):
    side = build.side(Topology(1))
    assert transfer.choose(side.pages).implementation == "host"
    assert transfer.choose(side.pages, "host").implementation == "host"
    assert transfer.choose(side.pages, "device") == ("device", "asked for")


@pytest.mark.parametrize(
    "pages, why",
    [
        (elsewhere(), "the pool lies on cuda"),
        (elsewhere("cpu", addressable=False), "other processes hold"),
    ],
)
def test_any_other_pool_is_served_by_the_device_and_the_host_says_why_not(pages, why):
    choice = transfer.choose(pages)
    assert choice.implementation == "device"
    assert why in choice.reason
    with pytest.raises(errors.IncompatiblePlan, match=why) as refusal:
        transfer.choose(pages, "host")
    assert "implementation='device'" in str(refusal.value)


def test_a_pool_in_another_memory_order_is_left_to_the_device(build):
    side = build.side(Topology(1))
    sharding = side.pages.sharding
    turned = jax.device_put(side.pages, Format(Layout((0, 2, 1)), sharding))
    choice = transfer.choose(turned)
    assert choice.implementation == "device"
    assert "not contiguous" in choice.reason
    found = transfer.export_records(turned, side.page_ids, side.plan, 48)
    assert np.array_equal(found, side.records)


def test_an_unknown_implementation_is_refused_with_the_known_ones(build):
    with pytest.raises(errors.ConfigError, match="Use one of auto, host, device"):
        transfer.choose(build.side(Topology(1)).pages, "gpu")
