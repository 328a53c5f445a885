"""Keys of the HTTP service: each is bound to one user, and only its hash is kept.

A key is `kvmem_ID_SECRET`, with 256 random bits of secret: it is shown once, when it is
made. The file holds the SHA-256 of the whole key (no stretching is needed where nothing
can be guessed), is closed to others (0600), and is replaced whole under a lock. The
law: an identity comes out of this file and from nowhere else.

    token = KeyRing(root).add("lab", "ann")
    KeyRing(root).find(token)  # Key(id=..., account="lab", user="ann", ...)

A running service sees keys that were added or taken back at its next request.
"""

import contextlib
import dataclasses
import hashlib
import hmac
import json
import pathlib
import secrets
import time
from collections.abc import Iterator

from kvmem import errors
from kvmem.session import files, ids, locks
from kvmem.session.io import OsIO

__all__ = ["FILE_NAME", "Key", "KeyRing"]

FILE_NAME = "keys.json"
VERSION = 1
_MAX_TOKEN_CHARS = 128


@dataclasses.dataclass(frozen=True)
class Key:
    """One key, as it is kept."""

    id: str
    account: str
    user: str
    created: float  # seconds since the epoch
    sha256: str


class KeyRing:
    """The keys of one root."""

    def __init__(self, root: pathlib.Path | str, io: OsIO | None = None):
        self._root, self._io = pathlib.Path(root), io or OsIO()
        self._path = self._root / FILE_NAME
        self._locks = locks.Locks(self._io)
        self._stamp: object = None
        self._keys: dict[str, Key] = {}

    def add(self, account: str, user: str) -> str:
        """Make a key of a user and return it; it cannot be shown again.

        Raises:
            InvalidId: no account or user can have such a name.
        """
        account, user = ids.check_account(account), ids.check_user(user)
        id_ = secrets.token_hex(4)
        token = f"kvmem_{id_}_{secrets.token_urlsafe(32)}"
        key = Key(id_, account, user, round(time.time(), 3), _hash(token))
        with self._changing() as keys:
            keys[id_] = key
        return token

    def revoke(self, id_: str) -> None:
        """Take a key back; NotFound where there is none of that id."""
        with self._changing() as keys:
            if keys.pop(id_, None) is None:
                asked, law = f"key {id_!r}", "there is none of that id"
                raise errors.NotFound(errors.say(asked, law, "List the keys"))

    def rows(self) -> tuple[Key, ...]:
        """Return every key, in the order in which they were made."""
        return tuple(sorted(self._read().values(), key=lambda key: key.created))

    def find(self, token: str) -> Key | None:
        """Return the key of a token, None where it is none of ours."""
        if len(token) > _MAX_TOKEN_CHARS or not token.isascii():
            return None
        _, _, rest = token.partition("_")
        key = self._read().get(rest.partition("_")[0])
        if key is None:
            return None
        return key if hmac.compare_digest(_hash(token), key.sha256) else None

    def _read(self) -> dict[str, Key]:
        """Return the keys of the file, read again when it was replaced."""
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return {}
        stamp = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
        if stamp != self._stamp:
            self._keys, self._stamp = _parsed(self._io.read(self._path)), stamp
        return self._keys

    @contextlib.contextmanager
    def _changing(self) -> Iterator[dict[str, Key]]:
        """Lend the keys under the lock; they are written when nothing was raised."""
        files.make_root(self._io, self._root)
        with self._locks.hold(self._root / f".{FILE_NAME}.lock", "the keys"):
            keys = dict(self._read())
            yield keys
            self._write(keys)

    def _write(self, keys: dict[str, Key]) -> None:
        rows = [dataclasses.asdict(key) for key in keys.values()]
        whole = json.dumps({"version": VERSION, "keys": rows}, indent=1)
        files.write(self._io, self._path, whole.encode())


def _parsed(whole: bytes) -> dict[str, Key]:
    """Return the keys of a file's bytes, or raise for one that cannot be read."""
    try:
        read = json.loads(whole)
        version = read["version"]
        keys = [Key(**row) for row in read["keys"]] if version == VERSION else []
    except (ValueError, TypeError, KeyError) as error:
        asked, law = f"the keys in {FILE_NAME}", "the file cannot be read"
        cure = "Restore it, or move it away and add the keys anew"
        raise errors.CorruptPage(errors.say(asked, law, cure)) from error
    if version != VERSION:
        law = f"they have version {version!r}, and this kvmem reads {VERSION}"
        asked = f"the keys in {FILE_NAME}"
        raise errors.FormatMismatch(errors.say(asked, law, "Use a newer kvmem"))
    return {key.id: key for key in keys}


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
