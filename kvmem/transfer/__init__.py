"""Transfer: between a pool's pages and token records.

The only room that knows both sides. `export_records` and `import_records` are the
verbs; `choose` says which executor runs them and why. The host executor is numpy on
the arrays' own memory (CPU); the device executor is a jax program for any backend;
both move the same bytes.
"""

from kvmem.transfer.choose import IMPLEMENTATIONS, Choice, choose
from kvmem.transfer.records import export_records, import_records
from kvmem.transfer.window import Window

__all__ = [
    "IMPLEMENTATIONS",
    "Choice",
    "Window",
    "choose",
    "export_records",
    "import_records",
]
