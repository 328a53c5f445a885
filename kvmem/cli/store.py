"""Look at a store of token records, verify it, tidy it, export a chain.

    kvmem store ls ROOT          what is there: ids, shapes, dtypes, sizes, ages
    kvmem store show ROOT        every field behind both ids, and where chains end
    kvmem store verify ROOT      read every byte; exit code 1 where damage is found
    kvmem store gc ROOT          sweep leftovers, rewrite what is less than half live
    kvmem store export ROOT --key HEX --out chain.safetensors

No device is touched, and only gc becomes the root's writer. ROOT is a folder, or
s3://bucket/prefix.
"""

import dataclasses
import json
from collections.abc import Sequence

from kvmem import console
from kvmem.cli import store_tables
from kvmem.cli.store_arguments import Arguments, bad, rows_of, verdict
from kvmem.cli.store_export import export
from kvmem.cli.store_gc import gc
from kvmem.cli.store_show import show
from kvmem.store import SegmentRow
from kvmem.store.bucket import scheme_of

__all__ = ["Arguments", "run"]

_DAMAGE = ("damaged", "foreign", "unreachable")
_USES = {"export": ("key", "tokens", "out"), "gc": ("max_nbytes",)}


def run(arguments: Arguments) -> int:
    """Do one action and return its exit code."""
    _refuse_idle(arguments)
    rows = rows_of(arguments)
    actions = {"show": show, "gc": gc, "export": export}
    return actions.get(arguments.action, _list)(arguments, rows)


def _list(arguments: Arguments, rows: Sequence[SegmentRow]) -> int:
    """Print what is there, and what is wrong with it."""
    if arguments.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
    else:
        store_tables.show_segments(console.out(), rows)
        store_tables.show_problems(rows)
    return verdict(any(row.status in _DAMAGE for row in rows))


def _refuse_idle(arguments: Arguments) -> None:
    """Raise for an option that the action has no use for, or a root it cannot take."""
    action, root = arguments.action, arguments.root
    asked = f"kvmem store {action}"
    others = {name for names in _USES.values() for name in names}
    idle = [n for n in others - set(_USES.get(action, ())) if getattr(arguments, n)]
    if not scheme_of(root):
        idle += [n for n in ("endpoint", "region") if getattr(arguments, n)]
    if idle:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(idle))
        raise bad(f"{asked} with {flags}", "it has no use for that", "Leave it out")
    if action == "export" and not (
        arguments.out and bool(arguments.key) != bool(arguments.tokens)
    ):
        raise bad(
            asked,
            "an export is one chain into one file",
            "Give --out FILE and one of --key HEX and --tokens FILE",
        )
