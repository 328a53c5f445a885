"""Cooldowns: for how long a memory is held back, by four clocks."""

import pytest

from kvmem.errors import ConfigError
from kvmem.session import Hit, SessionStore, cooldown, messages, resident, tokens, turns
from kvmem.session.ledger import Ledger, Record
from kvmem.session.lines import Clock
from kvmem.session.service import verbs


class Finds:
    def __init__(self, *uris: str):
        self.uris = uris

    def search(self, principal, query, limit, actor, peer_scope):
        return [Hit(uri, f"text of {uri}", 1.0) for uri in self.uris]


@pytest.fixture
def make_me(tmp_path):
    def make(*uris: str, rules: str = "kvmem"):
        store = SessionStore.open(
            tmp_path / rules, rules, retriever=Finds(*uris), durability="process"
        )
        return store.principal("lab", "ann")

    return make


def say(role: str, text: str = "x") -> list[dict]:
    return [{"role": role, "content": text}]


def served(me, policy, session="s") -> list[str]:
    found = me.recall("q", session=me.session(session), cooldown=policy)
    return [entry.uri for entry in found.entries]


def test_messages_count_what_was_stored(make_me):
    me = make_me("M")
    seen = []
    for _ in range(7):
        seen.append(served(me, messages(3)))
        me.session("s").append(say("assistant"))
    assert seen == [["M"], [], [], ["M"], [], [], ["M"]]


def test_turns_count_what_the_user_said(make_me):
    me, seen = make_me("M"), []
    for _ in range(5):
        seen.append(served(me, turns(2)))
        me.session("s").append(say("user"))
        for _ in range(3):
            me.session("s").append(say("assistant"))
            me.session("s").append(say("tool"))
    assert seen == [["M"], [], ["M"], [], ["M"]]


def test_tokens_count_about_what_was_stored(make_me):
    me, seen = make_me("M"), []
    for _ in range(5):
        seen.append(served(me, tokens(20)))
        me.session("s").append(say("user", "x" * 40))  # ten tokens
    assert seen == [["M"], [], ["M"], [], ["M"]]


@pytest.mark.parametrize("policy", [messages(4), turns(4), tokens(8)])
def test_no_clock_goes_back_with_a_commit_or_a_lost_meta_file(make_me, policy):
    me = make_me("M")
    session = me.session("s")
    session.append(say("user", "x" * 8))
    assert served(me, policy) == ["M"]
    for is_due in (False, False, False, True):
        session.append(say("user", "x" * 8))
        session.commit()
        session.place.file(".meta.json").unlink()
        assert served(me, policy) == (["M"] if is_due else [])


def test_resident_holds_back_exactly_what_lies_in_the_chain(make_me):
    me, live, asked = make_me("M", "N"), set(), []

    def chain(session, actor):
        asked.append((session, actor))
        return live

    assert served(me, resident(chain)) == ["M", "N"]
    assert served(me, resident(chain)) == ["M", "N"], "neither lies in the chain yet"
    live.add("M")
    assert served(me, resident(chain)) == ["N"]
    assert served(me, messages(3)) == []
    live.clear()
    assert served(me, resident(chain)) == ["M", "N"]
    assert set(asked) == {("s", None)}


def test_a_chain_that_cannot_be_asked_holds_nothing_back(make_me):
    me = make_me("M")
    for _ in range(2):
        assert served(me, resident(lambda session, actor: 1 / 0)) == ["M"]


def test_k12_a_commit_that_archives_the_span_frees_a_resident_memory_at_once(make_me):
    me = make_me("M")
    session = me.session("s")

    def live(name, actor):
        parts = [p for m in me.session(name).live() for p in m.parts]
        return {part["uri"] for part in parts if part["type"] == "context"}

    session.append(say("user") * 2)
    assert served(me, resident(live)) == ["M"]
    memory = {"type": "context", "uri": "M", "text": "text of M"}
    session.append([{"role": "user", "content": ["hm", memory]}])
    session.append(say("assistant") * 2)
    assert served(me, resident(live)) == []
    session.commit()
    assert served(me, messages(10)) == []
    assert served(me, resident(live)) == ["M"]


@pytest.mark.case("SES-22")
def test_a_memory_comes_back_when_the_text_has_left_the_context(make_me):
    me = make_me("M")
    assert served(me, messages(20)) == ["M"]
    for number in range(5):
        me.session("s").append(say("user") * 10)
        assert served(me, messages(20)) == (["M"] if number in (1, 3) else [])


@pytest.mark.case("SES-22")
def test_a_session_that_nobody_captures_does_not_hold_back_for_ever(make_me):
    me = make_me("M")
    seen = [served(me, messages(3)) for _ in range(8)]
    assert seen == [["M"], [], [], [], ["M"], [], [], []]
    assert me.session("s").clock == 0
    old = make_me("M", rules="openviking")
    assert [served(old, messages(3)) for _ in range(8)] == [["M"]] + [[]] * 7


def test_recalls_count_only_while_the_clock_stands_still(make_me):
    me = make_me("M")
    assert [served(me, messages(3)) for _ in range(3)] == [["M"], [], []]
    me.session("s").append(say("user"))
    assert [served(me, messages(3)) for _ in range(6)] == [[]] * 6
    me.session("s").append(say("user") * 2)
    assert served(me, messages(3)) == ["M"]


@pytest.mark.case("SES-21")
def test_a_hundred_tool_turns_repeat_far_less_than_without_a_window(make_me):
    memories = [f"m{i}" for i in range(20)]

    def num_served(policy):
        me, count = make_me(*memories), 0
        for number in range(100):
            name = f"{policy.unit}{policy.n}"
            me.store.retriever.uris = [memories[number % 20], memories[number % 7]]
            count += len(served(me, policy, name))
            me.session(name).append(say("tool"))
        return count

    assert num_served(messages(0)) > 190
    assert num_served(messages(10)) < 0.7 * num_served(messages(0))
    assert num_served(messages(100)) == 20


def test_a_record_ahead_of_the_clock_holds_nothing_back():
    ledger = Ledger({None: {"M": Record(9, n=3, unit="messages")}})
    for turn, is_cooled in ((2, False), (9, True), (11, True), (12, False)):
        found = cooldown.cooled(messages(3), ledger, "s", None, Clock(turn))
        assert bool(found) == is_cooled, turn


def test_a_record_without_a_clock_of_its_own_counts_in_messages():
    ledger = Ledger({None: {"M": Record(4)}})
    for policy in (turns(3), tokens(3)):
        assert cooldown.cooled(policy, ledger, "s", None, Clock(6, 100, 1000))
        assert not cooldown.cooled(policy, ledger, "s", None, Clock(7, 100, 1000))


def test_records_are_kept_for_the_longest_window_that_may_ask():
    records = {
        "long": Record(0, n=10, unit="messages"),
        "short": Record(0, n=2, unit="messages"),
        "ahead": Record(90, n=10, unit="messages"),
        "turns": Record(0, n=2, unit="turns", turns=0),
        "chain": Record(0, n=0, unit="resident"),
    }
    clock = Clock(40, 8, 400)
    kept = cooldown.kept(messages(1), records, clock, keeps_window=True)
    assert kept == ["long", "turns", "chain"]
    kept = cooldown.kept(messages(10), records, clock, keeps_window=False)
    assert kept == ["long", "short", "turns", "chain"]


@pytest.mark.parametrize("n", [-1, 1.5, True, "3", None])
def test_a_window_is_a_count(n):
    for policy in (messages, turns, tokens):
        with pytest.raises(ConfigError):
            policy(n)
    with pytest.raises(ConfigError):
        resident(n)


@pytest.mark.parametrize("words", ["messages(\u0663)", "messages(3) ", "turns(-1)"])
def test_a_window_over_http_is_a_count_in_ascii_digits(words):
    with pytest.raises(ConfigError, match="Send messages"):
        verbs._policy(words)
    assert verbs._policy("messages(3)") == messages(3)
