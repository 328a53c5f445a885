"""Messages: who said what, in parts.

The law: what a caller passes is checked whole before a byte is written, and what is
stored of it is plain JSON. A part is {"type": "text", "text": ...}, a memory that was
put in is {"type": "context", "uri": ..., "text": ...}, and any other mapping with a
"type" is kept as it is.

    parse([{"role": "user", "content": "hello"}])
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence

from kvmem.errors import ConfigError, say
from kvmem.session import ids

ROLES = ("system", "user", "assistant", "tool")
MAX_BATCH = 100
CAPTURED = "capture:"  # how a source begins that says what was captured (`marks`)
_KEYS = {"role", "content", "parts", "peer", "kind", "turn_id", "sources"}


@dataclasses.dataclass(frozen=True)
class Message:
    """One stored message of a session."""

    seq: int  # its place, dense from 0 over the whole life of the session
    id: str
    role: str
    parts: tuple[Mapping, ...]
    created_at: str
    peer: str | None = None  # whom it is about, or who said it, beside the user
    actor: str | None = None  # under which actor it was appended
    kind: str | None = None
    turn_id: str | None = None
    sources: tuple[str, ...] = ()  # ids of the messages it was made from
    carries: tuple[str, ...] = ()  # ids of the recalls whose memories it holds

    @property
    def text(self) -> str:
        """Return the texts of its parts, memories included, a part a line."""
        return "\n".join(p["text"] for p in self.parts if "text" in p)

    @property
    def said(self) -> str:
        """Return what was said: the texts of its parts without recalled memories."""
        return "\n".join(p["text"] for p in self.parts if p["type"] == "text")


def parse(messages: Sequence[Mapping], peer: str | None = None) -> tuple[dict, ...]:
    """Return messages as they are stored, but for what the log adds.

    Args:
        messages: 1 to 100 mappings with a "role" and "content" (a string or a list of
            parts), and as they like "peer", "kind", "turn_id" and "sources".
        peer: the peer of messages that name none.

    Raises:
        ConfigError: they are none, too many, or not of this form.
        InvalidId: a peer has no valid name.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        kind, law = type(messages).__name__, "a batch is a list of messages"
        raise _refused(f"messages of type {kind}", law, "Pass a list")
    if not 0 < len(messages) <= MAX_BATCH:
        law = f"a batch has 1 to {MAX_BATCH}"
        raise _refused(f"{len(messages)} messages", law, "Append several batches")
    return tuple(_parse_one(message, peer) for message in messages)


def digest(parsed: Sequence[dict], actor: str | None) -> str:
    """Return what tells one batch's content from another's, 32 hex digits."""
    data = json.dumps([actor, *parsed], sort_keys=True).encode()
    return hashlib.sha256(data).hexdigest()[:32]


def from_line(seq: int, stored: Mapping) -> Message:
    """Return the message of a line of the log."""
    return Message(
        seq,
        stored["id"],
        stored["role"],
        tuple(stored["parts"]),
        stored["created_at"],
        stored.get("peer"),
        stored.get("actor"),
        stored.get("kind"),
        stored.get("turn_id"),
        tuple(stored.get("sources", ())),
        tuple(each["id"] for each in stored.get("carries", ())),
    )


def num_tokens(stored: Mapping) -> int:
    """Estimate the tokens of a message: 1/4 a character, 1.5 of CJK, 2 beyond U+FFFF.

    The estimate is OpenViking's; what an engine really feeds is its own to count.
    """
    return math.ceil(sum(map(_tokens_of, _texts(stored))))


def _texts(stored: Mapping):
    return (part["text"] for part in stored["parts"] if "text" in part)


def _tokens_of(text: str) -> float:
    if text.isascii():
        return len(text) / 4
    return sum(
        2 if c > "\uffff" else 1.5 if "\u2e80" <= c <= "\uffef" else 0.25 for c in text
    )


def _parse_one(message: Mapping, peer: str | None) -> dict:
    if not isinstance(message, Mapping):
        raise _refused(f"message {message!r}", "a message is a mapping", "Pass a dict")
    if unknown := set(message) - _KEYS:
        law = f"a message has {', '.join(sorted(_KEYS))}"
        raise _refused(f"message with {sorted(map(str, unknown))}", law, "Drop them")
    if message.get("role") not in ROLES:
        law = f"a role is one of {', '.join(ROLES)}"
        raise _refused(f"role {message.get('role')!r}", law, "Name one of them")
    if ("content" in message) == ("parts" in message):
        raise _refused("a message", 'it has "content" or "parts"', "Give one of them")
    content = message["content"] if "content" in message else message["parts"]
    parsed = {"role": message["role"], "parts": _parts(content)}
    if (named := message.get("peer", peer)) is not None:
        parsed["peer"] = ids.check_peer(_string(named, "a peer"))
    for key in ("kind", "turn_id"):
        if message.get(key) is not None:
            parsed[key] = _string(message[key], key)
    if (sources := message.get("sources")) is not None:
        if not isinstance(sources, list | tuple):
            raise _refused(f"sources {sources!r}", "they are a list", "Pass a list")
        if sources:
            parsed["sources"] = [_source(each) for each in sources]
    return parsed


def _parts(content) -> list[dict]:
    if isinstance(content, str):
        return [_part(content)]
    if isinstance(content, Mapping) or not isinstance(content, Sequence):
        law = "it is a string or a list of parts"
        raise _refused(f"content of {type(content).__name__}", law, "Pass a string")
    return [_part(part) for part in content]


def _part(part) -> dict:
    if isinstance(part, str):
        return {"type": "text", "text": _string(part, "a text")}
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        law = 'a part is a string or a mapping with a "type"'
        raise _refused(f"part {part!r}", law, "Pass text parts")
    if "text" in part or part["type"] == "text":
        _string(part.get("text"), "a part's text")
    if part["type"] == "context":
        _string(part.get("uri"), "a context part's uri")
    try:  # what comes back must be what was stored, and Unicode
        data = json.dumps(part, allow_nan=False, ensure_ascii=False)
        stored = json.loads(data.encode())
    except (TypeError, ValueError, RecursionError) as bad:
        law = f"it is JSON, and {bad}"
        raise _refused(f"part of type {part['type']}", law, "Pass JSON") from bad
    return stored


def _source(value) -> str:
    if _string(value, "a source").startswith(CAPTURED):
        law = f"what begins with {CAPTURED!r} is written by a capture alone"
        raise _refused(f"source {value!r}", law, "Name a message's id")
    return value


def _string(value, what: str) -> str:
    if not isinstance(value, str):
        raise _refused(f"{what} {value!r}", "it is a string", "Pass a string")
    try:
        value.encode()
    except UnicodeEncodeError as bad:
        law, cure = "half a character is no Unicode", "Give whole characters"
        raise _refused(f"{what} {ascii(value)[:60]}", law, cure) from bad
    return value


def _refused(asked: str, law: str, cure: str) -> ConfigError:
    return ConfigError(say(asked, law, cure))
