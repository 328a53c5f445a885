"""Distilling draft layers: what they say beside what the model says of the same text.

The draft reads the model's row of each token before, says what may come next, then
reads its own rows instead, as it does when it proposes further. The law: the model is
never changed, nor its embeddings and head, which the draft speaks with; what is trained
are the draft's own tensors.

    trainer = Trainer(model, mtp.draw(model), learning_rate=1e-3, depth=2)
    state, loss = trainer.step(trainer.start(), tokens)      # i32[N, L]
    layers = trainer.layers(state)
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from kvmem.geometry import Topology
from kvmem.model import mtp
from kvmem.model.decoder import Decoder
from kvmem.model.loaded import LoadedModel
from kvmem.model.mtp_decoder import MtpDecoder
from kvmem.model.partitions import partition_of

__all__ = ["State", "Trainer"]

_OF_TARGET = ("embed", "norm", "lm_head")
_NAMES = {
    "input_norm": "input_layernorm.weight",
    "out": "self_attn.o_proj.weight",
    "post_norm": "post_attention_layernorm.weight",
    "down": "mlp.down_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}


class State(NamedTuple):
    """What training changes."""

    params: dict[str, jax.Array]  # the draft's own, by the decoder's names
    optimizer: optax.OptState


class _Fixed(NamedTuple):
    """What training does not change: the model, and what the draft has of it."""

    teacher: nnx.State
    shared: dict[str, jax.Array]


class Trainer:
    """Distils one draft.

    Args:
        target: the model.
        draft: layers to begin with.
        learning_rate: of Adam.
        depth: passes over a text, the first behind the model's rows and each further
            one behind the draft's own.
    """

    def __init__(
        self, target: LoadedModel, draft: LoadedModel, learning_rate: float, depth: int
    ):
        self._target, self._draft, self._depth = target, draft, depth
        self._optimizer = optax.adam(learning_rate)
        self._partition = partition_of(draft.spec, Topology())
        whole = partition_of(target.spec, Topology())
        self._graph, teacher = nnx.split(
            Decoder(whole, whole.rank_params(target.params, 0))
        )
        own = self._partition.rank_params(draft.params, 0)
        shared = {name: own[name] for name in _OF_TARGET if name in own}
        self._first = {n: jnp.asarray(x) for n, x in own.items() if n not in _OF_TARGET}
        fixed = jax.device_put(_Fixed(teacher, shared))
        self._step = functools.partial(jax.jit(self._advance), fixed)
        self._look = functools.partial(jax.jit(self._compare), fixed)

    def start(self) -> State:
        """Return the state before the first step."""
        return State(self._first, self._optimizer.init(self._first))

    def step(self, state: State, tokens: np.ndarray) -> tuple[State, float]:
        """Learn from texts i32[N, L]; return the mean divergence before, in nats."""
        state, loss = self._step(state, jnp.asarray(tokens))
        return state, float(loss)

    def held_out(self, state: State, tokens: np.ndarray) -> tuple[float, list[float]]:
        """Return the divergence on texts i32[N, L], and of each pass the share of
        places where the draft's likeliest token is the model's."""
        loss, agreement = self._look(state.params, jnp.asarray(tokens))
        return float(loss), np.asarray(agreement).tolist()

    def layers(self, state: State) -> LoadedModel:
        """Return the draft with what was learned, by the names of its file."""
        spec, found = self._draft.spec, {}
        rows = [heads * spec.head_dim for heads in (spec.heads, spec.kv_heads)]
        for name, array in state.params.items():
            array, (*layer, what) = np.asarray(array), name.split(".")
            prefix = ".".join(["model", *layer, ""]) if layer else ""
            if what in ("qkv", "qkv_bias"):
                parts = np.split(array, np.cumsum(rows))
                kind = "bias" if what == "qkv_bias" else "weight"
                for each, part in zip("qkv", parts, strict=True):
                    found[f"{prefix}self_attn.{each}_proj.{kind}"] = part
            elif what == "gate_up":
                gate, up = np.split(array, 2)
                found[f"{prefix}mlp.gate_proj.weight"] = gate
                found[f"{prefix}mlp.up_proj.weight"] = up
            elif layer:
                found[prefix + _NAMES[what]] = array
            else:
                found[f"mtp.{what}.weight"] = array
        return mtp.with_params(self._target, spec.layers, found, "trained")

    def _advance(self, fixed: _Fixed, state: State, tokens: jax.Array):
        said = self._taught(fixed, tokens)
        loss, slopes = jax.value_and_grad(self._loss)(
            state.params, fixed.shared, *said, tokens
        )
        changes, optimizer = self._optimizer.update(slopes, state.optimizer)
        return State(optax.apply_updates(state.params, changes), optimizer), loss

    def _compare(self, fixed: _Fixed, params, tokens: jax.Array):
        rows, logits = self._taught(fixed, tokens)
        best = jnp.argmax(logits, -1)
        agreement = [
            jnp.mean(jnp.argmax(said, -1)[:, at:] == best[:, at:])
            for at, said in enumerate(self._passes(params, fixed.shared, rows, tokens))
        ]
        loss = self._loss(params, fixed.shared, rows, logits, tokens)
        return loss, jnp.stack(agreement)

    def _taught(self, fixed: _Fixed, tokens: jax.Array):
        """Return the model's rows f32[N, L, D] and logits f32[N, L, V]."""
        decoder = nnx.merge(self._graph, fixed.teacher)
        rows = decoder.rows(tokens)
        return rows, decoder.head(rows)

    def _passes(
        self, params, shared, rows: jax.Array, tokens: jax.Array
    ) -> list[jax.Array]:
        """Return the draft's logits of each pass."""
        draft = MtpDecoder(self._partition, {**shared, **params})
        said = []
        for _ in range(self._depth):
            rows = draft.rows(tokens, hidden=jnp.pad(rows, _BEHIND)[:, :-1])
            said.append(draft.head(rows))
        return said

    def _loss(self, params, shared, rows, logits, tokens) -> jax.Array:
        """Return the mean over passes and places of the divergence from the model.

        A pass of the draft's own rows has none before its first, so it begins later.
        """
        wanted = jax.nn.log_softmax(logits)
        total = jnp.float32(0)
        for at, said in enumerate(self._passes(params, shared, rows, tokens)):
            off = jnp.exp(wanted) * (wanted - jax.nn.log_softmax(said))
            total += off.sum(-1)[:, at:].mean()
        return total / self._depth


_BEHIND = ((0, 0), (1, 0), (0, 0))  # a row of zeros before the first token
