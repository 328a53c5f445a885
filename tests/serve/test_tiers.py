"""An engine over RAM, over RAM and disk, over a store that it never names."""

import numpy as np
import pytest

from kvmem import geometry, store
from kvmem.canonical import format_id
from kvmem.serve.request import SamplingParams

CHUNK = 8


def text(seed, length):
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def greedy(count):
    return SamplingParams(max_tokens=count, ignore_eos=True)


@pytest.fixture
def facts(tiny_model):
    model = tiny_model()
    groups = geometry.group_layers(model.spec.layer_specs("float32"), 4)
    return {
        "model_id": model.model_id,
        "format_id": format_id(groups),
        "record_nbytes": groups[0].record_nbytes,
        "chunk_tokens": CHUNK,
    }


@pytest.fixture(params=["pageable", "pinned_host"])
def host(request, facts):
    """Room for six chunks."""
    nbytes = 6 * CHUNK * facts["record_nbytes"]
    return store.HostTier(nbytes, memory=request.param, **facts)


def test_pages_that_left_the_device_come_back_from_ram(engine, host):
    made = engine(store=host, prefix_cache=False)
    (first,) = made.generate(text(0, 30), greedy(6))
    (again,) = made.generate(text(0, 30), greedy(6))
    assert again.output_ids == first.output_ids
    assert (first.stored_tokens, again.stored_tokens) == (0, 24)
    assert host.stats().written == 4 and host.stats().hits == 3


def test_ram_that_forgot_gives_a_shorter_prefix_and_the_same_tokens(engine, host):
    made = engine(store=host, prefix_cache=False)
    firsts = [made.generate(text(seed, 30), greedy(6))[0] for seed in range(3)]
    assert host.stats().evicted and host.stats().nbytes <= host.max_nbytes
    for seed, first in enumerate(firsts):
        (again,) = made.generate(text(seed, 30), greedy(6))
        assert again.output_ids == first.output_ids


def test_a_conversation_keeps_its_beginning_in_ram(engine, host):
    made = engine(store=host, prefix_cache=False)
    (first,) = made.generate(text(0, 20), greedy(6))
    turn = [*text(0, 20), *first.output_ids, *text(9, 10)]
    made.generate(turn, greedy(4))  # puts only what is new
    made.generate(text(1, 30), greedy(6))  # four chunks more than there is room
    (again,) = made.generate(turn, greedy(4))
    assert again.stored_tokens >= CHUNK  # its suffix went, not its prefix


def test_disk_behind_ram_serves_another_engine(engine, host, facts, tmp_path):
    prompt = text(4, 40)
    with store.PageStore.open(tmp_path / "root", **facts) as disk:
        made = engine(store=store.TieredStore(host, disk), prefix_cache=False)
        (first,) = made.generate(prompt, greedy(6))
        (again,) = made.generate(prompt, greedy(6))
        assert again.stored_tokens == 32 and disk.stats().hits == 0
    with store.PageStore.open(tmp_path / "root", **facts) as disk:
        fresh = store.HostTier(host.max_nbytes, **facts)
        tiers = store.TieredStore(fresh, disk)
        made = engine(store=tiers, prefix_cache=False)
        (other,) = made.generate(prompt, greedy(6))
        assert other.output_ids == first.output_ids
        assert other.stored_tokens == 32
        assert (disk.stats().hits, fresh.stats().num_chunks) == (4, 4)
