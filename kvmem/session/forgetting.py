"""Notes of forgettings that are not done: what a retry could not know any more.

A memory is known by its uri, and where it was told before it was changed or moved by
what it was then; but its item goes first. The law: the note is durable before an item
is erased, it holds digests and never words, and it goes when nothing is left to clean.
So a forgetting that was cut off, or that met damage, is completed by the next, moved
items and all.

    memory = begun(store, ("lab", "ann"), Memory("memories/tea", digests))
    done(store, ("lab", "ann"), memory)
"""

import json
from collections.abc import Iterator
from pathlib import Path

from kvmem.session import files, ids, place
from kvmem.session.forget import Memory
from kvmem.session.identity import VERSION

FORMAT = "kvmem.session.forgetting"
_FOLDER = ".forgetting"


def begun(store, owner: tuple[str, str], memory: Memory) -> Memory:
    """Note a forgetting durably; return the memory with what notes before it know."""
    notes = [known for _, known in _notes(store, owner, memory)]
    digests = frozenset().union(*(known.digests for known in notes))
    uris = frozenset().union(*(known.uris for known in notes))
    is_known = memory.digests <= digests and memory.uris <= uris
    memory = memory._replace(digests=memory.digests | digests, uris=memory.uris | uris)
    if not is_known:
        folder = _folder(store, owner)
        files.make_folder(store.io, folder, store.root)
        fields = {
            "format": FORMAT,
            "version": VERSION,
            "account": owner[0],
            "user": owner[1],
            "uri": memory.uri,
            "digests": sorted(memory.digests),
            "uris": sorted(memory.uris),
        }
        path = folder / f"{ids.to_path(memory.uri)}.json"
        files.write(store.io, path, json.dumps(fields).encode())
    return memory


def done(store, owner: tuple[str, str], memory: Memory) -> None:
    """Take the notes of a forgetting away: nothing is left of the memory."""
    notes = list(_notes(store, owner, memory))
    for path, _ in notes:
        store.io.unlink(path)
    if notes:
        store.io.sync_dir(_folder(store, owner))


def _notes(
    store, owner: tuple[str, str], memory: Memory
) -> Iterator[tuple[Path, Memory]]:
    """Yield the notes of a uri and of all below it: each file, and what it knows."""
    folder = _folder(store, owner)
    for name in store.io.names(folder):
        try:
            fields = json.loads(store.io.read(folder / name))
            if (fields["version"], fields["account"], fields["user"]) != (
                VERSION,
                *owner,
            ):
                continue
            digests = frozenset(map(str, fields["digests"]))
            uris = frozenset(map(str, fields.get("uris", ())))  # of an older kvmem
            known = Memory(fields["uri"], digests, uris)
        except (ValueError, KeyError, TypeError):  # cut off: nothing was erased yet
            continue
        if memory.is_at(known.uri):
            yield folder / name, known


def _folder(store, owner: tuple[str, str]) -> Path:
    return place.sessions_folder(store.root, *owner) / _FOLDER
