"""Bodies of requests: what each verb of the service may be sent, read strictly.

One dataclass a verb is read from JSON, and described to others as JSON Schema: the
OpenAPI document cannot say anything else than what the service reads. The law: a member
that is not declared is refused, as is one of another type; "account" and "user" are
declared nowhere.

    read(Forget, {"uri": "memories/tea"})  # Forget(uri="memories/tea")
    schema(Forget)                         # {"type": "object", "properties": ...}
"""

import dataclasses
import types
import typing
from collections.abc import Mapping

from kvmem import errors

__all__ = ["Append", "Captured", "Commit", "Forget", "Recall", "Remember"]
__all__ += ["read", "schema"]


@dataclasses.dataclass(frozen=True)
class Append:
    """Messages that are kept all or not at all."""

    messages: list[dict]
    key: str | None = None  # the same key appends once
    peer: str | None = None
    carries: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Captured:
    """Messages of an agent's history, behind the `after` that are captured already."""

    messages: list[dict]  # each with "role" and "content", and an "id" as it likes
    after: int
    last: str | None = None  # the mark of the last captured one
    peer: str | None = None


@dataclasses.dataclass(frozen=True)
class Commit:
    """Messages older than the last `keep` go to the archive."""

    keep: int = 0


@dataclasses.dataclass(frozen=True)
class Forget:
    """A memory, taken away everywhere."""

    uri: str


@dataclasses.dataclass(frozen=True)
class Recall:
    """A question to the user's memories."""

    query: str
    session: str | None = None
    cooldown: str = "messages(3)"
    peer_scope: str | None = None
    request_id: str | None = None
    mark: str = "return"
    limit: int | None = None


@dataclasses.dataclass(frozen=True)
class Remember:
    """A text to keep."""

    text: str
    uri: str | None = None
    peer: str | None = None
    key: str | None = None


def read[T](kind: type[T], body: object) -> T:
    """Return a body's dataclass, or raise ConfigError with everything that is wrong."""
    asked = f"a body of {kind.__name__.lower()}"
    if not isinstance(body, Mapping):
        law = "it is a JSON object"
        raise errors.ConfigError(errors.say(asked, law, "Send members, not a list"))
    wrong = list(_faults(kind, body))
    if wrong:
        names = ", ".join(field.name for field in dataclasses.fields(kind))
        raise errors.ConfigError(errors.say(asked, "; ".join(wrong), f"It has {names}"))
    return kind(**body)


def schema(kind: type) -> dict[str, object]:
    """Return the JSON Schema of a body."""
    fields, hints = dataclasses.fields(kind), typing.get_type_hints(kind)
    members = {field.name: _schema_of(hints[field.name]) for field in fields}
    for field in fields:
        if field.default is not dataclasses.MISSING:
            members[field.name]["default"] = field.default
    return {
        "type": "object",
        "description": (kind.__doc__ or "").strip(),
        "properties": members,
        "required": [field.name for field in fields if _is_required(field)],
        "additionalProperties": False,
    }


def _faults(kind: type, body: Mapping):
    """Yield what is wrong with a body, in words."""
    hints = typing.get_type_hints(kind)
    for name in sorted(set(body) - set(hints), key=str):
        yield f"it has no member {str(name)[:40]!r}"
    for field in dataclasses.fields(kind):
        if field.name not in body:
            if _is_required(field):
                yield f"{field.name!r} is missing"
        elif not _fits(body[field.name], hints[field.name]):
            yield f"{field.name!r} is not {_word(hints[field.name])}"


def _is_required(field: dataclasses.Field) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _fits(value: object, hint: object) -> bool:
    if typing.get_origin(hint) is list:
        (inner,) = typing.get_args(hint)
        return isinstance(value, list) and all(_fits(each, inner) for each in value)
    if isinstance(hint, types.UnionType):
        return any(_fits(value, each) for each in typing.get_args(hint))
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


_WORDS = {str: "string", int: "integer", dict: "object", types.NoneType: "null"}


def _word(hint: object) -> str:
    if typing.get_origin(hint) is list:
        return f"a list of {_word(typing.get_args(hint)[0])}s"
    if isinstance(hint, types.UnionType):
        return " or ".join(_word(each) for each in typing.get_args(hint))
    return _WORDS[hint]


def _schema_of(hint: object) -> dict[str, object]:
    if typing.get_origin(hint) is list:
        return {"type": "array", "items": _schema_of(typing.get_args(hint)[0])}
    if isinstance(hint, types.UnionType):
        return {"type": [_WORDS[each] for each in typing.get_args(hint)]}
    return {"type": _WORDS[hint]}
