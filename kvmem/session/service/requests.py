"""What comes in: who asks, for which actor, with which body, or why it is refused.

The law: an identity comes from the key alone. A request that brings one of its own, in
a header, in the query or in the body, is refused and not merely ignored, so that nobody
can believe that it was heeded. Nothing is done before the whole body is there: a
request that is cut off has done nothing.
"""

import json
import math
import re

from starlette.requests import Request

from kvmem import errors
from kvmem.session import ids
from kvmem.session.keys import Key, KeyRing
from kvmem.session.problems import Problem, Refused
from kvmem.session.service.limits import Limits

__all__ = ["ACTOR", "actor_of", "body_of", "key_of", "query_of", "refuse_identity"]

ACTOR = "x-kvmem-actor"

_IDENTITY = re.compile(
    r"x-(kvmem|openviking)-.*|(x-)?(account|user|tenant|role|agent|org)(-id|-name)?"
    r"|(x-)?(remote|forwarded|authenticated)-user|x-forwarded-(email|groups)"
)
_HALF_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]")
MAX_DEPTH = 100  # of a body's objects and lists in each other
_MAX_DEPTH_WORDS = f"it is nested too deeply, more than {MAX_DEPTH} times"


def refuse_identity(request: Request) -> None:
    """Raise for a header that says who asks, but for the key's own."""
    said = sorted({n for n in request.headers if _IDENTITY.fullmatch(n) and n != ACTOR})
    if said:
        detail = errors.say(
            f"a request with {', '.join(said)[:200]}",
            "account and user are those of the key, and no header changes them",
            "Leave these headers out; X-Kvmem-Actor names an actor",
        )
        raise Refused(Problem(400, "identity-header", "Who asks is the key", detail))


def key_of(request: Request, keys: KeyRing) -> Key:
    """Return the key of a request, or raise what asks for one."""
    said = request.headers.getlist("authorization")
    kind, _, token = said[0].partition(" ") if len(said) == 1 else ("", "", "")
    key = keys.find(token.strip()) if kind.lower() == "bearer" else None
    if key is None:
        law = "it needs one key of this service"
        cure = 'Send "Authorization: Bearer KEY"; kvmem sessions keys add makes keys'
        detail = errors.say("this request", law, cure)
        raise Refused(Problem(401, "unauthorized", "No valid key", detail))
    return key


def actor_of(request: Request) -> str | None:
    """Return the actor that a request names, or raise for one that cannot be."""
    said = request.headers.getlist(ACTOR)
    if len(said) > 1:
        raise bad("X-Kvmem-Actor twice", "a request has one actor", "Send it once")
    if not said or not said[0].strip():
        return None
    try:
        return ids.check_actor(said[0])
    except UnicodeError as error:
        raise bad("X-Kvmem-Actor", "it is not text", "Send ASCII") from error


def query_of(request: Request, names: tuple[str, ...]) -> dict[str, str]:
    """Return the query's values, each once and each declared."""
    pairs = request.query_params.multi_items()
    unknown = sorted({name for name, _ in pairs} - set(names))
    if unknown or len(pairs) != len({name for name, _ in pairs}):
        asked = f"a query with {', '.join(unknown)[:80] or 'a name twice'}"
        law = f"this route knows {', '.join(names) or 'none'}, each once"
        raise bad(asked, law, "Leave the others out")
    return dict(pairs)


async def body_of(request: Request, limits: Limits) -> object:
    """Return the JSON of a request's body when all of it has come.

    Raises:
        Refused: it is too large (413), or no JSON.
        ClientDisconnect: it was cut off.
    """
    said = request.headers.get("content-length", "")
    if said.isdigit() and int(said) > limits.max_body_nbytes:
        raise _too_large(limits)
    chunks, nbytes = [], 0
    async for chunk in request.stream():
        nbytes += len(chunk)
        if nbytes > limits.max_body_nbytes:
            raise _too_large(limits)
        chunks.append(chunk)
    return _parsed(b"".join(chunks))


def bad(asked: str, law: str, cure: str) -> Refused:
    """Return the refusal of a request that has no meaning."""
    detail = errors.say(asked, law, cure)
    title = "A request that has no meaning"
    return Refused(Problem(400, "bad-request", title, detail))


def _parsed(raw: bytes) -> object:
    """Return the JSON of a whole body: finite numbers, whole characters, no repeats.

    It is text in UTF-8 before it is JSON, and flat enough to be told again.
    """
    try:
        text = raw.decode()
        body = json.loads(text, parse_constant=_no_number, object_pairs_hook=_once)
        if _is_deep(body):
            raise bad("this body", _MAX_DEPTH_WORDS, "Send it flatter")
        if _HALF_CHARACTER.search(raw):
            json.dumps(body, ensure_ascii=False).encode()
    except RecursionError as error:
        raise bad("this body", _MAX_DEPTH_WORDS, "Send it flatter") from error
    except ValueError as error:
        law = f"it is no JSON in UTF-8 ({str(error)[:80]})"
        raise bad("this body", law, "Send one JSON object") from error
    return body


def _is_deep(body: object) -> bool:
    """Say whether objects and lists stand too deep in each other."""
    level = [body]
    for _ in range(MAX_DEPTH + 1):
        level = [child for each in level for child in _children(each)]
        if not level:
            return False
    return True


def _children(value: object):
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a member stands twice")
    if any(isinstance(v, float) and not math.isfinite(v) for v in members.values()):
        raise ValueError("a number is not finite")
    return members


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")


def _too_large(limits: Limits) -> Refused:
    law = f"a body has at most {limits.max_body_nbytes:,} bytes"
    detail = errors.say("this body", law, "Send several requests")
    return Refused(Problem(413, "too-large", "Too large", detail))
