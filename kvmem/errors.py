"""The words for failure: every error kvmem raises on purpose.

A message has three beats, made by `say`: what was asked, which law it meets, what would
work, with the numbers in place. Tests match on the type and on one key phrase.

    raise OutOfPages(say("handout of 13 pages", "the pool has 8", "Raise pool.memory"))

Errors about what a person passed are `ValueError`s as well, so that code which knows
nothing of kvmem can catch them.
"""

__all__ = [
    "ActorRequired",
    "Busy",
    "ConfigError",
    "Conflict",
    "CorruptPage",
    "Deleted",
    "Denied",
    "FormatMismatch",
    "IncompatiblePlan",
    "InvalidId",
    "KVMemError",
    "NotFound",
    "NotKept",
    "OutOfPages",
    "StoreLocked",
    "say",
]


class KVMemError(Exception):
    """Base of every error that kvmem raises on purpose."""


class ConfigError(KVMemError, ValueError):
    """A setting that has no meaning: unknown key, wrong type, value out of range."""


class IncompatiblePlan(KVMemError, ValueError):
    """Settings that are legal one by one and cannot be combined."""


class FormatMismatch(KVMemError, ValueError):
    """Bytes that do not mean what the reader was told they mean."""


class InvalidId(KVMemError, ValueError):
    """A page, sequence or request id that the books do not know in that role."""


class OutOfPages(KVMemError):
    """The pool cannot serve a request now, or can never serve it."""


class CorruptPage(KVMemError):
    """Stored bytes that differ from what was acknowledged."""


class NotFound(KVMemError, LookupError):
    """Nothing of that name is there for the one who asks."""


class NotKept(KVMemError):
    """Requests that ended well and whose records the store could not keep.

    `outputs` are theirs: nothing of the answer is lost.
    """

    def __init__(self, message: str, outputs: tuple = ()):
        super().__init__(message)
        self.outputs = outputs


class StoreLocked(KVMemError):
    """Another live writer holds the root."""


class Busy(KVMemError):
    """A resource is in use and waiting would not be right."""


class Conflict(KVMemError):
    """One key, two different contents."""


class Deleted(KVMemError):
    """The thing asked for was deleted on purpose."""


class Denied(KVMemError):
    """The principal may not do this."""


class ActorRequired(KVMemError):
    """A call that needs an actor was made outside any actor scope."""


def say(asked: str, law: str, cure: str) -> str:
    """Join the three beats of a message: asked, law, what would work."""
    return f"{asked}: {law}. {cure.rstrip('.')}."
