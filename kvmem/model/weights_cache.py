"""Dequantised models kept on disk, so that a GGUF file is parsed and expanded once.

    $KVMEM_CACHE (else ~/.cache/kvmem)/gguf/<SHA-256 of the file>.<scheme>/
        tensors.safetensors     float32, mapped on load
        model.json              line 1: SHA-256 of line 2; line 2: spec, tokenizer,
                                SHA-256 of every tensor

Law: what `fetch` returns was checked byte for byte; anything else is a miss, and the
next `keep` replaces it. An entry appears by one rename. The key is the file's content,
so a file that changed in place is another entry. Deleting the folder is always safe.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import numpy as safetensors_numpy

from kvmem import geometry
from kvmem.errors import FormatMismatch
from kvmem.model import loaded, tensor_file
from kvmem.model.spec import ModelSpec
from kvmem.model.tokenizer import Tokenizer

__all__ = ["MAX_NBYTES", "fetch", "fetch_spec", "folder", "keep", "key_of"]

MAX_NBYTES = 4 << 30  # a larger model is dequantised anew rather than fill the disk
_SCHEME = 1  # raise it whenever a loader's result changes
_ABANDONED_S = 24 * 3600

_log = logging.getLogger(__name__)


def folder() -> Path:
    """Return where entries live."""
    root = os.environ.get("KVMEM_CACHE") or Path.home() / ".cache" / "kvmem"
    return Path(root) / "gguf"


def key_of(path: Path) -> str:
    """Return the key of a source file: its content's digest and our scheme."""
    with path.open("rb") as file:
        return f"{hashlib.file_digest(file, 'sha256').hexdigest()}.{_SCHEME}"


def fetch(key: str, source: str) -> loaded.LoadedModel | None:
    """Return the model kept under `key`, or None if there is none that is whole."""
    entry = folder() / key
    if not entry.is_dir():
        return None
    try:
        facts = _facts(entry)
        params = tensor_file.read(entry / "tensors.safetensors")
        digests = loaded.tensor_digests(params)
        if digests != facts["digests"]:
            raise FormatMismatch("a tensor differs from its digest")
    except (FormatMismatch, OSError, ValueError, KeyError) as error:
        _log.warning("cached model %s is damaged (%s); it is built anew", entry, error)
        return None
    spec = _spec(facts["spec"])
    tokenizer = Tokenizer.from_state(facts["tokenizer"])
    return loaded.LoadedModel(spec, params, tokenizer, source, digests)


def fetch_spec(key: str) -> ModelSpec | None:
    """Return the facts of the model kept under `key`; its weights are not looked at."""
    try:
        return _spec(_facts(folder() / key)["spec"])
    except (FormatMismatch, OSError, ValueError, KeyError):
        return None


def keep(key: str, model: loaded.LoadedModel) -> bool:
    """Write an entry, replacing a damaged one; say whether it now stands there.

    A disk that is full or read-only costs later loads their speed and nothing else, so
    it is logged, not raised.
    """
    if model.nbytes > MAX_NBYTES:
        return False
    try:
        folder().mkdir(parents=True, exist_ok=True)
        _sweep()
        scratch = Path(tempfile.mkdtemp(prefix=".tmp-", dir=folder()))
        try:
            _write(scratch, model)
            _put(scratch, folder() / key)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        _log.warning("cannot keep %s in %s: %s", model.source, folder(), error)
        return False
    return True


def _write(scratch: Path, model: loaded.LoadedModel) -> None:
    """Fill a scratch folder with the files of an entry."""
    tensors = scratch / "tensors.safetensors"
    safetensors_numpy.save_file(dict(model.params), tensors)
    facts = {
        "spec": dataclasses.asdict(model.spec),
        "tokenizer": model.tokenizer.state(),
        "digests": dict(model.digests or loaded.tensor_digests(model.params)),
    }
    line = json.dumps(facts, ensure_ascii=True)
    seal = hashlib.sha256(line.encode()).hexdigest()
    (scratch / "model.json").write_text(f"{seal}\n{line}\n", "utf-8")


def _put(scratch: Path, entry: Path) -> None:
    """Rename a filled scratch folder to its place, over whatever stands there."""
    if entry.exists():
        aside = Path(tempfile.mkdtemp(prefix=".tmp-", dir=entry.parent))
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            os.rename(entry, aside / "old")
        shutil.rmtree(aside, ignore_errors=True)
    os.rename(scratch, entry)


def _sweep() -> None:
    """Remove scratch folders that a killed process left behind a day ago."""
    for path in folder().glob(".tmp-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(path, ignore_errors=True)


def _facts(entry: Path) -> dict[str, Any]:
    """Read and check an entry's facts."""
    seal, _, line = (entry / "model.json").read_text("utf-8").partition("\n")
    if hashlib.sha256(line.removesuffix("\n").encode()).hexdigest() != seal:
        raise FormatMismatch("model.json differs from its digest")
    return json.loads(line)


def _spec(facts: Mapping[str, Any]) -> ModelSpec:
    """Make a spec from its JSON form; lists are tuples again."""
    rope = dict(facts["rope"])
    if rope["frequencies"] is not None:
        rope["frequencies"] = tuple(rope["frequencies"])
    changed = {"rope": geometry.Rope(**rope), "eos_ids": tuple(facts["eos_ids"])}
    return ModelSpec(**{**facts, **changed})
