"""`kvmem store gc`: sweep leftovers, keep to a budget, rewrite what is sparse.

The law: it is the root's one writer while it runs, or refused; what cannot be read is
kept, and said so.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from kvmem import settings, store
from kvmem.cli import store_tables
from kvmem.cli.store_arguments import Arguments, facts_of, verdict
from kvmem.store import SegmentRow, bucket, object_root, root_folder
from kvmem.store.bucket import scheme_of

__all__ = ["gc"]


def gc(arguments: Arguments, rows: Sequence[SegmentRow]) -> int:
    """Tidy each model and format; what could not be read is damage."""
    limit = arguments.max_nbytes
    most = settings.parse_nbytes(limit) if limit else None
    chunk, reports, shut = _chunk_tokens(arguments), [], []
    for (model_id, format_id), mine in store_tables.grouped(rows).items():
        if closed := [row for row in mine if not row.segment]:
            shut += closed
            continue
        if not (root_folder.is_id(model_id) and root_folder.is_id(format_id)):
            continue  # no store made that folder, and gc leaves strangers alone
        facts = facts_of(mine)
        record = facts.record_nbytes if facts else 1  # nothing here has records
        ids = model_id, format_id, record, chunk
        limits = {"max_nbytes": most} | arguments.place
        with store.open_root(arguments.root, *ids, **limits) as kept:
            done = dataclasses.asdict(kept.gc())
        done["swept"] = [*kept.swept, *done["swept"]]
        reports.append({"model_id": model_id, "format_id": format_id} | done)
    if arguments.json:
        print(json.dumps(reports, indent=2))
    for report in () if arguments.json else reports:
        print(f"model  {report['model_id']}\nformat {report['format_id']}")
        for name in ("swept", "dropped", "rewritten", "written", "kept"):
            print(f"  {name:<9} {', '.join(report[name]) or '-'}")
        print(f"  {'freed':<9} {report['freed_nbytes']:,} B")
        if report["unread_nbytes"]:
            print(
                f"  {'unread':<9} {report['unread_nbytes']:,} B, which stay and count"
            )
    if not arguments.json:
        store_tables.show_problems(shut)
    return verdict(bool(shut) or any(report["kept"] for report in reports))


def _chunk_tokens(arguments: Arguments) -> int:
    """Return the chunk size that belongs to the root."""
    if scheme_of(arguments.root):
        objects = bucket.open_bucket(arguments.root, **arguments.place)
        return object_root.chunk_tokens(objects)
    return root_folder.chunk_tokens(Path(arguments.root))
