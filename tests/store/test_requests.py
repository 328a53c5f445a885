"""What a put may be called with, in every store: a parent is a key, and another one."""

import pytest

from kvmem import store
from kvmem.errors import InvalidId
from kvmem.store import segment, sidecar

CHUNK, RECORD = 4, 96


@pytest.fixture(params=["disk", "ram", "both"])
def kept(request, open_store):
    ram = store.HostTier(1 << 20, RECORD, CHUNK)
    if request.param == "ram":
        return ram
    disk = open_store()
    return disk if request.param == "disk" else store.TieredStore(ram, disk)


@pytest.mark.parametrize("parent", [b"abc", b"a" * 64, "a" * 32, 7, b""])
def test_a_parent_that_is_no_key_is_refused_before_anything_is_kept(
    kept, make_chunks, parent
):
    chunks = make_chunks(2)
    with pytest.raises(InvalidId, match="page key"):
        kept.put(*chunks, parent=parent)
    assert kept.contains(chunks.keys) == 0
    assert kept.stats().num_chunks == 0


@pytest.mark.parametrize("at", [0, 1])
def test_no_text_continues_itself(kept, make_chunks, at):
    chunks = make_chunks(2)
    with pytest.raises(InvalidId, match="continues itself"):
        kept.put(*chunks, parent=chunks.keys[at])
    assert kept.contains(chunks.keys) == 0


@pytest.mark.parametrize("key", [None, 7, "a" * 32, b"short"])
def test_a_key_that_is_none_is_refused_in_words(kept, make_chunks, key):
    chunks = make_chunks(1)
    with pytest.raises(InvalidId, match="Make keys with chain_keys"):
        kept.put([key], *chunks[1:])
    with pytest.raises(InvalidId, match="Make keys with chain_keys"):
        kept.get([key], chunks.tokens)


def test_a_sidecar_that_cannot_be_read_is_one_segments_damage(
    open_store, make_chunks, monkeypatch
):
    """A kvmem that did not check parents wrote such tables, digest and all."""
    good, bad, st = make_chunks(2), make_chunks(1, 1), open_store()
    st.put(*good)
    with monkeypatch.context() as old:
        old.setattr(sidecar, "_NO_PARENT", b"abc")
        name = st.put(*bad).segment
    st.close()
    again = open_store()
    assert again.contains(good.keys) == 2 and again.contains(bad.keys) == 0
    found = segment.load(again._folder / name, again.facts)
    assert found.status == "damaged" and "rows of 3 bytes" in found.detail
    assert [r.status for r in again.verify() if r.segment == name] == ["damaged"]
