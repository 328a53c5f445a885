"""The facts of a hybrid decoder, from the fields of a Hugging Face config.

The law: everything that a `HybridSpec` says follows from its facts, so two specs of
equal facts are one model with one cache; whatever is not understood is refused.

    spec = HybridSpec("gpt_oss_tiny", settings.Table({"model_type": "gpt_oss", ...}))
    spec.layer_specs("bfloat16")      # a window and full attention in turn
"""

import dataclasses
import functools
from typing import Any

from kvmem import errors, settings
from kvmem.geometry import LayerSpec
from kvmem.model.hybrid.families import FAMILIES, Family
from kvmem.model.hybrid.mixers import Mixer
from kvmem.model.hybrid.weights import Weight

__all__ = ["HybridSpec"]

_NO_NUMBERS = ("max_position_embeddings", "bos_token_id", "eos_token_id")
_NO_NUMBERS += ("dtype", "torch_dtype")  # a tensor tells its own


@dataclasses.dataclass(frozen=True)
class HybridSpec:
    """One decoder whose layers may differ.

    Args:
        name: for people.
        facts: the fields of its config, `model_type` among them.

    Raises:
        ConfigError: an unknown family, or fields that are not its own.
    """

    name: str
    facts: settings.Table

    def __post_init__(self):
        settings.settle(self)
        self.family  # noqa: B018 - refuses what it does not understand, at once

    @functools.cached_property
    def family(self) -> Family:
        """The fields of the config, typed."""
        fields = dict(self.facts)
        kind = fields.pop("model_type", None)
        if kind not in FAMILIES:
            raise errors.ConfigError(
                errors.say(
                    f"model {self.name!r} of type {kind!r}",
                    "a hybrid decoder is computed as one of the known families",
                    f"Set model_type to one of {', '.join(FAMILIES)}",
                )
            )
        known = [field.name for field in dataclasses.fields(FAMILIES[kind])]
        foreign = sorted(set(fields) - set(known))
        missing = [
            field.name
            for field in dataclasses.fields(FAMILIES[kind])
            if field.default is dataclasses.MISSING and field.name not in fields
        ]
        if foreign or missing:
            raise errors.ConfigError(
                errors.say(
                    f"model {self.name!r} of type {kind}",
                    "; ".join(
                        [f"{key} is not computed" for key in foreign]
                        + [f"{key} is missing" for key in missing]
                    ),
                    f"Give the fields {', '.join(known)}; MLPs are dense",
                )
            )
        return FAMILIES[kind](**fields)

    @functools.cached_property
    def mixers(self) -> tuple[Mixer, ...]:
        """How the tokens of each layer meet."""
        return self.family.mixers()

    @property
    def hidden(self) -> int:
        """Elements of a token between layers."""
        return self.family.hidden_size

    @property
    def mlp(self) -> int:
        """Rows of the gate, and of the up projection."""
        return self.family.intermediate_size

    @property
    def vocab(self) -> int:
        """Token ids."""
        return self.family.vocab_size

    @property
    def norm_eps(self) -> float:
        """What a norm adds to the mean square."""
        return self.family.rms_norm_eps

    @property
    def tie_embeddings(self) -> bool:
        """Say whether logits are products with the embeddings."""
        return self.family.tie_word_embeddings

    @property
    def max_position(self) -> int:
        """Tokens of the longest text."""
        return self.family.max_position_embeddings

    @property
    def bos_id(self) -> int | None:
        """The id that begins a text, if any."""
        return self.family.bos_token_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a text."""
        found = self.family.eos_token_id
        return () if found is None else (found,)

    @property
    def numbers(self) -> dict[str, Any]:
        """The facts that change what is computed, JSON types only."""
        return {
            key: value
            for key, value in sorted(self.facts.plain().items())
            if key not in _NO_NUMBERS
        }

    def layer_specs(self, kv_dtype: str = "float32") -> tuple[LayerSpec, ...]:
        """Describe what each layer keeps, in pages of `kv_dtype`.

        Index keys are fp8 with scales, and the matrices of states float32, whatever the
        rest is kept in.
        """
        return tuple(
            cache
            for index, mixer in enumerate(self.mixers)
            for cache in mixer.caches(f"layers.{index}", index, kv_dtype)
        )

    def weights(self) -> dict[str, Weight]:
        """Describe every tensor of the model, by name."""
        norm = Weight((self.hidden,), drawn=self._norm)
        rows = Weight((self.vocab, self.hidden), 0)
        made = {"model.embed_tokens.weight": rows}
        for index, mixer in enumerate(self.mixers):
            for name, weight in self._layer_weights(mixer).items():
                made[f"model.layers.{index}.{name}"] = weight
        made["model.norm.weight"] = norm
        if not self.tie_embeddings:
            made["lm_head.weight"] = rows
        return made

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name every tensor of the model with its shape, `[out, in]`."""
        return {name: weight.shape for name, weight in self.weights().items()}

    @property
    def _norm(self) -> str:
        return "zero norm" if self.family.zero_norms else "norm"

    def _layer_weights(self, mixer: Mixer) -> dict[str, Weight]:
        """Describe the tensors of one layer."""
        norms = ["input_layernorm", "post_attention_layernorm"]
        if self.family.sandwich_norms:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        made = {
            f"{norm}.weight": Weight((self.hidden,), drawn=self._norm) for norm in norms
        }
        for name, weight in mixer.weights(self.hidden, self._norm).items():
            made[f"mixer.{name}"] = weight
        return made | {
            "mlp.gate_proj.weight": Weight((self.mlp, self.hidden), 0),
            "mlp.up_proj.weight": Weight((self.mlp, self.hidden), 0),
            "mlp.down_proj.weight": Weight((self.hidden, self.mlp), 1),
        }
