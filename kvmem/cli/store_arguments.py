"""What the actions of `kvmem store` share: their arguments, a root's rows, verdicts.

The law: a folder and a bucket are asked in the same words, and answer in the same rows.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Literal

import tyro

from kvmem import console, errors, store
from kvmem.store import SegmentRow, object_report
from kvmem.store.bucket import scheme_of

__all__ = ["Arguments", "bad", "facts_of", "rows_of", "verdict"]


def _text(metavar: str, *aliases: str) -> object:
    note = tyro.conf.arg(
        metavar=metavar, aliases=aliases, help_behavior_hint="(default: none)"
    )
    return Annotated[str, note]


@dataclasses.dataclass(frozen=True)
class Arguments(console.Common):
    """Look at a store of token records, verify it, tidy it, export a chain.

    Args:
        action: ls: what is there; show: every field behind both ids, and where chains
            end; verify: read every byte; gc: sweep leftovers and rewrite what is less
            than half live; export: write one chain as safetensors.
        root: a folder, or s3://bucket/prefix.
        model: start of the model id, where a root holds several.
        format: start of the format id, likewise.
        key: export: start of the last key of a chain.
        tokens: export: file with the token ids of a text, as JSON or apart by spaces.
        out: export: the file to write.
        max_nbytes: gc: evict until each model and format takes no more.
        endpoint: address of an s3:// root's server, if not Amazon's.
        region: region of an s3:// root's bucket.
        json: print JSON instead of tables.
    """

    action: tyro.conf.Positional[Literal["ls", "show", "verify", "gc", "export"]]
    root: tyro.conf.Positional[str]
    model: _text("ID") = ""
    format: _text("ID") = ""
    key: _text("HEX") = ""
    tokens: _text("FILE") = ""
    out: _text("FILE", "-o") = ""
    max_nbytes: _text("BYTES") = ""
    endpoint: _text("URL") = ""
    region: _text("REGION") = ""
    json: bool = False

    @property
    def place(self) -> dict[str, str | None]:
        """Where an object store's server is."""
        return {"endpoint": self.endpoint or None, "region": self.region or None}


def rows_of(arguments: Arguments) -> tuple[SegmentRow, ...]:
    """Return what the root holds of the models and formats that were asked for."""
    verify = arguments.action == "verify"
    if scheme_of(arguments.root):
        rows = object_report.inspect(arguments.root, verify, **arguments.place)
    else:
        rows = store.inspect(arguments.root, verify)
    models = _named(arguments.model, {row.model_id for row in rows})
    rows = [row for row in rows if row.model_id in models]
    formats = _named(arguments.format, {row.format_id for row in rows})
    return tuple(row for row in rows if row.format_id in formats)


def _named(start: str, ids: set[str]) -> set[str]:
    """Return the id that was written out, or those that start so."""
    return (
        {start}
        if start and start in ids
        else {id_ for id_ in ids if id_.startswith(start)}
    )


def facts_of(rows: Sequence[SegmentRow]) -> store.Facts | None:
    """Return what readable segments say of themselves, None if there are none."""
    for row in rows:
        if row.num_chunks:
            return store.Facts(
                row.model_id, row.format_id, row.chunk_tokens, row.record_nbytes
            )
    return None


def verdict(is_damaged: bool) -> int:
    """Return the exit code of an action that found damage, or none."""
    return console.CHECK_FAILED if is_damaged else console.DONE


def bad(asked: str, law: str, cure: str) -> errors.ConfigError:
    """Return the error of bad input, in three beats."""
    return errors.ConfigError(errors.say(asked, law, cure))
