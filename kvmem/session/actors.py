"""Which actor a call is made for: a view and a part of keys, never an identity.

An actor is one of several executors that share a user's credential. The law: a name
given to a call wins over the innermost scope of the same owner, which wins over the
principal's own default; a scope set to None takes only the scope's name away. Scopes
are context-local: tasks and threads that run beside each other cannot see each other's.

    with acting_as("planner", owner):
        resolve(owner)           # "planner"
        resolve(owner, "critic") # "critic"

Where a principal requires an actor and none is found, `ActorRequired` is raised: a
worker thread that was not given its caller's context fails, and does not fall back to
the view of everything.
"""

import contextlib
import contextvars
import re
from collections.abc import Hashable, Iterator

from kvmem import errors

__all__ = ["acting_as", "actor_name", "resolve", "scoped"]

_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,128}")
_SCOPES: contextvars.ContextVar[tuple[tuple[Hashable, str | None], ...]]
_SCOPES = contextvars.ContextVar("kvmem_actors", default=())


@contextlib.contextmanager
def acting_as(name: str | None, owner: Hashable) -> Iterator[str | None]:
    """Open a scope: calls of `owner` inside it are made for this actor.

    Args:
        name: the actor, surrounding blanks taken off; None ends the outer scope's
            name for the time of this one.
        owner: whose calls are meant, as (account, user): a scope opened for one user
            never filters another's calls.

    Raises:
        TypeError: the name is no string.
        ValueError: it is blank.
        InvalidId: it holds what an actor's name cannot.
    """
    name = None if name is None else actor_name(name)
    token = _SCOPES.set((*_SCOPES.get(), (owner, name)))
    try:
        yield name
    finally:
        _SCOPES.reset(token)


def scoped(owner: Hashable) -> str | None:
    """Return the actor of the innermost scope of this owner, None without one."""
    return next((name for each, name in reversed(_SCOPES.get()) if each == owner), None)


def resolve(
    owner: Hashable,
    name: str | None = None,
    default: str | None = None,
    required: bool = False,
) -> str | None:
    """Return the actor of a call: named, else scoped, else the default.

    Raises:
        ActorRequired: `required`, and none of the three is there.
    """
    found = actor_name(name) if name is not None else scoped(owner) or default
    if found is None and required:
        raise errors.ActorRequired(
            errors.say(
                "a call outside any actor scope",
                "this principal requires an actor, and a thread starts without one",
                "Give actor=, open acting_as(...), or run the worker in a copy of its "
                "caller's context (contextvars.copy_context)",
            )
        )
    return found


def actor_name(name: str) -> str:
    """Return an actor's or peer's name without surrounding blanks, checked.

    Raises:
        TypeError: it is no string.
        ValueError: it is blank.
        InvalidId: it is not letters, digits and `_ . @ -`, or is `.` or `..`, has two
            `@`, more than 128 characters, or is the reserved `__self`.
    """
    if not isinstance(name, str):
        raise TypeError(f"an actor is named by a string, not by {type(name).__name__}")
    bare = name.strip()
    if not bare:
        raise ValueError(
            errors.say("a blank actor", "an actor has a name", "Give one, or None")
        )
    if (
        not _NAME.fullmatch(bare)
        or bare in (".", "..", "__self")
        or bare.count("@") > 1
    ):
        raise errors.InvalidId(
            errors.say(
                f"actor {ascii(bare[:40])}",
                "names are 1 to 128 ASCII letters, digits, '_', '.', '-' and one '@', "
                "and not '.', '..' or '__self'",
                "Encode other names, for example as unpadded urlsafe base64",
            )
        )
    return bare
