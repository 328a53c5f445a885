"""What a call of put or get may hand to a store of records: keys, tokens, records.

The law: every store asks for the same shapes and says the same words when they differ,
so that one can stand in another's place.

    keys, tokens = checked_request(facts, keys, tokens)    # tokens i32[n, chunk_tokens]
    rows = checked_rows(facts, len(keys), records)         # u8[n, row_nbytes]
    new = new_positions(keys, lambda i: said_of(tokens[i], rows[i]), held)
"""

from collections.abc import Callable, Sequence

import numpy as np

from kvmem.errors import Conflict, FormatMismatch, InvalidId, say
from kvmem.store import durable
from kvmem.store.page_key import PageKey, token_array
from kvmem.store.segment import Facts

Said = tuple[bytes, bytes]  # a chunk's tokens, and the checksum of its records


def checked_request(
    facts: Facts, keys: Sequence[PageKey], tokens: np.ndarray
) -> tuple[list[PageKey], np.ndarray]:
    """Return n keys and their tokens, i32[n, chunk_tokens], or raise FormatMismatch."""
    keys = [PageKey(key) for key in keys]
    tokens = token_array(tokens)
    shape = len(keys), facts.chunk_tokens
    if tokens.shape not in (shape, (shape[0] * shape[1],)):
        raise FormatMismatch(
            say(
                f"tokens of shape {tokens.shape} for {len(keys)} keys",
                f"a key stands for {shape[1]} tokens, so their shape is {shape}",
                "Pass the tokens of full chunks, one key each",
            )
        )
    return keys, tokens.reshape(shape)


def checked_rows(facts: Facts, num_chunks: int, records: np.ndarray) -> np.ndarray:
    """Return the records as u8[num_chunks, row_nbytes], or raise FormatMismatch."""
    chunk, record = facts.chunk_tokens, facts.record_nbytes
    shapes = (num_chunks * chunk, record), (num_chunks, chunk, record)
    is_array = hasattr(records, "dtype") and hasattr(records, "shape")
    if not is_array or records.dtype != np.uint8 or records.shape not in shapes:
        what = f"{records.dtype}{list(records.shape)}" if is_array else type(records)
        raise FormatMismatch(
            say(
                f"records {what}",
                f"{num_chunks} chunks of {chunk} tokens of {record} bytes are "
                f"uint8{list(shapes[0])}",
                "View the bytes as uint8, one record a token",
            )
        )
    return np.ascontiguousarray(records).reshape(num_chunks, chunk * record)


def checked_parent(keys: Sequence[PageKey], parent: PageKey | None) -> PageKey | None:
    """Return what the first key continues, or raise InvalidId."""
    if parent is None:
        return None
    parent = PageKey(parent)
    if parent in keys:
        raise InvalidId(
            say(
                f"put of {len(keys)} chunks that continue {parent!r}",
                "it is one of them, and no text continues itself",
                "Pass the key before the first one, or no parent",
            )
        )
    return parent


def said_of(tokens: np.ndarray, row: np.ndarray) -> Said:
    """Return what a chunk's key will stand for: i32[chunk_tokens], u8[row_nbytes]."""
    return tokens.tobytes(), durable.digest(row)


def new_positions(
    keys: Sequence[PageKey],
    said: Callable[[int], Said],
    held: Callable[[PageKey], Said | None],
) -> list[int]:
    """Return which chunks are not held, each key once, or raise Conflict.

    Args:
        keys: n keys.
        said: what the key at a position would stand for; asked for where it matters.
        held: what a key stands for in the store, None if it is not held.
    """
    new, first = [], {}
    for i, key in enumerate(keys):
        taken = held(key)
        if taken is None and key not in first:
            first[key] = i
            new.append(i)
            continue
        taken, mine = taken or said(first[key]), said(i)
        if taken != mine:
            same_tokens = taken[0] == mine[0]
            what = "records" if same_tokens else "tokens"
            raise Conflict(
                say(
                    f"put of chunk {i} under {key!r}",
                    f"the key is taken with other {what}, and a key names one content",
                    "Put only what lies beyond contains(keys)"
                    if same_tokens
                    else "Make keys with chain_keys from the tokens that are put",
                )
            )
    return new
