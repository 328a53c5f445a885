"""A tiny checkpoint on disk, so that experiments run in seconds where no model is.

Random weights of a few thousand parameters and a tokenizer of bytes, written as
config.json, model.safetensors and tokenizer.json: what any llama-family folder holds,
and read by the same loader. A config asks for it by `source = "tiny"`.

    folder = write(pathlib.Path("runs/tiny"))
"""

import dataclasses
import json
import pathlib

import numpy as np
import safetensors.numpy

from kvmem.config import ModelConfig
from kvmem.model import presets
from kvmem.model.hybrid import random_model
from kvmem.model.loaded import LoadedModel

__all__ = ["SOURCE", "load", "write"]

SOURCE = "tiny"
_FOLDER = pathlib.Path("runs") / "tiny-decoder"

_FACTS = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 257,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": None,
    "eos_token_id": 256,
    "torch_dtype": "float32",
}


def load(config: ModelConfig) -> tuple[ModelConfig, LoadedModel]:
    """Load the model of a config, "tiny" being written first; return both."""
    if config.facts is not None:
        return config, config.load()
    if config.source == SOURCE:
        config = dataclasses.replace(config, source=str(write(_FOLDER)))
    return config, presets.load(config.source, config.weight_dtype())


def write(folder: pathlib.Path) -> pathlib.Path:
    """Write the checkpoint; the same bytes every time. Return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_FACTS))
    spec = presets.read_spec(folder)
    rng = np.random.default_rng(0)
    params = {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else rng.normal(0, 0.4, shape).astype(np.float32)
        for name, shape in spec.parameters().items()
    }
    safetensors.numpy.save_file(params, folder / "model.safetensors")
    random_model.byte_core().save(str(folder / "tokenizer.json"))
    facts = {"eos_token": random_model.EOS, "chat_template": random_model.TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    return folder
