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
from collections.abc import Hashable, Iterator

from kvmem import errors
from kvmem.session import ids

__all__ = ["acting_as", "resolve", "scoped"]

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
    name = None if name is None else ids.check_actor(name)
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
    found = ids.check_actor(name) if name is not None else scoped(owner) or default
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
