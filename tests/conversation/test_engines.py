"""Conversations on engines of every kind, and on stores that keep little or nothing."""

import dataclasses

import pytest

from kvmem import config as configs
from kvmem.conversation import Conversations
from kvmem.errors import Deleted
from kvmem.session import SessionStore

TEXT = "A long enough text to fill a few chunks of sixteen tokens, all of them."


@pytest.fixture
def start_tiny(repo_root, tmp_path):
    """Return `start_tiny(name)`: conversations on the tiny model of a config."""
    opened = []

    def start_tiny(name: str):
        while opened:
            opened.pop().close()
        path = repo_root / "configs" / "models" / f"{name}.toml"
        sets = [
            f"store.root={tmp_path / 'pages'}",
            "store.chunk_tokens=8",
            "serve.max_batch=1",
            "serve.chunks=[128]",
            "serve.widths=[512]",
            "serve.prefill_chunk=128",
        ]
        engine = configs.load(path, sets, {}).engine()
        made = Conversations(engine, SessionStore.open(tmp_path / "sessions"))
        opened.append(made)
        return made, made.sessions.principal("lab", "ann")

    yield start_tiny
    for each in opened:
        each.close()


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma3_tiny", "qwen3_next_tiny"])
def test_several_groups_of_layers_resume_and_forget(start_tiny, short, name, tmp_path):
    short = dataclasses.replace(short, memories=1)
    conversations, me = start_tiny(name)
    me.remember("tea at ten", "memories/tea")
    talk = conversations.open(me.session("s"), options=short)
    talk.say(TEXT)
    talk.say("when is tea?")

    conversations, me = start_tiny(name)
    talk = conversations.open(me.session("s"), options=short)
    again = talk.say("so?")
    assert again.resume.num_reused == again.output.stored_tokens > 64
    ids = list(again.output.prompt_ids)
    conversations.engine.recall, store = None, conversations.engine.recall
    (whole,) = conversations.engine.generate([ids], short.sampling)
    conversations.engine.recall = store
    assert whole.output_ids == again.output.output_ids
    me.forget("memories/tea")
    assert not [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and b"tea at ten" in path.read_bytes()
    ]
    assert conversations.sessions.fsck(me.session("s")) == ()
    assert talk.say("and so?").resume.num_reused >= 64


def test_a_store_that_is_full_costs_prefills_and_no_turn(start, short):
    conversations, me = start(max_nbytes=20_000)
    talk = conversations.open(me.session("s"), options=short)
    replies = [talk.say(f"{TEXT} {number}") for number in range(3)]
    assert all(reply.output for reply in replies)
    conversations, me = start(max_nbytes=20_000)
    reply = conversations.open(me.session("s"), options=short).say("so?")
    assert reply.output is not None
    if reply.resume.num_reused < reply.resume.num_expected:
        assert reply.resume.reason is not None


def test_a_store_that_is_only_read_keeps_nothing_and_answers_the_same(start, short):
    conversations, me = start()
    talk = conversations.open(me.session("s"), options=short)
    talk.say(TEXT)
    conversations, me = start(read_only=True)
    talk = conversations.open(me.session("s"), options=short)
    second = talk.say("and then?")
    assert second.output.stored_tokens > 0
    assert talk.say("and then what?").resume.reason is None
    held = conversations.pages.stats().num_chunks
    conversations, me = start()
    assert conversations.pages.stats().num_chunks == held
    reply = conversations.open(me.session("s"), options=short).say("and?")
    assert reply.resume.reason in ("not_found", "evicted")
    assert reply.resume.num_reused > 0


def test_chains_of_a_session_are_saved_by_another_process_meanwhile(
    start, short, root, chain_of
):
    conversations, me = start()
    talk = conversations.open(me.session("s"), options=short)
    talk.say(TEXT)
    blob, generation = me.session("s").chains.get(None)
    stream = talk.turn("and then?").deltas()
    next(stream)
    other = SessionStore.open(root).principal("lab", "ann").session("s")
    other.chains.put(None, blob, generation)
    for _ in stream:
        pass
    assert chain_of(me.session("s")).encode() == blob  # theirs stands
    reply = talk.say("so?")
    assert reply.resume.reason is None
    assert chain_of(me.session("s")).encode() != blob


def test_archiving_between_two_turns_leaves_what_begins_alike(start, short):
    conversations, me = start()
    options = dataclasses.replace(short, system="s" * 55)
    talk = conversations.open(me.session("s"), options=options)
    for number in range(3):
        talk.say(f"{number} {TEXT}")
    assert me.session("s").commit(keep=2).status == "archived"
    reply = talk.say("so?")
    assert (reply.resume.num_reused, reply.resume.reason) == (64, "edited")
    assert conversations.sessions.fsck(me.session("s")) == ()
    assert talk.say("and?").resume.reason is None


def test_actors_whose_names_look_alike_share_no_chain(start, short, chain_of):
    conversations, me = start()
    session = me.session("s")
    names = [None, "user", "a", "A", "a.b", "a_b", "None"]
    for name in names:
        conversations.open(session, name, short).say(f"I am {name}")
    assert len({chain_of(session, name).tokens for name in names}) == len(names)
    assert set(session.chains.actors()) == set(names)


def test_a_session_that_was_deleted_meanwhile_is_said_to_be(start, short):
    conversations, me = start()
    talk = conversations.open(me.session("s"), options=short)
    stream = talk.turn(TEXT).deltas()
    next(stream)
    me.session("s").delete()
    with pytest.raises(Deleted):
        list(stream)
    assert not conversations.engine.scheduler.has_work
    with pytest.raises(Deleted):
        talk.say("hello?")
    conversations.collect()
    assert conversations.pages.stats().num_chunks == 0
