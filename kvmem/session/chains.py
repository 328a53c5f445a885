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
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvmem.errors import Conflict, CorruptPage, FormatMismatch, say
from kvmem.session import files, ids, log, materialise, tombstone
from kvmem.session.identity import Identity
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
            held = _read(self._place, actor)
        except (FileNotFoundError, CorruptPage):
            return None, 0
        return held.blob, held.generation

    def fault(self, actor: str | None = None) -> str | None:
        """Return why a chain that is there reads as none, None where all is well."""
        try:
            _read(self._place, actor)
        except FileNotFoundError:
            return None
        except CorruptPage as bad:
            return str(bad)
        return None

    def put(
        self,
        actor: str | None,
        blob: bytes,
        generation: int,
        is_stale: Callable[[], bool] = lambda: False,
    ) -> int:
        """Replace a chain durably and return its new generation.

        Args:
            actor: whose chain.
            blob: its bytes.
            generation: the one that `get` returned, 0 where there was none.
            is_stale: asked under the session's lock, where no forgetting can come
                between: what the chain holds was forgotten meanwhile.

        Raises:
            Conflict: another put came between, or it is stale.
            Deleted: the session was deleted.
        """
        with self._place.locked():
            self._check(actor, generation)
            if is_stale():
                asked = f"a chain of session {self._place.identity.session!r}"
                law = "something that it holds was forgotten meanwhile"
                raise Conflict(say(asked, law, "Feed what the log says now"))
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
        return tuple(manifests(self._place))

    def _check(self, actor: str | None, generation: int) -> None:
        tombstone.check(self._place, self._generation)
        _, now = self.get(actor)
        if now != generation:
            asked = f"a chain of session {self._place.identity.session!r}"
            law = f"it is at generation {now}, not {generation}"
            raise Conflict(
                say(asked, law, "Get it again, and put what follows from it")
            )


class Held(NamedTuple):
    """What a chain's file says: whose it is, and the chain's own bytes."""

    identity: Identity
    actor: str | None
    generation: int
    blob: bytes


def parse(data: bytes) -> Held | None:
    """Return what the bytes of a file say, None where they are no whole chain."""
    head, _, blob = data.partition(b"\n")
    try:
        fields = json.loads(head)
        identity = Identity(*(fields[name] for name in Identity._fields))
        identity.check(fields, FORMAT)
        is_whole = (len(blob), zlib.crc32(blob)) == (fields["nbytes"], fields["crc"])
        held = Held(identity, fields["actor"], fields["generation"], blob)
    except (ValueError, KeyError, TypeError, FormatMismatch):
        return None
    return held if is_whole else None


def manifests(place: Place) -> Mapping[str | None, bytes]:
    """Return every readable chain of a session, for who frees what they name."""
    folder = place.file(CHAINS)
    names = (name for name in place.io.names(folder) if name.endswith(_SUFFIX))
    every = (_own(place, place.io.read(folder / name)) for name in names)
    return {held.actor: held.blob for held in every if held is not None}


def drop_all(place: Place) -> None:
    """Take every chain away, for want of who cuts them; under the lock.

    For who frees the pages that they named, see `unnamed`.
    """
    folder = place.file(CHAINS)
    names = place.io.names(folder)
    for name in names:
        place.io.unlink(folder / name)
    if names:
        place.io.sync_dir(folder)


def drop_damaged(place: Place) -> None:
    """Take away chains that nobody can read for what they hold; under the lock."""
    folder = place.file(CHAINS)
    for name in place.io.names(folder):
        if _own(place, place.io.read(folder / name)) is None:
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


def _own(place: Place, data: bytes) -> Held | None:
    """Return what the bytes of a file say if it is whole and this session's."""
    held = parse(data)
    return held if held and held.identity == place.identity else None


def _read(place: Place, actor: str | None) -> Held:
    held = _own(place, place.io.read(place.file(CHAINS) / _file_name(actor)))
    if held is None or held.actor != actor:
        asked = f"the chain of {actor or 'the user'} in {place.identity.session!r}"
        law = "its file is damaged, of another version, or another session's"
        raise CorruptPage(say(asked, law, "It counts as no chain; put another"))
    return held
