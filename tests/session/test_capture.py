"""Capture: each message of a history goes into the log once."""

import threading

import hypothesis
import pytest
from hypothesis import strategies as st

from kvmem import errors
from kvmem.session import SessionStore
from kvmem.session.capture import Capture
from kvmem.session.marks import in_log, marked, unsent


def said(words, named=True):
    """Return a history; with names, a message's id is its first word."""
    messages = [{"role": "user", "content": word} for word in words]
    names = [{"id": word.split("'")[0]} if named else {} for word in words]
    return [m | n for m, n in zip(messages, names, strict=True)]


def texts(me, session="s"):
    return [message.text for message in me.session(session).messages()]


def push(capture, words, named=True, session="s"):
    return capture.push(said(words, named), session=session).sent


@pytest.mark.parametrize(
    ("seen", "new", "missing"),
    [
        ("", "ab", "ab"),
        ("ab", "ab", ""),
        ("ab", "abcd", "cd"),  # it grew
        ("abcd", "ab", ""),  # a view of less of it
        ("abcd", "cde", "e"),  # trimmed at its head
        ("xoyo", "yoo", "o"),  # trimmed, and a word said again
        ("oo", "ooo", "o"),
        ("abc", "abXc", "X"),  # something put in
        ("abc", "Sbcd", "Sd"),  # a summary in place of the head
    ],
)
def test_of_a_history_without_ids_what_is_new_is_missing(seen, new, missing):
    marks = [f"{c}:" for c in seen], [f"{c}:" for c in new]
    assert "".join(new[i] for i in unsent(*marks, marks[0])) == missing


@hypothesis.given(st.text("abc", max_size=12), st.text("abc", max_size=6))
def test_a_history_that_grew_sends_its_tail(seen, tail):
    old = [f"{c}:" for c in seen]
    new = old + [f"{c}:" for c in tail]
    assert unsent(old, new, old) == list(range(len(old), len(new)))
    assert unsent(new, new, new) == unsent(new, new[: len(seen)], new) == []


@hypothesis.given(
    st.text("abc", max_size=10),
    st.integers(0, 10),
    st.lists(st.integers(0, 10), max_size=4),
)
def test_what_was_never_seen_is_sent_wherever_it_was_put(seen, cut, places):
    kept = list(seen[cut:])
    for number, place in enumerate(places):
        kept.insert(place, f"new{number}")
    old, new = [f"{c}:" for c in seen], [f"{c}:" for c in kept]
    sent = [kept[i] for i in unsent(old, new, old)]
    assert {w for w in kept if w.startswith("new")} <= set(sent)
    if not places:
        assert sent == []


def test_a_message_with_an_id_is_known_by_it_and_an_edit_is_another(me):
    capture = Capture(me)
    assert push(capture, ["a", "b", "c"]) == 3
    assert push(capture, ["c", "a", "d"]) == 1  # any order: ids are known
    assert push(capture, ["a", "b'", "c", "d"]) == 1  # b was edited
    assert push(capture, ["a", "b'", "c", "d"]) == 0
    assert push(Capture(me), ["a", "b'", "c", "d", "e"]) == 1
    assert texts(me) == ["a", "b", "c", "d", "b'", "e"]


def test_an_edited_history_without_ids_sends_the_edit_once(me):
    capture = Capture(me)
    push(capture, ["a", "b", "c"], named=False)
    assert push(capture, ["a", "x", "c"], named=False) == 1
    assert push(capture, ["a", "x", "c", "d"], named=False) == 1
    assert texts(me) == ["a", "b", "c", "x", "d"]


def test_a_restart_and_a_commit_resend_nothing(store, me):
    push(Capture(me), ["a", "b"])
    me.session("s").commit()
    again = SessionStore.open(store.root).principal("lab", "ann")
    assert push(Capture(again), ["a", "b"]) == 0
    assert push(Capture(again), ["a", "b", "c"]) == 1
    assert texts(again) == ["a", "b", "c"]


def test_cursors_are_keyed_by_actor_session_and_peer(me):
    for actor in (None, "A", "B"):
        for session in ("s", "t"):
            for peer in (None, "wang", "zhang"):
                capture = Capture(me, lambda _, actor=actor: actor, peer=peer)
                assert push(capture, ["a", "b"], session=session) == 2
                assert push(capture, ["a", "b"], session=session) == 0
                again = Capture(me, lambda _, actor=actor: actor, peer=peer)
                assert push(again, ["a", "b"], session=session) == 0
    found = me.session("s").messages()
    assert len(found) == 18
    assert {(m.actor, m.peer) for m in found} == {
        (a, p) for a in (None, "A", "B") for p in (None, "wang", "zhang")
    }


def test_what_others_appended_is_no_part_of_a_cursor(me):
    me.session("s").append(said(["a"], named=False))
    assert push(Capture(me), ["a", "b"]) == 2


def test_a_long_history_goes_in_batches_and_a_failure_keeps_those_before(me):
    class Failing:
        supports_request_actor_peer = True
        left = 2
        actor, acting_as, captured = None, me.acting_as, me.captured

        def capture(self, *args):
            self.left -= 1
            if self.left < 0:
                raise OSError("the network")
            return me.capture(*args)

    transport, words = Failing(), [f"w{i}" for i in range(350)]
    capture = Capture(transport)
    with pytest.raises(OSError, match="network"):
        push(capture, words)
    assert len(texts(me)) == 200
    transport.left = 9
    assert push(capture, words) == 150
    assert texts(me) == words


def test_an_answer_that_was_lost_is_no_reason_to_send_again(me):
    class Deaf:
        supports_request_actor_peer = True
        actor, acting_as, captured = None, me.acting_as, me.captured

        def capture(self, *args):
            me.capture(*args)
            raise TimeoutError

    with pytest.raises(TimeoutError):
        push(Capture(Deaf()), ["a", "b"])
    assert push(Capture(me), ["a", "b"]) == 0
    deaf = Capture(Deaf())
    with pytest.raises(TimeoutError):
        push(deaf, ["a", "b", "c"])
    deaf._transport = me  # the network is back, and the cursor is behind the log
    assert push(deaf, ["a", "b", "c", "d"]) == 1
    assert texts(me) == ["a", "b", "c", "d"]


@pytest.mark.case("SES-13")
def test_captures_at_once_neither_lose_nor_double(me):
    barrier, words = threading.Barrier(4), [f"w{i}" for i in range(12)]

    def work():
        capture = Capture(me)
        barrier.wait()
        for end in range(1, len(words) + 1):
            push(capture, words[:end])

    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert texts(me) == words


def test_a_deleted_session_is_not_filled_again(me):
    capture = Capture(me)
    push(capture, ["a"])
    me.session("s").delete()
    with pytest.raises(errors.Deleted):
        push(capture, ["a", "b"])
    me.session("s").create()
    assert push(Capture(me), ["a", "b"]) == 2


@pytest.mark.parametrize("forged", ["capture::forged:1", "capture:x"])
def test_nothing_but_a_capture_says_that_something_was_captured(me, forged):
    session = me.session("s")
    with pytest.raises(errors.ConfigError, match="by a capture alone"):
        session.append([{"role": "user", "content": "x", "sources": [forged]}])
    with pytest.raises(errors.ConfigError, match="by a capture alone"):
        me.capture("s", [{"role": "user", "content": "x", "sources": [forged]}], 0)
    assert me.captured("s") == [] and session.clock == 0


def test_a_captured_message_keeps_the_sources_it_came_with(me):
    said = {"role": "user", "content": "x", "id": "m1", "sources": ["msg_1", "msg_2"]}
    assert me.capture("s", [said], 0) == 1
    mark, *sources = me.session("s").messages()[0].sources
    assert sources == ["msg_1", "msg_2"] and mark.startswith("capture:")
    assert me.captured("s") == [marked(said)]


def test_marks_that_are_known_are_of_this_session_and_no_other(tmp_path):
    store = SessionStore.open(tmp_path, rules="openviking")  # no life has a number
    session = store.principal("lab", "ann").session("s")
    push(Capture(session.principal), ["a", "b"])
    assert [m.partition(":")[2] for m in in_log(session, None, None)] == ["a", "b"]
    session.delete()
    assert in_log(session, None, None) == ()
    push(Capture(session.principal), ["c", "d", "e"])
    assert [m.partition(":")[2] for m in in_log(session, None, None)] == ["c", "d", "e"]
    assert in_log(session, "A", None) == in_log(session, None, "wang") == ()


def test_resolvers_are_asked_with_the_runtime_and_must_name_something(me):
    capture = Capture(me, lambda r: r["actor"], lambda r: r["session"])
    pushed = capture.push(said(["a"]), {"actor": "A", "session": "s"})
    assert pushed == ("s", "A", 1, 1)
    for actor, error in ((3, TypeError), (" ", ValueError)):
        with pytest.raises(error):
            capture.push(said(["a"]), {"actor": actor, "session": "s"})
    with pytest.raises(errors.ConfigError, match="session_resolver"):
        Capture(me).push(said(["a"]))
    with pytest.raises(ValueError, match="AsyncClient"):
        Capture(type("Async", (), {"is_async": True})())


def test_a_mark_is_of_what_is_said_and_the_id():
    one = {"role": "user", "content": "hello", "id": "m1"}
    assert marked(one) == marked(one | {"content": [{"type": "text", "text": "hello"}]})
    others = [one | {"id": "m2"}, one | {"role": "tool"}, one | {"content": "hello "}]
    assert len({marked(each) for each in (one, *others)}) == 4
