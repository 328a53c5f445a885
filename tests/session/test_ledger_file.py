"""A ledger's file: what changed stands behind what it was, and reads as one ledger."""

import dataclasses
import errno

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmem.errors import FormatMismatch
from kvmem.session import OsIO, SessionStore, ledger, ledger_file, lines, messages
from kvmem.session.identity import Identity
from kvmem.session.ledger import EMPTY, Ledger, Record, Request
from kvmem.session.place import LEDGER

ME = Identity("lab", "ann", "s")
uris = st.sampled_from(["M", "N", "Z", "memories/tea", "ü"])
records = st.builds(Record, turn=st.integers(0, 9), tokens=st.none() | st.just(3))
actors = st.dictionaries(
    st.none() | st.sampled_from(["planner", "критик"]), st.dictionaries(uris, records)
)
answers = st.dictionaries(
    st.sampled_from("abc"),
    st.builds(
        Request,
        actor=st.none(),
        query=st.sampled_from("qr"),
        turn=st.integers(0, 9),
        entries=st.just(({"uri": "M", "text": "a\n\u2028b"},)),
        records=st.just({"M": {"turn": 1}}),
    ),
)
counts = st.integers(1, 9)
ledgers = st.builds(Ledger, actors, answers, counts, counts, counts)


def without_nobody(ledger: Ledger) -> Ledger:
    """Return a ledger without actors that have no record."""
    held = {actor: each for actor, each in ledger.actors.items() if each}
    return dataclasses.replace(ledger, actors=held)


@settings(max_examples=40)
@given(st.lists(ledgers, min_size=1, max_size=6))
def test_lines_behind_a_ledger_make_it_every_later_one(states):
    first, *later = states
    data = ledger_file.dump(first, ME, 7)
    for state in later:
        data += ledger_file.line(ledger_file.parse(data, ME).ledger, state)
    found = ledger_file.parse(data, ME)
    assert without_nobody(found.ledger) == without_nobody(states[-1])
    assert (found.is_right, found.nbytes, found.wholes) == (True, len(data), 7)
    assert found.has_changes == bool(later)


@settings(max_examples=40)
@given(ledgers, ledgers, st.data())
def test_a_line_that_was_cut_off_changes_nothing_and_no_line_follows_it(
    before, after, data
):
    whole = ledger_file.dump(before, ME)
    line = ledger_file.line(before, after)
    cut = data.draw(st.integers(1, len(line) - 1))
    for rest in (line[:cut], bytes(cut), line[: cut - 1] + bytes(len(line) - cut)):
        found = ledger_file.parse(whole + rest, ME)
        assert without_nobody(found.ledger) == without_nobody(before)
        assert not found.is_right
    assert not ledger_file.parse(whole[:-1], ME).is_right


NO_CHANGES = [{"records": 3, "counts": [1, 1, 1]}, {"counts": [1]}, {"gone": {}}, {}]


@pytest.mark.parametrize("bad", [b"{}\n", b"x\n", *map(lines.seal, NO_CHANGES)])
def test_a_bad_line_is_left_out_and_the_others_count(bad):
    one = Ledger({None: {"A": Record(1)}})
    both = Ledger({None: {"A": Record(1), "B": Record(2)}})
    data = ledger_file.dump(EMPTY, ME) + ledger_file.line(EMPTY, one) + bad
    found = ledger_file.parse(data + ledger_file.line(one, both), ME)
    assert found.ledger.of(None) == both.of(None) and not found.is_right


class Watching(OsIO):
    """A disk that counts what is done to ledgers, and fails what it is told to."""

    def __init__(self):
        self.verbs, self.fails = [], None

    def perform(self, step, action):
        if LEDGER in step.path.name or step.verb == "sync_dir":
            self.verbs.append(step.verb)
            if step.verb == self.fails:
                action()
                raise OSError(errno.EIO, "the disk is failing")
        return action()


@pytest.fixture
def io():
    return Watching()


@pytest.fixture
def me(tmp_path, io, told):
    store = SessionStore.open(tmp_path / "root", io=io, retriever=told("M"))
    yield store.principal("lab", "ann")
    store.close()


def recalled(me, uri="M", **how):
    me.store.retriever.hits = [dataclasses.replace(me.store.retriever.hits[0], uri=uri)]
    return me.recall("q", session=me.session("s"), **how)


def test_a_serving_costs_one_write_and_one_sync(me, io):
    recalled(me, "A")
    io.verbs.clear()
    for number in range(5):
        assert recalled(me, f"B{number}").is_recorded
    assert io.verbs == ["append", "sync"] * 5
    again = SessionStore.open(me.store.root).principal("lab", "ann").session("s")
    assert set(again.ledger()) == {"A", *(f"B{i}" for i in range(5))}


def test_a_recall_that_only_counts_is_left_to_the_system(me, io):
    recalled(me)
    io.verbs.clear()
    for _ in range(3):
        assert recalled(me).entries == ()
    assert io.verbs == ["append"] * 3
    again = SessionStore.open(me.store.root, io=io, retriever=me.store.retriever)
    assert recalled(again.principal("lab", "ann")).entries != ()  # they were counted
    assert io.verbs[-2:] == ["append", "sync"]


def test_another_process_makes_sure_of_what_it_builds_on(me, io, tmp_path):
    recalled(me, "A")
    other = Watching()
    store = SessionStore.open(tmp_path / "root", io=other, retriever=me.store.retriever)
    you = store.principal("lab", "ann")
    recalled(you, "B", request_id="r")
    assert other.verbs[-3:] == ["sync_dir", "append", "sync"]
    io.verbs.clear()
    assert recalled(me, request_id="r").status == "replayed"
    assert io.verbs == ["sync"]  # the other may have died before its own
    assert recalled(me, request_id="r").status == "replayed"
    assert io.verbs == ["sync"]


@pytest.mark.parametrize("verb", ["append", "sync"])
def test_a_serving_that_could_not_be_written_is_not_there(me, io, verb):
    recalled(me, "A")
    io.fails = verb
    found = recalled(me, "B")
    assert (found.status, len(found.entries)) == ("write_failed", 1)
    io.fails = None
    assert set(me.session("s").ledger()) == {"A"}
    assert recalled(me, "B").entries != ()
    assert set(me.session("s").ledger()) == {"A", "B"}


@pytest.mark.parametrize("rest", [b"{", b"\0" * 40, b'{"counts":[0,0,0],"crc":"0"}\n'])
def test_a_file_that_is_not_right_is_written_whole_with_what_it_says(me, io, rest):
    recalled(me, "A")
    recalled(me, "B")
    path = me.session("s").place.file(LEDGER)
    path.write_bytes(path.read_bytes() + rest)
    assert recalled(me, "C").status == "ok"
    assert set(me.session("s").ledger()) == {"A", "B", "C"}
    data = path.read_bytes()
    assert data.count(b"\n") == 1 and ledger_file.parse(data, ME).is_right


def test_a_file_of_an_older_version_is_read_and_written_anew(me):
    recalled(me, "A")
    path = me.session("s").place.file(LEDGER)
    old = b'{"format":"kvmem.session.ledger","version":1,"entries":{"O":{"turn":0}}}'
    path.write_bytes(old)
    assert recalled(me, "B").status == "ok"
    assert set(me.session("s").ledger()) == {"O", "B"}
    assert b'"version":2' in path.read_bytes()


def test_a_file_does_not_grow_beyond_twice_what_it_says(me, monkeypatch):
    monkeypatch.setattr(ledger_file, "_MOST_NBYTES", 1000)
    monkeypatch.setattr(ledger, "MAX_REQUESTS", 5)
    path, most, wholes = me.session("s").place.file(LEDGER), 0, set()
    for number in range(40):
        recalled(me, f"u{number % 3}", cooldown=messages(1), request_id=f"r{number}")
        found = ledger_file.parse(path.read_bytes(), ME)
        wholes.add(found.wholes)
        most = max(most, found.nbytes - 2 * found.head_nbytes)
    assert 3 < len(wholes) < 20  # it was made whole, and not each time
    assert most < 1000


@settings(max_examples=40)
@given(st.lists(ledgers, min_size=2, max_size=5), st.integers(0, 4), st.data())
def test_what_was_read_before_is_read_on_from_and_never_trusted(states, seen, data):
    first, *later = states
    whole, known = ledger_file.dump(first, ME), None
    for number, state in enumerate(later):
        if number == seen:
            known = ledger_file.parse(whole, ME)
        whole += ledger_file.line(ledger_file.parse(whole, ME).ledger, state)
    assert ledger_file.parse(whole, ME, known) == ledger_file.parse(whole, ME)
    other = bytearray(whole)
    other[data.draw(st.integers(0, len(other) - 1))] ^= 1

    def read(known):
        try:
            return ledger_file.parse(bytes(other), ME, known)
        except FormatMismatch:
            return None

    assert read(known) == read(None)
    assert read(ledger_file.parse(whole, ME)) == read(None)
