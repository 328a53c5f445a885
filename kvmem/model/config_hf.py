"""A Hugging Face config.json, read as facts or refused in words.

Law: every field that changes what a llama-family decoder computes is either turned into
a fact of `ModelSpec` or named in the refusal; all refusals come at once, those of
`kvmem.model.config_fields` about types among them.

    read(Path("Qwen2.5-0.5B/config.json")).qkv_bias      # True
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvmem import geometry
from kvmem.errors import FormatMismatch, say
from kvmem.model import config_fields
from kvmem.model.spec import ModelSpec

__all__ = ["declared_dtype", "read"]


class _Family(NamedTuple):
    """What a `model_type` means beyond its config's fields."""

    qkv_bias: bool = False
    qk_norm: bool = False
    windowed: bool = False  # a window applies without `use_sliding_window`


_FAMILIES = {
    "llama": _Family(),
    "mistral": _Family(windowed=True),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(qk_norm=True),
}
_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
)
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}


def read(path: Path) -> ModelSpec:
    """Read a config.json, with generation_config.json beside it for the end ids.

    Raises:
        FormatMismatch: not JSON, a field is missing, or the model computes something
            that this decoder does not.
    """
    config = config_fields.load(path)
    generation = _generation(path)
    sound = config_fields.sound(config, config_fields.FIELDS)
    rope = _rope_block(sound)
    faults = [
        *config_fields.faults(config, config_fields.FIELDS),
        *_faults(config, sound),
        *_size_faults(config, sound),
        *_rope_faults(rope),
        *config_fields.faults(generation, config_fields.GENERATION),
    ]
    if faults:
        raise FormatMismatch(
            say(
                f"the model of {path}",
                f"kvmem computes plain llama-family decoders: {'; '.join(faults)}",
                f"Use an unquantised model of type {', '.join(_FAMILIES)} with full "
                "attention",
            )
        )
    return _spec(sound, rope, path, _eos_ids(sound, generation))


def declared_dtype(path: Path) -> str | None:
    """Return the dtype that a config.json declares, None if it does not.

    Raises:
        FormatMismatch: not JSON, or a dtype that is no text.
    """
    config = config_fields.load(path)
    declared = config.get("dtype") or config.get("torch_dtype")
    if declared is not None and not isinstance(declared, str):
        raise FormatMismatch(
            say(
                f"dtype of {path}",
                f"it is {declared!r}, not the name of a dtype",
                "Write for example bfloat16, or set model.dtype and model.kv_dtype",
            )
        )
    return declared


def _generation(path: Path) -> dict[str, Any]:
    """Return the generation_config.json beside a config.json, {} without one."""
    beside = path.parent / "generation_config.json"
    return config_fields.load(beside) if beside.is_file() else {}


def _spec(
    config: Mapping[str, Any],
    rope: Mapping[str, Any],
    path: Path,
    eos_ids: tuple[int, ...],
) -> ModelSpec:
    """Make the facts of a config in which no fault was found."""
    family = _FAMILIES[config["model_type"]]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return ModelSpec(
        name=path.absolute().parent.name,
        hidden=config["hidden_size"],
        mlp=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        vocab=config["vocab_size"],
        norm_eps=float(config["rms_norm_eps"]),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_position=config["max_position_embeddings"],
        rope=_rope(rope, head_dim),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        bos_id=config.get("bos_token_id"),
        eos_ids=eos_ids,
    )


def _faults(config: Mapping[str, Any], sound: Mapping[str, Any]) -> list[str]:
    """Name every field that asks for something else than a plain decoder.

    `sound` is `config` without the fields whose values are of the wrong type.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        return [f"model_type is {kind!r}"]
    required = [*_REQUIRED]
    if kind != "llama":  # only llama's own default is "as many as heads"
        required.append("num_key_value_heads")
    if kind == "qwen3":
        required.append("head_dim")
    faults = [f"{key} is missing" for key in required if config.get(key) is None]
    wanted = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    for key, value in wanted.items():
        if config.get(key, value) != value:
            faults.append(f"{key} is {config[key]!r}, not {value!r}")
    if config.get("quantization_config"):
        faults.append("quantization_config is set")
    return faults + _window_faults(sound, _FAMILIES[kind].windowed)


def _size_faults(config: Mapping[str, Any], sound: Mapping[str, Any]) -> list[str]:
    """Name sizes that are legal one by one and make no decoder together."""
    faults = []
    heads, hidden = sound.get("num_attention_heads"), sound.get("hidden_size")
    kv_heads, head_dim = sound.get("num_key_value_heads"), sound.get("head_dim")
    if heads and kv_heads and heads % kv_heads:
        faults.append(
            f"num_attention_heads is {heads}, no multiple of num_key_value_heads "
            f"{kv_heads}"
        )
    if config.get("head_dim") is None and heads and hidden:
        head_dim, over = divmod(hidden, heads)
        if over:
            faults.append(
                f"hidden_size is {hidden}, no multiple of num_attention_heads {heads}, "
                "and head_dim is not given"
            )
            head_dim = None
    if head_dim is not None and head_dim % 2:
        faults.append(f"head_dim is {head_dim}, and rope turns pairs of dims")
    return faults


def _window_faults(config: Mapping[str, Any], windowed: bool) -> list[str]:
    """Name what makes attention look at a window only."""
    faults = []
    window = config.get("sliding_window")
    active = window is not None and config.get("use_sliding_window", windowed)
    if active and window < (config.get("max_position_embeddings") or 0):
        faults.append(f"sliding_window is {window}, shorter than the longest position")
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        faults.append(f"layer_types holds {', '.join(sorted(kinds))}")
    return faults


def _rope_block(config: Mapping[str, Any]) -> dict[str, Any]:
    """Join the two spellings: `rope_parameters`, or `rope_scaling` and `rope_theta`."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    block = {key: value for key, value in found.items() if value is not None}
    block.setdefault("rope_theta", config.get("rope_theta", 10_000.0))
    block.setdefault("rope_type", block.get("type", "default"))
    block.setdefault("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    return block


def _rope_faults(block: Mapping[str, Any]) -> list[str]:
    """Name what the rotation asks for and this decoder does not do."""
    kind = block["rope_type"]
    if any(isinstance(value, dict) for value in block.values()):
        return ["rope_parameters differ between layers"]
    faults = [
        f"rope key {fault}" for fault in config_fields.faults(block, config_fields.ROPE)
    ]
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        known = ", ".join(_ROPE_KEYS)
        return faults + [
            f"rope_type is {kind!r}, and frequencies that change with the length "
            f"cannot be cached; known: {known}"
        ]
    faults += [
        f"rope key {key} is missing" for key in _ROPE_KEYS[kind] if key not in block
    ]
    if block["partial_rotary_factor"] != 1.0:
        faults.append(f"partial_rotary_factor is {block['partial_rotary_factor']}")
    return faults or _band_faults(kind, block)


def _band_faults(kind: str, block: Mapping[str, Any]) -> list[str]:
    """Name numbers of a scaling that leave it no band to blend in."""
    if kind == "llama3":
        low, high = block["low_freq_factor"], block["high_freq_factor"]
        if low >= high:
            return [f"low_freq_factor is {low}, not below high_freq_factor {high}"]
    if kind == "yarn" and block["rope_theta"] <= 1:
        return [f"rope_theta is {block['rope_theta']}, and yarn divides by its log"]
    return []


def _rope(block: Mapping[str, Any], head_dim: int) -> geometry.Rope:
    """Turn the declared scaling into frequencies."""
    theta = float(block["rope_theta"])
    kind = block["rope_type"]
    if kind == "linear":
        return geometry.rope.linear(theta, head_dim, block["factor"])
    if kind == "llama3":
        keys = _ROPE_KEYS[kind]
        return geometry.rope.llama3(theta, head_dim, *(block[key] for key in keys))
    if kind == "yarn":
        return _yarn(theta, head_dim, block)
    return geometry.Rope(theta)


def _yarn(theta: float, width: int, block: Mapping[str, Any]) -> geometry.Rope:
    """Turn a YaRN block into a rope; absent keys are YaRN's own."""
    return geometry.rope.yarn(
        theta,
        width,
        block["factor"],
        block["original_max_position_embeddings"],
        beta_fast=block.get("beta_fast") or 32,
        beta_slow=block.get("beta_slow") or 1,
        attention_factor=block.get("attention_factor"),
        mscale=block.get("mscale"),
        mscale_all_dim=block.get("mscale_all_dim"),
        truncate=block.get("truncate", True),
    )


def _eos_ids(
    config: Mapping[str, Any], generation: Mapping[str, Any]
) -> tuple[int, ...]:
    """List the ids that end a text: generation_config's, else the config's."""
    found = generation.get("eos_token_id")
    found = config.get("eos_token_id") if found is None else found
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (found,)
