"""Conversations beside others: stores without them, closed ones, and other actors."""

import dataclasses

import numpy as np
import pytest

from kvmem.conversation import Conversations, Options, transcript
from kvmem.errors import ConfigError
from kvmem.session import SessionStore, late

TEA = "tea at ten"
QUESTION = "When is it that we all have our tea, do say?"[:43]


def holding(root, needle: bytes) -> list:
    return [p for p in root.rglob("*") if p.is_file() and needle in p.read_bytes()]


@pytest.fixture
def elsewhere(root):
    """The principal in a store that has no conversations, as the HTTP service's."""
    return SessionStore.open(root).principal("lab", "ann")


def ids_of(chain, at: int = 48) -> bytes:
    """Return a chunk of a chain as the page store writes it."""
    return np.asarray(chain.tokens[at : at + 16], np.int32).tobytes()


@pytest.mark.parametrize("verb", ["forget", "delete"])
def test_what_a_store_without_conversations_takes_away_is_freed_by_the_next_turn(
    asking, short, elsewhere, chain_of, tmp_path, verb
):
    conversations, me, talk = asking()
    talk.say(QUESTION)
    needle = ids_of(chain_of(talk.session))
    assert holding(tmp_path, needle)
    if verb == "forget":
        elsewhere.forget("memories/tea")
        assert talk.session.chains.get() == (None, 0)
        assert not holding(tmp_path, TEA.encode())
        assert "KV" not in str(conversations.sessions.fsck(talk.session))
    else:
        elsewhere.session("s").delete()
    assert holding(tmp_path, needle)  # nobody there could free the pages
    conversations.open(me.session("t"), options=short).say("hello")
    assert not holding(tmp_path, needle)


@pytest.mark.parametrize("verb", ["collect", "begin"])
def test_what_was_taken_away_is_freed_by_whoever_collects_or_begins(
    asking, start, elsewhere, chain_of, tmp_path, verb
):
    conversations, me, talk = asking()
    talk.say(QUESTION)
    needle = ids_of(chain_of(talk.session))
    elsewhere.forget("memories/tea")
    if verb == "collect":
        assert conversations.collect().num_chunks
    else:
        start()
    assert not holding(tmp_path, needle)


@pytest.mark.parametrize("placement", ["tail", "system"])
@pytest.mark.parametrize("is_begun", [True, False])
def test_what_others_forget_during_a_turn_is_not_kept_by_it(
    asking, elsewhere, tmp_path, placement, is_begun
):
    conversations, me, talk = asking(placement=placement)
    turn = talk.turn(QUESTION)
    stream = turn.deltas()
    if is_begun:
        next(stream)
    elsewhere.forget("memories/tea")
    for _ in stream:
        pass
    fed = np.asarray(turn.reply.output.prompt_ids, np.int32)
    said = conversations.engine.tokenizer.decode(fed.tolist())
    assert (TEA in said) == is_begun
    needles = [TEA.encode(), b", ".join(str(t).encode() for t in TEA.encode())]
    if is_begun:
        needles.append(fed[said.index(TEA) // 16 * 16 :][:16].tobytes())
    assert [path for each in needles for path in holding(tmp_path, each)] == []
    assert conversations.sessions.fsck(talk.session) == ()


@pytest.mark.parametrize("placement", ["tail", "system"])
@pytest.mark.parametrize("is_forgotten", [True, False])
def test_a_chain_that_was_rendered_whole_is_kept_unless_a_memory_went(
    asking, elsewhere, monkeypatch, placement, is_forgotten
):
    monkeypatch.setattr(
        transcript.Transcript,
        "_made",
        lambda self, turns: transcript._rendered_whole(self._tokenizer, turns),
    )
    _, _, talk = asking(placement=placement)
    stream = talk.turn(QUESTION).deltas()
    next(stream)
    if is_forgotten:
        elsewhere.forget("memories/tea")
    for _ in stream:
        pass
    assert (talk.session.chains.get()[0] is None) == is_forgotten


def test_what_is_forgotten_between_recall_and_append_is_told_nowhere(
    asking, elsewhere, tmp_path, monkeypatch
):
    conversations, me, talk = asking()
    fits = type(talk)._require_fits

    def forgotten_now(talk, *parts):
        elsewhere.forget("memories/tea")
        fits(talk, *parts)

    monkeypatch.setattr(type(talk), "_require_fits", forgotten_now)
    reply = talk.say(QUESTION)
    assert TEA not in conversations.engine.tokenizer.decode(reply.output.prompt_ids)
    assert not holding(tmp_path, TEA.encode())
    assert talk.session.ledger() == {}
    assert conversations.sessions.fsck(talk.session) == ()


def test_the_check_at_the_append_is_what_keeps_it_out(
    asking, elsewhere, tmp_path, monkeypatch
):
    """The twin: without it, the text comes back."""
    monkeypatch.setattr(late, "gone", lambda principal, uris: frozenset())
    _, _, talk = asking()
    fits = type(talk)._require_fits
    monkeypatch.setattr(
        type(talk),
        "_require_fits",
        lambda talk, *parts: (elsewhere.forget("memories/tea"), fits(talk, *parts)),
    )
    talk.say(QUESTION)
    assert holding(tmp_path, TEA.encode())


def test_closed_conversations_leave_their_store_to_others(start, make_engine, short):
    first, me = start()
    talk = first.open(me.session("s"), options=short)
    talk.say("hello")
    begun = talk.turn("and more")
    first.close()
    first.close()
    for asked in (lambda: talk.say("again"), lambda: list(begun.deltas())):
        with pytest.raises(ConfigError, match="closed"):
            asked()
    store = first.sessions
    assert (store.on_forget, store.on_delete, store.fsck_hooks) == ([], [], [])
    second = Conversations(make_engine(), store)
    me.remember(TEA, "memories/tea")
    assert me.forget("memories/tea") == ("memories/tea",)
    assert second.open(me.session("s"), options=short).say("so?").resume.num_reused
    me.session("s").delete()
    assert second.pages.stats().num_chunks == 0


def test_each_actors_turns_have_keys_of_their_own(start, short):
    conversations, me = start()
    me.remember(TEA, "memories/tea")
    options, replies = dataclasses.replace(short, memories=1), {}
    for actor in (None, "planner", "user"):
        talk = conversations.open(me.session("s"), actor, options)
        replies[actor] = talk.say("tea?", key="turn-1").text
        assert talk.say("tea?", key="turn-1").output is None
    assert me.session("s").clock == 6
    said = {m.actor: m.said for m in me.session("s").messages() if m.role != "user"}
    assert said == replies


@pytest.mark.parametrize("are_begun", [False, True])
def test_two_turns_under_one_key_have_one_answer(start, short, are_begun):
    conversations, me = start()
    talk = conversations.open(me.session("s"), options=short)
    other = conversations.open(me.session("s"), options=short)
    turns = [one.turn("hello", key="turn-1") for one in (talk, other)]
    streams = [turn.deltas() for turn in turns]
    if are_begun:
        for stream in streams:
            next(stream)
        me.session("s").append([{"role": "user", "content": "meanwhile"}])
    told = [list(stream) for stream in streams]
    assert told[0] and bool(told[1]) == are_begun  # what is answered is fed to nobody
    assert turns[0].reply.text == turns[1].reply.text
    assert turns[0].reply.output is not None
    roles = [message.role for message in me.session("s").messages()]
    assert roles.count("assistant") == 1


@pytest.mark.parametrize("placement", ["tail", "system"])
def test_a_turn_that_is_refused_records_no_recall(asking, placement):
    conversations, me, talk = asking(placement=placement)
    with pytest.raises(ConfigError, match="at most 768"):
        talk.say("tea " + "x" * 800)
    assert (talk.session.clock, talk.session.ledger()) == (0, {})
    assert [e.uri for e in talk.say("tea?").recall.entries] == ["memories/tea"]


@pytest.mark.parametrize(
    "given", [{"memories": -1}, {"memories": "4"}, {"placement": "head"}]
)
def test_options_that_cannot_be_are_refused_where_they_are_made(given):
    with pytest.raises(ConfigError, match=next(iter(given))):
        Options(**given)
