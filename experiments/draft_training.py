"""Distilling draft layers: what they say beside what the model said of its own text.

The draft reads the model's row of each token before, says what may come next, then
reads its own rows instead, as it does when it proposes further. What the model made of
its texts was kept (`draft_texts`), so a step computes the draft alone, and weighs what
the model took for likely against the words that it uses and a few others, for whom they
stand. The law: the model is never changed, nor its embeddings and head, which the draft
speaks with; what is trained are the draft's own tensors.

    trainer = Trainer(model, mtp.draw(model), lessons, Learning(taught=80))
    state, loss = trainer.step(trainer.start(), lessons.of(slice(4)), number=0)
    layers = trainer.layers(state)
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments import draft_passes
from experiments.draft_texts import Lessons
from kvmem.geometry import Topology
from kvmem.model import draft_spec, mtp
from kvmem.model.decoder import Decoder
from kvmem.model.draft_spec import ARRAYS_OF_TARGET
from kvmem.model.loaded import LoadedModel
from kvmem.model.mtp_decoder import MtpDecoder
from kvmem.model.ops import rms_norm
from kvmem.model.partitions import partition_of

__all__ = ["Learning", "Pass", "State", "Trainer"]

_NAMES = {
    "input_norm": "input_layernorm.weight",
    "out": "self_attn.o_proj.weight",
    "post_norm": "post_attention_layernorm.weight",
    "down": "mlp.down_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}
_WARM = 0.05  # of all steps, over which the rate rises
_LONGEST = 1.0  # norm of a step's slopes


class State(NamedTuple):
    """What training changes."""

    params: dict[str, jax.Array]  # the draft's own, by the decoder's names
    optimizer: optax.OptState


@dataclasses.dataclass(frozen=True)
class Learning:
    """How a draft learns.

    Args:
        taught: last places of each text that the model wrote.
        depth: passes over a text, the first behind the model's rows and each further
            one behind the draft's own.
        learning_rate: of Adam, at its highest; it falls to nothing.
        steps: of training in all.
        words: tokens that are always weighed, the likeliest of the lessons.
        others: drawn from all other tokens at each step, for whom they stand.
        alone: share of the steps, the first ones, that learn the first pass alone,
            which cost a third.
    """

    taught: int
    depth: int = 3
    learning_rate: float = 1e-3
    steps: int = 200
    words: int = 4096
    others: int = 512
    alone: float = 0.4

    def depth_at(self, step: int) -> int:
        """Return how many passes a step learns."""
        return 1 if step < self.alone * self.steps else self.depth


class Pass(NamedTuple):
    """What a draft makes of some places, and what the model took for likely there."""

    rows: jax.Array  # f32[N, Q, D] before the last norm
    likely: jax.Array  # i32[N, Q, K] tokens, the likeliest first
    logprobs: jax.Array  # f32[N, Q, K]


class _Fixed(NamedTuple):
    """What training does not change: what the draft has of the model, and words."""

    shared: dict[str, jax.Array]  # embeddings, last norm and head
    words: jax.Array  # i32[M]
    place: jax.Array  # i32[V] of a word in `words`, -1: none


class Trainer:
    """Distils one draft.

    Args:
        target: the model.
        draft: layers to begin with.
        lessons: that are trained on, whose likeliest tokens are the words.
        learning: how.

    What is mtp's own is named here, for other kinds of drafts to name theirs.
    """

    decoder: Callable[..., Decoder] = MtpDecoder
    complete = staticmethod(mtp.with_params)
    prefix = "mtp"  # of the tensors that are of no layer

    def __init__(
        self,
        target: LoadedModel,
        draft: LoadedModel,
        lessons: Lessons,
        learning: Learning,
    ):
        self._target, self._spec, self.learning = target, draft.spec, learning
        self._partition = partition_of(draft.spec, Topology())
        self._optimizer = _optimizer(learning)
        self._first = draft
        self.words, self._rest = _words(lessons, target.spec.vocab, learning.words)
        place = np.full(target.spec.vocab, -1, np.int32)
        place[self.words] = np.arange(len(self.words))
        own = self._partition.rank_params(draft.params, 0)
        shared = {name: own[name] for name in ARRAYS_OF_TARGET if name in own}
        fixed = jax.device_put(_Fixed(shared, self.words, place))
        step = jax.jit(self._advance, static_argnames="depth")
        self._step = functools.partial(step, fixed)
        self._look = functools.partial(jax.jit(self._compare), fixed)

    def start(self, draft: LoadedModel | None = None) -> State:
        """Return the state before the first step, of other layers if some are given."""
        own = self._partition.rank_params((draft or self._first).params, 0)
        own = {n: jnp.asarray(x) for n, x in own.items() if n not in ARRAYS_OF_TARGET}
        return State(own, self._optimizer.init(own))

    def step(self, state: State, lessons: Lessons, number: int) -> tuple[State, float]:
        """Learn from some texts; return the mean divergence before, in nats.

        Args:
            state: after the steps before.
            lessons: the texts.
            number: of the step, from 0 on; it draws the others.
        """
        count = min(self.learning.others, len(self._rest))
        others = np.random.default_rng(number).choice(self._rest, count, replace=False)
        depth = self.learning.depth_at(number)
        state, loss = self._step(state, lessons, others, depth=depth)
        return state, float(loss)

    def held_out(
        self, state: State, lessons: Lessons, batch: int = 8
    ) -> tuple[float, list[float]]:
        """Return how far the draft is from the model on texts, and how often it is not.

        Returns:
            The mean divergence in nats, all tokens weighed, and of each pass the share
            of places where the draft's likeliest token is the model's.
        """
        found = []
        for first in range(0, len(lessons.tokens), batch):
            part = lessons.of(slice(first, first + batch))
            found.append((len(part.tokens), *self._look(state.params, part)))
        counts, losses, agreement = (np.asarray(x) for x in zip(*found, strict=True))
        shares = np.average(agreement, axis=0, weights=counts)
        return float(np.average(losses, weights=counts)), shares.tolist()

    def layers(self, state: State) -> LoadedModel:
        """Return the draft with what was learned, by the names of its file."""
        spec, found = self._spec, {}
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
                found[f"{self.prefix}.{what}.weight"] = array
        found[draft_spec.WORDS] = self.words
        return self.complete(self._target, spec.layers, found, "trained")

    def passes(self, draft: Decoder, lessons: Lessons, depth: int) -> list[Pass]:
        """Return what each pass makes of the places that are taught."""
        found = draft_passes.passes(
            draft, lessons.tokens, lessons.rows, depth, self.learning.taught
        )
        ahead = (lessons.likely, lessons.logprobs)
        return [Pass(rows, *(x[:, -rows.shape[1] :] for x in ahead)) for rows in found]

    def _advance(
        self, fixed: _Fixed, state: State, lessons: Lessons, others, depth: int
    ):
        loss, slopes = jax.value_and_grad(self._loss)(
            state.params, fixed, lessons, others, depth
        )
        changes, optimizer = self._optimizer.update(
            slopes, state.optimizer, state.params
        )
        return State(optax.apply_updates(state.params, changes), optimizer), loss

    def _passes(self, params, fixed: _Fixed, lessons: Lessons, depth: int):
        """Return the draft and, of each pass, its rows and what was thought there."""
        draft = self.decoder(self._partition, {**fixed.shared, **params})
        return draft, self.passes(draft, lessons, depth)

    def _loss(
        self, params, fixed: _Fixed, lessons: Lessons, others, depth: int
    ) -> jax.Array:
        """Return the mean over passes and places of the divergence from the model."""
        draft, found = self._passes(params, fixed, lessons, depth)
        head = fixed.shared.get("lm_head", fixed.shared["embed"])
        # An other token stands for as many as were not drawn beside it.
        weight = np.log(max(1, len(self._rest)) / max(1, len(others)))
        weights = np.repeat([0, weight], [len(fixed.words), len(others)])
        weights = jnp.asarray(weights, jnp.float32)[None, None]
        heads = jnp.concatenate([head[fixed.words], head[others]])
        total = jnp.float32(0)
        for rows, likely, logprobs in found:
            rows = rms_norm(rows, draft.norm, self._spec.norm_eps)
            said = jnp.einsum("nqd,md->nqm", rows, heads)
            whole = jax.nn.logsumexp(said + weights, -1, keepdims=True)
            total += _divergence(said - whole, fixed.place[likely], logprobs)
        return total / len(found)

    def _compare(self, fixed: _Fixed, params, lessons: Lessons):
        draft, found = self._passes(params, fixed, lessons, self.learning.depth)
        agreement, total = [], jnp.float32(0)
        for rows, likely, logprobs in found:
            said = jax.nn.log_softmax(draft.head(rows))
            agreement.append(jnp.mean(jnp.argmax(said, -1) == likely[..., 0]))
            total += _divergence(said, likely, logprobs)
        return total / len(found), jnp.stack(agreement)


def _divergence(said: jax.Array, at: jax.Array, logprobs: jax.Array) -> jax.Array:
    """Return the mean divergence of a draft from what was likely, in nats.

    Args:
        said: f32[N, Q, M] log-probabilities of the draft.
        at: i32[N, Q, K] where the likely tokens stand among them; -1: nowhere.
        logprobs: f32[N, Q, K] of the likely tokens.
    """
    is_known = at >= 0
    known = jnp.where(is_known, logprobs, -jnp.inf)
    wanted = jax.nn.log_softmax(jnp.where(is_known.any(-1, keepdims=True), known, 0))
    shares = jnp.where(is_known, jnp.exp(wanted), 0)
    said = jnp.take_along_axis(said, jnp.maximum(at, 0), axis=-1)
    return (shares * (jnp.where(is_known, wanted, 0) - said)).sum(-1).mean()


def _optimizer(learning: Learning) -> optax.GradientTransformation:
    """Return Adam at a rate that rises a little and falls to nothing."""
    rate = optax.warmup_cosine_decay_schedule(
        0.0,
        learning.learning_rate,
        int(_WARM * learning.steps),
        learning.steps,
    )
    return optax.chain(optax.clip_by_global_norm(_LONGEST), optax.adam(rate))


def _words(lessons: Lessons, vocab: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return i32[M] the likeliest tokens of lessons, and all the others."""
    mass = np.zeros(vocab)
    np.add.at(mass, lessons.likely, np.exp(lessons.logprobs))
    order = np.argsort(-mass, kind="stable").astype(np.int32)
    return np.sort(order[:count]), np.sort(order[count:])
