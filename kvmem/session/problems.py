"""Problems: what the service says when it refuses, and what the client makes of it.

One table turns an error into a status and a name, and the name back into the error, so
that a program meets the same types in process and over HTTP (problem+json, RFC 9457).
The law: a detail says what the caller itself sent and nothing else; where the cause is
the service's own (damage, a full disk, a fault), the words are general and the cause is
for the service's log.

    of(errors.Conflict("..."))  # Problem(409, "conflict", "...")
"""

import dataclasses
import errno

from kvmem import errors

__all__ = ["MEDIA_TYPE", "Problem", "Refused", "error_of", "of"]

MEDIA_TYPE = "application/problem+json"
_URN = "urn:kvmem:"

# The first row whose class fits holds: children stand before their parents.
_ROWS = (
    ("invalid-id", 400, errors.InvalidId, "An id that cannot be"),
    ("actor-required", 400, errors.ActorRequired, "An actor is required"),
    ("denied", 403, errors.Denied, "Not yours to do"),
    ("not-found", 404, errors.NotFound, "Nothing of that name"),
    ("conflict", 409, errors.Conflict, "One key, two contents"),
    ("deleted", 410, errors.Deleted, "Deleted on purpose"),
    ("busy", 503, errors.Busy, "Busy, try again"),
    ("damaged", 500, errors.CorruptPage, "Stored bytes are damaged"),
    ("bad-format", 500, errors.FormatMismatch, "Stored by another version"),
    ("bad-request", 400, errors.ConfigError, "A request that has no meaning"),
)
_BLAND = {
    "damaged": "what is stored under this name is damaged; the service's log says more",
    "bad-format": "what is stored under this name cannot be read by this version",
    "no-space": "the service cannot write now; what was sent is not kept",
    "fault": "a fault of the service; its log says more",
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """One refusal, as problem+json says it."""

    status: int
    name: str  # the last part of its type
    title: str
    detail: str
    retry_after_s: float | None = None

    @property
    def body(self) -> dict[str, object]:
        """The members of RFC 9457."""
        return {
            "type": _URN + self.name,
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
        }


class Refused(errors.KVMemError):
    """A request that the service refuses before any verb runs."""

    def __init__(self, problem: Problem):
        super().__init__(problem.detail)
        self.problem = problem


def of(error: BaseException) -> Problem:
    """Return the problem of an error that a verb raised."""
    if isinstance(error, Refused):
        return error.problem
    for name, status, kind, title in _ROWS:
        if isinstance(error, kind):
            retry_after_s = 1.0 if status == 503 else None
            detail = _BLAND.get(name, str(error))
            return Problem(status, name, title, detail, retry_after_s)
    if isinstance(error, OSError):
        status = 507 if error.errno in (errno.ENOSPC, errno.EDQUOT) else 500
        return Problem(status, "no-space", "Not stored", _BLAND["no-space"])
    return Problem(500, "fault", "A fault of the service", _BLAND["fault"])


def error_of(status: int, body: object) -> Exception:
    """Return the error that a client raises for an answer of the service."""
    body = body if isinstance(body, dict) else {}
    name = str(body.get("type", "")).removeprefix(_URN)
    detail = str(body.get("detail") or f"the service answered {status}")
    kinds = {row[0]: row[2] for row in _ROWS} | {
        "too-many": errors.Busy,
        "no-space": OSError,
        "unauthorized": errors.Denied,
        "identity-header": errors.Denied,
        "too-large": errors.ConfigError,
    }
    return kinds.get(name, errors.KVMemError)(detail)
