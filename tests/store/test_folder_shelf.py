"""A folder of segments: what a look may take in while its own writer is at work."""

import threading

from kvmem import store
from kvmem.store.folder_shelf import FolderShelf


class AtRename(store.Disk):
    """A disk on which something happens once, when the first segment has its name."""

    def __init__(self):
        self.hook = None

    def perform(self, step, action):
        done = action()
        if step.verb == "rename" and step.path.name == "manifest.json" and self.hook:
            hook, self.hook = self.hook, None
            hook()
        return done


def test_a_segment_dropped_while_a_refresh_was_under_way_stays_away(
    open_store, make_chunks, monkeypatch
):
    disk, looked, go = AtRename(), threading.Event(), threading.Event()
    st, look = open_store(max_nbytes=20_000, io=disk), FolderShelf.look

    def slow(self, held):
        seen = look(self, held)
        looked.set()
        go.wait(30)
        return seen

    monkeypatch.setattr(FolderShelf, "look", slow)
    beside = threading.Thread(target=st.refresh)
    disk.hook = lambda: (beside.start(), looked.wait(30))
    first = make_chunks(3)
    st.put(*first)
    for seed in range(1, 8):
        st.put(*make_chunks(3, seed))
    go.set()
    beside.join()
    there = {path.name for path in st._folder.iterdir()}
    assert st.contains(first.keys) == 0 and set(st._index.segments) == there
    st.put(*make_chunks(3, 100))


def test_a_refresh_does_not_publish_what_the_writer_has_not(open_store, make_chunks):
    disk, seen = AtRename(), []
    st, chunks = open_store(io=disk), make_chunks(2)

    def beside():
        st.refresh()
        seen.append(st.contains(chunks.keys))

    disk.hook = beside
    st.put(*chunks)
    assert seen == [0] and st.contains(chunks.keys) == 2
    assert dict(st._index.live) == {name: 2 for name in st._index.segments}


def test_a_link_named_like_a_segment_is_a_strangers(open_store, make_chunks, tmp_path):
    st = open_store()
    st.put(*make_chunks(1))
    st.close()
    (tmp_path / "elsewhere").mkdir()
    (st._folder / "00000007-abcdef01").symlink_to(tmp_path / "elsewhere")
    again = open_store()
    assert again.swept == () == again.gc().swept
    assert (tmp_path / "elsewhere").is_dir()


def test_a_segment_moved_to_another_disk_leaves_both_when_it_goes(
    open_store, make_chunks, tmp_path
):
    chunks, st = make_chunks(2), open_store()
    folder = st._folder / st.put(*chunks).segment
    st.close()
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    again = open_store(max_nbytes=0)
    assert again.get(*chunks[:2]).num_hit == 2
    assert again.gc().dropped == (folder.name,)
    assert not folder.is_symlink() and not (tmp_path / "elsewhere").exists()
