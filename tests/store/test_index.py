import gc
import shutil
import weakref

import pytest

from kvmem.store import folder_shelf, segment, shelf
from kvmem.store.segment import Facts

FACTS = Facts("m", "f", 4, 96)


@pytest.fixture
def write(tmp_path, make_chunks):
    def write(name, chunks):
        rows = chunks.records.reshape(len(chunks.keys), -1)
        return segment.write(tmp_path / name, FACTS, chunks.keys, chunks.tokens, rows)

    return write


def test_the_index_is_rebuilt_from_segments_alone(tmp_path, write, make_chunks):
    chunks = make_chunks(5)
    write("00000001-aaaaaaaa", chunks.part(0, 3))
    write("00000002-aaaaaaaa", chunks.part(3, 5))
    for path in tmp_path.rglob("zarr.json"):
        path.unlink()
    held = folder_shelf.rebuild(tmp_path, FACTS)
    assert held.prefix(chunks.keys) == 5
    assert [held.places[key].row for key in chunks.keys] == [0, 1, 2, 0, 1]
    assert held.places[chunks.keys[3]].tokens == chunks.tokens[3].tobytes()


def test_prefix_stops_at_the_first_hole(tmp_path, write, make_chunks):
    chunks = make_chunks(5)
    write("00000001-aaaaaaaa", chunks.part(0, 2))
    write("00000002-aaaaaaaa", chunks.part(3, 5))
    held = folder_shelf.rebuild(tmp_path, FACTS)
    assert held.prefix(chunks.keys) == 2
    assert held.prefix(chunks.keys[2:]) == 0
    assert held.prefix(chunks.keys[3:]) == 2


def test_of_two_segments_with_one_key_the_later_counts(tmp_path, write, make_chunks):
    chunks = make_chunks(2)
    write("00000010-aaaaaaaa", chunks)
    write("00000009-ffffffff", chunks)
    held = folder_shelf.rebuild(tmp_path, FACTS)
    assert {place.segment.name for place in held.places.values()} == {
        "00000010-aaaaaaaa"
    }


def test_a_masked_chunk_is_a_hole_until_it_is_added_again(tmp_path, write, make_chunks):
    chunks = make_chunks(3)
    write("00000001-aaaaaaaa", chunks)
    held = folder_shelf.rebuild(tmp_path, FACTS)
    place = held.places[chunks.keys[1]]
    held.mask(chunks.keys[1], "checksum", place)
    assert held.prefix(chunks.keys) == 1
    assert held.why_not(chunks.keys[1]) == "checksum"
    held.mask(chunks.keys[2], "checksum", place)
    assert len(held.masked) == 1, "the fault was another place's"
    held.add(write("00000002-aaaaaaaa", chunks.part(1, 2)))
    assert held.prefix(chunks.keys) == 3 and held.masked == {}


def test_what_is_no_segment_is_named_and_not_held(tmp_path, write, make_chunks):
    chunks = make_chunks(2)
    whole = write("00000001-aaaaaaaa", chunks)
    shutil.copytree(whole.folder, tmp_path / "00000002-bbbbbbbb")
    (tmp_path / "00000003-aaaaaaaa" / "orbax.orbax-checkpoint-tmp").mkdir(parents=True)
    (tmp_path / "notes.txt").touch()
    held = folder_shelf.rebuild(tmp_path, FACTS)
    assert list(held.segments) == ["00000001-aaaaaaaa"]
    assert {name: bad.status for name, bad in held.unusable.items()} == {
        "00000002-bbbbbbbb": "foreign",
        "00000003-aaaaaaaa": "unfinished",
        "notes.txt": "unfinished",
    }


def test_a_segment_sealed_later_is_taken_in_by_extend(tmp_path, write, make_chunks):
    chunks = make_chunks(2)
    unsealed = tmp_path / "00000001-aaaaaaaa"
    sealed = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    write("00000001-aaaaaaaa", chunks)
    unsealed.rename(sealed)
    unsealed.mkdir()
    held = folder_shelf.rebuild(tmp_path, FACTS)
    assert held.prefix(chunks.keys) == 0 and len(held.unusable) == 1
    unsealed.rmdir()
    sealed.rename(unsealed)
    assert shelf.extend(held, folder_shelf.FolderShelf(tmp_path, FACTS)) == 1
    assert shelf.extend(held, folder_shelf.FolderShelf(tmp_path, FACTS)) == 0
    assert held.prefix(chunks.keys) == 2 and held.unusable == {}


def test_a_folder_that_is_not_there_holds_nothing(tmp_path):
    assert folder_shelf.rebuild(tmp_path / "none", FACTS).places == {}


def test_a_chunk_that_was_evicted_and_came_back_is_not_called_evicted(
    tmp_path, write, make_chunks
):
    chunks = make_chunks(2)
    write("00000001-aaaaaaaa", chunks)
    held = folder_shelf.rebuild(tmp_path, FACTS)
    for key in chunks.keys[::-1]:
        held.evict(key)
    assert held.why_not(chunks.keys[0]) == "evicted"
    held.add(write("00000002-aaaaaaaa", chunks))
    assert [held.why_not(key) for key in chunks.keys] == [None, None]
    assert held.live == {"00000001-aaaaaaaa": 0, "00000002-aaaaaaaa": 2}


def test_a_segment_that_is_gone_is_held_by_nothing(tmp_path, write, make_chunks):
    chunks = make_chunks(2)
    name = write("00000001-aaaaaaaa", chunks).name
    held = folder_shelf.rebuild(tmp_path, FACTS)
    gone = weakref.ref(held.segments[name])
    held.remove(name)
    gc.collect()
    assert gone() is None and held.prefix(chunks.keys) == 0


def test_what_was_unusable_and_is_gone_is_forgotten(tmp_path, write, make_chunks):
    name = write("00000001-aaaaaaaa", make_chunks(2)).name
    (tmp_path / name / "manifest.json").unlink()
    held = folder_shelf.rebuild(tmp_path, FACTS)
    assert held.unusable.keys() == {name}
    shutil.rmtree(tmp_path / name)
    assert shelf.extend(held, folder_shelf.FolderShelf(tmp_path, FACTS)) == 0
    assert held.unusable == {}
