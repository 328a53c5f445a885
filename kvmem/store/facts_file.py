"""What the two ids of a store stand for, as JSON beside the segments.

    <model_id>/_model.json                  every fact that the model id digests
               _format.<format_id>.json     every field that the format id digests

The law: these files explain and nothing depends on them: a store is read without. They
are facts only as far as an id is their digest, which `kvmem store show` works out anew.

    facts_file.write(store, model.facts, canonical.format_fields(groups))
    facts_file.read(root, model_id, format_id)      # Facts, None where there is no file
"""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvmem.store import bucket, durable
from kvmem.store.object_store import ObjectStore
from kvmem.store.page_store import PageStore
from kvmem.store.parted_store import PartedStore
from kvmem.store.parts import whole_id


class Explained(NamedTuple):
    """What the files of one model and format say; None where there is none."""

    model: dict[str, Any] | None
    format: dict[str, Any] | None


def names(model_id: str, format_id: str) -> tuple[str, str]:
    """Return the two files' names below the root; a part is explained by its whole."""
    return f"{model_id}/_model.json", f"{model_id}/_format.{whole_id(format_id)}.json"


def write(
    store: PageStore | PartedStore | ObjectStore,
    model: Mapping[str, Any],
    format_: Mapping[str, Any],
) -> None:
    """Explain a writable store's ids, unless that was done in these words."""
    ids = store.facts.model_id, store.facts.format_id
    for name, said in zip(names(*ids), (model, format_), strict=True):
        data = json.dumps(said, indent=1, sort_keys=True).encode() + b"\n"
        if isinstance(store, ObjectStore):
            store.put_beside(name, data)
            continue
        path = store.root / name
        with contextlib.suppress(OSError):
            if path.read_bytes() == data:
                continue
        durable.write_file(path, data)


def read(
    root: str | Path,
    model_id: str,
    format_id: str,
    endpoint: str | None = None,
    region: str | None = None,
) -> Explained:
    """Return what a root's files say; one that is no JSON object says nothing.

    Args:
        root: a folder, or s3://bucket/prefix.
        model_id: of which model.
        format_id: of which format.
        endpoint: where an object store's server is.
        region: of the bucket.

    Raises:
        OSError: the server refused, or did not answer.
    """
    is_url = bucket.scheme_of(root)
    objects = bucket.open_bucket(str(root), endpoint, region) if is_url else None
    found = []
    for name in names(model_id, format_id):
        try:
            data = objects.read(name) if objects else _read_file(Path(root) / name)
            said = json.loads(data or b"")
        except ValueError:
            said = None
        found.append(said if isinstance(said, dict) else None)
    return Explained(*found)


def _read_file(path: Path) -> bytes | None:
    """Return a file's bytes, None where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return None
