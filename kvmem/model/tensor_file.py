"""Safetensors files as mapped host arrays, bfloat16 included.

The library checks the file (header, offsets, length) and writes it; this maps it, since
its numpy reader copies every tensor and knows no bfloat16. Law: arrays are read-only
views of the mapped file, alive as long as any of them is.

    tensors = read("model.safetensors")      # no bytes are read yet
"""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors

from kvmem.errors import FormatMismatch, say

__all__ = ["read"]

_DTYPES = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


def read(path: Path) -> dict[str, np.ndarray]:
    """Map the tensors of one file.

    Raises:
        FormatMismatch: the file is damaged, or holds elements that are no plain floats.
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
    _require_floats(path, {name: entry["dtype"] for name, entry in header.items()})
    mapped = np.memmap(path, np.uint8, "r", offset=8 + header_nbytes)
    return {name: _view(mapped, entry) for name, entry in header.items()}


def _view(mapped: np.memmap, entry: dict) -> np.ndarray:
    """View one tensor's bytes as its elements."""
    start, stop = entry["data_offsets"]
    elements = mapped[start:stop].view(np.ndarray).view(_DTYPES[entry["dtype"]])
    return elements.reshape(entry["shape"])


def _require_floats(path: Path, dtypes: dict[str, str]) -> None:
    """Refuse integer and fp8 tensors, which mean quantised weights."""
    odd = {name: dtype for name, dtype in dtypes.items() if dtype not in _DTYPES}
    if odd:
        name, dtype = next(iter(odd.items()))
        raise FormatMismatch(
            say(
                f"{len(odd)} tensors of {path} ({name}: {dtype}, …)",
                f"weights are read as {', '.join(_DTYPES)}, without dequantising",
                "Use the checkpoint that was not quantised",
            )
        )
