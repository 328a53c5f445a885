"""Tables: a plan as the integers that device kernels take.

Kernels know nothing of layers and heads: a call of `pallas_kernels.export_records`, or
of its mirrors, is a table of runs that are alike. The law: the runs of all tables are a
rank's page, each byte once, padding aside; a field whose keys turn is asked for alone.

    for runs in tables(plan, rank):
        layout = Layout(runs.nbytes, runs.slot_stride, runs.slots)
        records = dispatch.run("export_records", records, pages[rank], page_ids,
                               runs.table, first_token, layout=layout)
"""

import collections
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from kvmem import errors
from kvmem.canonical import CopyPlan, record_offsets

__all__ = ["Runs", "tables"]


class Runs(NamedTuple):
    """Runs of a page that are alike: a head of a field of a layer each, in bytes.

    Slot s of run k is bytes [table[k, 0] + s * slot_stride, + nbytes) of a page, and
    bytes [table[k, 1], + nbytes) of that token's record.
    """

    nbytes: int
    slot_stride: int
    slots: int
    table: np.ndarray  # i32[K, 2]


def tables(
    plan: CopyPlan, rank: int = 0, fields: Collection[str] | None = None
) -> tuple[Runs, ...]:
    """Return the runs of a rank's pages, those of one width and distance together.

    Args:
        fields: names of fields, "k" say; None: all.

    Raises:
        IncompatiblePlan: pages whose slots are not a sequence's tokens in a row, or
            that lie in several places.
    """
    _require_one_run_of_tokens(plan, rank)
    record = record_offsets(plan.group)
    alike = collections.defaultdict(list)
    for entry in plan.envelope(rank).entries:
        field = entry.field
        if fields is not None and field.name not in fields:
            continue
        for head in range(entry.nheads):
            start = entry.offset + head * field.head_nbytes
            name = field.layer, field.name, entry.head0 + head
            alike[field.head_nbytes, entry.slot_stride].append((start, record[name]))
    slots = plan.group.page_size
    return tuple(
        Runs(*sizes, slots, np.array(rows, np.int32)) for sizes, rows in alike.items()
    )


def _require_one_run_of_tokens(plan: CopyPlan, rank: int) -> None:
    faults = []
    if plan.topology.dcp > 1:
        faults.append(f"tokens go by turns to {plan.topology.dcp} ranks")
    built = plan.envelope(rank)
    if len(built.planes) > 1 or built.extents > 1:
        parts = len(built.planes) * built.extents
        faults.append(f"a page is parted over {parts} places")
    if faults:
        raise errors.IncompatiblePlan(
            errors.say(
                f"group {plan.group.name!r} as tables of runs",
                "; ".join(faults),
                "Use export_records and import_records of this room, which serve all",
            )
        )
