"""Whose file it is: the identity every file of a session carries, and its version.

The law: a file says in full whose it is, and one that says another name is refused, so
that a folder moved, copied or folded in case by a disk is never read as another's.

    identity = Identity("lab", "ann", "s1")
    identity.head("kvmem.session.log")  # {"format": ..., "version": 1, "account": ...}
"""

from collections.abc import Mapping
from typing import NamedTuple

from kvmem.errors import FormatMismatch, say

VERSION = 1


class Identity(NamedTuple):
    """The session that a file belongs to."""

    account: str
    user: str
    session: str

    def head(self, format: str) -> dict:
        """Return the fields with which a file of this session begins."""
        return {"format": format, "version": VERSION} | self._asdict()

    def check(self, head: Mapping, format: str, strict: bool = True) -> None:
        """Raise FormatMismatch where a file's fields are not those of `head`.

        Args:
            head: fields as they were read.
            format: what the file is.
            strict: fields of the identity may not be missing either.
        """
        version = head.get("version")
        if version != VERSION or (strict and head.get("format") != format):
            law = f"this kvmem reads {format} of version {VERSION}"
            found = f"a file of {head.get('format')!r}, version {version!r}"
            raise FormatMismatch(
                say(found, law, "Read it with the kvmem that wrote it")
            )
        for field, mine in self._asdict().items():
            if head.get(field, None if strict else mine) != mine:
                law = f"it says it is of {field} {head.get(field)!r}, not {mine!r}"
                asked = f"a {format} of session {self.session!r}"
                raise FormatMismatch(
                    say(asked, law, "Put the folder back in its place")
                )
