"""Texts that a model writes, kept with what it thought at each token.

A draft learns from three things: the text, the model's hidden row of each token, and
what it took for likely to follow. All of them are at hand while the model writes, so
they are kept then, a file a batch, and no training step runs the model. The law: what
is kept are the rows and likelihoods that the model has of the whole text, whoever reads
it again; and a file is read for the model, the prompts and the manner that it is of.

    lessons = draft_texts.read(model, prompts, Writing(length=128), folder)
    lessons.tokens.shape                       # [N, 128]
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from kvmem import errors
from kvmem.model.decoder import Decoder
from kvmem.model.loaded import LoadedModel
from kvmem.model.rotate import angles
from kvmem.model.spec import ModelSpec

__all__ = ["Lessons", "Writing", "read", "room"]

_Prompts = Sequence[Sequence[int]]
_Keys = list[tuple[jax.Array, jax.Array]]  # f32[N, KH, L, Dh] keys, values; a layer
_TO_DRAW = -1  # stands where no token is given


class Lessons(NamedTuple):
    """N texts of L tokens, and what the model thought at each; host arrays."""

    tokens: np.ndarray  # i32[N, L]
    rows: np.ndarray  # f32[N, L, D] before the last norm
    likely: np.ndarray  # i32[N, L, K] what may follow, the likeliest first
    logprobs: np.ndarray  # f32[N, L, K]

    def of(self, texts: slice | np.ndarray) -> "Lessons":
        """Return some of the texts."""
        return Lessons(*(array[texts] for array in self))


@dataclasses.dataclass(frozen=True)
class Writing:
    """How texts are written.

    Args:
        length: tokens of a text, prompt and continuation.
        temperature: of what is drawn, among the `kept` likeliest; 0: the likeliest.
        kept: likeliest tokens that are kept of each place.
        batch: texts that are written together, and kept in one file.
        seed: of what is drawn.
        dtype: of the products' inputs while the model writes; sums are float32.
    """

    length: int
    temperature: float = 0.5
    kept: int = 16
    batch: int = 96
    seed: int = 0
    dtype: str = "float32"


def room(prompts: _Prompts, length: int) -> int:
    """Return how many of the last places of every text the model writes.

    Raises:
        ConfigError: a prompt that leaves none.
    """
    longest = max(map(len, prompts))
    if longest < length:
        return length - longest
    raise errors.ConfigError(
        errors.say(
            f"texts of {length} tokens behind a prompt of {longest}",
            "the model writes a part of each",
            "Raise length, or shorten the prompts",
        )
    )


def read(
    model: LoadedModel, prompts: _Prompts, writing: Writing, folder: pathlib.Path
) -> Lessons:
    """Return a text behind each prompt; a batch that has its file is not written again.

    Args:
        model: that writes.
        prompts: token ids, for each text.
        writing: how.
        folder: of the files.

    Raises:
        ConfigError: a prompt that leaves no room, or a folder with texts of another
            model, of other prompts, or written otherwise.
        IncompatiblePlan: a model whose layers differ.
    """
    room(prompts, writing.length)
    _require_alike(model)
    folder.mkdir(parents=True, exist_ok=True)
    writer, found = None, []
    for first in range(0, len(prompts), writing.batch):
        path, some = folder / f"{first:06}.npz", prompts[first : first + writing.batch]
        asked = _asked(model, some, writing, first)
        if not path.exists():
            writer = writer or _Writer(model, prompts, writing)
            _save(path, writer(some, first), asked)
            print(f"{first + len(some)} of {len(prompts)} texts")
        found.append(_load(path, asked))
    return Lessons(*map(np.concatenate, zip(*found, strict=True)))


def _require_alike(model: LoadedModel) -> None:
    if not isinstance(model.spec, ModelSpec):
        raise errors.IncompatiblePlan(
            errors.say(
                f"texts that {model.source} writes",
                "the writer keeps keys and values of layers that are all alike",
                "Train draft layers for a model of the Llama family",
            )
        )


def _asked(model: LoadedModel, prompts: _Prompts, writing: Writing, first: int) -> str:
    """Digest what one file is written from (64 hex digits)."""
    facts = [model.model_id, dataclasses.asdict(writing), first, [*map(list, prompts)]]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _save(path: pathlib.Path, lessons: Lessons, asked: str) -> None:
    """Write one file, by one rename."""
    scratch = path.with_suffix(".tmp.npz")
    np.savez(scratch, asked=asked, **lessons._asdict())
    scratch.replace(path)


def _load(path: pathlib.Path, asked: str) -> list[np.ndarray]:
    """Read one file's arrays, if it is the one that is asked for."""
    with np.load(path) as arrays:
        if arrays["asked"] == asked:
            return [arrays[name] for name in Lessons._fields]
    raise errors.ConfigError(
        errors.say(
            f"the texts of {path}",
            "they are of another model, of other prompts, or were written otherwise",
            "Name another folder, or remove this one",
        )
    )


class _Writer:
    """A model that writes, a batch of texts at a time."""

    def __init__(self, model: LoadedModel, prompts: _Prompts, writing: Writing):
        self._writing = writing
        decoder = Decoder.from_params(model.spec, model.params, dtype=writing.dtype)
        part, (graph, state) = decoder.partition, nnx.split(decoder)
        scan = jax.jit(functools.partial(_scan, graph, writing))
        self._scan = functools.partial(scan, state)
        shape = (1, part.kv_heads, writing.length, model.spec.head_dim)
        none = [(jnp.zeros(shape), jnp.zeros(shape))] * model.spec.layers
        # What all prompts begin with is read once; the last token of each is not in it.
        self._shared = len(os.path.commonprefix([list(each)[:-1] for each in prompts]))
        self._keys, self._ahead = self._read(none, prompts[:1], 0, self._shared, 0)

    def __call__(self, prompts: _Prompts, number: int) -> Lessons:
        """Write behind some prompts; batches of another number draw other tokens."""
        repeated = functools.partial(jnp.repeat, repeats=len(prompts), axis=0)
        keys = jax.tree.map(repeated, self._keys)
        rest = self._writing.length
        _, found = self._read(keys, prompts, self._shared, rest, number)
        pairs = zip(map(repeated, self._ahead), found, strict=True)
        return Lessons(*(np.asarray(jnp.concatenate(pair, 1)) for pair in pairs))

    def _read(
        self, keys: _Keys, prompts: _Prompts, first: int, end: int, number: int
    ) -> tuple[_Keys, list[jax.Array]]:
        """Go on from `first` to `end`; return all keys, and arrays of those places."""
        given = np.full((len(prompts), self._writing.length), _TO_DRAW, np.int32)
        for row, prompt in zip(given, prompts, strict=True):
            row[: len(prompt)] = prompt
        random = jax.random.key(self._writing.seed)
        random = jax.random.split(jax.random.fold_in(random, number), end - first)
        places = jnp.arange(first, end, dtype=jnp.int32)
        keys, found = self._scan(keys, (places, given.T[first:end], random))
        return keys, [jnp.swapaxes(array, 0, 1) for array in found]


def _scan(graph: nnx.GraphDef, writing: Writing, state: nnx.State, keys: _Keys, given):
    """Read the given tokens place by place, and draw where none is given.

    Args:
        graph, state: of the decoder.
        writing: how tokens are drawn.
        keys: of the places before.
        given: i32[T] places, i32[T, N] tokens, and T random keys.

    Returns:
        The keys, and what `Lessons` holds with places first: [T, N, ...].
    """
    decoder = nnx.merge(graph, state)
    spec = decoder.partition.spec

    def step(carried, at):
        (keys, drawn), (place, tokens, random) = carried, at
        tokens = jnp.where(tokens == _TO_DRAW, drawn, tokens)
        keys, row = _token(decoder, keys, tokens, place)
        logits = jax.nn.log_softmax(decoder.head(row)[:, 0])
        logprobs, likely = lax.top_k(logits, min(writing.kept, spec.vocab))
        drawn = _drawn(logprobs, likely, writing.temperature, random)
        return (keys, drawn), (tokens, row[:, 0], likely, logprobs)

    (keys, _), found = lax.scan(step, (keys, jnp.zeros_like(given[1][0])), given)
    return keys, found


def _token(decoder: Decoder, keys: _Keys, tokens: jax.Array, place: jax.Array):
    """Read i32[N] tokens at one place behind `keys`; return keys and rows [N, 1, D]."""
    spec = decoder.partition.spec
    x = decoder.enter(tokens[:, None], None, None)
    cos, sin = angles(spec.rope, spec.head_dim, place[None, None])
    grown = []
    for layer, (k, v) in zip(decoder.layers, keys, strict=True):
        q, *new = layer.heads(x, cos, sin)
        k, v = (
            lax.dynamic_update_slice_in_dim(old, jnp.swapaxes(row, 1, 2), place, 2)
            for old, row in zip((k, v), new, strict=True)
        )
        grown.append((k, v))
        x = layer.mix(x, _seen(q, k, v, place), None)
    return grown, x


def _seen(q: jax.Array, k: jax.Array, v: jax.Array, place: jax.Array) -> jax.Array:
    """Attend from rows [N, 1, H, Dh] to the places up to their own."""
    q = q.reshape(len(q), k.shape[1], -1, q.shape[-1])
    scores = jnp.einsum("nkgd,nkjd->nkgj", q, k) / q.shape[-1] ** 0.5
    is_ahead = jnp.arange(k.shape[2], dtype=jnp.int32) > place
    scores = jnp.where(is_ahead[None, None, None], -jnp.inf, scores)
    out = jnp.einsum("nkgj,nkjd->nkgd", jax.nn.softmax(scores), v)
    return out.reshape(len(out), 1, -1, out.shape[-1])


def _drawn(
    logprobs: jax.Array, likely: jax.Array, temperature: float, random: jax.Array
) -> jax.Array:
    """Draw i32[N] among the likeliest tokens."""
    if not temperature:
        return likely[:, 0]
    at = jax.random.categorical(random, logprobs / temperature)
    return jnp.take_along_axis(likely, at[:, None], axis=1)[:, 0]
