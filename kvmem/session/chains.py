"""Chains: what a session's KV pages are, kept as bytes that this room does not read.

The law: an actor's chain is replaced whole, and only by who saw its last generation
(compare and set); it is never ahead of the log, which is made durable first; and it
goes with its session. KV is a cache: what is damaged reads as no chain, with a reason.

    blob, generation = session.chains.get("planner")
    generation = session.chains.put("planner", blob, generation)
"""

import dataclasses
import json
import zlib
from collections.abc import Mapping

from kvmem.errors import Conflict, CorruptPage, FormatMismatch, say
from kvmem.session import files, ids, log, materialise, tombstone
from kvmem.session.place import CHAINS, Place

FORMAT = "kvmem.session.chain"
_SUFFIX, _NOBODY, _ACTOR = ".chain", "user", "actor-"


@dataclasses.dataclass(frozen=True)
class Chains:
    """The chains of one session's handle, one an actor; None: the user's own."""

    _place: Place
    _generation: int | None

    def get(self, actor: str | None = None) -> tuple[bytes | None, int]:
        """Return an actor's chain and its generation, (None, 0) without one."""
        tombstone.check(self._place, self._generation)
        try:
            fields, blob = _read(self._place, actor)
        except (FileNotFoundError, CorruptPage, FormatMismatch):
            return None, 0
        return blob, fields["generation"]

    def fault(self, actor: str | None = None) -> str | None:
        """Return why a chain that is there reads as none, None where all is well."""
        try:
            _read(self._place, actor)
        except FileNotFoundError:
            return None
        except (CorruptPage, FormatMismatch) as bad:
            return str(bad)
        return None

    def put(self, actor: str | None, blob: bytes, generation: int) -> int:
        """Replace a chain durably and return its new generation.

        Args:
            actor: whose chain.
            blob: its bytes.
            generation: the one that `get` returned, 0 where there was none.

        Raises:
            Conflict: another put came between.
            Deleted: the session was deleted.
        """
        with self._place.locked():
            self._check(actor, generation)
            materialise.ensure(self._place)
            self._place.settle(log.read(self._place))
            folder = self._place.file(CHAINS)
            files.make_folder(self._place.io, folder, self._place.folder)
            path = folder / _file_name(actor)
            data = _encoded(self._place, actor, blob, generation + 1)
            files.write(self._place.io, path, data)
        return generation + 1

    def drop(self, actor: str | None, generation: int) -> None:
        """Take a chain away durably; as `put`, only who saw its last generation."""
        with self._place.locked():
            self._check(actor, generation)
            if self._place.io.is_dir(self._place.file(CHAINS)):
                self._place.io.unlink(self._place.file(CHAINS) / _file_name(actor))
                self._place.io.sync_dir(self._place.file(CHAINS))

    def actors(self) -> tuple[str | None, ...]:
        """Return whose chains there are, the user's own as None."""
        tombstone.check(self._place, self._generation)
        found = []
        for name in self._place.io.names(self._place.file(CHAINS)):
            if not name.endswith(_SUFFIX):
                continue
            data = self._place.io.read(self._place.file(CHAINS) / name)
            fields = _head(self._place, data)
            if fields is not None:
                found.append(fields["actor"])
        return tuple(found)

    def _check(self, actor: str | None, generation: int) -> None:
        tombstone.check(self._place, self._generation)
        _, now = self.get(actor)
        if now != generation:
            asked = f"a chain of session {self._place.identity.session!r}"
            law = f"it is at generation {now}, not {generation}"
            raise Conflict(
                say(asked, law, "Get it again, and put what follows from it")
            )


def manifests(place: Place) -> Mapping[str | None, bytes]:
    """Return every readable chain of a session, for who frees what they name."""
    folder, found = place.file(CHAINS), {}
    for name in place.io.names(folder):
        if name.endswith(_SUFFIX):
            fields = _head(place, place.io.read(folder / name))
            if fields is not None:
                found[fields["actor"]] = _read(place, fields["actor"])[1]
    return found


def drop_damaged(place: Place) -> None:
    """Take away chains that nobody can read for what they hold; under the lock."""
    folder = place.file(CHAINS)
    for name in place.io.names(folder):
        if _head(place, place.io.read(folder / name)) is None:
            place.io.unlink(folder / name)
            place.io.sync_dir(folder)


def _file_name(actor: str | None) -> str:
    if actor is None:
        return _NOBODY + _SUFFIX
    return _ACTOR + ids.to_path(ids.check_actor(actor)) + _SUFFIX


def _encoded(place: Place, actor: str | None, blob: bytes, generation: int) -> bytes:
    fields = place.identity.head(FORMAT) | {
        "actor": actor,
        "generation": generation,
        "nbytes": len(blob),
        "crc": zlib.crc32(blob),
    }
    return json.dumps(fields).encode() + b"\n" + blob


def _head(place: Place, data: bytes) -> dict | None:
    """Return the first line's fields if the file is whole and this session's."""
    head, _, blob = data.partition(b"\n")
    try:
        fields = json.loads(head)
        place.identity.check(fields, FORMAT)
        is_whole = (len(blob), zlib.crc32(blob)) == (fields["nbytes"], fields["crc"])
    except (ValueError, KeyError, AttributeError):
        return None
    return fields if is_whole else None


def _read(place: Place, actor: str | None) -> tuple[dict, bytes]:
    data = place.io.read(place.file(CHAINS) / _file_name(actor))
    fields = _head(place, data)
    if fields is None or fields["actor"] != actor:
        asked = f"the chain of {actor or 'the user'} in {place.identity.session!r}"
        law = "its file is damaged, of another version, or another session's"
        raise CorruptPage(say(asked, law, "It counts as no chain; put another"))
    return fields, data.partition(b"\n")[2]
