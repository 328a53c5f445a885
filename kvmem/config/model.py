"""The table [model]: where a model comes from, and what it is kept in.

A model is a file, or the public facts of one. Facts alone can be planned; facts and a
seed are a model of random weights. Law: exactly one of the two says what a model is.

    ModelConfig("smollm2-135m-instruct", kv_dtype="bfloat16").spec().layers       # 30
    ModelConfig(facts={"model_type": "gpt_oss", ...}).spec().layer_specs()
"""

import dataclasses
from pathlib import Path
from typing import Literal

from kvmem import errors, settings
from kvmem.geometry import LayerSpec, kinds
from kvmem.model import cache_facts, presets
from kvmem.model.cache_facts import CacheSpec
from kvmem.model.hybrid import random_model
from kvmem.model.hybrid.spec import HybridSpec
from kvmem.model.loaded import LoadedModel
from kvmem.model.spec import ModelSpec
from kvmem.settings import Table

__all__ = ["DType", "ModelConfig", "WeightDType"]

WeightDType = Literal["float32", "float16", "bfloat16"]
DType = Literal[
    "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "mxfp8"
]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Where a model comes from, and what it and its cache are kept in.

    Args:
        source: a preset's name, a .gguf file, a checkpoint folder, or (to plan only) a
            config.json.
        dtype: dtype of the weights; None: the checkpoint's own, else float32.
        kv_dtype: dtype of cached keys and values; None: the checkpoint's own, else
            bfloat16.
        facts: in place of a source, fields of a model's config.json.
        seed: weights are drawn from this seed; only with facts.
    """

    source: str | None = None
    dtype: WeightDType | None = None
    kv_dtype: DType | None = None
    facts: Table | None = None
    seed: int | None = None

    def __post_init__(self):
        settings.settle(self)
        named = self.source is not None and bool(self.source.strip())
        if named == (self.facts is not None) or (named and self.seed is not None):
            raise errors.ConfigError(
                errors.say(
                    f"model.source = {self.source!r} with "
                    f"{len(self.facts or ())} facts and seed = {self.seed}",
                    "a model comes from somewhere, a source or facts, and a seed draws "
                    "the weights of facts",
                    "Give model.source, a path or one of the presets "
                    f"{', '.join(presets.PRESETS)}; or a table model.facts",
                )
            )

    def spec(self) -> ModelSpec | HybridSpec | CacheSpec:
        """Return the facts of a model that runs, else those that plans need.

        Raises:
            FormatMismatch: not even the sizes of its cache are understood.
            ConfigError: no such source, or a seed with facts that no decoder computes.
        """
        if self.facts is not None and self.seed is not None:
            return HybridSpec(self._drawn_name(), self.facts)
        if self.facts is not None:
            return cache_facts.read_facts(self.facts, refusal=_NO_WEIGHTS)
        try:
            return presets.read_spec(self.source)
        except errors.FormatMismatch as cannot_run:
            path = _config_json(self.source)
            if path is None:
                raise
            return cache_facts.read(path, refusal=str(cannot_run).rstrip("."))

    def layer_specs(
        self, spec: ModelSpec | HybridSpec | CacheSpec | None = None
    ) -> tuple[LayerSpec, ...]:
        """Return what each layer keeps of a token in this cache's dtype.

        Args:
            spec: the model's, where it has been read before.
        """
        spec = self.spec() if spec is None else spec
        if self.cache_dtype() != "mxfp8":
            return spec.layer_specs(self.cache_dtype())
        return tuple(map(kinds.mxfp8, spec.layer_specs(kinds.FP8)))

    def load(self) -> LoadedModel:
        """Load the weights of a source, or draw those of facts and a seed."""
        dtype = self.weight_dtype()
        if self.facts is None:
            return presets.load(self.source, dtype)
        return random_model.make(self.facts, self.seed, dtype, self._drawn_name())

    def _drawn_name(self) -> str:
        return f"{self.facts.get('model_type')} drawn from seed {self.seed}"

    def declared_dtype(self) -> str | None:
        """Return the dtype that a checkpoint or its facts declare."""
        if self.facts is None:
            return presets.declared_dtype(self.source)
        return self.facts.get("dtype") or self.facts.get("torch_dtype")

    def weight_dtype(self) -> str:
        """Return the dtype that the weights are loaded in."""
        return self.dtype or self.declared_dtype() or "float32"

    def cache_dtype(self) -> str:
        """Return the dtype that keys and values are cached in."""
        return self.kv_dtype or self.declared_dtype() or "bfloat16"


_NO_WEIGHTS = "facts say how much a cache keeps, and are no weights"


def _config_json(source: str) -> Path | None:
    """Return the config.json that a source is or holds, None for a .gguf file."""
    if source.endswith(".json"):
        return Path(source)
    path = presets.resolve(source)
    return path / "config.json" if path.is_dir() else None
