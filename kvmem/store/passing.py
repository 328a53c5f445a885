"""Failures that pass: the server was away, or this process was short of something.

The law: what passes is never called damage, and what may be damage is never called
passing: an error that this file does not know is damage, and keeps its bytes.

    does_pass(OSError(errno.EMFILE, "Too many open files"))      # True

TensorStore says what went wrong in the words of Abseil's status codes and, of files,
with the system's error number.
"""

import errno
import re

_NUMBERS = {
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ENOBUFS,
    errno.EAGAIN,
    errno.EINTR,
    errno.ETIMEDOUT,
    errno.ESTALE,
    errno.ENOTCONN,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.ECONNABORTED,
}
_NUMBER = re.compile(r"os_error_code='(\d+)'")
_WORDS = re.compile(
    r"\b(UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED|CANCELLED"
    r"|PERMISSION_DENIED|UNAUTHENTICATED)\b"
)


def reason_of(error: BaseException) -> str:
    """Return "unreachable" for what passes, else "damaged"."""
    return "unreachable" if does_pass(error) else "damaged"


def does_pass(error: BaseException) -> bool:
    """Say whether the same question may well be answered a minute later."""
    if isinstance(error, TimeoutError) or getattr(error, "errno", None) in _NUMBERS:
        return True
    if found := _NUMBER.search(str(error)):
        return int(found[1]) in _NUMBERS
    return bool(_WORDS.search(str(error)))
