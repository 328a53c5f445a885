"""Turns that are said again, left half way, or taken by two at once."""

import dataclasses

import pytest

from kvmem.errors import Conflict, InvalidId


@pytest.fixture
def talk(start, short):
    conversations, me = start()
    return conversations.open(me.session("s"), options=short)


def left_open(talk, text, key):
    """Take a turn whose reader goes away after the first token."""
    stream = talk.turn(text, key).deltas()
    next(stream)
    stream.close()


def test_a_turn_that_nobody_answered_is_not_answered_by_another_ones(talk):
    left_open(talk, "the first", "turn-1")
    second = talk.say("the second", key="turn-2")
    again = talk.say("the first", key="turn-1")
    assert again.output is not None
    assert again.output.prompt_ids != second.output.prompt_ids
    assert talk.say("the first", key="turn-1").text == again.text
    assert talk.say("the second", key="turn-2").text == second.text
    assert talk.session.clock == 4


def test_a_turn_is_answered_from_an_archive_too(talk):
    first = talk.say("hello", key="turn-1")
    talk.say("and more", key="turn-2")
    talk.session.commit(keep=2)
    again = talk.say("hello", key="turn-1")
    assert (again.text, again.output) == (first.text, None)


def test_a_turn_is_answered_from_a_log_that_has_no_room_for_another(talk):
    first = talk.say("x" * 700, key="turn-1")
    again = talk.say("x" * 700, key="turn-1")
    assert (again.text, again.output) == (first.text, None)


def test_another_text_under_a_turns_key_is_refused(talk):
    talk.say("hello", key="turn-1")
    with pytest.raises(Conflict, match="turn-1"):
        talk.say("hello again", key="turn-1")
    assert talk.session.clock == 2


def test_a_turn_said_again_holds_the_memories_that_it_held(talk, short):
    me = talk.session.principal
    me.remember("tea is at ten", "memories/tea")
    talk.options = dataclasses.replace(short, memories=2)
    left_open(talk, "when is tea?", "turn-1")
    me.remember("when it rains tea is at noon", "memories/rain")
    talk.say("when is tea?", key="turn-1")
    assert talk.session.clock == 2
    assert "rains" not in talk.session.messages()[0].text


def test_a_key_that_cannot_be_kept_is_refused_before_anything_is_said(talk):
    for key in ("", "k" * 250, "k" * 5000):
        with pytest.raises(InvalidId):
            talk.say("hello", key=key)
    assert not talk.session.exists or talk.session.clock == 0


def test_a_reader_that_goes_at_the_last_token_leaves_nothing_running(talk):
    stream = talk.turn("hello").deltas()
    for _ in range(10):  # as many tokens as it has
        next(stream)
    stream.close()
    assert not talk.engine.scheduler.has_work
    assert talk.say("hello again").output is not None


def test_two_turns_of_one_session_at_once_are_both_logged(talk, short):
    other = type(talk)(
        talk.engine,
        talk.session,
        None,
        talk._facts,
        talk.identity,
        short,
        talk.forgotten,
    )
    one, two = talk.turn("the one"), other.turn("the other")
    pieces = zip(one.deltas(), two.deltas(), strict=False)
    for _ in pieces:
        pass
    for turn in (one, two):
        for _ in turn.deltas():
            pass
    assert talk.session.clock == 4
    reply = talk.say("and now?")
    assert reply.resume.num_reused <= reply.resume.num_expected
    fed = list(reply.output.prompt_ids)
    talk.engine.reset(weights_epoch=talk.engine.stats().weights_epoch)
    talk.engine.recall, store = None, talk.engine.recall
    (whole,) = talk.engine.generate([fed], short.sampling, talk.identity)
    talk.engine.recall = store
    assert whole.output_ids == reply.output.output_ids


def test_an_answer_of_no_words_is_an_answer(talk):
    talk.session.append(
        [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": ""},
            {"role": "user", "content": ""},
            {"role": "assistant", "parts": []},
            {"role": "tool", "parts": [{"type": "tool", "result": [1]}]},
        ]
    )
    assert talk.say("").output is not None
    assert talk.say("ü 😀 \u202e\x00 tea").output is not None


def test_half_a_character_is_refused_and_not_logged(talk):
    with pytest.raises(ValueError, match="whole Unicode"):
        talk.say("\ud800")
    assert talk.session.clock == 0


def test_ids_that_anybody_appended_break_no_turn(talk):
    forged = {
        "type": "tokens",
        "tokenizer": talk.engine.tokenizer.identity,
        "ids": [10**9, -1, "x"],
    }
    said = {"type": "text", "text": "hi"}
    talk.session.append(
        [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "parts": [said, forged]},
        ]
    )
    assert talk.say("so?").output is not None


IN_TURN = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant in turn') }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("keep", [None, 2])
def test_a_half_turn_stops_no_conversation_whose_template_wants_roles_in_turn(
    start, short, monkeypatch, keep
):
    conversations, me = start()
    tokenizer = conversations.engine.tokenizer
    monkeypatch.setattr(tokenizer, "template", IN_TURN + tokenizer.template)
    talk = conversations.open(me.session("s"), options=short)
    talk.say("what is first, and long enough for a chunk")
    stream = talk.turn("this one gets no answer").deltas()
    next(stream)
    stream.close()
    if keep is not None:
        me.session("s").commit(keep=keep)  # an answer is first now
    reply = talk.say("and this one?")
    fed = tokenizer.decode(reply.output.prompt_ids)
    assert "this one gets no answer\nand this one?" in fed
    again = talk.say("good")
    assert again.resume.reason is None
    assert again.resume.num_reused == again.resume.num_expected > 0
