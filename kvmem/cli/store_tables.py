"""What `kvmem store` prints for a person: tables of segments, of ids, of chains.

Ages are counted from now; sizes are bytes. Ids stand in full; of a key so much that it
names one chunk in the next command.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.markup import escape

from kvmem import console
from kvmem.store import SegmentRow

__all__ = ["grouped", "show_chains", "show_facts", "show_problems", "show_segments"]
__all__ += ["sums"]

_MOST_CHAINS = 20
_KEY_CHARS = 16  # enough for --key, and for a narrow terminal


def show_segments(out: console.Console, rows: Sequence[SegmentRow]) -> None:
    """Print a table for each model and format, and a line of sums."""
    for ids, mine in grouped(rows).items():
        print(f"model  {ids[0]}\nformat {ids[1]}")
        table = console.table(
            "segments",
            *("segment", "status", "> chunks", "array", "> bytes"),
            *("> age", "> used"),
        )
        for row in mine:
            table.add_row(
                row.segment,
                row.status,
                console.count(row.num_chunks),
                escape(", ".join(f"{a.dtype}{list(a.shape)}" for a in row.arrays)),
                console.count(row.file_nbytes),
                age(row.created),
                age(row.used),
            )
        out.print(table)
        print(f"{sums(mine)}\n")
    if not rows:
        print("an empty store")


def show_problems(rows: Iterable[SegmentRow]) -> None:
    """Print what is wrong, one line a problem."""
    for row in rows:
        for problem in row.problems:
            print(f"{row.model_id}/{row.format_id}/{row.segment}: {problem}")


def show_facts(
    what: str, id_: str, facts: Mapping[str, Any] | None, holds: bool
) -> None:
    """Print one id, whether it is the digest of these facts, and each of them."""
    if facts is None:
        print(f"{what} id {id_}: the root does not say what it stands for\n")
        return
    verdict = "is the digest of" if holds else "IS NOT THE DIGEST OF"
    print(f"{what} id {id_} {verdict}:")
    for line in _lines(facts):
        print(f"  {line}")
    print()


def show_chains(out: console.Console, chains: Sequence[Mapping[str, Any]]) -> None:
    """Print where chains end, newest first."""
    table = console.table("chains", "last key", "> chunks", "> tokens", "> age")
    for chain in chains[:_MOST_CHAINS]:
        table.add_row(
            chain["key"][:_KEY_CHARS],
            console.count(chain["chunks"]),
            console.count(chain["tokens"]),
            age(chain["created"]),
        )
    out.print(table)
    if len(chains) > _MOST_CHAINS:
        print(f"and {len(chains) - _MOST_CHAINS:,} more: --json lists them all")


def grouped(rows: Iterable[SegmentRow]) -> dict[tuple[str, str], list[SegmentRow]]:
    """Return the rows of each model and format."""
    groups: dict[tuple[str, str], list[SegmentRow]] = {}
    for row in rows:
        groups.setdefault((row.model_id, row.format_id), []).append(row)
    return groups


def sums(rows: Sequence[SegmentRow]) -> str:
    """Return one line about the rows of a model and format."""
    chunks = sum(row.num_chunks for row in rows)
    tokens = sum(row.num_chunks * row.chunk_tokens for row in rows)
    nbytes = sum(row.file_nbytes for row in rows)
    sizes = sorted({(r.chunk_tokens, r.record_nbytes) for r in rows if r.num_chunks})
    cut = "; ".join(f"{chunk} tokens of {record:,} B" for chunk, record in sizes)
    bad = sum(row.status != "ok" for row in rows)
    return (
        f"{chunks:,} chunks ({cut or 'none'}), {tokens:,} tokens, {nbytes:,} B in "
        f"{len(rows)} segments, {bad} not ok"
    )


def age(seconds: float) -> str:
    """Return how long ago a time was, in the unit that suits it."""
    if not seconds:
        return "-"
    passed = max(0.0, time.time() - seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if passed >= 2 * length:
            return f"{passed / length:.0f} {unit}"
    return f"{passed:.0f} s"


def _lines(value: Any, key: str = "") -> list[str]:
    """Spell nested facts, a leaf or a row of leaves a line."""
    if isinstance(value, Mapping):
        pairs = [(f"{key}.{name}" if key else name, v) for name, v in value.items()]
    elif isinstance(value, list) and not all(map(_is_cell, value)):
        pairs = [(f"{key}[{i}]", v) for i, v in enumerate(value)]
    else:
        return [f"{key} = {value!r}"]
    return [line for name, inner in pairs for line in _lines(inner, name)]


def _is_cell(value: Any) -> bool:
    """Say whether a value is a leaf, or a list of leaves such as a shape."""
    if isinstance(value, list):
        return not any(isinstance(each, Mapping | list) for each in value)
    return not isinstance(value, Mapping)
