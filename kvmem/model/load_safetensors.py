"""Real models from Hugging Face checkpoint directories.

Reads config.json, model.safetensors (or its shards by index), tokenizer.json. Law: the
tensors are exactly those the config asks for, in the dtype that was asked for; a tensor
that is missing, unknown or of another shape is named.

    model = load("Llama-3.2-1B-Instruct")
    model.params["model.embed_tokens.weight"].dtype       # float32
"""

import concurrent.futures
import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kvmem import geometry
from kvmem.errors import FormatMismatch, say
from kvmem.model import config_hf, tensor_file, tokenizer
from kvmem.model.loaded import LoadedModel
from kvmem.model.spec import ModelSpec

__all__ = ["load"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def load(directory: Path | str, dtype: str = "float32") -> LoadedModel:
    """Read a checkpoint directory.

    Args:
        directory: holds config.json, safetensors, tokenizer.json.
        dtype: of the returned tensors; those stored so are mapped, not copied.

    Raises:
        FormatMismatch: a file is missing or damaged, or the model is not supported.
    """
    directory = Path(directory)
    _require_files(directory)
    spec = config_hf.read(directory / "config.json")
    stored = _without_surplus(_stored(directory), spec)
    spec.require({name: array.shape for name, array in stored.items()}, str(directory))
    words = tokenizer.from_checkpoint(directory, spec.eos_ids)
    if words.max_id >= spec.vocab:
        raise FormatMismatch(
            say(
                f"the tokenizer of {directory} with ids up to {words.max_id}",
                f"the model has embeddings for {spec.vocab} ids",
                "Use the tokenizer.json that belongs to the weights",
            )
        )
    params = _cast(stored, geometry.np_dtype(dtype))
    return LoadedModel(spec, params, words, str(directory))


def _require_files(directory: Path) -> None:
    """Refuse a directory without config or safetensors."""
    has = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
    if "config.json" not in has or not has & {_SINGLE, _INDEX}:
        raise FormatMismatch(
            say(
                f"the checkpoint {directory}",
                f"a checkpoint directory holds config.json and {_SINGLE} (or {_INDEX})",
                "Save it with `save_pretrained(…)`, or give the path of a .gguf file",
            )
        )


def _stored(directory: Path) -> dict[str, np.ndarray]:
    """Map every tensor of the single file or of the index's shards."""
    if not (directory / _INDEX).is_file():
        return tensor_file.read(directory / _SINGLE)
    places = json.loads((directory / _INDEX).read_text("utf-8"))["weight_map"]
    shards = {}
    for name in sorted(set(places.values())):
        path = directory / name
        if Path(name).name != name or not path.is_file():
            raise FormatMismatch(
                say(
                    f"shard {name!r} of {directory}",
                    f"{_INDEX} names it and the directory does not hold it",
                    "Fetch the whole checkpoint",
                )
            )
        shards[name] = tensor_file.read(path)
    missing = [name for name, shard in places.items() if name not in shards[shard]]
    if missing:
        raise FormatMismatch(
            say(
                f"tensor {missing[0]} of {directory}",
                f"{_INDEX} places it in {places[missing[0]]}, which does not hold it",
                "Fetch the whole checkpoint",
            )
        )
    return {name: shards[shard][name] for name, shard in places.items()}


def _without_surplus(
    stored: Mapping[str, np.ndarray], spec: ModelSpec
) -> dict[str, np.ndarray]:
    """Drop what older writers add: rope buffers, a second copy of a tied embedding."""
    return {
        name: array
        for name, array in stored.items()
        if not name.endswith(".rotary_emb.inv_freq")
        and not (spec.tie_embeddings and name == "lm_head.weight")
    }


def _cast(stored: Mapping[str, np.ndarray], dtype: np.dtype) -> dict[str, np.ndarray]:
    """Convert in threads; arrays of that dtype stay mapped."""

    def one(array: np.ndarray) -> np.ndarray:
        return array.astype(dtype, copy=False)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
        return dict(zip(stored, threads.map(one, stored.values()), strict=True))
