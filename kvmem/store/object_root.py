"""The root of an object store: what all models and formats below a prefix share.

    _store.json     layout version and chunk size, as in a root folder

The law: a prefix is opened with the chunk size it was made with, or not at all; one
that holds something else is never turned into a store; and one whose server has no
conditional put is never written to.

    make(objects, chunk_tokens=16)     # make it if new, and check it
"""

import json

from kvmem.errors import ConfigError, CorruptPage, FormatMismatch, say
from kvmem.store import root_folder
from kvmem.store.bucket import Bucket
from kvmem.store.writer_lease import NAME


def make(objects: Bucket, chunk_tokens: int) -> None:
    """Make an empty prefix a store, and check one that is."""
    objects.require_conditional_put()
    if objects.read(root_folder.META) is None:
        names = [n for n in objects.names() if n != NAME and not n.startswith("_probe")]
        if names:
            raise ConfigError(
                say(
                    f"a page store in {objects.url}",
                    f"there is something else: {names[0]}, and no {root_folder.META}",
                    "Use an empty prefix",
                )
            )
        facts = {"kind": "kvmem store", "version": root_folder.VERSION}
        text = json.dumps(facts | {"chunk_tokens": chunk_tokens})
        objects.put_new(root_folder.META, text.encode() + b"\n")
    check(objects, chunk_tokens)


def chunk_tokens(objects: Bucket) -> int:
    """Return the chunk size of a root, or raise unless it is a store that we read."""
    version, found = _read_meta(objects)
    if version != root_folder.VERSION:
        raise FormatMismatch(
            say(
                f"opening {objects.url} of layout version {version}",
                f"this kvmem reads version {root_folder.VERSION}",
                "Use the kvmem that wrote it, or another root",
            )
        )
    return found


def check(objects: Bucket, asked: int) -> None:
    """Raise unless the prefix is a store of this layout version and chunk size."""
    found = chunk_tokens(objects)
    if found != asked:
        raise FormatMismatch(
            say(
                f"opening {objects.url} with chunk_tokens={asked}",
                f"the root was made with chunk_tokens={found}, for all that is in it",
                f"Use chunk_tokens={found}, or another root",
            )
        )


def _read_meta(objects: Bucket) -> tuple[int, int]:
    """Return layout version and chunk size."""
    data = objects.read(root_folder.META)
    if data is None:
        raise ConfigError(
            say(
                f"looking at {objects.url}",
                f"it has no {root_folder.META}, so there is no store",
                "Check the URL, or open it once for writing",
            )
        )
    try:
        meta = json.loads(data)
        return meta["version"], meta["chunk_tokens"]
    except (ValueError, KeyError, TypeError) as damage:
        raise CorruptPage(
            say(
                f"reading {objects.url}/{root_folder.META}",
                f"it is not what a store writes there ({damage})",
                "Restore it; every segment's manifest says the chunk size",
            )
        ) from damage
