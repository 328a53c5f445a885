"""Ids: which names are allowed, and which file each of them is.

The law: `to_path` is injective on every string, and stays so where a disk folds case;
a path it makes is one plain component that begins neither with a dot nor with another
id's escape. Nothing is ever replaced by a look-alike: a name is kept or refused.

    to_path("S1"), to_path("s1")  # "=531", "s1"
"""

import hashlib
import re
import unicodedata

from kvmem.errors import InvalidId, say

MAX_SESSION_CHARS = 128
MAX_NAME_CHARS = 128
MAX_KEY_CHARS = 256
_MAX_PATH_CHARS = 160  # with a prefix or a suffix of ours it stays under 255 bytes

_NAME = re.compile(r"[A-Za-z0-9_.@-]+")
_DEVICES = {"con", "prn", "aux", "nul"} | {
    f"{port}{number}" for port in ("com", "lpt") for number in range(10)
}
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_-.")


def check_account(name: str) -> str:
    """Return an account's name, trimmed; one that begins with "_" is refused."""
    name = check_name(name, "account")
    if name.startswith("_"):
        raise _refused("account", name, "a leading underscore is kept for the store")
    return name


def check_user(name: str) -> str:
    """Return a user's name, trimmed, or raise InvalidId."""
    return check_name(name, "user")


def check_peer(name: str) -> str:
    """Return a peer's name, trimmed, or raise InvalidId."""
    return check_name(name, "peer")


def check_actor(name: str) -> str:
    """Return an actor's name, trimmed.

    Raises:
        TypeError: it is no string.
        ValueError: it is blank.
        InvalidId: it has characters that no name has.
    """
    return check_name(name, "actor")


def check_name(name: str, kind: str) -> str:
    """Return a name of letters, digits and "_.@-" with one "@" at most, trimmed."""
    if not isinstance(name, str):
        raise TypeError(
            say(f"{kind} {name!r}", "a name is a string", f"Pass the {kind}'s name")
        )
    trimmed = name.strip()
    if not trimmed:
        raise InvalidId(  # a ValueError too
            say(f"{kind} {name!r}", "a name is not blank", "Leave it out, or name one")
        )
    if not _NAME.fullmatch(trimmed):
        raise _refused(kind, name, "it has letters, digits and _ . @ - only")
    if trimmed in (".", "..") or trimmed.count("@") > 1 or trimmed == "__self":
        raise _refused(kind, name, "it is no dots alone, has one @ and is not __self")
    if len(trimmed) > MAX_NAME_CHARS:
        raise _refused(kind, name[:20] + "…", f"it has {MAX_NAME_CHARS} characters")
    return trimmed


def check_session(name: str) -> str:
    """Return a session's id as it is, or raise InvalidId: nothing is trimmed.

    An id is 1 to 128 printable characters in normal form (NFC) without separators of
    paths or drives, blanks at its ends, or the name of a device.
    """
    if not isinstance(name, str):
        raise TypeError(say(f"session {name!r}", "an id is a string", "Pass a string"))
    if not name or len(name) > MAX_SESSION_CHARS:
        law = f"it has 1 to {MAX_SESSION_CHARS} characters, not {len(name)}"
        raise _refused("session", name[:20], law)
    if name in (".", "..") or any(c in '/\\:<>"|?*' for c in name):
        raise _refused("session", name, "it is no path and no drive")
    if name != name.strip() or not name.isprintable():
        raise _refused("session", name, "it is printable, with no blanks at its ends")
    if unicodedata.normalize("NFC", name) != name:
        raise _refused("session", name, "equal letters are equal code points (NFC)")
    if name.split(".")[0].lower() in _DEVICES:
        raise _refused("session", name, "it is not the name of a device")
    return name


def check_key(key: str, kind: str = "key") -> str:
    """Return a caller's own key or request id: 1 to 256 characters of any kind."""
    if not isinstance(key, str):
        raise TypeError(say(f"{kind} {key!r}", "a key is a string", "Pass a string"))
    if not 0 < len(key) <= MAX_KEY_CHARS:
        law = f"it has 1 to {MAX_KEY_CHARS} characters, not {len(key)}"
        raise _refused(kind, key[:20], law)
    return key


def to_path(name: str) -> str:
    """Return the one path component of a name, injective even where case is folded.

    Small letters, digits, "_", "-" and dots inside stay; every other byte of the
    UTF-8 form is "=" and two small hex digits. What grows too long ends in "==" and
    its SHA-256.
    """
    inside = range(1, len(name) - 1)
    path = "".join(
        c if c in _PLAIN and (c != "." or i in inside) else _escaped(c)
        for i, c in enumerate(name)
    )
    if path.split(".")[0] in _DEVICES:
        path = _escaped(path[0]) + path[1:]
    if len(path) > _MAX_PATH_CHARS:
        digest = hashlib.sha256(_utf8(name)).hexdigest()
        path = f"{path[:64].rstrip('=')}=={digest}"
    return path or "=="


def _escaped(char: str) -> str:
    return "".join(f"={byte:02x}" for byte in _utf8(char))


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _refused(kind: str, name: str, law: str) -> InvalidId:
    return InvalidId(say(f"{kind} {name!r}", law, "Choose another, or encode yours"))
