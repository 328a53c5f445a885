"""What a published model keeps of its tokens: public facts become layers of cache.

Planning needs sizes alone, so it works for models that no engine here can run. Law: the
facts are those of the model's own Hugging Face config.json, read from the file or
copied into a config; what would change a size and is not understood is refused in
words, all of it at once.

    spec = read_facts({"model_type": "deepseek_v3", "num_hidden_layers": 61,
                       "kv_lora_rank": 512, "qk_rope_head_dim": 64,
                       "qk_nope_head_dim": 128})
    sum(f.token_nbytes for x in spec.layer_specs() for f in x.fields)      # 70,272

Rows here are sizes: how keys were rotated is a fact of the decoder that runs. That
DeepSeek-V3.2's index keys are mixed behind their rotation is one of the model (its
published inference code), and decides whether they may be moved.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvmem.errors import FormatMismatch, say
from kvmem.geometry import LayerSpec, Rope, kinds
from kvmem.model import config_fields
from kvmem.settings import Table

__all__ = ["FAMILIES", "CacheSpec", "layers", "read", "read_facts"]

_MOST_HEADS = 65_536  # of all layers; each has a place in a page and is enumerated
FP8 = "float8_e4m3fn"
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """The facts of a model that is planned, and why no engine runs it.

    `refusal` is empty where nothing was asked about running it.
    """

    name: str
    facts: Table
    refusal: str = ""

    def layer_specs(self, kv_dtype: str = "bfloat16") -> tuple[LayerSpec, ...]:
        """Describe what each layer keeps of a token, in rows of `kv_dtype`."""
        return layers(self.facts.plain(), kv_dtype)

    @property
    def max_position(self) -> int | None:
        """The longest text that the model knows positions for, if it says."""
        text = _text(self.facts.plain())
        return text.get("max_position_embeddings") or text.get("model_max_length")


def read(path: Path, refusal: str = "") -> CacheSpec:
    """Read a config.json of any family that `layers` knows.

    Raises:
        FormatMismatch: no JSON, or what `layers` refuses.
    """
    name = path.absolute().parent.name
    return read_facts(config_fields.load(path), name, refusal, f"the model of {path}")


def read_facts(
    facts: Mapping[str, Any],
    name: str = "",
    refusal: str = "",
    asked: str = "a table of facts",
) -> CacheSpec:
    """Return the spec of a table of facts.

    Raises:
        FormatMismatch: what `layers` refuses.
    """
    plain = facts.plain() if isinstance(facts, Table) else dict(facts)
    plain = _without_nulls(plain)
    layers(plain, "bfloat16", asked)
    return CacheSpec(name or plain["model_type"], Table(plain), refusal)


def layers(
    facts: Mapping[str, Any], kv_dtype: str, asked: str = "a table of facts"
) -> tuple[LayerSpec, ...]:
    """Return what every layer of a model keeps, by its config's public fields.

    Args:
        facts: fields of a config.json; those of `text_config`, where it has one.
        kv_dtype: of cached rows. Sparse attention in float8_e4m3fn keeps latents of
            656 bytes, scales and an unquantised tail included; its index keys are
            always fp8 with scales. States are float32, or `mamba_ssm_dtype`.
        asked: what the facts are, for the refusal.

    Raises:
        FormatMismatch: every fault at once.
    """
    text = _text(facts)
    faults = config_fields.faults(text, config_fields.CACHE)
    sound = config_fields.sound(text, config_fields.CACHE)
    family = FAMILIES.get(sound.get("model_type", ""))
    if family is None:
        faults = [f"model_type is {text.get('model_type')!r}", *faults]
    else:
        faults += [f"{key} is missing" for key in family.required if key not in sound]
    if family is not None and not faults:
        faults = [*_count_faults(sound), *family.faults(sound)]
    if faults:
        raise FormatMismatch(
            say(
                asked,
                "sizes of a cache follow from public facts that are understood: "
                + "; ".join(faults),
                f"Give the fields of a config.json of type {', '.join(FAMILIES)}",
            )
        )
    return family.layers(sound, kv_dtype)


class _Family(NamedTuple):
    """How one kind of config.json spells its layers."""

    layers: Callable[[Mapping[str, Any], str], tuple[LayerSpec, ...]]
    required: tuple[str, ...]
    faults: Callable[[Mapping[str, Any]], Sequence[str]] = lambda _: ()


def _text(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of the text model: a model of images too nests them."""
    inner = facts.get("text_config")
    if not isinstance(inner, Mapping):
        return facts
    return {"model_type": facts.get("model_type")} | dict(inner)


def _without_nulls(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what is null: it stands for absent."""
    return {
        key: _without_nulls(value) if isinstance(value, Mapping) else value
        for key, value in facts.items()
        if value is not None
    }


def _rows(facts: Mapping[str, Any], kv_dtype: str) -> dict[str, Any]:
    """Return the width of keys and values a head."""
    heads = facts["num_attention_heads"]
    return {
        "kv_heads": facts.get("num_key_value_heads", heads),
        "head_dim": facts.get("head_dim") or facts["hidden_size"] // heads,
        "dtype": kv_dtype,
    }


def _windowed(facts: Mapping[str, Any], kv_dtype: str) -> tuple[LayerSpec, ...]:
    """Return layers of keys and values a head, some of which look at a window."""
    rows, window = _rows(facts, kv_dtype), facts.get("sliding_window")
    return tuple(
        LayerSpec(
            f"layers.{index}",
            index,
            window=window if kind == _SLIDING else None,
            **rows,
        )
        for index, kind in enumerate(_layer_types(facts))
    )


def _latent(facts: Mapping[str, Any], index: int, kv_dtype: str, fp8: bool = False):
    rope = facts["qk_rope_head_dim"]
    return kinds.latent(
        f"layers.{index}",
        index,
        rank=facts["kv_lora_rank"],
        rope_dim=rope,
        dtype="bfloat16" if fp8 else kv_dtype,
        scale=(facts["qk_nope_head_dim"] + rope) ** -0.5,
        fp8=fp8,
    )


def _latents(facts: Mapping[str, Any], kv_dtype: str) -> tuple[LayerSpec, ...]:
    """Return layers of latent attention."""
    count = facts["num_hidden_layers"]
    return tuple(_latent(facts, index, kv_dtype) for index in range(count))


def _sparse_latents(facts: Mapping[str, Any], kv_dtype: str) -> tuple[LayerSpec, ...]:
    """Return layers of sparse latent attention: a latent and its index keys each."""
    found = []
    for index in range(facts["num_hidden_layers"]):
        found.append(_latent(facts, index, kv_dtype, fp8=kv_dtype == FP8))
        name = f"layers.{index}.indexer"
        key = {"dim": facts["index_head_dim"], "rope": Rope(kind="hadamard")}
        found.append(kinds.indexer(name, index, **key))
    return tuple(found)


def _gated(facts: Mapping[str, Any], kv_dtype: str) -> tuple[LayerSpec, ...]:
    """Return full attention among gated delta nets."""
    rows = _rows(facts, kv_dtype)
    return tuple(
        LayerSpec(f"layers.{index}", index, **rows)
        if kind == _FULL
        else kinds.gated_delta(
            f"layers.{index}",
            index,
            key_heads=facts["linear_num_key_heads"],
            value_heads=facts["linear_num_value_heads"],
            key_dim=facts["linear_key_head_dim"],
            value_dim=facts["linear_value_head_dim"],
            conv_kernel=facts["linear_conv_kernel_dim"],
            state_dtype=facts.get("mamba_ssm_dtype", "float32"),
        )
        for index, kind in enumerate(_layer_types(facts))
    )


def _kimi(facts: Mapping[str, Any], kv_dtype: str) -> tuple[LayerSpec, ...]:
    """Return latent attention among delta attention; the config counts from one."""
    linear = facts["linear_attn_config"]
    return tuple(
        kinds.kda(
            f"layers.{index}",
            index,
            heads=linear["num_heads"],
            head_dim=linear["head_dim"],
            conv_kernel=linear["short_conv_kernel_size"],
            state_dtype=facts.get("mamba_ssm_dtype", "float32"),
        )
        if index + 1 in linear["kda_layers"]
        else _latent(facts, index, kv_dtype)
        for index in range(facts["num_hidden_layers"])
    )


def _layer_types(facts: Mapping[str, Any]) -> list[str]:
    """Return what each layer looks at: as declared, else by the family's pattern."""
    if "layer_types" in facts:
        return list(facts["layer_types"])
    indices = range(facts["num_hidden_layers"])
    kind = facts["model_type"]
    if kind in ("gemma3", "gemma3_text"):
        every = facts.get("sliding_window_pattern", 6)
        return [_SLIDING if (index + 1) % every else _FULL for index in indices]
    if kind == "qwen3_next":
        every = facts.get("full_attention_interval", 4)
        return [_LINEAR if (index + 1) % every else _FULL for index in indices]
    if kind == "gpt_oss":
        return [_FULL if index % 2 else _SLIDING for index in indices]
    sliding = "sliding_window" in facts and facts.get(
        "use_sliding_window", not kind.startswith("qwen")
    )
    first = facts.get("max_window_layers", 0) if kind.startswith("qwen") else 0
    return [_SLIDING if sliding and index >= first else _FULL for index in indices]


def _count_faults(facts: Mapping[str, Any]) -> list[str]:
    """Name lists of layers that are not as long as the model, or of unknown kinds."""
    found, count = [], facts["num_hidden_layers"]
    types = facts.get("layer_types", [_FULL] * count)
    known = (_FULL, _LINEAR if facts["model_type"] == "qwen3_next" else _SLIDING)
    if facts["model_type"] == "deepseek_v32":
        known = (*known, "indexed_attention")
    heads = facts.get("num_key_value_heads", facts.get("num_attention_heads", 1))
    if count * heads > _MOST_HEADS:
        found.append(
            f"{count} layers of {heads} heads are {count * heads:,} in all, more than "
            f"{_MOST_HEADS:,}"
        )
    if len(types) != count:
        found.append(f"layer_types names {len(types)} layers of {count}")
    strange = sorted(set(types) - set(known))
    if strange:
        found.append(f"layer_types holds {', '.join(strange)}")
    if _SLIDING in types and "sliding_window" not in facts:
        found.append("layer_types has windows and sliding_window is missing")
    return found


def _head_faults(facts: Mapping[str, Any]) -> list[str]:
    """Name head counts that make no rows."""
    heads, hidden = facts["num_attention_heads"], facts.get("hidden_size")
    if "head_dim" not in facts and (hidden is None or hidden % heads):
        return [f"head_dim is missing, and hidden_size {hidden} is none of its heads"]
    return []


def _index_faults(facts: Mapping[str, Any]) -> list[str]:
    """Name widths that a scale a 128 elements does not fit."""
    return [
        f"{key} is {facts[key]}, no multiple of 128"
        for key in ("index_head_dim", "kv_lora_rank")
        if facts[key] % 128
    ]


def _kda_faults(facts: Mapping[str, Any]) -> list[str]:
    """Name what the table of linear layers lacks."""
    linear, count = facts["linear_attn_config"], facts["num_hidden_layers"]
    faults = config_fields.faults(linear, config_fields.KDA)
    faults += [f"{key} is missing" for key in config_fields.KDA if key not in linear]
    if not faults:
        named = sorted([*linear["kda_layers"], *linear["full_attn_layers"]])
        if named != list(range(1, count + 1)):
            faults = [f"kda_layers and full_attn_layers are not layers 1 to {count}"]
    return [f"linear_attn_config: {fault}" for fault in faults]


_HEADS = ("num_hidden_layers", "num_attention_heads")
_MLA = ("num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")
_WINDOW = (*_HEADS, "num_key_value_heads", "head_dim", "sliding_window")
_DENSE = _Family(_windowed, _HEADS, _head_faults)
_GROUPED = _Family(_windowed, (*_HEADS, "num_key_value_heads"), _head_faults)
_DELTA = tuple(
    f"linear_{name}"
    for name in (
        "num_key_heads",
        "num_value_heads",
        "key_head_dim",
        "value_head_dim",
        "conv_kernel_dim",
    )
)
FAMILIES = {
    "llama": _DENSE,
    "mistral": _GROUPED,
    "mixtral": _GROUPED,
    "qwen2": _GROUPED,
    "qwen3": _GROUPED,
    "qwen3_moe": _GROUPED,
    "gemma3": _Family(_windowed, _WINDOW),
    "gemma3_text": _Family(_windowed, _WINDOW),
    "gpt_oss": _Family(_windowed, _WINDOW),
    "deepseek_v3": _Family(_latents, _MLA),
    "deepseek_v32": _Family(_sparse_latents, (*_MLA, "index_head_dim"), _index_faults),
    "qwen3_next": _Family(
        _gated, (*_HEADS, "num_key_value_heads", "head_dim", *_DELTA)
    ),
    "kimi_linear": _Family(_kimi, (*_MLA, "linear_attn_config"), _kda_faults),
}
