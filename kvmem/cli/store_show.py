"""`kvmem store show`: what the two ids of a root stand for, and where its chains end.

The law: an id that is not the digest of the facts beside it is damage, and said so.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvmem import canonical, console, store
from kvmem.cli import store_tables
from kvmem.cli.store_arguments import Arguments, facts_of, verdict
from kvmem.model import loaded
from kvmem.store import SegmentRow, chain_file, facts_file

__all__ = ["show"]


def show(arguments: Arguments, rows: Sequence[SegmentRow]) -> int:
    """Print what ids stand for; an id that is not the digest of its facts is damage."""
    found = [
        _explained(arguments, *ids, mine)
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
    return verdict(any(s["facts"] is not None and not s["holds"] for s in said))


def _explained(
    arguments: Arguments, model_id: str, format_id: str, rows: Sequence[SegmentRow]
) -> dict[str, Any]:
    """Return all that a root says of one model and format."""
    root, place = arguments.root, arguments.place
    model, fields = facts_file.read(root, model_id, format_id, **place)
    facts, chains = facts_of(rows), []
    if facts:
        sizes = facts.record_nbytes, facts.chunk_tokens
        ids = model_id, format_id
        with store.open_root(root, *ids, *sizes, read_only=True, **place) as kept:
            chains = _chains(kept.links(), facts.chunk_tokens)
    return {
        "model": {
            "id": model_id,
            "facts": model,
            "holds": model is not None and loaded.id_of(model) == model_id,
        },
        "format": {
            "id": format_id,
            "facts": fields,
            "holds": fields is not None
            and canonical.format.id_of(fields) == store.whole_id(format_id),
        },
        "chains": chains,
        "segments": len(rows),
        "sums": store_tables.sums(rows),
    }


def _chains(
    links: Mapping[bytes, chain_file.Link], chunk_tokens: int
) -> list[dict[str, Any]]:
    """Return where chains end, newest first."""
    continued = {link.parent for link in links.values()}
    found = []
    for key in links.keys() - continued:
        num_chunks = len(chain_file.chain_to(links.get, key).keys)
        found.append(
            {
                "key": key.hex(),
                "chunks": num_chunks,
                "tokens": num_chunks * chunk_tokens,
                "created": links[key].created,
            }
        )
    return sorted(found, key=lambda chain: (-chain["created"], chain["key"]))
