"""Append: once a key, all of a batch or none, in the session it was meant for."""

import pytest

from kvmem.errors import ConfigError, Conflict, Deleted, InvalidId
from kvmem.session import messages


def say(*texts: str) -> list[dict]:
    return [{"role": "user", "content": text} for text in texts]


def texts(session) -> list[str]:
    return [m.text for m in session.messages()]


def test_a_key_is_stored_once_however_often_it_is_sent(ann, open_store):
    session = ann.session("s")
    first = session.append(say("a", "b"), key="k")
    again = session.append(say("a", "b"), key="k")
    elsewhere = open_store().principal("lab", "ann").session("s")
    assert first == (0, 2, False, None)
    assert again == elsewhere.append(say("a", "b"), key="k") == (0, 2, True, None)
    assert texts(session) == ["a", "b"]


def test_without_a_key_equal_messages_are_two(ann):
    session = ann.session("s")
    session.append(say("a"))
    session.append(say("a"))
    assert texts(session) == ["a", "a"]
    assert len({m.id for m in session.messages()}) == 2


@pytest.mark.parametrize("is_archived", [False, True])
@pytest.mark.parametrize(
    "other", [{"messages": say("b")}, {"messages": say("a", "a")}, {"actor": "planner"}]
)
def test_a_key_with_another_content_is_a_conflict(ann, other, is_archived):
    session = ann.session("s")
    session.append(say("a"), key="k")
    if is_archived:
        session.commit()
    with pytest.raises(Conflict, match="another content"):
        session.append(**{"messages": say("a"), "key": "k"} | other)
    assert texts(session) == ["a"]


@pytest.mark.case("SES-30")
def test_a_key_is_known_when_its_messages_are_archived(ann, open_store):
    session = ann.session("s")
    session.append(say("a"), key="k0")
    session.commit()
    session.append(say("b"), key="k1")
    session.commit()
    for handle in (session, open_store().principal("lab", "ann").session("s")):
        assert handle.append(say("a"), key="k0") == (0, 1, True, None)
        assert handle.append(say("b"), key="k1") == (1, 2, True, None)
    assert texts(session) == ["a", "b"] and session.clock == 2


@pytest.mark.case("SES-06")
def test_what_is_said_after_a_rotation_is_in_the_new_session(ann):
    ann.session("s1").append(say("old"))
    before = ann.session("s1").place.file("messages.jsonl").read_bytes()
    session = ann.session("s1")
    session = ann.session("s2")
    session.append(say("new"))
    session.commit()
    assert texts(ann.session("s2")) == ["new"] and ann.session("s2").clock == 1
    assert ann.session("s1").place.file("messages.jsonl").read_bytes() == before


@pytest.mark.case("SES-01")
def test_two_users_of_one_session_name_share_nothing(open_store):
    store = open_store()
    users = [store.principal("lab", "ann"), store.principal("lab", "bob")]
    users.append(store.principal("other", "ann"))
    for number, user in enumerate(users):
        user.session("s").append(say(f"of {number}"), key="k")
        user.remember(f"memory {number} of tea")
        found = user.recall("tea", session=user.session("s"), cooldown=messages(3))
        assert [e.text for e in found.entries] == [f"memory {number} of tea"]
    for number, user in enumerate(users):
        assert texts(user.session("s")) == [f"of {number}"]
        assert len(user.session("s").ledger()) == 1 and user.sessions() == ("s",)
    store.close()


def test_a_message_keeps_its_peer_actor_kind_and_sources(ann):
    session = ann.session("s")
    given = {"role": "user", "content": "a", "peer": " wang ", "kind": "user_query"}
    given |= {"turn_id": "t1", "sources": ["m0"]}
    with ann.acting_as("planner"):
        session.append([given, {"role": "tool", "content": "b"}], peer="zhang")
    first, second = session.messages()
    assert (first.peer, second.peer) == ("wang", "zhang")
    assert first.actor == second.actor == "planner"
    assert (first.kind, first.turn_id, first.sources) == ("user_query", "t1", ("m0",))


@pytest.mark.parametrize(
    ("messages", "law"),
    [
        ([], "1 to 100"),
        (say(*"x" * 101), "1 to 100"),
        ("hello", "a list of messages"),
        ([{"role": "robot", "content": "x"}], "a role is one of"),
        ([{"role": "user"}], "content"),
        ([{"role": "user", "content": "x", "parts": []}], "content"),
        ([{"role": "user", "content": 3}], "a string or a list"),
        ([{"role": "user", "content": [{"text": "x"}]}], "type"),
        ([{"role": "user", "content": [{"type": "context", "text": "x"}]}], "uri"),
        ([{"role": "user", "content": [{"type": "t", "x": float("nan")}]}], "JSON"),
        ([{"role": "user", "content": "x", "peeer": "w"}], "a message has"),
        (["hello"], "a mapping"),
    ],
)
def test_a_batch_of_the_wrong_form_writes_nothing(ann, messages, law):
    session = ann.session("s")
    with pytest.raises(ConfigError, match=law):
        session.append(messages)
    assert not session.exists and not session.place.folder.exists()


def test_a_peer_that_is_no_name_is_refused(ann):
    with pytest.raises(InvalidId):
        ann.session("s").append(say("x"), peer="a/b")
    assert not ann.session("s").exists


def test_a_meta_file_that_is_broken_or_cannot_be_written_stops_nobody(ann, make_world):
    session = ann.session("s")
    session.append(say("a"))
    for bad in (b"{", b"[]", b"\xff", b'{"version": 9}', b'{"version":1,"user":"bob"}'):
        session.place.file(".meta.json").write_bytes(bad)
        session.append(say("b"))
        assert session.meta()["total_message_count"] == session.clock
    world = make_world()
    world.play([["msg", "s", 1], ["fault", "write", "*/.meta.json", 1]])
    world.play(
        [["msg", "s", 1], ["clock", "s", 2], ["meta", "s", {"message_count": 1}]]
    )
    world.play([["msg", "s", 1], ["meta", "s", {"message_count": 3}]])


def test_a_handle_makes_nothing_until_it_is_used(ann):
    session = ann.session("s")
    assert session.clock == 0 and session.messages() == () and session.ledger() == {}
    assert not session.exists and not ann.folder.exists()
    assert session.meta() == {} and session.chains.actors() == ()


def test_an_append_to_a_deleted_session_is_refused(ann):
    session = ann.session("s")
    session.append(say("a"))
    ann.session("s").delete()
    with pytest.raises(Deleted):
        session.append(say("b"))
    assert not session.place.folder.exists()
