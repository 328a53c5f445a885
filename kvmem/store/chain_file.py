"""One chain of chunks as a safetensors file, for whoever has no kvmem.

    records     u8[tokens, record_nbytes]
    tokens      i32[tokens]
    keys        u8[chunks, 32]
    metadata    model_id, format_id, chunk_tokens, record_nbytes, starts, fields

The law: what is written was verified as every read is, and says how much of the chain
it is: `starts` is "at token 0" where the first key proves it, else "unknown" (a chain
with extras, or one whose beginning is not held). `fields` is what the records mean, as
JSON, where the root explains it.

    chain = chain_to(find, key)                # keys and tokens, first chunk first
    write("out.safetensors", facts, chain, found.records, fields)
"""

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.numpy

from kvmem.store.page_key import KEY_NBYTES, PageKey, link, seed
from kvmem.store.parts import whole_id
from kvmem.store.segment import Facts

_OS_ERROR = re.compile(r"os error (\d+)")


class Link(NamedTuple):
    """A held chunk: its tokens, and the key that it continues if that is known."""

    tokens: np.ndarray  # i32[chunk_tokens]
    parent: PageKey | None
    created: float = 0.0  # seconds since the epoch


class Chain(NamedTuple):
    """Chunks that follow one another."""

    keys: tuple[PageKey, ...]
    tokens: np.ndarray  # i32[chunks, chunk_tokens]


def chain_to(find: Callable[[PageKey], Link | None], key: PageKey) -> Chain:
    """Return the held chunks that end with `key`, as far back as parents are known.

    It ends before a chunk that it has: no text goes in circles, a damaged one might.
    """
    keys: list[PageKey] = []
    tokens = []
    at: PageKey | None = key
    seen: set[PageKey] = set()
    while at is not None and at not in seen and (found := find(at)) is not None:
        keys.append(at)
        seen.add(at)
        tokens.append(found.tokens)
        at = found.parent
    return Chain(tuple(reversed(keys)), np.array(tokens[::-1], np.int32))


def write(
    path: str | Path,
    facts: Facts,
    chain: Chain,
    records: np.ndarray,
    fields: dict[str, Any] | None,
) -> None:
    """Write a chain's leading chunks, as many as there are records.

    Raises:
        OSError: the path cannot be written.
    """
    num_chunks = len(records) // facts.chunk_tokens
    keys, tokens = chain.keys[:num_chunks], chain.tokens[:num_chunks]
    metadata = {
        "model_id": facts.model_id,
        "format_id": facts.format_id,
        "chunk_tokens": str(facts.chunk_tokens),
        "record_nbytes": str(facts.record_nbytes),
        "starts": "at token 0" if _is_first(facts, keys, tokens) else "unknown",
    }
    if fields is not None:
        metadata["fields"] = json.dumps(fields, sort_keys=True)
    table = np.frombuffer(b"".join(keys), np.uint8).reshape(num_chunks, KEY_NBYTES)
    tensors = {
        "records": np.ascontiguousarray(records),
        "tokens": np.ascontiguousarray(tokens.reshape(-1), np.int32),
        "keys": table,
    }
    try:
        safetensors.numpy.save_file(tensors, path, metadata)
    except safetensors.SafetensorError as error:
        if code := _OS_ERROR.search(str(error)):
            number = int(code[1])
            raise OSError(number, os.strerror(number), str(path)) from error
        raise


def _is_first(facts: Facts, keys: Sequence[PageKey], tokens: np.ndarray) -> bool:
    """Say whether the first key is that of a plain text's first chunk."""
    start = seed(f"{facts.model_id}/{whole_id(facts.format_id)}")
    return bool(keys) and link(start, tokens[0]) == keys[0]
