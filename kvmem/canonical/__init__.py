"""The canonical form: what every topology calls the same byte.

Token records, derived from envelopes: mapping (one page of one rank), plan (all ranks),
elect (which of them writes a byte), compose (one side's pages into another's), judge
(is it the right bijection?), format (what the bytes mean, as an id). Pure numpy, no
jax: this room is arithmetic on byte addresses.

The law: the records of tokens [a, c) are those of [a, b) followed by those of [b, c),
and nothing in them depends on topology, page size or page order.
"""

from kvmem.canonical.compose import Copy, compose
from kvmem.canonical.elect import Turn
from kvmem.canonical.format import FORMAT_VERSION, format_fields, format_id
from kvmem.canonical.grid import RunGrid, grids
from kvmem.canonical.judge import Objection, judge
from kvmem.canonical.mapping import (
    RECORD,
    canonical_envelope,
    mapping,
    record_offsets,
)
from kvmem.canonical.plan import CopyPlan, check, plan
from kvmem.canonical.runs import CopyRun

__all__ = [
    "FORMAT_VERSION",
    "RECORD",
    "Copy",
    "CopyPlan",
    "CopyRun",
    "Objection",
    "RunGrid",
    "Turn",
    "canonical_envelope",
    "check",
    "compose",
    "format_fields",
    "format_id",
    "grids",
    "judge",
    "mapping",
    "plan",
    "record_offsets",
]
