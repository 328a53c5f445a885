"""The table of a segment's chunks: one safetensors file beside the rows.

    keys        u8[C, 32]      parents     u8[C, 32]   zeros where it is not known
    tokens      i32[C, n]      checksums   u8[C, 16]

The law: the table is read as a few arrays and long byte strings, not as an object for
every field of every chunk: a root of many chunks opens in a time that grows with them
and no faster, because there is nothing for Python's collector to walk over.

    data = pack(keys, parents, tokens, checksums)
    keys, parents, tokens, checksums = unpack(data)
"""

from collections.abc import Sequence

import numpy as np
import safetensors.numpy

from kvmem.errors import CorruptPage, say
from kvmem.store.page_key import KEY_NBYTES

NAME = "chunks.safetensors"
SUM_NBYTES = 16
_NO_PARENT = bytes(KEY_NBYTES)  # no digest is zero

Key = bytes  # 32 of them: a `PageKey`, or what equals one


def pack(
    keys: Sequence[Key],
    parents: Sequence[Key | None],
    tokens: np.ndarray,
    checksums: Sequence[bytes],
) -> bytes:
    """Return the table's bytes; `unpack` reads them."""

    def table(rows) -> np.ndarray:
        return np.frombuffer(b"".join(rows), np.uint8).reshape(len(keys), -1)

    tensors = {
        "keys": table(keys),
        "parents": table(parent or _NO_PARENT for parent in parents),
        "tokens": np.ascontiguousarray(tokens, "<i4"),
        "checksums": table(checksums),
    }
    return safetensors.numpy.save(tensors)


def unpack(
    data: bytes,
) -> tuple[tuple[Key, ...], tuple[Key | None, ...], np.ndarray, tuple[bytes, ...]]:
    """Return keys, parents, tokens, checksums.

    Raises:
        CorruptPage: keys or checksums of another width.
    """
    tensors = safetensors.numpy.load(data)
    keys = _rows(tensors["keys"], KEY_NBYTES)
    known = dict(zip(keys, keys, strict=True)) | {_NO_PARENT: None}
    above = _rows(tensors["parents"], KEY_NBYTES)
    parents = tuple(known.get(row, row) for row in above)
    checksums = _rows(tensors["checksums"], SUM_NBYTES)
    return keys, parents, tensors["tokens"], checksums


def _rows(table: np.ndarray, nbytes: int) -> tuple[bytes, ...]:
    """Return the rows of u8[C, nbytes], each as bytes."""
    if table.shape[1] != nbytes:
        raise CorruptPage(
            say(
                f"a table of chunks with rows of {table.shape[1]} bytes",
                f"a key has {KEY_NBYTES} bytes and a checksum {SUM_NBYTES}",
                "Read it with the kvmem that wrote it",
            )
        )
    return tuple(np.ascontiguousarray(table).view(f"V{nbytes}").ravel().tolist())
