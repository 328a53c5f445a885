"""Safetensors files as mapped host arrays, bfloat16 included.

The library checks the file (header, offsets, length) and writes it; this maps it, since
its numpy reader copies every tensor and knows no bfloat16. Law: arrays are read-only
views of the mapped file, alive as long as any of them is.

    tensors = read("model.safetensors")      # no bytes are read yet
"""

import json
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors

from kvmem.errors import FormatMismatch, say

__all__ = ["FLOATS", "read"]

FLOATS = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


def read(path: Path, dtypes: Mapping[str, np.dtype] = FLOATS) -> dict[str, np.ndarray]:
    """Map the tensors of one file.

    Args:
        path: of the file.
        dtypes: of elements that are read, by the format's names.

    Raises:
        FormatMismatch: the file is damaged, or holds elements of another dtype.
    """
    try:
        with safetensors.safe_open(path, framework="np"):
            pass
    except safetensors.SafetensorError as error:
        raise FormatMismatch(
            say(f"reading {path}", str(error), "Fetch or write the whole file again")
        ) from error
    with path.open("rb") as file:
        header_nbytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_nbytes))
    header.pop("__metadata__", None)
    found = {name: entry["dtype"] for name, entry in header.items()}
    _require_dtypes(path, found, dtypes)
    mapped = np.memmap(path, np.uint8, "r", offset=8 + header_nbytes)
    return {name: _view(mapped, entry, dtypes) for name, entry in header.items()}


def _view(mapped: np.memmap, entry: dict, dtypes: Mapping[str, np.dtype]) -> np.ndarray:
    """View one tensor's bytes as its elements."""
    start, stop = entry["data_offsets"]
    elements = mapped[start:stop].view(np.ndarray).view(dtypes[entry["dtype"]])
    return elements.reshape(entry["shape"])


def _require_dtypes(
    path: Path, found: Mapping[str, str], dtypes: Mapping[str, np.dtype]
) -> None:
    """Refuse elements that nobody asked for: integers and fp8 are quantised weights."""
    odd = {name: dtype for name, dtype in found.items() if dtype not in dtypes}
    if odd:
        name, dtype = next(iter(odd.items()))
        raise FormatMismatch(
            say(
                f"{len(odd)} tensors of {path} ({name}: {dtype}, …)",
                f"weights are read as {', '.join(dtypes)}, without dequantising",
                "Use the checkpoint that was not quantised",
            )
        )
