"""Mixers: how the tokens of a layer meet, as facts: what is kept, which weights.

Three kinds: `Attention` over keys and values (a window, learned sinks, an output gate),
`Latent` attention over one compressed row a token, with index keys that select what is
read, and the gated `DeltaNet`, which keeps a matrix a head. The law: the cache of a
layer (`caches`) and its weights (`weights`) follow from the same fields.

    DeltaNet(2, 4, 16, 16, conv_kernel=4).caches("layers.0", 0, "bfloat16")

No jax; `attention_layer`, `latent_layer` and `delta_layer` compute them.
"""

import dataclasses

from kvmem.geometry import LayerSpec, Rope, kinds
from kvmem.model.hybrid.weights import Weight

__all__ = ["Attention", "DeltaNet", "Indexer", "Latent", "Mixer"]


@dataclasses.dataclass(frozen=True)
class Attention:
    """Softmax attention of grouped query heads.

    Args:
        scale: factor on the scores.
        rope: how queries and keys are rotated.
        window: tokens that a query sees, itself included; None: all.
        shares: the layer whose keys and values are read; None: its own.
        bias: biases on all four projections.
        qk_norm: norms of query and key heads before they are rotated.
        gated: the output of a head is multiplied by the sigmoid of a gate.
        learned_sinks: a learned score a query head takes part in every softmax.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope
    window: int | None = None
    shares: str | None = None
    bias: bool = False
    qk_norm: bool = False
    gated: bool = False
    learned_sinks: bool = False

    def caches(self, name: str, index: int, kv_dtype: str) -> tuple[LayerSpec, ...]:
        """Return what layer `name` keeps of a token."""
        spec = LayerSpec(
            name,
            index,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=kv_dtype,
            rope=self.rope,
            window=self.window,
            scale=self.scale,
            shares=self.shares,
        )
        return (spec,)

    def weights(self, hidden: int, norm: str) -> dict[str, Weight]:
        """Name the layer's own weights; `norm` is how its norms are drawn."""
        rows, kv_rows = self.heads * self.head_dim, self.kv_heads * self.head_dim
        q_rows = rows * (2 if self.gated else 1)
        made = {
            "q_proj.weight": Weight((q_rows, hidden), 0, self.heads),
            "o_proj.weight": Weight((hidden, rows), 1, self.heads),
        }
        owned = ("k", "v") if self.shares is None else ()
        for each in owned:
            made[f"{each}_proj.weight"] = Weight((kv_rows, hidden), 0, self.kv_heads)
        if self.bias:
            made["q_proj.bias"] = Weight((q_rows,), 0, self.heads, "bias")
            made["o_proj.bias"] = Weight((hidden,), drawn="bias")
            for each in owned:
                made[f"{each}_proj.bias"] = Weight((kv_rows,), 0, self.kv_heads, "bias")
        if self.qk_norm:
            made["q_norm.weight"] = Weight((self.head_dim,), drawn=norm)
            if owned:
                made["k_norm.weight"] = Weight((self.head_dim,), drawn=norm)
        if self.learned_sinks:
            made["sinks"] = Weight((self.heads,), 0, self.heads, "bias")
        return made


@dataclasses.dataclass(frozen=True)
class Indexer:
    """Index keys and queries, by which a latent layer selects what it reads."""

    heads: int
    dim: int
    top_k: int
    rope: Rope


@dataclasses.dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: keys and values are products of one row a token.

    Args:
        q_rank: elements of the compressed query.
        rank: elements of the compressed keys and values.
        nope_dim, rope_dim, v_dim: elements of a head's plain key, of the rotated key
            that all heads share, and of a head's value.
        rope: how the shared key, as a row of its own, is rotated.
        indexer: selects what is read; None: all of it.
    """

    heads: int
    q_rank: int
    rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    scale: float
    rope: Rope
    indexer: Indexer | None = None

    def caches(self, name: str, index: int, kv_dtype: str) -> tuple[LayerSpec, ...]:
        """Return what layer `name` keeps of a token: its row, its index key."""
        fp8 = kv_dtype == kinds.FP8
        row = kinds.latent(
            name,
            index,
            rank=self.rank,
            rope_dim=self.rope_dim,
            dtype="bfloat16" if fp8 else kv_dtype,
            rope=self.rope,
            scale=self.scale,
            fp8=fp8,
        )
        if self.indexer is None:
            return (row,)
        key = kinds.indexer(
            self.index_name(name),
            index,
            dim=self.indexer.dim,
            rope=self.indexer.rope,
        )
        return row, key

    @staticmethod
    def index_name(name: str) -> str:
        """Return what the index keys of layer `name` are called."""
        return f"{name}.indexer"

    def weights(self, hidden: int, norm: str) -> dict[str, Weight]:
        """Name the layer's own weights; `norm` is how its norms are drawn."""
        q_rows = self.heads * (self.nope_dim + self.rope_dim)
        kv_rows = self.heads * (self.nope_dim + self.v_dim)
        made = {
            "q_a_proj.weight": Weight((self.q_rank, hidden)),
            "q_a_layernorm.weight": Weight((self.q_rank,), drawn=norm),
            "q_b_proj.weight": Weight((q_rows, self.q_rank), 0, self.heads),
            "kv_a_proj.weight": Weight((self.rank + self.rope_dim, hidden)),
            "kv_a_layernorm.weight": Weight((self.rank,), drawn=norm),
            "kv_b_proj.weight": Weight((kv_rows, self.rank), 0, self.heads),
            "o_proj.weight": Weight((hidden, self.heads * self.v_dim), 1, self.heads),
        }
        if self.indexer is not None:
            heads, dim = self.indexer.heads, self.indexer.dim
            made |= {
                "indexer.wq_b.weight": Weight((heads * dim, self.q_rank)),
                "indexer.wk.weight": Weight((dim, hidden)),
                "indexer.k_norm.weight": Weight((dim,), drawn="norm"),
                "indexer.k_norm.bias": Weight((dim,), drawn="bias"),
                "indexer.weights_proj.weight": Weight((heads, hidden)),
            }
        return made


@dataclasses.dataclass(frozen=True)
class DeltaNet:
    """A gated delta net: short convolutions and a decaying matrix a value head."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    @property
    def heads(self) -> int:
        """Heads that ranks divide."""
        return self.value_heads

    def caches(self, name: str, index: int, kv_dtype: str) -> tuple[LayerSpec, ...]:
        """Return what layer `name` keeps of a sequence."""
        state = kinds.gated_delta(
            name,
            index,
            key_heads=self.key_heads,
            value_heads=self.value_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            conv_kernel=self.conv_kernel,
            conv_dtype="bfloat16" if kv_dtype == kinds.FP8 else kv_dtype,
        )
        return (state,)

    def weights(self, hidden: int, norm: str) -> dict[str, Weight]:
        """Name the layer's own weights; `norm` is how its norms are drawn."""
        keys = self.key_heads, self.key_heads * self.key_dim
        values = self.value_heads, self.value_heads * self.value_dim
        made = {}
        for each, (heads, rows) in {"q": keys, "k": keys, "v": values}.items():
            made[f"{each}_proj.weight"] = Weight((rows, hidden), 0, heads)
            made[f"conv_{each}.weight"] = Weight((rows, self.conv_kernel), 0, heads)
        heads, rows = values
        return made | {
            "z_proj.weight": Weight((rows, hidden), 0, heads),
            "a_proj.weight": Weight((heads, hidden), 0, heads),
            "b_proj.weight": Weight((heads, hidden), 0, heads),
            "a_log": Weight((heads,), 0, heads, "rate"),
            "dt_bias": Weight((heads,), 0, heads, "bias"),
            "norm.weight": Weight((self.value_dim,), drawn="norm"),
            "o_proj.weight": Weight((hidden, rows), 1, heads),
        }


Mixer = Attention | Latent | DeltaNet
