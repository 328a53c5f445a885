"""What is forgotten or deleted is gone from the pages too, and nothing else is."""

import dataclasses

import numpy as np
import pytest

from kvmem.conversation import Conversations
from kvmem.errors import CorruptPage, FormatMismatch, StoreLocked
from kvmem.session import messages

TEA = "tea at ten"  # ten tokens of bytes


def holding(root, needle: bytes) -> list:
    return [p for p in root.rglob("*") if p.is_file() and needle in p.read_bytes()]


@pytest.fixture
def with_tea(start, short):
    """A conversation in whose first message the memory stands at tokens 50 to 60."""
    conversations, me = start()
    me.remember(TEA, "memories/tea")
    options = dataclasses.replace(short, memories=1)
    talk = conversations.open(me.session("s"), options=options)
    question = "When is it that we all have our tea, do say?"[:43]
    reply = talk.say(question)
    assert [each.uri for each in reply.recall.entries] == ["memories/tea"]
    talk.say("Thank you ever so much for telling me that.")
    return conversations, me, talk


def test_a_forgotten_memory_cuts_the_chain_before_its_first_token(
    with_tea, chain_of, tmp_path
):
    conversations, me, talk = with_tea
    chain = chain_of(talk.session)
    (span,) = [s for s in chain.spans if s.uri]
    assert (span.start, span.end) == (50, 60)
    ids = np.asarray(chain.tokens[48:64], np.int32).tobytes()
    held = conversations.pages.get(
        chain.keys(talk.identity), np.asarray(chain.tokens[: chain.num_kept], np.int32)
    )
    needles = [TEA.encode(), ids, held.records[48].tobytes()[:64]]
    assert all(holding(tmp_path, needle) for needle in needles)  # the search sees them
    me.forget("memories/tea")
    assert chain_of(talk.session).num_rows == 48
    assert chain_of(talk.session).uris == frozenset()
    for needle in needles:
        assert not holding(tmp_path, needle)
    assert conversations.pages.stats().num_chunks == 3
    assert conversations.sessions.fsck(talk.session) == ()
    reply = talk.say("And what was it again?")
    assert TEA not in conversations.engine.tokenizer.decode(reply.output.prompt_ids)
    assert reply.resume.num_reused == 48


def test_without_the_hook_the_bytes_stay(with_tea, tmp_path, chain_of):
    """The twin: the search above finds what is not taken away."""
    conversations, me, talk = with_tea
    held = np.asarray(chain_of(talk.session).tokens[48:64], np.int32).tobytes()
    conversations.sessions.on_forget.clear()
    me.forget("memories/tea")
    assert holding(tmp_path, held)


def test_a_chain_of_another_format_is_cut_and_said_so(
    with_tea, start, tiny_model, chain_of
):
    _, loaded = tiny_model
    params = {name: array * 1.25 for name, array in loaded.params.items()}
    others, me = start(loaded=dataclasses.replace(loaded, params=params))
    with pytest.raises(FormatMismatch, match="engine of that model"):
        me.forget("memories/tea")
    assert chain_of(me.session("s")).num_rows == 48
    conversations, me = start()
    me.forget("memories/tea")  # again, with the right one: its pages go
    assert conversations.pages.stats().num_chunks == 3


def test_deleting_a_session_frees_what_no_other_names(start, short, chain_of):
    conversations, me = start()
    text = "A long enough text to fill a few chunks of sixteen tokens, all of them."
    for name in ("a", "b"):
        talk = conversations.open(me.session(name), options=short)
        talk.say(text)
        talk.say(f"and this is what {name} alone says after it, at some length")
    kept = chain_of(me.session("b")).keys(talk.identity)
    gone = set(chain_of(me.session("a")).keys(talk.identity)) - set(kept)
    assert gone
    me.session("a").delete()
    assert conversations.pages.contains(kept) == len(kept)
    assert conversations.pages.stats().num_chunks == len(kept)
    assert conversations.sessions.fsck(me.session("b")) == ()


def test_a_chunk_that_is_gone_is_a_violation(start, short):
    conversations, me = start()
    conversations.open(me.session("s"), options=short).say("x" * 60)
    conversations.pages.retain(())
    (violation,) = conversations.sessions.fsck(me.session("s"))
    assert violation.law == "I9"


def test_pages_of_another_owner_are_a_violation(start, short):
    conversations, me = start()
    conversations.open(me.session("s"), options=short).say("x" * 60)
    blob, _ = me.session("s").chains.get(None)
    bob = conversations.sessions.principal("lab", "bob").session("s")
    bob.append([{"role": "user", "content": "hi"}] * 2)
    bob.chains.put(None, blob, 0)
    assert {v.law for v in conversations.sessions.fsck(bob)} == {"I10"}
    reply = conversations.open(bob, options=short).say("x" * 60)
    assert (reply.resume.num_reused, reply.resume.reason) == (0, "salt")


@pytest.mark.parametrize(
    ("policy", "found"), [("resident", ["memories/tea"]), ("messages", [])]
)
def test_a_memory_is_recallable_once_its_text_has_left_the_chain(
    start, short, policy, found
):
    conversations, me = start()
    me.remember(TEA, "memories/tea")
    session = me.session("s")
    session.append(
        [{"role": role, "content": "earlier"} for role in ("user", "assistant")]
    )
    cooldown = conversations.resident(me) if policy == "resident" else messages(10)
    options = dataclasses.replace(short, memories=1, cooldown=cooldown)
    talk = conversations.open(session, options=options)
    first = talk.say("when is tea?")  # served at message 2
    assert len(first.recall.entries) == 1
    assert talk.say("when is tea, really?").recall.entries == ()
    session.commit(keep=1)
    again = talk.say("when is tea, once more?")
    assert [each.uri for each in again.recall.entries] == found


def test_a_reader_of_pages_says_that_it_cannot_free_them(start, short):
    conversations, me = start()
    conversations.open(me.session("s"), options=short).say("x" * 60)
    conversations, me = start(read_only=True)
    with pytest.raises(StoreLocked, match="freeing pages"):
        me.session("s").delete()
    assert not me.session("s").exists  # it is deleted, and its pages are not yet
    conversations, me = start()
    me.session("s").delete()
    assert conversations.pages.stats().num_chunks == 0


def test_an_engine_without_a_store_has_no_conversations(start, make_engine):
    conversations, _ = start()
    engine = conversations.engine
    engine.recall = None
    with pytest.raises(ValueError, match=r"\[store\]"):
        Conversations(engine, conversations.sessions)


@pytest.mark.parametrize("uri", ["memories", "memories/tea"])
@pytest.mark.parametrize("placement", ["tail", "system"])
def test_what_was_moved_or_lay_in_a_folder_is_forgotten_where_it_was_told(
    asking, tmp_path, chain_of, uri, placement
):
    conversations, me, talk = asking(placement=placement)
    talk.say("When is it that we all have our tea, do say?"[:43])
    chain = chain_of(talk.session)
    (span,) = [s for s in chain.spans if s.uri]
    start = span.start // 16 * 16
    needle = np.asarray(chain.tokens[start : start + 16], np.int32).tobytes()
    assert holding(tmp_path, needle)
    if uri == "memories/tea":
        me.items.move(uri, "facts/tea")
        uri = "facts/tea"
    me.forget(uri)
    assert not holding(tmp_path, needle)
    assert chain_of(talk.session).uris == frozenset()


@pytest.mark.parametrize("placement", ["tail", "system"])
@pytest.mark.parametrize("is_begun", [True, False])
def test_what_is_forgotten_during_a_turn_is_not_kept_by_it(
    asking, tmp_path, placement, is_begun
):
    conversations, me, talk = asking(placement=placement)
    turn = talk.turn("When is it that we all have our tea, do say?"[:43])
    stream = turn.deltas()
    if is_begun:
        next(stream)
    me.forget("memories/tea")
    for _ in stream:
        pass
    fed = np.asarray(turn.reply.output.prompt_ids, np.int32)
    said = conversations.engine.tokenizer.decode(fed.tolist())
    assert (TEA in said) == is_begun
    at = said.index(TEA) if is_begun else 0
    needles = [TEA.encode(), b", ".join(str(t).encode() for t in TEA.encode())]
    needles += [fed[at // 16 * 16 :][:16].tobytes()] if is_begun else []
    found = [path for needle in needles for path in holding(tmp_path, needle)]
    assert not found
    assert talk.say("and again, when is it?").output is not None
    assert conversations.sessions.fsck(talk.session) == ()


def test_damage_of_one_session_leaves_a_memory_in_no_pages(
    with_tea, tmp_path, chain_of, short
):
    conversations, me, talk = with_tea
    chain = chain_of(talk.session)
    ids = np.asarray(chain.tokens[48:64], np.int32).tobytes()
    options = dataclasses.replace(short, memories=1)
    other = conversations.open(me.session("t"), options=options)
    other.say("When is it that we all have our tea, do say?"[:43])
    assert chain_of(other.session).uris
    path = talk.session.place.file("messages.jsonl")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptPage, match="'s'"):
        me.forget("memories/tea")
    assert not holding(tmp_path / "pages", ids)
    assert chain_of(other.session).uris == frozenset()
    assert talk.session.chains.get(None) == (None, 0)  # nobody can say what it holds
