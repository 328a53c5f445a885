"""Bodies: what is not declared is refused, and the schema says what is read."""

import dataclasses

import pytest

from kvmem import errors
from kvmem.session import bodies

_KINDS = [getattr(bodies, n) for n in bodies.__all__ if n[0].isupper()]


def test_a_body_is_read_with_its_defaults():
    read = bodies.read(bodies.Append, {"messages": [{"role": "user"}]})
    assert read == bodies.Append([{"role": "user"}], None, None, [])


@pytest.mark.parametrize("kind", _KINDS)
def test_no_body_says_who_asks(kind):
    names = {field.name for field in dataclasses.fields(kind)}
    assert not names & {"account", "user", "actor", "tenant", "role"}
    good = {name: "x" for name in names}
    with pytest.raises(errors.ConfigError, match="'account'"):
        bodies.read(kind, good | {"account": "lab"})


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([], "JSON object"),
        ({}, "'messages' is missing"),
        ({"messages": "x"}, "'messages' is not a list of objects"),
        ({"messages": [1]}, "'messages' is not a list of objects"),
        ({"messages": [], "key": 3}, "'key' is not string or null"),
        ({"messages": [], "carries": None}, "'carries' is not a list of strings"),
        ({"message": []}, "no member 'message'; 'messages' is missing"),
    ],
)
def test_everything_that_is_wrong_is_said_at_once(body, words):
    with pytest.raises(errors.ConfigError, match=words):
        bodies.read(bodies.Append, body)


def test_true_is_no_number():
    with pytest.raises(errors.ConfigError, match="'keep' is not integer"):
        bodies.read(bodies.Commit, {"keep": True})


@pytest.mark.parametrize("kind", _KINDS)
def test_the_schema_has_the_members_that_are_read(kind):
    schema = bodies.schema(kind)
    assert list(schema["properties"]) == [f.name for f in dataclasses.fields(kind)]
    assert schema["additionalProperties"] is False
    for name in schema["required"]:
        assert "default" not in schema["properties"][name]
