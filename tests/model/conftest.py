"""Small models on disk: a GGUF file, a checkpoint directory; and the real one."""

import json
import math
import pathlib
import re
import types

import gguf
import numpy as np
import pytest
import safetensors.numpy

from kvmem import geometry
from kvmem.model import gguf_tokenizer, presets
from kvmem.model.loaded import LoadedModel
from kvmem.model.spec import ModelSpec

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def byte_symbols() -> list[str]:
    """The 256 characters that stand for bytes in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(b) for b in plain] + [chr(256 + i) for i in range(len(others))]


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """The demo model, from its GGUF file (kept dequantised after the first load)."""
    return presets.load("smollm2-135m-instruct")


@pytest.fixture(autouse=True)
def own_cache(request, tmp_path, monkeypatch):
    """Keep made models out of the user's cache; `smollm2` alone shares it."""
    if "smollm2" not in request.fixturenames:
        monkeypatch.setenv("KVMEM_CACHE", str(tmp_path / "kvmem-cache"))


@pytest.fixture
def tokens_metadata() -> dict:
    """`tokenizer.ggml.*` of a byte-level BPE with a few merges and special tokens."""
    special = ["<|end|>", "<|start|>", "<tool>"]
    merged = ["Ġt", "he", "Ġthe", "12", "123"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": special + byte_symbols() + merged,
        "tokenizer.ggml.token_type": [3, 3, 4] + [1] * (256 + len(merged)),
        "tokenizer.ggml.merges": ["Ġ t", "h e", "Ġt he", "1 2", "12 3"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for m in messages %}<|start|>{{ m['role'] }}:"
        "{{ m['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant:{% endif %}",
    }


@pytest.fixture
def tiny_spec(tokens_metadata) -> ModelSpec:
    return ModelSpec(
        name="tiny",
        hidden=64,
        mlp=96,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocab=len(tokens_metadata["tokenizer.ggml.tokens"]),
        norm_eps=1e-5,
        tie_embeddings=True,
        max_position=128,
        rope=geometry.Rope(theta=50_000.0),
        bos_id=1,
        eos_ids=(0,),
    )


@pytest.fixture
def make_params():
    """Random float32 tensors of a spec, by name."""

    def make(spec: ModelSpec, seed: int = 0) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        return {
            name: rng.standard_normal(shape, np.float32)
            for name, shape in spec.parameters().items()
        }

    return make


@pytest.fixture
def write_gguf(tmp_path, tokens_metadata):
    """Write a GGUF file as llama.cpp's converter does: q and k rows interleaved."""

    def write(spec, params, *, quant=None, architecture="llama", extra=(), drop=()):
        path = tmp_path / "tiny.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        facts = {
            f"{architecture}.block_count": spec.layers,
            f"{architecture}.context_length": spec.max_position,
            f"{architecture}.embedding_length": spec.hidden,
            f"{architecture}.feed_forward_length": spec.mlp,
            f"{architecture}.attention.head_count": spec.heads,
            f"{architecture}.attention.head_count_kv": spec.kv_heads,
            f"{architecture}.attention.layer_norm_rms_epsilon": spec.norm_eps,
            f"{architecture}.rope.freq_base": spec.rope.theta,
            "general.name": spec.name,
        }
        for key, value in (facts | tokens_metadata | dict(extra)).items():
            if key not in drop:
                _add_key(writer, key, value)
        for name, array in params.items():
            if name not in drop:
                _add_tensor(writer, spec, name, array, quant)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def _add_key(writer: gguf.GGUFWriter, key: str, value) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_string(key, value)


def _add_tensor(writer, spec, name, array, quant) -> None:
    if "q_proj" in name:
        array = interleaved(array, spec.heads)
    if "k_proj" in name:
        array = interleaved(array, spec.kv_heads)
    if quant is not None and array.ndim == 2:
        data = gguf.quantize(array, quant)
        writer.add_tensor(gguf_name(name), data, raw_dtype=quant)
    else:
        writer.add_tensor(gguf_name(name), array)


def interleaved(array: np.ndarray, heads: int) -> np.ndarray:
    """Each head's rows from (member, pair) to (pair, member), one by one."""
    width = array.shape[0] // heads
    order = [
        head * width + member * width // 2 + pair
        for head in range(heads)
        for pair in range(width // 2)
        for member in range(2)
    ]
    return array[order]


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, inner = stem.split(".", 3)
        return f"blk.{layer}.{_GGUF_NAMES[inner]}.{kind}"
    return f"{_GGUF_NAMES.get(stem, stem)}.{kind}"


@pytest.fixture
def write_checkpoint(tmp_path, tokens_metadata):
    """Write a checkpoint directory: config, safetensors (in shards), tokenizer."""

    def write(spec, params, *, config=None, num_shards=1, template=None):
        directory = tmp_path / "checkpoint"
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(hf_config(spec, config)))
        _write_shards(directory, params, num_shards)
        write_tokenizer(directory, tokens_metadata)
        if template is not None:
            (directory / "chat_template.jinja").write_text(template)
        return directory

    return write


def hf_config(spec: ModelSpec, changes=None) -> dict:
    config = {
        "model_type": "llama",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.mlp,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab,
        "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.max_position,
        "rope_theta": spec.rope.theta,
        "tie_word_embeddings": spec.tie_embeddings,
        "hidden_act": "silu",
        "bos_token_id": spec.bos_id,
        "eos_token_id": list(spec.eos_ids),
    }
    return config | (changes or {})


def _write_shards(directory: pathlib.Path, params, num_shards: int) -> None:
    if num_shards == 1:
        safetensors.numpy.save_file(params, directory / "model.safetensors")
        return
    places = {}
    for shard in range(num_shards):
        part = dict(list(params.items())[shard::num_shards])
        name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        safetensors.numpy.save_file(part, directory / name)
        places |= dict.fromkeys(part, name)
    index = json.dumps({"weight_map": places})
    (directory / "model.safetensors.index.json").write_text(index)


def write_tokenizer(directory: pathlib.Path, metadata: dict) -> None:
    state = gguf_tokenizer.build(metadata).state()
    (directory / "tokenizer.json").write_text(state["core"])
    config = {"bos_token": "<|start|>", "eos_token": {"content": "<|end|>"}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="session")
def made():
    """The plain functions of this file, for tests that need one alone."""
    return types.SimpleNamespace(
        hf_config=hf_config, interleaved=interleaved, write_tokenizer=write_tokenizer
    )


@pytest.fixture(scope="session")
def decoder_spec():
    """Make the facts of a decoder that compiles in a second; fields by keyword."""

    def make(**changes) -> ModelSpec:
        sizes = dict(hidden=32, mlp=50, layers=2, heads=4, kv_heads=2, head_dim=8)
        rest = dict(vocab=67, norm_eps=1e-5, tie_embeddings=True, max_position=128)
        return ModelSpec("small", **(sizes | rest | changes))

    return make


@pytest.fixture(scope="session")
def decoder_params():
    """Random float32 tensors of a spec, scaled so that activations stay near one."""

    def make(spec: ModelSpec, seed: int = 0) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        return {
            name: rng.standard_normal(shape, np.float32) / np.sqrt(shape[-1])
            if len(shape) == 2
            else 1 + 0.3 * rng.standard_normal(shape, np.float32)
            for name, shape in spec.parameters().items()
        }

    return make


@pytest.fixture(scope="session")
def pool_copies():
    """Say what a compiled step does to its pool beside updating it in place."""

    def find(compiled, pages, spare_nbytes: int) -> list[str]:
        memory = compiled.memory_analysis()
        found = []
        if memory.alias_size_in_bytes < pages.nbytes:
            found.append(f"only {memory.alias_size_in_bytes} bytes are aliased")
        if memory.temp_size_in_bytes > spare_nbytes:
            found.append(f"{memory.temp_size_in_bytes} temporary bytes")
        for line in compiled.as_text().splitlines():
            made = re.match(r"\s*(?:ROOT )?%?\S+ = (u8\[[\d,]*\])\S* copy\(", line)
            if made and math.prod(map(int, made[1][3:-1].split(","))) == pages.nbytes:
                found.append(line.strip())
        return found

    return find
