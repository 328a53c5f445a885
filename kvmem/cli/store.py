"""Look at a store of token records, verify it, tidy it, export a chain.

    kvmem store ls ROOT          what is there: ids, shapes, dtypes, sizes, ages
    kvmem store show ROOT        every field behind both ids, and where chains end
    kvmem store verify ROOT      read every byte; exit code 1 where damage is found
    kvmem store gc ROOT          sweep leftovers, rewrite what is less than half live
    kvmem store export ROOT --key HEX --out chain.safetensors

No device is touched, and only gc takes the writer's lock. ROOT is a folder; ls, verify
and export take s3://bucket/prefix too.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from kvmem import canonical, console, errors, settings, store
from kvmem.cli import store_tables
from kvmem.model import loaded
from kvmem.store import (
    SegmentRow,
    chain_file,
    facts_file,
    folder_shelf,
    index,
    object_report,
    root_folder,
)
from kvmem.store.bucket import scheme_of

__all__ = ["Arguments", "run"]

_DAMAGE = ("damaged", "foreign")
_USES = {"export": ("key", "tokens", "out"), "gc": ("max_nbytes",)}


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


def run(arguments: Arguments) -> int:
    """Do one action and return its exit code."""
    _refuse_idle(arguments)
    rows = _rows(arguments)
    actions = {"show": _show, "gc": _gc, "export": _export}
    return actions.get(arguments.action, _list)(arguments, rows)


def _list(arguments: Arguments, rows: Sequence[SegmentRow]) -> int:
    """Print what is there, and what is wrong with it."""
    if arguments.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
    else:
        store_tables.show_segments(console.out(), rows)
        store_tables.show_problems(rows)
    return _verdict(any(row.status in _DAMAGE for row in rows))


def _show(arguments: Arguments, rows: Sequence[SegmentRow]) -> int:
    """Print what ids stand for; an id that is not the digest of its facts is damage."""
    found = [
        _explained(arguments.root, *ids, mine)
        for ids, mine in store_tables.grouped(rows).items()
    ]
    if arguments.json:
        print(json.dumps(found, indent=2))
    for each in () if arguments.json else found:
        for what in ("model", "format"):
            said = each[what]
            store_tables.show_facts(what, said["id"], said["facts"], said["holds"])
        store_tables.show_chains(console.out(), each["chains"])
        print(f"{each['sums']}\n")
    said = [each[what] for each in found for what in ("model", "format")]
    return _verdict(any(s["facts"] is not None and not s["holds"] for s in said))


def _explained(
    root: str, model_id: str, format_id: str, rows: Sequence[SegmentRow]
) -> dict[str, Any]:
    """Return all that a root says of one model and format."""
    model, fields = facts_file.read(root, model_id, format_id)
    facts = _facts(rows)
    return {
        "model": {
            "id": model_id,
            "facts": model,
            "holds": model is not None and loaded.id_of(model) == model_id,
        },
        "format": {
            "id": format_id,
            "facts": fields,
            "holds": fields is not None and canonical.format.id_of(fields) == format_id,
        },
        "chains": _chains(_index(root, facts)) if facts else [],
        "segments": len(rows),
        "sums": store_tables.sums(rows),
    }


def _chains(held: index.Index) -> list[dict[str, Any]]:
    """Return where chains end, newest first."""
    places, links = held.places, _links(held)
    continued = {place.parent for place in places.values()}
    found = []
    for key in places.keys() - continued:
        num_chunks = len(chain_file.chain_to(links.get, key).keys)
        found.append(
            {
                "key": key.hex(),
                "chunks": num_chunks,
                "tokens": num_chunks * places[key].segment.facts.chunk_tokens,
                "created": places[key].segment.created,
            }
        )
    return sorted(found, key=lambda chain: (-chain["created"], chain["key"]))


def _gc(arguments: Arguments, rows: Sequence[SegmentRow]) -> int:
    """Tidy each model and format; a chunk that could not be read is damage."""
    limit = arguments.max_nbytes
    most = settings.parse_nbytes(limit) if limit else None
    chunk, reports = root_folder.chunk_tokens(Path(arguments.root)), []
    for (model_id, format_id), mine in store_tables.grouped(rows).items():
        facts = _facts(mine)
        record = facts.record_nbytes if facts else 1  # nothing here has records
        ids = model_id, format_id, record, chunk
        with store.PageStore.open(arguments.root, *ids, max_nbytes=most) as kept:
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
    return _verdict(any(report["kept"] for report in reports))


def _export(arguments: Arguments, rows: Sequence[SegmentRow]) -> int:
    """Write one chain as far as it can be read; an unreadable chunk is damage."""
    facts = _one_format(arguments, rows)
    ids = facts.model_id, facts.format_id
    sizes = facts.record_nbytes, facts.chunk_tokens
    is_url, fields = scheme_of(arguments.root), None
    with store.open_root(
        arguments.root, *ids, *sizes, read_only=True, **arguments.place
    ) as kept:
        links = kept.links() if is_url else _links(_index(arguments.root, facts))
        chain = _chain(arguments, facts, links)
        found = kept.get(chain.keys, chain.tokens)
    if not found.num_hit:
        raise _bad(
            f"an export of {len(chain.keys)} chunks",
            f"none of them can be read ({found.reason}: {found.detail})",
            "See kvmem store show for the chains there are",
        )
    if not is_url:
        fields = facts_file.read(arguments.root, *ids).format
    chain_file.write(arguments.out, facts, chain, found.records, fields)
    said = {
        "out": arguments.out,
        "tokens": len(found.records),
        "chunks": found.num_hit,
        "asked": len(chain.keys),
        "reason": found.reason,
        "detail": found.detail,
    }
    if arguments.json:
        print(json.dumps(said, indent=2))
    else:
        print(
            f"{said['tokens']:,} tokens in {said['chunks']:,} of {said['asked']:,} "
            f"chunks to {arguments.out}" + f" ({found.reason})" * bool(found.reason)
        )
    return _verdict(found.reason in ("checksum", "damaged"))


def _chain(
    arguments: Arguments,
    facts: store.Facts,
    links: Mapping[store.PageKey, chain_file.Link],
) -> chain_file.Chain:
    """Return the keys and tokens that were asked for."""
    if arguments.tokens:
        ids = _read_tokens(arguments.tokens)
        namespace = f"{facts.model_id}/{facts.format_id}"
        keys = store.chain_keys(namespace, ids, facts.chunk_tokens)
        whole = np.array(ids[: len(keys) * facts.chunk_tokens], np.int32)
        return chain_file.Chain(keys, whole.reshape(-1, facts.chunk_tokens))
    matches = [key for key in links if key.hex().startswith(arguments.key.lower())]
    if len(matches) != 1:
        raise _bad(
            f"a chain that ends with the key {arguments.key}",
            f"{len(matches)} chunks have a key that starts so",
            "Give the key of one; kvmem store show lists where chains end",
        )
    return chain_file.chain_to(links.get, matches[0])


def _read_tokens(path: str) -> list[int]:
    text = Path(path).read_text()
    try:
        found = json.loads(text) if text.lstrip().startswith("[") else text.split()
        return [int(each) for each in found]
    except (ValueError, TypeError) as error:
        raise _bad(
            f"tokens from {path}", str(error), "Write ids as a JSON list, or by spaces"
        ) from error


def _index(root: str, facts: store.Facts) -> index.Index:
    return folder_shelf.rebuild(Path(root) / facts.model_id / facts.format_id, facts)


def _links(held: index.Index) -> dict[store.PageKey, chain_file.Link]:
    return {
        key: chain_file.Link(place.segment.tokens[place.row], place.parent)
        for key, place in held.places.items()
    }


def _rows(arguments: Arguments) -> tuple[SegmentRow, ...]:
    """Return what the root holds of the models and formats that were asked for."""
    verify = arguments.action == "verify"
    if scheme_of(arguments.root):
        rows = object_report.inspect(arguments.root, verify, **arguments.place)
    else:
        rows = store.inspect(arguments.root, verify)
    return tuple(
        row
        for row in rows
        if row.model_id.startswith(arguments.model)
        and row.format_id.startswith(arguments.format)
    )


def _facts(rows: Sequence[SegmentRow]) -> store.Facts | None:
    """Return what readable segments say of themselves, None if there are none."""
    for row in rows:
        if row.num_chunks:
            return store.Facts(
                row.model_id, row.format_id, row.chunk_tokens, row.record_nbytes
            )
    return None


def _one_format(arguments: Arguments, rows: Sequence[SegmentRow]) -> store.Facts:
    """Return the facts of the one model and format that has chunks."""
    groups = store_tables.grouped(row for row in rows if row.num_chunks)
    if len(groups) != 1:
        there = ", ".join("/".join(ids) for ids in groups) or "no chunk"
        raise _bad(
            f"an export from {arguments.root}",
            f"it holds {there}",
            "Choose one model and format with --model and --format",
        )
    return _facts(next(iter(groups.values())))


def _refuse_idle(arguments: Arguments) -> None:
    """Raise for an option that the action has no use for, or a root it cannot take."""
    action, root = arguments.action, arguments.root
    asked = f"kvmem store {action}"
    others = {name for names in _USES.values() for name in names}
    idle = [n for n in others - set(_USES.get(action, ())) if getattr(arguments, n)]
    if scheme_of(root):
        if action in ("show", "gc"):
            raise _bad(
                f"{asked} {root}",
                "it reads the files of a folder",
                "Use ls, verify or export for a URL",
            )
    else:
        idle += [n for n in ("endpoint", "region") if getattr(arguments, n)]
    if idle:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(idle))
        raise _bad(f"{asked} with {flags}", "it has no use for that", "Leave it out")
    if action == "export" and not (
        arguments.out and bool(arguments.key) != bool(arguments.tokens)
    ):
        raise _bad(
            asked,
            "an export is one chain into one file",
            "Give --out FILE and one of --key HEX and --tokens FILE",
        )


def _verdict(is_damaged: bool) -> int:
    return console.CHECK_FAILED if is_damaged else console.DONE


def _bad(asked: str, law: str, cure: str) -> errors.ConfigError:
    return errors.ConfigError(errors.say(asked, law, cure))
