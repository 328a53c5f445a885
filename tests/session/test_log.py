"""The log's file: appended durably, mended, and as long as before where that fails."""

import errno
import os

import pytest

from kvmem.errors import CorruptPage
from kvmem.session import OsIO, SessionStore, log
from kvmem.session.place import LOG


def say(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


@pytest.fixture
def torn(ann):
    """A session of two messages, and the bytes with which a third would begin."""
    session = ann.session("s")
    session.append(say("first"), key="k0")
    session.append(say("second: é\u2028"), key="k1")
    before = session.place.file(LOG).read_bytes()
    session.append(say("third: é"), key="k2")
    whole = session.place.file(LOG).read_bytes()
    return session, before, whole[len(before) :]


def reopened(session) -> object:
    store = SessionStore.open(session.place.root, durability="process")
    return store.principal("lab", "ann").session("s")


@pytest.mark.case("SES-28")
def test_a_write_cut_off_at_any_byte_does_not_swallow_the_next_message(torn):
    session, before, line = torn
    path = session.place.file(LOG)
    for end in range(1, len(line)):
        path.write_bytes(before + line[:end])
        again = reopened(session)
        assert again.clock == 2
        answer = again.append(say("next"), key="k3")
        kept = again.place.file(answer.repair.kept)
        assert answer.repair.nbytes == end and kept.read_bytes() == line[:end]
        kept.unlink()
        texts = [m.text for m in reopened(session).messages()]
        assert texts == ["first", "second: é\u2028", "next"]


def test_a_code_point_cut_in_two_by_another_writer_is_cut_off_too(torn):
    session, before, _ = torn
    half = before + '{"seq": 2, "message": "é'.encode()[:-1]
    session.place.file(LOG).write_bytes(half)
    assert session.append(say("next")).repair.kept == "messages.torn-0"
    assert session.clock == 3


def test_what_was_torn_is_kept_each_under_its_own_name(torn):
    session, _, line = torn
    for number in range(3):
        with open(session.place.file(LOG), "ab") as file:
            file.write(line[: 10 + number])
        answer = session.append(say(f"m{number}"))
        assert answer.repair == (f"messages.torn-{number}", 10 + number)
    assert session.append(say("calm")).repair is None


class Short(OsIO):
    """A disk that is full after so many bytes of an append."""

    def __init__(self, room: int, more_fail: bool):
        self.room, self.more_fail = room, more_fail

    def append(self, path, data):
        super().append(path, data[: self.room])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def truncate(self, path, nbytes):
        if self.more_fail:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().truncate(path, nbytes)


@pytest.mark.parametrize("more_fail", [False, True])
def test_a_disk_that_is_full_at_any_byte_is_told_of_and_harms_nothing(torn, more_fail):
    session, before, line = torn
    path = session.place.file(LOG)
    for room in range(0, len(line) - 60, 29):
        path.write_bytes(before)
        full = SessionStore.open(session.place.root, io=Short(room, more_fail))
        with pytest.raises(OSError, match="No space"):
            full.principal("lab", "ann").session("s").append(say("lost"), key="k9")
        if not more_fail:
            assert path.read_bytes() == before, "as long as before"
        again = reopened(session)
        again.append(say("next"), key="k9")
        assert [m.text for m in again.messages()][2:] == ["next"]


def test_a_sync_that_fails_is_no_acknowledgement(ann, open_store):
    class Unsynced(OsIO):
        def sync(self, path):
            if path.name == LOG:
                raise OSError(errno.EIO, "Input/output error")
            super().sync(path)

    ann.session("s").create()
    bad = open_store(io=Unsynced()).principal("lab", "ann").session("s")
    with pytest.raises(OSError, match="Input/output"):
        bad.append(say("lost"), key="k")
    assert ann.session("s").clock == 0
    assert not ann.session("s").append(say("lost"), key="k").is_repeat


def test_damage_in_the_middle_is_loud_to_a_handle_that_knows_the_log(torn):
    session, _, _ = torn
    path = session.place.file(LOG)
    data = bytearray(path.read_bytes())
    data[data.index(b'"first"', 200) + 1] ^= 1
    path.write_bytes(data)
    for use in (session.messages, lambda: session.clock, session.live):
        with pytest.raises(CorruptPage, match="line 2"):
            use()
    with pytest.raises(CorruptPage):
        session.append(say("more"))
    assert path.read_bytes() == data


def test_a_log_is_parsed_where_it_is_new_only(ann, monkeypatch):
    session = ann.session("s")
    session.append(say("a"))
    known = session.place.logs[session.place.file(LOG)]
    session.append(say("b"))
    monkeypatch.setattr(log.lines, "scan", None)  # nobody reads it from its start
    assert session.messages()[1].text == "b"
    assert session.place.logs[session.place.file(LOG)].lines[0] is known.lines[0]


def test_a_reader_does_not_mend(torn):
    session, before, line = torn
    session.place.file(LOG).write_bytes(before + line[:9])
    assert len(session.messages()) == session.clock == 2
    assert session.place.file(LOG).read_bytes() == before + line[:9]
