"""What a bucket holds, for whoever looks at it: read-only, no lease, no device.

The law: every manifest under the prefix has a row, and so has every folder of objects
without one; the rows are those of `report.inspect`.

    object_report.inspect("s3://bucket/kv", endpoint="http://127.0.0.1:9000")
"""

import dataclasses
import re

from kvmem.errors import CorruptPage
from kvmem.store import bucket, manifest, object_root, object_segment
from kvmem.store.bucket import Bucket
from kvmem.store.object_segment import MANIFESTS, ObjectSegment
from kvmem.store.report import SegmentRow, arrays
from kvmem.store.segment import Facts

_NAME = re.compile(rf"([^/]+)/([^/]+)/(?:{MANIFESTS}/(\d+)\.json|(\d+)-[0-9a-f]+/.+)")


def inspect(
    url: str,
    verify: bool = False,
    endpoint: str | None = None,
    region: str | None = None,
) -> tuple[SegmentRow, ...]:
    """Return a row for every segment under a URL, by model, format and number.

    Raises:
        ConfigError: there is no store, or no such scheme.
        FormatMismatch: a root of another layout version.
        OSError: the server refused, or did not answer.
    """
    objects = bucket.open_bucket(url, endpoint, region)
    object_root.chunk_tokens(objects)
    committed, folders = set(), set()
    for match in filter(None, map(_NAME.fullmatch, objects.names())):
        model_id, format_id, number, of_folder = match.groups()
        found = committed if number else folders
        found.add((model_id, format_id, int(number or of_folder)))
    rows = [_row(objects, *each, verify) for each in committed]
    rows += [
        SegmentRow(*ids, f"{number:08d}", "unfinished", ("it has no manifest",))
        for *ids, number in folders - committed
    ]
    kept = filter(None, rows)
    return tuple(sorted(kept, key=lambda r: (r.model_id, r.format_id, r.segment)))


def _row(
    objects: Bucket, model_id: str, format_id: str, number: int, verify: bool
) -> SegmentRow | None:
    """Return a committed segment's row, None for a fence and for what went away."""
    ids = model_id, format_id
    facts = _own_facts(objects, Facts(*ids, 1, 1), number)
    found = object_segment.load(objects, facts, number)
    if found is None:
        return None
    if not isinstance(found, ObjectSegment):
        said = f"{number:08d}", found.status, (found.detail,)
        return SegmentRow(*ids, *said, file_nbytes=found.file_nbytes)
    problems = object_segment.inspect(found) if verify else ()
    if problems and not object_segment.is_there(found):
        return None  # its writer took it away meanwhile
    return SegmentRow(
        *ids,
        found.name,
        "damaged" if problems else "ok",
        problems,
        num_chunks=len(found.keys),
        chunk_tokens=facts.chunk_tokens,
        record_nbytes=facts.record_nbytes,
        nbytes=found.nbytes,
        file_nbytes=sum(nbytes for nbytes, _ in found.objects.values()),
        created=found.created,
        used=found.created,
        arrays=arrays(found),
    )


def _own_facts(objects: Bucket, place: Facts, number: int) -> Facts:
    """Return the sizes that a segment says it has, under the ids of its place."""
    name = object_segment.manifest_name(place, number)
    try:
        said = manifest.unpack(objects.read(name) or b"").get("facts", {})
        sizes = {k: said[k] for k in ("chunk_tokens", "record_nbytes")}
    except (CorruptPage, KeyError):
        return place
    return dataclasses.replace(place, **sizes)
