"""`kvmem store export`: one chain as a safetensors file, for whoever has no kvmem.

The law: what is written was verified, and it says how much of the chain it is.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from kvmem import errors, store
from kvmem.cli import store_tables
from kvmem.cli.store_arguments import Arguments, bad, facts_of, verdict
from kvmem.store import SegmentRow, chain_file, facts_file

__all__ = ["export"]

_NOT_READ = ("checksum", "damaged", "deadline", "unreachable")


def export(arguments: Arguments, rows: Sequence[SegmentRow]) -> int:
    """Write one chain as far as it can be read; an unreadable chunk is damage."""
    facts = _one_format(arguments, rows)
    ids = facts.model_id, facts.format_id
    sizes = facts.record_nbytes, facts.chunk_tokens
    with store.open_root(
        arguments.root, *ids, *sizes, read_only=True, **arguments.place
    ) as kept:
        chain = _chain(arguments, facts, kept.links())
        found = kept.get(chain.keys, chain.tokens)
    if not chain.keys:
        raise bad(
            f"an export of what {arguments.tokens} says",
            f"a chunk here is {facts.chunk_tokens} tokens, and the file has fewer",
            "Give at least one whole chunk of tokens",
        )
    if not found.num_hit and found.reason in _NOT_READ:
        raise errors.CorruptPage(
            errors.say(
                f"an export of {len(chain.keys)} chunks",
                f"the first of them cannot be read ({found.reason}: {found.detail})",
                "See kvmem store verify for what is damaged",
            )
        )
    if not found.num_hit:
        raise bad(
            f"an export of {len(chain.keys)} chunks",
            f"none of them can be read ({found.reason}: {found.detail})",
            "See kvmem store show for the chains there are",
        )
    fields = facts_file.read(arguments.root, *ids, **arguments.place).format
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
    return verdict(found.reason in _NOT_READ)


def _chain(
    arguments: Arguments,
    facts: store.Facts,
    links: Mapping[store.PageKey, chain_file.Link],
) -> chain_file.Chain:
    """Return the keys and tokens that were asked for."""
    if arguments.tokens:
        ids = _read_tokens(arguments.tokens)
        namespace = f"{facts.model_id}/{store.whole_id(facts.format_id)}"
        keys = store.chain_keys(namespace, ids, facts.chunk_tokens)
        whole = np.array(ids[: len(keys) * facts.chunk_tokens], np.int32)
        return chain_file.Chain(keys, whole.reshape(-1, facts.chunk_tokens))
    matches = [key for key in links if key.hex().startswith(arguments.key.lower())]
    if len(matches) != 1:
        raise bad(
            f"a chain that ends with the key {arguments.key}",
            f"{len(matches)} chunks have a key that starts so",
            "Give the key of one; kvmem store show lists where chains end",
        )
    return chain_file.chain_to(links.get, matches[0])


def _read_tokens(path: str) -> list[int]:
    try:
        text = Path(path).read_text()
        found = json.loads(text) if text.lstrip().startswith("[") else text.split()
        return [int(each) for each in found]
    except (ValueError, TypeError) as error:
        raise bad(
            f"tokens from {path}", str(error), "Write ids as a JSON list, or by spaces"
        ) from error


def _one_format(arguments: Arguments, rows: Sequence[SegmentRow]) -> store.Facts:
    """Return the facts of the one model and format that has chunks."""
    groups = store_tables.grouped(row for row in rows if row.num_chunks)
    if len(groups) != 1:
        there = ", ".join("/".join(ids) for ids in groups) or "no chunk"
        raise bad(
            f"an export from {arguments.root}",
            f"it holds {there}",
            "Choose one model and format with --model and --format",
        )
    return facts_of(next(iter(groups.values())))
