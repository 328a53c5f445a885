"""Families: the fields of a Hugging Face config, read as the mixers of each layer.

One dataclass a `model_type`, its fields named and spelled as in the models' public
config.json. The law: a field that is not declared here is refused, never ignored, and
so is a value of another type; both by the words of `kvmem.settings`. Experts are not
among the fields: the MLP of a layer is dense, `intermediate_size` wide.

    GptOss(**facts).mixers()     # a window, full attention, a window, ...

Sources: config.json and modelling code of openai/gpt-oss-120b, google/gemma-3-27b-it,
google/gemma-3n-E4B-it, deepseek-ai/DeepSeek-V3.2-Exp, Qwen/Qwen3-Next-80B-A3B-Instruct.
"""

import dataclasses
from typing import ClassVar, Literal

from kvmem import errors, settings
from kvmem.geometry import Rope
from kvmem.model.hybrid.mixers import Attention, DeltaNet, Indexer, Latent, Mixer

__all__ = ["FAMILIES", "DeepseekV32", "Family", "Gemma3", "GptOss", "Qwen3Next"]

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """The fields that every config has.

    Raises:
        ConfigError: every field of a wrong type or below one at once.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    layer_types: tuple[str, ...] | None = None
    dtype: str | None = None  # of weights and caches, where nobody says otherwise
    torch_dtype: str | None = None  # its older spelling

    known_types: ClassVar[tuple[str, ...]] = (_FULL,)
    activation: ClassVar[Literal["silu", "gelu"]] = "silu"
    zero_norms: ClassVar[bool] = False  # a norm's weight is what it adds to one
    sandwich_norms: ClassVar[bool] = False  # a norm behind each half too
    scaled_embeddings: ClassVar[bool] = False  # by the root of hidden_size

    def __post_init__(self):
        settings.settle(self)
        settings.require_positive(
            **{
                field.name: getattr(self, field.name)
                for field in dataclasses.fields(self)
                if field.type is int
            }
        )
        types = self.types()
        unknown = sorted(set(types) - set(self.known_types))
        if len(types) != self.num_hidden_layers or unknown:
            raise errors.ConfigError(
                errors.say(
                    f"{len(types)} layer types for {self.num_hidden_layers} layers"
                    + (f", {', '.join(unknown)} among them" if unknown else ""),
                    "each layer has one type that its family knows",
                    f"Use {', '.join(self.known_types)}, one a layer",
                )
            )

    def types(self) -> tuple[str, ...]:
        """Return the type of each layer: as declared, or by the family's pattern."""
        return self.layer_types or tuple(
            map(self.type_of, range(self.num_hidden_layers))
        )

    def type_of(self, index: int) -> str:
        """Return the type of a layer where none is declared."""
        return _FULL

    def mixers(self) -> tuple[Mixer, ...]:
        """Return how the tokens of each layer meet."""
        return tuple(self.mixer(index, kind) for index, kind in enumerate(self.types()))

    def mixer(self, index: int, kind: str) -> Mixer:
        """Return the mixer of one layer of type `kind`."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptOss(Family):
    """GPT-OSS: windows and full attention in turn, a learned sink a query head."""

    num_key_value_heads: int
    head_dim: int
    sliding_window: int
    rope_theta: float = 150_000.0
    rms_norm_eps: float = 1e-5
    attention_bias: bool = True

    known_types = (_FULL, _SLIDING)

    def type_of(self, index: int) -> str:
        """Return "sliding_attention" for the first layer, and every second one."""
        return _FULL if index % 2 else _SLIDING

    def mixer(self, index: int, kind: str) -> Mixer:
        """Return the attention of one layer."""
        return Attention(
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            rope=Rope(self.rope_theta),
            window=self.sliding_window if kind == _SLIDING else None,
            bias=self.attention_bias,
            learned_sinks=True,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3(Family):
    """Gemma 3: five windows to a layer of full attention, each kind with its rope.

    `num_kv_shared_layers`, a field of Gemma 3n, makes the last layers read the keys and
    values of the last layer of their type before them.
    """

    num_key_value_heads: int
    head_dim: int
    sliding_window: int
    query_pre_attn_scalar: int
    rope_theta: float = 1_000_000.0
    rope_local_base_freq: float = 10_000.0
    sliding_window_pattern: int = 6
    tie_word_embeddings: bool = True
    num_kv_shared_layers: int | None = None

    known_types = (_FULL, _SLIDING)
    activation = "gelu"
    zero_norms = True
    sandwich_norms = True
    scaled_embeddings = True

    def type_of(self, index: int) -> str:
        """Return "full_attention" for every last layer of a pattern."""
        return _SLIDING if (index + 1) % self.sliding_window_pattern else _FULL

    def mixer(self, index: int, kind: str) -> Mixer:
        """Return the attention of one layer."""
        local = kind == _SLIDING
        return Attention(
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            scale=self.query_pre_attn_scalar**-0.5,
            rope=Rope(self.rope_local_base_freq if local else self.rope_theta),
            window=self.sliding_window if local else None,
            shares=self._owner(index, kind),
            qk_norm=True,
        )

    def _owner(self, index: int, kind: str) -> str | None:
        """Return the layer whose cache a layer reads, None where it is its own."""
        own = self.num_hidden_layers - (self.num_kv_shared_layers or 0)
        if index < own:
            return None
        owners = [at for at, each in enumerate(self.types()[:own]) if each == kind]
        if not owners:
            raise errors.ConfigError(
                errors.say(
                    f"layer {index} of type {kind} among the last "
                    f"{self.num_kv_shared_layers}, which keep no cache",
                    "it reads the cache of a layer of its type before them",
                    "Lower num_kv_shared_layers",
                )
            )
        return f"layers.{owners[-1]}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekV32(Family):
    """DeepSeek-V3.2: latent attention that reads what its indexer selects."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int

    def mixer(self, index: int, kind: str) -> Mixer:
        """Return the latent attention of one layer."""
        width = self.qk_rope_head_dim
        return Latent(
            heads=self.num_attention_heads,
            q_rank=self.q_lora_rank,
            rank=self.kv_lora_rank,
            nope_dim=self.qk_nope_head_dim,
            rope_dim=width,
            v_dim=self.v_head_dim,
            scale=(self.qk_nope_head_dim + width) ** -0.5,
            rope=Rope(self.rope_theta, style="interleaved"),
            indexer=Indexer(
                heads=self.index_n_heads,
                dim=self.index_head_dim,
                top_k=self.index_topk,
                rope=Rope(self.rope_theta, width=width),
            ),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Next(Family):
    """Qwen3-Next: three gated delta nets to a layer of gated full attention."""

    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    full_attention_interval: int = 4
    partial_rotary_factor: float = 0.25
    rope_theta: float = 10_000_000.0

    known_types = (_FULL, _LINEAR)
    zero_norms = True

    def type_of(self, index: int) -> str:
        """Return "full_attention" for every last layer of an interval."""
        return _LINEAR if (index + 1) % self.full_attention_interval else _FULL

    def mixer(self, index: int, kind: str) -> Mixer:
        """Return the delta net or the attention of one layer."""
        if kind == _LINEAR:
            return DeltaNet(
                key_heads=self.linear_num_key_heads,
                value_heads=self.linear_num_value_heads,
                key_dim=self.linear_key_head_dim,
                value_dim=self.linear_value_head_dim,
                conv_kernel=self.linear_conv_kernel_dim,
            )
        width = int(self.head_dim * self.partial_rotary_factor)
        return Attention(
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            rope=Rope(self.rope_theta, width=width),
            qk_norm=True,
            gated=True,
        )


FAMILIES: dict[str, type[Family]] = {
    "gpt_oss": GptOss,
    "gemma3_text": Gemma3,
    "deepseek_v32": DeepseekV32,
    "qwen3_next": Qwen3Next,
}
