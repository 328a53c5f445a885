"""A memory is held back while the next turn is fed it anyway, and no longer."""

import dataclasses

import pytest

TEA = "tea is at ten"


@pytest.fixture
def open_talk(start, short):
    """Return `open_talk(...)`: conversations, and a talk that holds back residents."""

    def open_talk(actor=None, **options):
        conversations, me = start()
        me.remember(TEA, "memories/tea")
        options = dataclasses.replace(
            short, memories=1, cooldown=conversations.resident(me), **options
        )
        return conversations, conversations.open(me.session("s"), actor, options)

    return open_talk


def served(talk, text="when is tea?") -> list[str]:
    return [entry.uri for entry in talk.say(text).recall.entries]


def test_a_system_message_is_made_anew_so_its_memories_are_served_anew(open_talk):
    _, talk = open_talk(placement="system")
    for _ in range(3):
        reply = talk.say("when is tea?")
        assert [entry.uri for entry in reply.recall.entries] == ["memories/tea"]
        said = talk.engine.tokenizer.decode(reply.output.prompt_ids)
        assert said.count(TEA) == 1


def test_a_chain_that_is_lost_brings_no_memory_twice(open_talk):
    conversations, talk = open_talk()
    assert served(talk) == ["memories/tea"]
    conversations.drop(talk.session)
    reply = talk.say("when is tea, I forgot?")
    assert reply.recall.entries == ()
    assert talk.engine.tokenizer.decode(reply.output.prompt_ids).count(TEA) == 1


def test_a_turn_that_was_cut_off_left_its_memory_in_sight(open_talk):
    _, talk = open_talk()
    stream = talk.turn("when is tea?").deltas()
    next(stream)
    stream.close()
    assert served(talk, "so when is tea?") == []


def test_what_one_actor_was_told_another_was_not(open_talk):
    conversations, planner = open_talk("planner")
    assert served(planner) == ["memories/tea"]
    critic = conversations.open(planner.session, "critic", planner.options)
    assert served(critic) == ["memories/tea"]
    assert served(critic) == served(planner) == []
