"""Which rows of a decoder's weights each rank holds, and what is padded for it.

Heads are never cut: tensor parallelism divides the KV heads or is a multiple of them
(then a KV head stands on several ranks), and divides the query heads. MLP and
vocabulary rows are dealt out evenly; where they do not divide, zero rows are added at
the end, which is exact: a zero MLP row adds nothing, a padded logit is -inf.

    Partition(smollm2, Topology(tp=9)).paddings
    # (Padding(name='mlp', size=1536, padded=1539), Padding('vocab', 49152, 49158))

No jax: the plan of a model is read without a device.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from kvmem.errors import IncompatiblePlan, say
from kvmem.geometry import Topology
from kvmem.model.spec import ModelSpec

__all__ = ["Padding", "Partition"]


@dataclasses.dataclass(frozen=True)
class Padding:
    """Rows of a dimension before and after it was made divisible."""

    name: str
    size: int
    padded: int


@dataclasses.dataclass(frozen=True)
class Partition:
    """The share of one rank: every rank's arrays have equal shapes.

    Raises:
        IncompatiblePlan: heads that this topology cannot divide, or token shards.
    """

    spec: ModelSpec
    topology: Topology = Topology()

    def __post_init__(self):
        spec, topology = self.spec, self.topology
        if topology.dcp > 1:
            raise IncompatiblePlan(
                say(
                    f"weights cut for {topology.dcp} token shards",
                    "ranks that share the tokens of a sequence hold the same weights",
                    f"Cut them for Topology(tp={topology.tp})",
                )
            )
        if not self._fits(topology.tp):
            sizes = [t for t in range(1, spec.heads + 1) if self._fits(t)]
            raise IncompatiblePlan(
                say(
                    f"{spec.heads} query heads and {spec.kv_heads} KV heads on TP "
                    f"{topology.tp}",
                    "every rank holds equally many whole query heads, and a KV head "
                    "lies whole on its ranks",
                    f"Use TP {', '.join(map(str, sizes))}",
                )
            )

    @property
    def q_heads(self) -> int:
        """Query heads of a rank."""
        return self.spec.heads // self.topology.tp

    @property
    def kv_heads(self) -> int:
        """KV heads of a rank, replicas counted."""
        return max(1, self.spec.kv_heads // self.topology.tp)

    @property
    def mlp(self) -> int:
        """Rows of the gate, and of the up projection, on a rank."""
        return -(-self.spec.mlp // self.topology.tp)

    @property
    def vocab(self) -> int:
        """Rows of the embedding, and logits, on a rank."""
        return -(-self.spec.vocab // self.topology.tp)

    @property
    def paddings(self) -> tuple[Padding, ...]:
        """What was padded, () when every dimension divides."""
        tp = self.topology.tp
        made = (
            Padding("mlp", self.spec.mlp, self.mlp * tp),
            Padding("vocab", self.spec.vocab, self.vocab * tp),
        )
        return tuple(padding for padding in made if padding.padded != padding.size)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name every array of one rank with its shape, `[out, in]`."""
        spec = self.spec
        shapes = {"embed": (self.vocab, spec.hidden), "norm": (spec.hidden,)}
        if not spec.tie_embeddings:
            shapes["lm_head"] = (self.vocab, spec.hidden)
        for index in range(spec.layers):
            for name, shape in self._layer_shapes().items():
                shapes[f"layers.{index}.{name}"] = shape
        return shapes

    @property
    def num_elements(self) -> int:
        """Elements of all the arrays of one rank, padding and replicas included."""
        return sum(int(np.prod(shape)) for shape in self.shapes().values())

    def rank_params(
        self, params: Mapping[str, np.ndarray], rank: int
    ) -> dict[str, np.ndarray]:
        """Cut one rank's arrays out of a whole model's, fused as the decoder reads.

        Args:
            params: the tensors of `spec.parameters()`, Hugging Face names.
            rank: whose share.
        """
        own = {
            "embed": _deal(params["model.embed_tokens.weight"], self.vocab, rank),
            "norm": params["model.norm.weight"],
        }
        if not self.spec.tie_embeddings:
            own["lm_head"] = _deal(params["lm_head.weight"], self.vocab, rank)
        for index in range(self.spec.layers):
            prefix = f"model.layers.{index}."
            of_layer = {
                name.removeprefix(prefix): array
                for name, array in params.items()
                if name.startswith(prefix)
            }
            for name, array in self._rank_layer(of_layer, rank).items():
                own[f"layers.{index}.{name}"] = array
        return own

    def _rank_layer(
        self, params: Mapping[str, np.ndarray], rank: int
    ) -> dict[str, np.ndarray]:
        """Cut one rank's arrays of one layer, by the decoder's own names."""

        def fused(what: str) -> np.ndarray:
            parts = [params[f"self_attn.{name}_proj.{what}"] for name in "qkv"]
            rows = [self._head_rows(name, rank) for name in "qkv"]
            return np.concatenate([p[r] for p, r in zip(parts, rows, strict=True)])

        gate, up = (
            _deal(params[f"mlp.{name}_proj.weight"], self.mlp, rank)
            for name in ("gate", "up")
        )
        out = params["self_attn.o_proj.weight"][:, self._head_rows("q", rank)]
        down = _deal(params["mlp.down_proj.weight"].T, self.mlp, rank).T
        own = {
            "input_norm": params["input_layernorm.weight"],
            "qkv": fused("weight"),
            "out": np.ascontiguousarray(out),
            "post_norm": params["post_attention_layernorm.weight"],
            "gate_up": np.concatenate([gate, up]),
            "down": np.ascontiguousarray(down),
        }
        if self.spec.qkv_bias:
            own["qkv_bias"] = fused("bias")
        if self.spec.qk_norm:
            own["q_norm"] = params["self_attn.q_norm.weight"]
            own["k_norm"] = params["self_attn.k_norm.weight"]
        return own

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        spec, hidden = self.spec, self.spec.hidden
        q_rows = self.q_heads * spec.head_dim
        qkv_rows = q_rows + 2 * self.kv_heads * spec.head_dim
        shapes = {
            "input_norm": (hidden,),
            "qkv": (qkv_rows, hidden),
            "out": (hidden, q_rows),
            "post_norm": (hidden,),
            "gate_up": (2 * self.mlp, hidden),
            "down": (hidden, self.mlp),
        }
        if spec.qkv_bias:
            shapes["qkv_bias"] = (qkv_rows,)
        if spec.qk_norm:
            shapes |= {"q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}
        return shapes

    def _head_rows(self, name: str, rank: int) -> slice:
        """Return the rows of one rank's heads in a q, k or v projection."""
        dim, tp_index = self.spec.head_dim, self.topology.tp_index(rank)
        if name == "q":
            start, count = tp_index * self.q_heads, self.q_heads
        else:
            field = self.spec.layer_specs()[0].fields[0]
            start, count = self.topology.shard(field, rank)
        return slice(start * dim, (start + count) * dim)

    def _fits(self, tp: int) -> bool:
        heads, kv_heads = self.spec.heads, self.spec.kv_heads
        return heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)


def _deal(array: np.ndarray, rows: int, rank: int) -> np.ndarray:
    """Return `rows` rows for `rank`, with zero rows past the end of `array`."""
    part = array[rank * rows : (rank + 1) * rows]
    missing = rows - len(part)
    if not missing:
        return part
    return np.concatenate([part, np.zeros((missing, *array.shape[1:]), array.dtype)])
