"""What each field of a checkpoint's JSON files may hold.

Law: a value of another type, or out of range, is named with what it should be; whoever
reads on is given only fields that are what they should be.

    config = load(Path("config.json"))               # an object, or FormatMismatch
    faults({"hidden_size": "64"}, FIELDS)
    # ["hidden_size is '64', not an integer >= 1"]
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvmem.errors import FormatMismatch, say

__all__ = ["CACHE", "FIELDS", "GENERATION", "KDA", "ROPE", "faults", "load", "sound"]


class _Law(NamedTuple):
    """What a field may hold, in words and as a question."""

    words: str
    holds: Callable[[Any], bool]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def _are(value: Any, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(holds, value))


_COUNT = _Law("an integer >= 1", lambda v: _is_integer(v) and v >= 1)
# Every row of every head of every layer has a place in a page, and is enumerated:
# a typing error must not cost minutes. Published models have some 130 of either.
_MOST = 512
_FEW = _Law(
    f"an integer from 1 to {_MOST:,}", lambda v: _is_integer(v) and 1 <= v <= _MOST
)
_SOME = _Law("an integer >= 0", lambda v: _is_integer(v) and v >= 0)
_ID = _Law("a token id", _is_integer)
_IDS = _Law(
    "a token id or a list of them", lambda v: _is_integer(v) or _are(v, _is_integer)
)
_FLAG = _Law("true or false", lambda v: isinstance(v, bool))
_TEXT = _Law("a text", lambda v: isinstance(v, str))
_TEXTS = _Law("a list of texts", lambda v: _are(v, lambda each: isinstance(each, str)))
_TABLE = _Law("an object", lambda v: isinstance(v, dict))
_NUMBER = _Law("a number", _is_number)
_POSITIVE = _Law("a number > 0", lambda v: _is_number(v) and v > 0)

GENERATION = {"eos_token_id": _IDS}
FIELDS = GENERATION | {
    "hidden_size": _COUNT,
    "intermediate_size": _COUNT,
    "num_hidden_layers": _FEW,
    "num_attention_heads": _FEW,
    "num_key_value_heads": _FEW,
    "head_dim": _COUNT,
    "vocab_size": _COUNT,
    "max_position_embeddings": _COUNT,
    "rms_norm_eps": _POSITIVE,
    "tie_word_embeddings": _FLAG,
    "bos_token_id": _ID,
    "sliding_window": _COUNT,
    "use_sliding_window": _FLAG,
    "layer_types": _TEXTS,
    "rope_theta": _POSITIVE,
    "rope_scaling": _TABLE,
    "rope_parameters": _TABLE,
    "dtype": _TEXT,
    "torch_dtype": _TEXT,
}
CACHE = {  # what decides the sizes of a cache, in any family
    **dict.fromkeys(
        (
            *("hidden_size", "head_dim", "vocab_size"),
            *("max_position_embeddings", "model_max_length"),
            *("sliding_window", "sliding_window_pattern", "full_attention_interval"),
            *("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"),
            *("index_head_dim", "linear_conv_kernel_dim"),
            *("linear_key_head_dim", "linear_value_head_dim"),
        ),
        _COUNT,
    ),
    **dict.fromkeys(
        (
            *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
            *("linear_num_key_heads", "linear_num_value_heads"),
        ),
        _FEW,
    ),
    "use_sliding_window": _FLAG,
    "max_window_layers": _SOME,
    "layer_types": _TEXTS,
    "text_config": _TABLE,
    "linear_attn_config": _TABLE,
    "mamba_ssm_dtype": _TEXT,
    "model_type": _TEXT,
}
KDA = {
    "num_heads": _FEW,
    "head_dim": _COUNT,
    "short_conv_kernel_size": _COUNT,
    "kda_layers": _Law("a list of layers", lambda v: _are(v, _is_integer)),
    "full_attn_layers": _Law("a list of layers", lambda v: _are(v, _is_integer)),
}
ROPE = {
    "rope_theta": _POSITIVE,
    "rope_type": _TEXT,
    "factor": _POSITIVE,
    "low_freq_factor": _POSITIVE,
    "high_freq_factor": _POSITIVE,
    "original_max_position_embeddings": _POSITIVE,
    "beta_fast": _POSITIVE,
    "beta_slow": _POSITIVE,
    "attention_factor": _POSITIVE,
    "mscale": _NUMBER,
    "mscale_all_dim": _NUMBER,
    "truncate": _FLAG,
}


def load(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        FormatMismatch: not JSON, or something else than an object.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise FormatMismatch(
            say(f"reading {path}", f"it is no JSON ({error})", f"Give a {path.name}")
        ) from error
    if not isinstance(found, dict):
        raise FormatMismatch(
            say(
                f"reading {path}",
                f"it holds a {type(found).__name__}, and its fields stand in an object",
                f"Give a {path.name} of a checkpoint",
            )
        )
    return found


def faults(values: Mapping[str, Any], laws: Mapping[str, _Law]) -> list[str]:
    """Name each field that is not what its law says; null stands for absent."""
    return [
        f"{key} is {_short(values[key])}, not {law.words}"
        for key, law in laws.items()
        if values.get(key) is not None and not law.holds(values[key])
    ]


def sound(values: Mapping[str, Any], laws: Mapping[str, _Law]) -> dict[str, Any]:
    """Return the fields that break no law, nulls left out."""
    return {
        key: value
        for key, value in values.items()
        if value is not None and (key not in laws or laws[key].holds(value))
    }


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
