"""The facts of a decoder of the Llama family: sizes, rope, norms, special ids.

A `ModelSpec` is frozen and hashable, made by a loader from what a file declares and
never guessed. Law: `spec.parameters()` names every tensor of the model with its shape
(Hugging Face names, `[out, in]` layout); a loader returns exactly these.

    spec = config_hf.read("Llama-3.2-1B/config.json")
    spec.parameters()["model.norm.weight"]        # (2048,)
    spec.layer_specs("bfloat16")[0].head_dim      # 64
"""

import dataclasses
from collections.abc import Mapping

from kvmem import geometry
from kvmem.errors import FormatMismatch, say

__all__ = ["ModelSpec"]


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """Sizes and numbers of one decoder; what its cached keys mean follows from them."""

    name: str
    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    norm_eps: float
    tie_embeddings: bool
    max_position: int
    rope: geometry.Rope = geometry.Rope()  # keys are half-split: dim i with i + D/2
    qkv_bias: bool = False
    qk_norm: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def layer_specs(self, kv_dtype: str = "float32") -> tuple[geometry.LayerSpec, ...]:
        """Describe what each layer keeps of a token, in pages of `kv_dtype`."""
        return tuple(
            geometry.LayerSpec(
                name=f"layers.{index}",
                index=index,
                kind="gqa",
                kv_heads=self.kv_heads,
                head_dim=self.head_dim,
                dtype=kv_dtype,
                rope=self.rope,
            )
            for index in range(self.layers)
        )

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name every tensor of the model with its shape, `[out, in]`."""
        shapes = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for index in range(self.layers):
            for name, shape in self._layer_parameters().items():
                shapes[f"model.layers.{index}.{name}"] = shape
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tie_embeddings:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        return shapes

    def require(self, found: Mapping[str, tuple[int, ...]], source: str) -> None:
        """Raise `FormatMismatch` unless `found` is exactly what `parameters` lists."""
        wanted = self.parameters()
        faults = [f"{name} is missing" for name in wanted if name not in found]
        faults += [f"{name} is unknown" for name in found if name not in wanted]
        faults += [
            f"{name} is {found[name]}, not {shape}"
            for name, shape in wanted.items()
            if name in found and found[name] != shape
        ]
        if faults:
            more = f" and {len(faults) - 8} more" if len(faults) > 8 else ""
            raise FormatMismatch(
                say(
                    f"the tensors of {source}",
                    f"its declared sizes ask for other ones: {'; '.join(faults[:8])}"
                    + more,
                    "Use a complete checkpoint of the declared architecture",
                )
            )

    def _layer_parameters(self) -> dict[str, tuple[int, ...]]:
        """Name the tensors of one layer."""
        q_rows, kv_rows = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (self.hidden,),
            "self_attn.q_proj.weight": (q_rows, self.hidden),
            "self_attn.k_proj.weight": (kv_rows, self.hidden),
            "self_attn.v_proj.weight": (kv_rows, self.hidden),
            "self_attn.o_proj.weight": (self.hidden, q_rows),
            "post_attention_layernorm.weight": (self.hidden,),
            "mlp.gate_proj.weight": (self.mlp, self.hidden),
            "mlp.up_proj.weight": (self.mlp, self.hidden),
            "mlp.down_proj.weight": (self.hidden, self.mlp),
        }
        if self.qkv_bias:
            shapes["self_attn.q_proj.bias"] = (q_rows,)
            shapes["self_attn.k_proj.bias"] = (kv_rows,)
            shapes["self_attn.v_proj.bias"] = (kv_rows,)
        if self.qk_norm:
            shapes["self_attn.q_norm.weight"] = (self.head_dim,)
            shapes["self_attn.k_norm.weight"] = (self.head_dim,)
        return shapes
