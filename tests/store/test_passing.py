"""Failures that pass are not damage: they are asked about again, and said so."""

import contextlib
import errno
import os
import resource
import time

import pytest
import tensorstore

from kvmem.store import object_arrays, passing, segment

UNREACHABLE = "ABORTED: All 4 retry attempts failed: UNAVAILABLE: Connection refused"


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (OSError(errno.EMFILE, "Too many open files"), True),
        (OSError(errno.ESTALE, "Stale file handle"), True),
        (OSError(errno.EIO, "Input/output error"), False),
        (OSError(errno.EIO, f"read: {UNREACHABLE}"), True),
        (TimeoutError(), True),
        (ValueError(UNREACHABLE), True),
        (ValueError("RESOURCE_EXHAUSTED: [os_error_code='24'] Error opening"), True),
        (ValueError("PERMISSION_DENIED: [os_error_code='13'] Error opening"), False),
        (ValueError("NOT_FOUND: chunk 0 is missing"), False),
        (ValueError("DATA_LOSS: Digest mismatch"), False),
        (ValueError("something new"), False),
    ],
)
def test_only_what_is_known_to_pass_is_said_to(error, passes):
    assert passing.does_pass(error) is passes


@contextlib.contextmanager
def no_descriptors():
    """Use up every file descriptor."""
    limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_process_short_of_descriptors_calls_nothing_damaged(open_store, make_chunks):
    chunks = make_chunks(2)
    with open_store() as st:
        name = st.put(*chunks).segment
    st = open_store(read_only=True)
    with no_descriptors():
        found = st.get(*chunks[:2])
        loaded = segment.load(st._folder / name, st.facts)
    assert (found.num_hit, found.reason) == (0, "unreachable")
    assert loaded.status == "unreachable"
    assert st.get(*chunks[:2]).reason == "unreachable", "asked again after a while"
    st.refresh()
    assert st.get(*chunks[:2]).num_hit == 2


def test_damage_stays_masked_over_a_refresh(open_store, make_chunks):
    chunks, st = make_chunks(2), open_store()
    st.put(*chunks)
    st._index.mask(chunks.keys[0], "damaged", st._index.places[chunks.keys[0]])
    st.refresh()
    assert st.get(*chunks[:2]).reason == "damaged"


def test_a_server_that_is_away_is_no_damage(open_objects, make_chunks, monkeypatch):
    chunks, opening = make_chunks(2), object_arrays.open_all
    with open_objects() as st:
        st.put(*chunks)

    def away(*_):
        raise ValueError(UNREACHABLE)

    st = open_objects(read_only=True)
    monkeypatch.setattr(object_arrays, "open_all", away)
    assert st.get(*chunks[:2]).reason == "unreachable"
    monkeypatch.setattr(object_arrays, "open_all", opening)
    st.refresh()
    assert st.get(*chunks[:2]).num_hit == 2


def test_opening_objects_takes_no_longer_than_the_deadline(
    open_objects, make_chunks, monkeypatch
):
    chunks = make_chunks(2)
    with open_objects() as st:
        st.put(*chunks)
    never = []

    def silent(*_, **__):
        never.append(tensorstore.Promise.new())
        return never[-1][1]

    st = open_objects(read_only=True)
    monkeypatch.setattr(tensorstore, "open", silent)
    started = time.monotonic()
    assert st.get(*chunks[:2], deadline_s=0.2).reason == "deadline"
    assert time.monotonic() - started < 10
