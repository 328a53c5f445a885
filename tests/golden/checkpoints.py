"""Tiny checkpoint directories, one a family, and what transformers says of them.

A directory holds what any llama-family checkpoint holds: config.json, safetensors,
tokenizer.json. Its numbers are SHAKE-128 streams, so it is the same bytes everywhere.
The law: the expected tokens and logits were computed from these very bytes by another
program; run this file where torch and transformers are installed to compute them again.

    write(folder, "qwen3")                     # a checkpoint directory, in milliseconds
    python tests/golden/checkpoints.py         # writes checkpoints.json beside it
"""

import dataclasses
import hashlib
import json
import pathlib
import tempfile

import numpy as np
import safetensors.numpy

GOLDEN = pathlib.Path(__file__).with_name("checkpoints.json")
TOKENS = 12  # of every continuation
PROMPTS = {
    "text": "The pages of a book, two by two: 12 34.\n\tDéjà vu?",
    "ids": [hashlib.sha256(b"%d" % at).digest()[0] for at in range(37)],
}

_SEED = "checkpoint 5"  # another one where two best logits come too close
_MARGIN = 5e-3
_VOCAB = 272  # a few more than the tokenizer has texts for, as Qwen's are
_MERGES = ("Ġ t", "h e", "Ġt he", "Ġ b", "o o", "Ġb oo", "Ġboo k", "1 2")
# How Llama 3 and Qwen cut texts; %s is how many digits stand together.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIAL = ("<|begin|>", "<|end|>")
_BEGIN, _END = 256 + len(_MERGES), 257 + len(_MERGES)
_BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": _VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": _BEGIN,
    "eos_token_id": _END,
    "torch_dtype": "float32",
}


@dataclasses.dataclass(frozen=True)
class Family:
    """How a checkpoint differs from the plainest one.

    `stored` is the dtype on disk, `shards` how many safetensors files hold it, `splits`
    how the tokenizer cuts a text, and `begins` says that it puts a begin-of-text token
    before every one.
    """

    config: dict
    splits: str = "words"
    stored: str = "float32"
    shards: int = 1
    begins: bool = False
    generation: dict | None = None  # generation_config.json


FAMILIES = {
    # Llama 3: scaled frequencies, the older spelling; shards; a begin-of-text token.
    "llama": Family(
        {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "rope_theta": 500_000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        splits="digits in threes",
        shards=3,
        begins=True,
    ),
    # Mistral: heads wider than hidden / heads, no window, bfloat16 on disk.
    "mistral": Family(
        {
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "head_dim": 24,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_window": None,
            "torch_dtype": "bfloat16",
        },
        stored="bfloat16",
        begins=True,
    ),
    # Qwen 2: biases on q, k and v, tied, a window that is declared and switched off.
    "qwen2": Family(
        {
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "sliding_window": 16,
            "max_window_layers": 1,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
        },
        splits="digits",
        generation={"eos_token_id": [_END, _BEGIN]},
    ),
    # Qwen 3: norms on q and k; YaRN, which also scales cos and sin; newer spellings.
    "qwen3": Family(
        {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "head_dim": 24,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
            "layer_types": ["full_attention"] * 2,
            "use_sliding_window": False,
            "attention_bias": False,
            "torch_dtype": None,
            "dtype": "float32",
        },
        splits="digits",
    ),
    # SmolLM: a tied llama with nine heads on three, head_dim left to be derived.
    "smollm": Family(
        {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 72,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "rope_theta": 100_000.0,
            "tie_word_embeddings": True,
        },
        splits="words and digits",
    ),
}


def write(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Write the checkpoint of a family; return its folder."""
    family = FAMILIES[name]
    config = {k: v for k, v in (_BASE | family.config).items() if v is not None}
    if "sliding_window" in family.config:
        config.setdefault("sliding_window", None)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    if family.generation is not None:
        _write_json(folder / "generation_config.json", family.generation)
    _write_json(folder / "tokenizer.json", _tokenizer(family))
    special = {"bos_token": _SPECIAL[0], "eos_token": _SPECIAL[1]}
    _write_json(
        folder / "tokenizer_config.json",
        special | {"tokenizer_class": "PreTrainedTokenizerFast"},
    )
    _write_tensors(folder, tensors(name), family.shards)
    return folder


def tensors(name: str) -> dict[str, np.ndarray]:
    """Return a family's tensors as they stand on disk."""
    config = _BASE | FAMILIES[name].config
    made = {}
    for tensor, shape in _shapes(config).items():
        stream = _stream(f"{_SEED}/{name}/{tensor}", shape)
        if len(shape) == 2:
            made[tensor] = stream * np.float32(1.6 / np.sqrt(shape[1]))
        elif tensor.endswith("norm.weight"):
            made[tensor] = 1 + stream * np.float32(0.3)
        else:
            made[tensor] = stream
    if FAMILIES[name].stored == "float32":
        return made
    return {key: _halved(array) for key, array in made.items()}


def digest(folder: pathlib.Path) -> str:
    """Return one digest of every file of a directory."""
    whole = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        whole.update(f"{path.name}\0".encode() + path.read_bytes())
    return whole.hexdigest()


def _shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Name every tensor of a checkpoint with its shape."""
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or hidden // heads
    rows = {"q": heads * width, "k": kv_heads * width, "v": kv_heads * width}
    layer = {f"self_attn.{n}_proj.weight": (r, hidden) for n, r in rows.items()}
    layer |= {
        "self_attn.o_proj.weight": (hidden, heads * width),
        "mlp.gate_proj.weight": (mlp, hidden),
        "mlp.up_proj.weight": (mlp, hidden),
        "mlp.down_proj.weight": (hidden, mlp),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if config["model_type"] == "qwen2":
        layer |= {f"self_attn.{n}_proj.bias": (r,) for n, r in rows.items()}
    if config["model_type"] == "qwen3":
        layer |= {f"self_attn.{n}_norm.weight": (width,) for n in ("q", "k")}
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}": s for name, s in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def _stream(seed: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return f32 of variance one, uniform, from SHAKE-128 of the seed's words."""
    count = int(np.prod(shape))
    raw = np.frombuffer(hashlib.shake_128(seed.encode()).digest(4 * count), "<u4")
    unit = (raw >> 8).astype(np.float32) / np.float32(1 << 24)  # 24 bits: exact
    return ((unit - np.float32(0.5)) * np.float32(12**0.5)).reshape(shape)


def _halved(array: np.ndarray) -> np.ndarray:
    """Return the upper halves of f32 numbers: the bits of their bfloat16 floor."""
    return (array.view(np.uint32) >> 16).astype(np.uint16)


def _write_tensors(folder: pathlib.Path, made: dict, shards: int) -> None:
    """Write model.safetensors, or as many shards and their index."""
    if shards == 1:
        (folder / "model.safetensors").write_bytes(_packed(made))
        return
    places = {}
    for at in range(shards):
        part = dict(list(made.items())[at::shards])
        name = f"model-{at + 1:05}-of-{shards:05}.safetensors"
        (folder / name).write_bytes(_packed(part))
        places |= dict.fromkeys(part, name)
    size = {"total_size": sum(array.nbytes for array in made.values())}
    index = {"metadata": size, "weight_map": places}
    _write_json(folder / "model.safetensors.index.json", index)


def _packed(made: dict[str, np.ndarray]) -> bytes:
    """Return a safetensors file; 16-bit words are bfloat16."""
    data = safetensors.numpy.save(made, {"format": "pt"})
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].replace(b'"dtype":"U16"', b'"dtype":"BF16"')
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def _tokenizer(family: Family) -> dict:
    """Return a byte-level tokenizer.json: 256 bytes, a few merges, two special ids."""
    pieces = [*_byte_symbols(), *(merge.replace(" ", "") for merge in _MERGES)]
    begin = {"id": _SPECIAL[0], "type_id": 0}
    around = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": begin}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            {"SpecialToken": begin},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {
            _SPECIAL[0]: {"id": _SPECIAL[0], "ids": [_BEGIN], "tokens": [_SPECIAL[0]]}
        },
    }
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": _BEGIN + at, "content": text, "special": True} | flags
            for at, text in enumerate(_SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": _splitter(family.splits),
        "post_processor": around if family.begins else None,
        "decoder": _byte_level(True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {piece: at for at, piece in enumerate(pieces)},
            "merges": list(_MERGES),
        },
    }


def _splitter(splits: str) -> dict:
    """Return the pre-tokenizer that cuts texts in one of four ways."""
    if splits == "words":
        return _byte_level(True)
    if splits == "words and digits":
        digits = {"type": "Digits", "individual_digits": True}
        return {"type": "Sequence", "pretokenizers": [digits, _byte_level(True)]}
    pattern = {"Regex": _SPLIT % ("{1,3}" if splits == "digits in threes" else "")}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated"}
    split["invert"] = False
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(False)]}


def _byte_level(use_regex: bool) -> dict:
    facts = {"add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}
    return {"type": "ByteLevel"} | facts


def _byte_symbols() -> list[str]:
    """Return the characters that stand for bytes 0 to 255 in such a vocabulary."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in plain else next(spare)) for byte in range(256)]


def _write_json(path: pathlib.Path, data: dict) -> None:
    path.write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n", "utf-8")


def _expected(folder: pathlib.Path, name: str) -> dict:
    """Ask transformers for greedy tokens, their log-probabilities, and logits."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = {"digest": digest(folder)}
    for kind, prompt in PROMPTS.items():
        ids = tokenizer(prompt).input_ids if kind == "text" else list(prompt)
        tokens, logprobs, margins, first = list(ids), [], [], None
        for _ in range(TOKENS):
            with torch.inference_mode():
                logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            first = logits if first is None else first
            best = logits.topk(2).values
            tokens.append(int(logits.argmax()))
            logprobs.append(round(float(logits.log_softmax(-1).max()), 5))
            margins.append(round(float(best[0] - best[1]), 5))
        output = tokens[len(ids) :]
        found[kind] = {
            "prompt_ids": ids,
            "output_ids": output,
            "text": tokenizer.decode(output, skip_special_tokens=True),
            "logprobs": logprobs,
            "margins": margins,
            "logits": [round(value, 4) for value in first.tolist()],
        }
    least = min(min(found[kind]["margins"]) for kind in PROMPTS)
    print(f"{name}: the two best logits are at least {least} apart")
    assert least > _MARGIN, "a tie that rounding decides: choose another _SEED"
    return found


def main() -> None:
    """Write checkpoints.json from what transformers computes in float32."""
    import torch
    import transformers

    versions = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "dtype": "float32",
        "attention": "eager",
    }
    with tempfile.TemporaryDirectory() as made:
        expected = {
            name: _expected(write(pathlib.Path(made) / name, name), name)
            for name in FAMILIES
        }
    lines = [json.dumps("source") + ": " + json.dumps(versions)]
    lines += [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in expected.items()]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
