"""The table [model]: where a model comes from, and what it is kept in.

ModelConfig("smollm2", kv_dtype="bfloat16")
"""

import dataclasses
from typing import Literal

from kvmem import errors, settings
from kvmem.model import presets

__all__ = ["DType", "ModelConfig", "WeightDType"]

WeightDType = Literal["float32", "float16", "bfloat16"]
DType = Literal["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Where a model comes from, and what it and its cache are kept in.

    Args:
        source: a preset's name, a .gguf file, a checkpoint folder, or (to plan only) a
            config.json.
        dtype: dtype of the weights; None: the checkpoint's own, else float32.
        kv_dtype: dtype of cached keys and values; None: the checkpoint's own, else
            bfloat16.
    """

    source: str
    dtype: WeightDType | None = None
    kv_dtype: DType | None = None

    def __post_init__(self):
        settings.settle(self)
        if not self.source.strip():
            raise errors.ConfigError(
                errors.say(
                    f"model.source = {self.source!r}",
                    "a model comes from somewhere",
                    f"Give a path, or one of the presets {', '.join(presets.PRESETS)}",
                )
            )

    def weight_dtype(self) -> str:
        """Return the dtype that the weights are loaded in."""
        return self.dtype or presets.declared_dtype(self.source) or "float32"

    def cache_dtype(self) -> str:
        """Return the dtype that keys and values are cached in."""
        return self.kv_dtype or presets.declared_dtype(self.source) or "bfloat16"
