"""Messages: what of them is text, what was said, and about how many tokens that is."""

import pytest

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
