"""The root folder: what all models and formats in it share, and who may write.

    _store.json     layout version and chunk size: they are the root's own
    _writer.lock    flock of the one writer

The law: a root is opened with the chunk size it was made with, or not at all; a folder
that holds something else is never turned into a store; and names that become folders
are safe as such. The root's own files start with "_", which no identity does.

    lock = take(root, chunk_tokens=16)     # make it if new, and be its writer
"""

import collections
import json
import re
from pathlib import Path

from kvmem.errors import ConfigError, CorruptPage, FormatMismatch, InvalidId, say
from kvmem.store import durable, manifest
from kvmem.store.index import Index
from kvmem.store.io import DISK, Disk
from kvmem.store.segment import Facts

META = "_store.json"
LOCK = "_writer.lock"
VERSION = 1
_SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def take(root: Path, asked: int, disk: Disk = DISK) -> durable.WriterLock:
    """Become the writer of `root`, making it if it is new."""
    _refuse_other_folder(root)
    durable.make_folder(root, disk)
    lock = durable.WriterLock(root / LOCK)
    try:
        if not (root / META).exists():
            facts = {"kind": "kvmem store", "version": VERSION}
            text = json.dumps(facts | {"chunk_tokens": asked})
            durable.write_file(root / META, text.encode() + b"\n", disk)
        check(root, asked)
    except BaseException:
        lock.release()
        raise
    return lock


def chunk_tokens(root: Path) -> int:
    """Return the chunk size of a root, or raise unless it is a store that we read."""
    version, found = _read_meta(root)
    if version != VERSION:
        raise FormatMismatch(
            say(
                f"opening {root} of layout version {version}",
                f"this kvmem reads version {VERSION}",
                "Use the kvmem that wrote it, or another root",
            )
        )
    return found


def check(root: Path, asked: int) -> None:
    """Raise unless `root` is a store of this layout version and chunk size."""
    found = chunk_tokens(root)
    if found != asked:
        raise FormatMismatch(
            say(
                f"opening {root} with chunk_tokens={asked}",
                f"the root was made with chunk_tokens={found}, for all that is in it",
                f"Use chunk_tokens={found}, or another root",
            )
        )


def check_facts(facts: Facts) -> None:
    """Raise unless both identities can name folders and both sizes are sizes."""
    for role in ("model_id", "format_id"):
        identity = getattr(facts, role)
        if not isinstance(identity, str) or not is_id(identity):
            raise InvalidId(
                say(
                    f"{role} {identity!r}",
                    "it names a folder: 1 to 128 of A-Z a-z 0-9 . _ -, "
                    "first a letter or digit",
                    "Use a digest, or replace the other characters",
                )
            )
    for role in ("record_nbytes", "chunk_tokens"):
        if getattr(facts, role) < 1:
            raise ConfigError(
                say(
                    f"{role}={getattr(facts, role)}",
                    "a record has bytes and a chunk has tokens",
                    "Use a number above 0",
                )
            )


def is_id(name: str) -> bool:
    """Say whether a store could have given a folder this name."""
    return bool(_SAFE_ID.fullmatch(name))


def _read_meta(root: Path) -> tuple[int, int]:
    """Return layout version and chunk size."""
    try:
        meta = json.loads((root / META).read_bytes())
        return meta["version"], meta["chunk_tokens"]
    except (FileNotFoundError, NotADirectoryError) as missing:
        raise ConfigError(
            say(
                f"opening {root} read-only",
                f"it has no {META}, so there is no store",
                _cure(root, "open it once for writing"),
            )
        ) from missing
    except (ValueError, KeyError, TypeError) as damage:
        raise CorruptPage(
            say(
                f"reading {root / META}",
                f"it is not what a store writes there ({damage})",
                "Restore it; every segment's manifest says the chunk size",
            )
        ) from damage


def _cure(root: Path, otherwise: str) -> str:
    """Return what helps where the root's own file is missing."""
    if not any(root.glob("*/*/*/" + manifest.NAME)):
        return f"Check the path, or {otherwise}"
    text = f'{{"kind": "kvmem store", "version": {VERSION}, "chunk_tokens": N}}'
    return (
        f"If this was a store, write {text} back as {META}, with the chunk_tokens that "
        f"the {manifest.NAME} of any segment says"
    )


def _refuse_other_folder(root: Path) -> None:
    """Raise if `root` holds something that is not a store."""
    if not root.exists():
        return
    ours = {META, META + ".tmp", LOCK}
    if not root.is_dir() or (
        not (root / META).exists() and any(p.name not in ours for p in root.iterdir())
    ):
        raise ConfigError(
            say(
                f"a page store in {root}",
                f"there is something else: no {META} among what is there",
                _cure(root, "use an empty or a new folder"),
            )
        )


def explain(root: Path, facts: Facts, held: Index) -> tuple[str, str]:
    """Return a miss's reason and words about what the root holds instead.

    "format" where what is here was written in another format or layout, "model" where
    it is another model's, else "not_found".
    """
    refused = collections.Counter(each.status for each in list(held.unusable.values()))
    reason, other = _explain(root, facts, held, refused)
    if unread := refused["damaged"] + refused["unreachable"]:
        other += f"; {unread} segments cannot be read"
    return reason, other


def _explain(root, facts, held, refused) -> tuple[str, str]:
    if refused["version"]:
        return (
            "format",
            f"; {refused['version']} segments are of another layout version",
        )
    if held.segments:
        return "not_found", ""
    foreign = [each.found for each in list(held.unusable.values()) if each.found]
    formats = {each.format_id for each in foreign if each.model_id == facts.model_id}
    formats |= set(_folders(root / facts.model_id)) - {facts.format_id}
    if formats:
        return "format", f"; of this model the root holds {_some(formats)}"
    models = {each.model_id for each in foreign} | set(_folders(root))
    if models := models - {facts.model_id}:
        return "model", f"; the root holds models {_some(models)}"
    return "not_found", ""


def _folders(folder: Path) -> list[str]:
    """Return the names of the folders in a folder that have something in them."""
    if not folder.is_dir():
        return []
    return [
        each.name for each in folder.iterdir() if each.is_dir() and any(each.iterdir())
    ]


def _some(names: set[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(first) + (" and others" if len(names) > 3 else "")
