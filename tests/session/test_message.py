"""Messages: what of them is text, what was said, and about how many tokens that is."""

import pytest

from kvmem.errors import ConfigError
from kvmem.session import message


def stored(*parts) -> dict:
    return message.parse([{"role": "user", "content": list(parts)}])[0]


MEMORY = {"type": "context", "uri": "M", "text": "remembered"}


def test_what_was_said_is_without_what_was_recalled():
    fields = stored("said", MEMORY, {"type": "tool", "name": "x", "text": "output"})
    one = message.from_line(3, fields | {"id": "m", "created_at": "now"})
    assert one.text == "said\nremembered\noutput" and one.said == "said"
    assert (one.seq, one.id, one.peer, one.carries) == (3, "m", None, ())


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("", 0), ("a", 1), ("abcd", 1), ("abcde", 2), ("会", 2), ("会議", 3), ("𝄞", 2)],
)
def test_tokens_are_estimated_by_the_kind_of_character(text, tokens):
    assert message.num_tokens(stored(text)) == tokens


def test_a_digest_is_of_what_is_said_and_by_whom():
    one = message.parse([{"role": "user", "content": "x"}])
    as_parts = message.parse([{"role": "user", "parts": ["x"]}])
    assert message.digest(one, None) == message.digest(as_parts, None)
    others = [
        message.digest(message.parse([{"role": "user", "content": "y"}]), None),
        message.digest(message.parse([{"role": "tool", "content": "x"}]), None),
        message.digest(message.parse([{"role": "user", "content": "x"}], "w"), None),
        message.digest(one * 2, None),
        message.digest(one, "planner"),
    ]
    assert len({message.digest(one, None), *others}) == 6


def test_parts_are_copied_and_any_kind_of_json_is_kept():
    part = {"type": "tool", "input": {"deep": [1, None, "é"]}}
    kept = stored(part)["parts"][0]
    part["input"]["deep"].append("later")
    assert kept == {"type": "tool", "input": {"deep": [1, None, "é"]}}


HALF = "cut \ud83d"


@pytest.mark.parametrize(
    "fields",
    [
        {"content": HALF},
        {"content": [HALF]},
        {"content": [{"type": "text", "text": HALF}]},
        {"content": [{"type": "tool", "input": {"deep": [HALF]}}]},
        {"content": [{"type": "tool", HALF: 1}]},
        {"content": "x", "kind": HALF},
        {"content": "x", "turn_id": HALF},
        {"content": "x", "sources": [HALF]},
    ],
)
def test_half_a_character_is_refused_before_it_is_stored(fields):
    with pytest.raises(ConfigError, match="Unicode|surrogates"):
        message.parse([{"role": "user"} | fields])


def test_parts_deeper_than_json_goes_are_refused_in_words():
    deep = []
    for _ in range(30_000):
        deep = [deep]
    with pytest.raises(ConfigError, match="it is JSON"):
        stored({"type": "tool", "input": deep})


@pytest.mark.parametrize(
    "wrong",
    [None, 5, "x", b"x", {"role": "user", "content": "x"}, {"x"}, iter([{}])],
)
def test_what_is_no_list_of_messages_is_refused_in_words(wrong):
    with pytest.raises(ConfigError, match="a batch is a list of messages"):
        message.parse(wrong)
