"""Transfer: between a pool's pages and token records.

The only room that knows both sides. `export_records` and `import_records` are the
verbs; `take_slots` and `put_slots` move rows that are named one by one; `choose` says
which executor runs them and why. The host executor is numpy on the arrays' own memory
(CPU); the device executor is a jax program for any backend; both move the same bytes.
`certify` proves that a model's write path, page order, sharding and executor make the
records that everyone else reads. `rerotate` moves the keys of records to other places.
`tables` is a plan as device kernels take it.
"""

from kvmem.transfer.arrays import Pages, as_bytes, from_bytes
from kvmem.transfer.certify import certify, require_certified
from kvmem.transfer.choose import IMPLEMENTATIONS, Choice, choose
from kvmem.transfer.records import export_records, import_records
from kvmem.transfer.rerotate import rerotate
from kvmem.transfer.slots import put_slots, take_slots
from kvmem.transfer.states import export_state, import_state
from kvmem.transfer.tables import Runs, tables
from kvmem.transfer.window import Window

__all__ = [
    "IMPLEMENTATIONS",
    "Choice",
    "Pages",
    "Runs",
    "Window",
    "as_bytes",
    "certify",
    "choose",
    "export_records",
    "export_state",
    "from_bytes",
    "import_records",
    "import_state",
    "put_slots",
    "require_certified",
    "rerotate",
    "tables",
    "take_slots",
]
