"""Recall: what was served a moment ago is held back; whatever breaks, it answers."""

import contextlib
import dataclasses

import pytest

from kvmem.errors import ConfigError, Conflict, Denied, InvalidId
from kvmem.session import Hit, OsIO, Recall, SessionStore, ledger_file, messages
from kvmem.session import recent as recent_recalls
from kvmem.session.place import LEDGER, LOG
from kvmem.session.recent import Recent

HITS = [Hit("A", "alpha", 0.9), Hit("B", "beta", 0.8), Hit("C", "gamma", 0.7)]


class Finds:
    """A retriever with some hits, that notes what it was asked."""

    def __init__(self, *hits: Hit):
        self.hits, self.asked, self.during = list(hits), [], None

    def search(self, principal, query, limit, actor, peer_scope):
        self.asked.append((query, limit, actor, peer_scope))
        if self.during:
            self.during()
        return self.hits[:limit]


@pytest.fixture
def finds():
    return Finds(*HITS)


@pytest.fixture
def me(tmp_path, finds):
    store = SessionStore.open(tmp_path / "root", retriever=finds, wait_s=0.05)
    return store.principal("lab", "ann")


def say(*texts: str) -> list[dict]:
    return [{"role": "user", "content": text} for text in texts]


def uris(found) -> list[str]:
    return [entry.uri for entry in found.entries]


def test_enough_is_asked_for_that_the_limit_is_met_behind_what_is_cooled(me, finds):
    session = me.session("s")
    assert uris(me.recall("q", session=session, limit=1)) == ["A"]
    found = me.recall("q", session=session, limit=1)
    assert uris(found) == ["B"] and (found.cooled, found.excluded) == (1, 1)
    found = me.recall("q", session=session, limit=1)
    assert uris(found) == ["C"] and (found.cooled, found.excluded) == (2, 2)
    assert [limit for _, limit, _, _ in finds.asked] == [1, 2, 3]


def test_equal_texts_are_given_once(me, finds):
    finds.hits = [Hit("A", "same", 1.0), Hit("B", "same", 0.9), Hit("C", "other", 0.8)]
    assert uris(me.recall("q", session=me.session("s"))) == ["A", "C"]
    assert set(me.session("s").ledger()) == {"A", "C"}


def test_render_says_how_much_of_a_hit_is_given(me):
    tiers = {"A": "abstract", "B": "uri", "C": None}
    session = me.session("s")
    found = me.recall("q", session=session, render=lambda hit: tiers[hit.uri])
    assert [(e.uri, e.tier, e.text) for e in found.entries] == [
        ("A", "abstract", "alpha"),
        ("B", "uri", "B"),
    ]
    assert found.rendered == "alpha\n\nB"
    assert {u: r.detail for u, r in session.ledger().items()} == {
        "A": "abstract",
        "B": "uri",
    }
    assert uris(me.recall("q", session=session)) == ["B", "C"], "a bare uri never cools"


def test_what_is_not_shown_is_not_recorded(me):
    session = me.session("s")
    seen = []
    found = me.recall("q", session=session, served=lambda e: bool(seen.append(e)))
    assert uris(found) == ["A", "B", "C"] and found.rendered == ""
    assert len(seen) == 1 and not session.place.file(LEDGER).exists()


def test_without_a_session_or_a_window_nothing_is_made(me):
    for found in (
        me.recall("q"),
        me.recall("q", session=me.session("s"), cooldown=messages(0)),
    ):
        assert found.status == "off" and found.turn is None and len(found.entries) == 3
    assert not me.folder.exists()


@pytest.mark.parametrize(
    "wrong",
    [
        {"peer_scope": "user"},
        {"mark": "later"},
        {"limit": 0},
        {"limit": True},
        {"cooldown": 3},
        {"query": None},
        {"render": lambda hit: "whole"},
    ],
)
def test_a_recall_of_the_wrong_form_is_refused(me, wrong):
    with pytest.raises(ConfigError):
        me.recall(**{"query": "q", "session": me.session("s")} | wrong)


def test_a_session_of_another_user_is_refused(me):
    bob = me.store.principal("lab", "bob")
    with pytest.raises(Denied):
        me.recall("q", session=bob.session("s"))
    assert not bob.folder.exists()


def test_a_session_of_another_store_is_refused_and_what_is_no_session(me, tmp_path):
    other = SessionStore.open(tmp_path / "other").principal("lab", "ann")
    with pytest.raises(Denied, match="another store"):
        me.recall("q", session=other.session("s"))
    with pytest.raises(ConfigError, match="takes a handle"):
        me.recall("q", session="s")
    again = SessionStore.open(me.store.root).principal("lab", "ann")  # the same
    assert me.recall("q", session=again.session("s")).status == "new"


# Retries.


def test_a_retry_is_answered_as_before_in_another_process_too(me, finds, tmp_path):
    session = me.session("s")
    first = me.recall("q", session=session, request_id="r", limit=2)
    finds.hits = []
    other = SessionStore.open(tmp_path / "root", retriever=finds)
    for principal in (me, other.principal("lab", "ann")):
        again = principal.recall("q", session=principal.session("s"), request_id="r")
        assert again == dataclasses.replace(first, status="replayed")


def test_a_retry_that_overtakes_its_first_call_is_answered_the_same(me, finds):
    session, retried = me.session("s"), []

    def retry():
        finds.during = None
        retried.append(me.recall("q", session=session, request_id="r"))

    finds.during = retry
    first = me.recall("q", session=session, request_id="r")
    assert uris(first) == uris(retried[0]) == ["A", "B", "C"]
    assert (first.status, retried[0].status) == ("replayed", "new")


def test_hits_that_are_not_rendered_leave_their_place_to_others(me):
    tiers = {"A": None, "B": "full", "C": "full"}
    found = me.recall("q", limit=2, render=lambda hit: tiers[hit.uri])
    assert uris(found) == ["B"], "the retriever was asked for two"
    session = me.session("s")
    me.recall("q", session=session, limit=1)
    found = me.recall("q", session=session, limit=1, render=lambda hit: tiers[hit.uri])
    assert uris(found) == ["B"]


def test_a_request_id_of_another_query_or_actor_is_a_conflict(me):
    session = me.session("s")
    me.recall("q", session=session, request_id="r")
    with pytest.raises(Conflict, match="another query"):
        me.recall("p", session=session, request_id="r")
    with pytest.raises(Conflict):
        me.recall("q", session=session, request_id="r", actor="planner")


def test_the_newest_hundred_answers_are_kept(me, finds):
    session = me.session("s")
    for i in range(103):
        finds.hits = [Hit(f"u{i}", f"text {i}", 1.0)]
        me.recall("q", session=session, request_id=f"r{i}")
    data = session.place.file(LEDGER).read_bytes()
    kept = ledger_file.parse(data, session.place.identity).ledger.requests
    assert list(kept) == [f"r{i}" for i in range(3, 103)]


# Served with a message.


def test_a_memory_marked_at_its_message_counts_from_there(me):
    session = me.session("s")
    found = me.recall("q", session=session, mark="append", limit=1, request_id="r")
    assert session.ledger() == {}
    session.append(say("x", "y"))
    session.append(say("with A"), carries=["r"])
    assert session.ledger()["A"].turn == 2
    assert session.messages()[2].carries == ("r",)
    session.append(say("once more"), carries=[found])
    assert session.ledger()["A"].turn == 3


def test_a_serving_with_a_message_survives_the_ledger_and_a_commit(me):
    session = me.session("s")
    found = me.recall("q", session=session, mark="append", limit=1)
    session.append(say("with A"), carries=[found])
    session.place.file(LEDGER).unlink()
    assert session.ledger()["A"].turn == 0, "the line says it"
    session.commit()
    assert session.ledger()["A"].turn == 0
    assert "A" not in uris(me.recall("q", session=session))
    assert me.store.fsck(session) == ()


def test_carrying_a_recall_that_was_served_at_once_does_not_serve_it_again(me):
    session = me.session("s")
    found = me.recall("q", session=session, request_id="r", limit=1)
    unnamed = me.recall("q", session=session, limit=1)
    session.append(say("x"))
    session.append(say("with A"), carries=["r"])
    session.append(say("with A"), carries=[found, unnamed])
    assert {u: r.turn for u, r in session.ledger().items()} == {"A": 0, "B": 0}


def test_every_recent_recall_can_be_carried_by_its_id(me, tmp_path):
    session, t = me.session("s"), me.session("t")
    served = me.recall("q", session=session, limit=1)
    off = me.recall("q")
    session.append(say("x"), carries=[served.id])
    assert session.ledger()["A"].turn == 0
    t.append(say("x"))
    t.append(say("y"), key="k", carries=[off.id])
    assert {u: r.turn for u, r in t.ledger().items()} == {"A": 1, "B": 1, "C": 1}
    other = SessionStore.open(tmp_path / "root").principal("lab", "ann").session("t")
    with pytest.raises(InvalidId):
        other.append(say("z"), carries=[off.id])
    with pytest.raises(InvalidId):
        me.store.principal("lab", "bob").session("t").append(say("z"), carries=[off.id])


def test_an_id_is_that_of_the_session_it_was_asked_for(me, finds):
    s, t = me.session("s"), me.session("t")
    for session, uri in ((s, "A"), (t, "B")):
        finds.hits = [Hit(uri, f"text of {uri}", 0.5)]
        me.recall("q", session=session, mark="append", request_id="turn-1")
    s.append(say("with A"), carries=["turn-1"])
    assert list(s.ledger()) == ["A"] and t.ledger() == {}
    with pytest.raises(InvalidId):  # not even where no other has that id
        me.session("u").append(say("x"), carries=["turn-1"])


def test_a_thousand_recalls_of_a_user_are_known_whatever_others_ask(me):
    recent, bob = Recent(), ("lab", "bob")
    recent.note(bob, "s", Recall("r9", (), "off"))
    for number in range(1005):
        recent.note(me.owner, None, Recall(f"r{number}", (), "off"))
    assert recent.get(me.owner, "s", "r4") is None
    assert recent.get(me.owner, "s", "r5").id == "r5"
    assert recent.get(bob, "s", "r9") and not recent.get(bob, "t", "r9")


def test_of_too_many_recalls_in_all_who_has_most_loses_the_oldest(monkeypatch):
    monkeypatch.setattr(recent_recalls, "MAX_IN_ALL", 10)
    recent, few = Recent(), ("lab", "few")
    recent.note(few, None, Recall("mine", (), "off"))
    for number in range(100):
        recent.note(("lab", "many"), None, Recall(f"r{number}", (), "off"))
    assert recent.get(few, "s", "mine") and recent.get(("lab", "many"), "s", "r91")
    assert recent.get(("lab", "many"), "s", "r90") is None


def test_no_recall_is_known_of_a_user_who_forgot(me):
    recent, bob = Recent(), ("lab", "bob")
    for owner in (me.owner, bob):
        recent.note(owner, None, Recall("r", (), "off"))
    recent.forget(me.owner)
    assert recent.get(me.owner, "s", "r") is None and recent.get(bob, "s", "r")
    found = me.recall("q")
    me.forget("A")
    with pytest.raises(InvalidId):
        me.session("s").append(say("x"), carries=[found.id])
    me.store.close()


def test_a_recall_that_nobody_knows_cannot_be_carried_and_writes_nothing(me):
    session = me.session("s")
    with pytest.raises(InvalidId, match="no recall of this session"):
        session.append(say("x"), key="k", carries=["unknown"])
    assert session.clock == 0
    off = me.recall("q", mark="append")
    session.append(say("x"), key="k", carries=[off])
    assert set(session.ledger()) == {"A", "B", "C"}
    assert session.append(say("x"), key="k", carries=["unknown"]).is_repeat


@pytest.mark.parametrize("wrong", [None, "abc", [5], 5, [None]])
def test_what_is_carried_is_a_list_of_recalls_or_ids(me, wrong):
    with pytest.raises(ConfigError, match="carries="):
        me.session("s").append(say("x"), carries=wrong)
    assert me.session("s").clock == 0


# Whatever is wrong, it answers.


class Forgets(Finds):
    """A retriever whose first hit is gone by the time it is asked."""

    def gone(self, principal, uris):
        return frozenset(uris[:1])


@pytest.mark.parametrize("wrong", ["busy", "damaged", "no answer"])
def test_what_was_forgotten_meanwhile_and_cannot_be_cleaned_is_dropped_and_told(
    me, wrong
):
    session, found = me.session("s"), Forgets(*HITS)
    me.store.retriever = found
    session.append(say("a", "b"))
    path = session.place.file(LOG)
    if wrong == "damaged":
        path.write_bytes(path.read_bytes().replace(b'"a"', b'"x"'))
    if wrong == "no answer":
        found.gone = lambda principal, uris: 1 / 0
    held = session.place.locked() if wrong == "busy" else contextlib.nullcontext()
    with held:
        answer = me.recall("q", session=session)
    assert answer.status == "unavailable" and answer.reason
    left = [] if wrong == "no answer" else ["B", "C"]
    assert uris(answer) == left and "alpha" not in answer.rendered
    notes = session.place.parent / ".forgetting"
    assert notes.exists() == (wrong != "no answer")
    if wrong == "no answer":
        assert session.ledger() == {}, "nothing that nobody saw is held back"


def test_a_damaged_log_makes_recall_unavailable_and_not_silent(me):
    session = me.session("s")
    session.append(say("a"))
    session.append(say("b"))
    path = session.place.file(LOG)
    path.write_bytes(path.read_bytes().replace(b'"a"', b'"x"'))
    found = me.recall("q", session=session)
    assert found.status == "unavailable" and "line 2" in found.reason
    assert uris(found) == ["A", "B", "C"] and found.turn is None


def test_a_deleted_session_is_unavailable_and_stays_deleted(me, finds):
    session = me.session("s")
    session.append(say("a"))
    me.session("s").delete()
    found = me.recall("q", session=session)
    assert found.status == "unavailable" and "deleted" in found.reason
    session.create()
    finds.during = me.session("s").delete  # while the search runs
    found = me.recall("q", session=session)
    assert found.status == "write_failed" and len(found.entries) == 3
    assert not session.place.folder.exists()


def test_a_busy_session_is_waited_for_and_then_told_of(me, finds):
    session = me.session("s")
    with session.place.locked():
        assert me.recall("q", session=session).status == "unavailable"
    session.create()
    held = session.place.locked()
    finds.during = held.__enter__
    found = me.recall("q", session=session)
    held.__exit__(None, None, None)
    assert found.status == "write_failed" and "another writer" in found.reason
    assert len(found.entries) == 3 and session.ledger() == {}


def test_a_memory_cooled_while_the_search_ran_is_dropped(me, finds):
    session = me.session("s")

    def other():
        finds.during = None
        me.recall("q", session=session, limit=2)

    finds.during = other
    found = me.recall("q", session=session)
    assert uris(found) == ["C"] and (found.cooled, found.excluded) == (2, 2)


def test_a_ledger_of_another_session_or_version_is_reset_and_kept(me):
    session = me.session("s")
    for number, bad in enumerate(
        [b"[1]", b'{"version":3}', b'{"version":1,"session":"t","entries":{"A":1}}']
    ):
        session.create()
        session.place.file(LEDGER).write_bytes(bad)
        found = me.recall("q", session=session)
        assert found.status == "reset" and len(found.entries) == 3
        kept = session.place.file(f".recall_log.bad-{number}")
        assert kept.read_bytes() == bad
        assert me.recall("q", session=session).status == "ok"


def test_a_bad_ledger_stays_where_it_is_while_nothing_is_served(me, finds):
    session = me.session("s")
    session.create()
    session.place.file(LEDGER).write_bytes(b"bad")
    finds.hits = []
    assert me.recall("q", session=session).status == "reset"
    assert session.place.file(LEDGER).read_bytes() == b"bad"


def test_a_bad_ledger_that_cannot_be_set_aside_is_not_overwritten(me, finds):
    class Stuck(OsIO):
        def replace(self, old, new):
            if "bad-" in new.name:
                raise OSError(5, "Input/output error")
            super().replace(old, new)

    session = me.session("s")
    session.create()
    session.place.file(LEDGER).write_bytes(b"bad")
    stuck = SessionStore.open(me.store.root, io=Stuck(), retriever=finds)
    ann = stuck.principal("lab", "ann")
    assert ann.recall("q", session=ann.session("s")).status == "write_failed"
    assert session.place.file(LEDGER).read_bytes() == b"bad"


@pytest.mark.case("SES-09")
def test_what_was_saved_in_one_session_is_found_in_another(open_store):
    """The rule: self memories are every actor's; a peer's only under that actor."""
    ann = open_store().principal("lab", "ann")
    ann.session("s1").append(say("I like tea"))
    ann.remember("Ann likes tea")
    ann.remember("Wang likes tea", peer="wang")
    ann.session("s1").commit()

    def found(actor):
        texts = ann.recall("tea", session=ann.session("s2"), actor=actor).entries
        return sorted(e.text for e in texts)

    assert found(None) == found("zhang") == ["Ann likes tea"]
    assert found("wang") == ["Ann likes tea", "Wang likes tea"]
    ann.store.close()
