"""Real models from GGUF files: metadata, tensors and tokenizer of the llama family.

Law: what comes out is what Hugging Face transformers would hold in float32: the same
names, `[out, in]` layout, and q and k rows in half-split order. llama.cpp stores those
rows permuted for an interleaved rope; they are un-permuted here, once, so that nothing
above knows about it and stored keys mean the same for every source of weights.

    model = load("SmolLM2-135M-Instruct.Q4_1.gguf")
    model.params["model.layers.0.self_attn.k_proj.weight"].shape      # (192, 576)
"""

import concurrent.futures
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from kvmem import geometry
from kvmem.errors import FormatMismatch, say
from kvmem.model import gguf_tokenizer, weights_cache
from kvmem.model.loaded import LoadedModel, tensor_digests
from kvmem.model.spec import ModelSpec

__all__ = ["load", "read", "read_spec"]

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_REQUIRED = (
    "llama.attention.head_count",
    "llama.attention.layer_norm_rms_epsilon",
    "llama.block_count",
    "llama.context_length",
    "llama.embedding_length",
    "llama.feed_forward_length",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.tokens",
)
_ROPE_FACTORS = "rope_freqs.weight"  # Llama 3.1 scaling, one divisor a frequency


def load(path: Path | str) -> LoadedModel:
    """Read a GGUF file of architecture "llama", dequantised to float32.

    The first load of a file keeps the result (`weights_cache`); later ones map it.

    Raises:
        FormatMismatch: not a GGUF file, another architecture, or a feature that this
            decoder does not compute.
    """
    path = Path(path)
    key = weights_cache.key_of(path)
    model = weights_cache.fetch(key, str(path))
    if model is None:
        model = read(path)
        weights_cache.keep(key, model)
    return model


def read(path: Path) -> LoadedModel:
    """Read a GGUF file itself, without the cache."""
    metadata, tensors = _contents(path)
    spec = _spec(metadata, tensors, path.stem)
    tensors.pop(_ROPE_FACTORS, None)
    params = _params(tensors, spec)
    spec.require({name: array.shape for name, array in params.items()}, str(path))
    digests = tensor_digests(params)
    return LoadedModel(spec, params, gguf_tokenizer.build(metadata), str(path), digests)


def read_spec(path: Path | str) -> ModelSpec:
    """Read a GGUF file's facts; no weight is dequantised."""
    path = Path(path)
    spec = weights_cache.fetch_spec(weights_cache.key_of(path))
    return spec or _spec(*_contents(path), path.stem)


def _contents(path: Path) -> tuple[dict[str, Any], dict[str, gguf.ReaderTensor]]:
    """Open a llama file: its key-values as Python data, its tensors by name."""
    reader = _open(path)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    _require_llama(metadata, path)
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _open(path: Path) -> gguf.GGUFReader:
    """Open a file, or say why it is no GGUF file."""
    try:
        reader = gguf.GGUFReader(path)
        if reader.byte_order == "S":
            raise ValueError("its bytes are in the other order than this machine's")
        return reader
    except (ValueError, KeyError, IndexError) as error:
        raise FormatMismatch(
            say(
                f"reading {path} as GGUF", str(error), "Give a whole GGUF file, v2 or 3"
            )
        ) from error


def _require_llama(metadata: Mapping[str, Any], path: Path) -> None:
    """Refuse what this decoder does not compute, all reasons at once."""
    architecture = metadata.get("general.architecture")
    if architecture == "llama":
        faults = [f"{key} is missing" for key in _REQUIRED if key not in metadata]
    else:
        faults = [f"general.architecture is {architecture!r}, not 'llama'"]
    for key in ("llama.expert_count", "llama.attention.sliding_window"):
        if metadata.get(key):
            faults.append(f"{key} is {metadata[key]}, not 0")
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        faults.append(f"llama.rope.scaling.type is {scaling!r}, not none or linear")
    if isinstance(metadata.get("llama.attention.head_count_kv"), list):
        faults.append("llama.attention.head_count_kv differs between layers")
    if faults:
        raise FormatMismatch(
            say(
                f"the model in {path}",
                f"kvmem computes plain llama decoders only: {'; '.join(faults)}",
                "Use a GGUF file of a Llama, Mistral or SmolLM model, or a checkpoint "
                "directory of a supported architecture",
            )
        )


def _spec(
    metadata: Mapping[str, Any], tensors: Mapping[str, gguf.ReaderTensor], stem: str
) -> ModelSpec:
    """Make the facts of the decoder from the declared keys."""
    heads = metadata["llama.attention.head_count"]
    hidden = metadata["llama.embedding_length"]
    head_dim = metadata.get("llama.attention.key_length", hidden // heads)
    return ModelSpec(
        name=metadata.get("general.name", stem),
        hidden=hidden,
        mlp=metadata["llama.feed_forward_length"],
        layers=metadata["llama.block_count"],
        heads=heads,
        kv_heads=metadata.get("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab=len(metadata["tokenizer.ggml.tokens"]),
        norm_eps=_shortest(metadata["llama.attention.layer_norm_rms_epsilon"]),
        tie_embeddings="output.weight" not in tensors,
        max_position=metadata["llama.context_length"],
        rope=_rope(metadata, head_dim, tensors.get(_ROPE_FACTORS)),
        bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_ids=gguf_tokenizer.eos_ids(metadata),
    )


def _rope(
    metadata: Mapping[str, Any], head_dim: int, factors: gguf.ReaderTensor | None
) -> geometry.Rope:
    """Make the rope facts; keys are half-split once rows are un-permuted."""
    width = metadata.get("llama.rope.dimension_count", head_dim)
    if width != head_dim:
        raise FormatMismatch(
            say(
                f"a rope over {width} of {head_dim} elements",
                "this decoder rotates whole heads",
                "Use a model with llama.rope.dimension_count = head_dim",
            )
        )
    theta = _shortest(metadata.get("llama.rope.freq_base", 10_000.0))
    if metadata.get("llama.rope.scaling.type", "none") == "linear":
        scale = metadata["llama.rope.scaling.factor"]
        return geometry.rope.linear(theta, head_dim, _shortest(scale))
    if factors is None:
        return geometry.Rope(theta)
    scaled = geometry.Rope(theta).inverse_frequencies(head_dim)
    scaled /= _dequantise(factors)
    return geometry.Rope(theta, frequencies=tuple(scaled.tolist()))


def _params(
    tensors: Mapping[str, gguf.ReaderTensor], spec: ModelSpec
) -> dict[str, np.ndarray]:
    """Dequantise all tensors in threads, renamed and un-permuted."""

    def one(tensor: gguf.ReaderTensor) -> np.ndarray:
        array = _dequantise(tensor)
        if ".attn_q." in tensor.name:
            return _half_split(array, spec.heads)
        if ".attn_k." in tensor.name:
            return _half_split(array, spec.kv_heads)
        return array

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
        arrays = threads.map(one, tensors.values())
        return dict(zip(map(_hf_name, tensors), arrays, strict=True))


def _dequantise(tensor: gguf.ReaderTensor) -> np.ndarray:
    """Return float32 values of one tensor in memory of its own."""
    array = gguf.dequantize(tensor.data, tensor.tensor_type)
    return np.array(array, dtype=np.float32, copy=None if array.flags.owndata else True)


def _half_split(array: np.ndarray, heads: int) -> np.ndarray:
    """Reorder each head's rows from (pair, member) to (member, pair)."""
    rows = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(array.shape)


def _hf_name(name: str) -> str:
    """Translate a GGUF name; an unknown one stays, for `ModelSpec.require` to name."""
    if name in _OUTER:
        return _OUTER[name]
    head, _, rest = name.removeprefix("blk.").partition(".")
    stem, _, kind = rest.rpartition(".")
    if stem not in _INNER:
        return name
    return f"model.layers.{head}.{_INNER[stem]}.{kind}"


def _shortest(value: float) -> float:
    """Return the shortest decimal that is this float32 (1e-05, not 9.99…e-06)."""
    return float(str(np.float32(value)))
