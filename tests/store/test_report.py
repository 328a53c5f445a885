"""What a root is seen to hold while its writer takes segments away: no damage."""

import shutil

import pytest

from kvmem.store import folder_shelf, manifest, object_segment, report, rows, segment


@pytest.fixture
def root(open_store, make_chunks):
    with open_store() as st:
        st.put(*make_chunks(2))
        st.put(*make_chunks(2, 1))
    return st


def first_of(st):
    return sorted(st._folder.iterdir())[0]


def when_called(monkeypatch, module, name, act, after=False):
    """Let `act` happen once beside a call of a function."""
    real, done = getattr(module, name), []

    def beside(*said):
        if not after and not done:
            done.append(act())
        found = real(*said)
        if after and not done:
            done.append(act())
        return found

    monkeypatch.setattr(module, name, beside)


@pytest.mark.parametrize(
    ("module", "name", "after"),
    [
        (segment, "load", False),
        (segment, "load", True),
        (folder_shelf, "file_nbytes", False),
        (rows, "inspect", False),
        (manifest, "unpack", True),
    ],
)
@pytest.mark.parametrize("verify", [False, True])
def test_a_segment_that_went_while_it_was_looked_at_has_no_row(
    root, monkeypatch, module, name, after, verify
):
    gone = first_of(root)
    when_called(monkeypatch, module, name, lambda: shutil.rmtree(gone), after)
    found = report.inspect(root.root, verify)
    if name == "inspect" and not verify:
        assert len(found) == 2
    else:
        assert [row.status for row in found][-1] == "ok" and len(found) <= 2
        assert {row.status for row in found} == {"ok"}


@pytest.mark.parametrize("verify", [False, True])
def test_one_that_lost_only_its_manifest_is_unfinished(root, monkeypatch, verify):
    gone = first_of(root)

    def drop():
        (gone / manifest.NAME).unlink()
        shutil.rmtree(gone / "orbax")
        (gone / "chunks.safetensors").unlink()

    when_called(monkeypatch, manifest, "unpack", drop, after=True)
    statuses = [row.status for row in report.inspect(root.root, verify)]
    assert statuses == ["unfinished", "ok"]


def test_the_stores_own_verify_leaves_out_what_went(root, monkeypatch):
    gone = first_of(root)
    when_called(monkeypatch, rows, "inspect", lambda: shutil.rmtree(gone))
    assert [each.status for each in root.verify()] == ["ok"]


def test_an_object_segment_that_went_is_no_damage(
    open_objects, make_chunks, s3, monkeypatch
):
    st = open_objects()
    for seed in range(2):
        st.put(*make_chunks(2, seed))
    first = st._index.segments[min(st._index.segments)]

    def drop():
        object_segment.retire(first)
        object_segment.delete(first)

    when_called(monkeypatch, object_segment, "inspect", drop)
    assert [each.status for each in st.verify()] == ["ok"]


def test_bytes_that_cannot_be_read_stay_and_count(open_store, make_chunks):
    budget = 60_000
    with open_store(max_nbytes=budget) as st:
        for seed in range(16):
            st.put(*make_chunks(4, seed))
    for folder in sorted(st._folder.iterdir())[:8]:
        path = folder / manifest.NAME
        path.write_bytes(path.read_bytes()[:-1])
    lost = sum(folder_shelf.file_nbytes(p.parent) for p in _damaged(st))
    with open_store(max_nbytes=budget) as st:
        for seed in range(100, 116):
            st.put(*make_chunks(4, seed))
        assert folder_shelf.file_nbytes(st._folder) <= budget
        assert st.stats().unread_nbytes == st.gc().unread_nbytes == lost > 0
        assert len(_damaged(st)) == 8


def _damaged(st):
    unusable = [r.segment for r in st.verify() if r.status == "damaged"]
    return [st._folder / name / manifest.NAME for name in unusable]
