"""Where the time of a decode step goes, part by part.

Each part is the engine's own code over the engine's own weights and pages, compiled
alone: the products of every layer, attention with its writes and reads, the head over
the vocabulary. They run in turns with the whole compiled step and with `Engine.step`;
what the step takes beyond the parts is norms, rope and glue, and what the engine takes
beyond the step is the host.

    parts_ms(engine, clock, prompts, rounds=5)     # {"engine": 31.0, "step": 29.5, ...}
"""

import functools
import statistics
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.engine_clock import EngineClock
from experiments.harness import Rounds, Timed, interleave
from kvmem import geometry, mesh
from kvmem.geometry import Topology
from kvmem.model import parallel
from kvmem.model.attention import attend_written, write_rows
from kvmem.model.decoder import Decoder
from kvmem.model.ops import linear
from kvmem.pool.table import GroupTable
from kvmem.serve import Engine

__all__ = ["mesh_of_one", "parts_ms"]

_STEPS = 4


class _Donated:
    """An array that a job donates and gets back."""

    def __init__(self, array: jax.Array):
        self.array = array

    def job(self, verb: Callable, *args: object) -> Callable[[], object]:
        """Return a job that runs `verb` on the array, and keeps what it gives back."""

        def run() -> object:
            self.array, answer = verb(self.array, *args)
            return answer

        return run


def parts_ms(
    clock: EngineClock, prompts: Sequence[Sequence[int]], rounds: int
) -> dict[str, float]:
    """Return the median milliseconds of a decode step of `prompts` and of its parts."""
    engine, rows, length = clock.engine, len(prompts), len(prompts[0])
    jobs = _part_jobs(engine, rows, length)

    def whole() -> Timed:
        return Timed(statistics.median(clock.decode(prompts, _STEPS, 1)))

    timed = interleave({"engine": whole} | jobs, rounds)
    found = {name: timed.median(name) * 1e3 for name in timed.seconds}
    parts = found["products"] + found["attention"] + found["head"]
    return found | {
        "rest of the step": found["step"] - parts,
        "host": found["engine"] - found["step"],
    }


def mesh_of_one(engine: Engine, rows: int, length: int, rounds: int) -> Rounds:
    """Time the compiled decode step, plain and on a mesh of one device, in turns."""
    spec, params, grid = engine.model.spec, engine.model.params, mesh.make(Topology())
    envelope, batch = _envelope(engine), _batch(engine, rows, length)
    jobs = {}
    for name, where in {"plain": None, "mesh of one": grid}.items():
        weights = engine.stepper.weights
        if where is not None:
            weights = parallel.load(spec, params, Topology(), where)
        step = parallel.make_step((envelope,), where)
        verb = jax.jit(
            lambda pages, w, *rest, step=step: step(w, pages, *rest), donate_argnums=0
        )
        pages = jax.device_put(_pages(engine), parallel.page_sharding(where))
        jobs[name] = _Donated(pages).job(verb, weights, *batch)
    return interleave(jobs, rounds, warm_up=2)


def _part_jobs(engine: Engine, rows: int, length: int) -> dict[str, Callable]:
    """Return a job for the compiled step and for each of its parts."""
    weights, envelope = engine.stepper.weights, _envelope(engine)
    batch = _batch(engine, rows, length)
    hidden = jnp.ones((rows, 1, engine.model.spec.hidden), jnp.float32)
    step = parallel.make_step((envelope,))
    whole = jax.jit(lambda pages, w, *rest: step(w, pages, *rest), donate_argnums=0)
    attention = jax.jit(functools.partial(_attention, envelope), donate_argnums=0)
    return {
        "step": _Donated(_pages(engine)).job(whole, weights, *batch),
        "products": functools.partial(jax.jit(_products), weights, hidden),
        "attention": _Donated(_pages(engine)).job(attention, weights, *batch),
        "head": functools.partial(jax.jit(_head), weights, hidden),
    }


def _decoder(weights: parallel.Weights) -> Decoder:
    """Return the one rank's decoder."""
    split = jax.tree.map(lambda leaf: leaf.squeeze(0), weights.split)
    return nnx.merge(weights.graph, split, weights.shared)


def _products(weights, x):
    """Multiply by every weight of every layer, each product feeding the next."""
    for layer in _decoder(weights).layers:
        qkv = linear(x, layer.qkv)
        x = linear(qkv[..., : layer.out[...].shape[1]], layer.out)
        up = linear(x, layer.gate_up)
        x = linear(up[..., : layer.down[...].shape[1]], layer.down)
    return x


def _head(weights, x):
    decoder = _decoder(weights)
    return linear(x, decoder.embed if decoder.lm_head is None else decoder.lm_head)


def _attention(envelope, pages, weights, tokens, starts, num_new, tables):
    """Write a token and attend, in every layer; each output feeds the next query."""
    decoder, pages, (table,) = _decoder(weights), pages[0], tables
    part, spec = decoder.partition, decoder.partition.spec
    shape = (*tokens.shape, -1, spec.head_dim)
    q = jnp.ones((*tokens.shape, part.q_heads, spec.head_dim), jnp.float32)
    for index in range(spec.layers):
        name = f"layers.{index}"
        kv = q[:, :, : part.kv_heads].reshape(shape)
        pages = write_rows(pages, envelope, name, kv, kv, table, starts, num_new)
        q = attend_written(
            pages, envelope, name, q, starts[:, None], table, starts + num_new
        )
    return pages[None], q


def _envelope(engine: Engine) -> geometry.Envelope:
    return engine.records_of.plan.envelope(0)


def _pages(engine: Engine) -> jax.Array:
    return jnp.zeros(engine.pool.pages.shape, jnp.uint8)


def _batch(engine: Engine, rows: int, length: int) -> tuple[jax.Array | tuple, ...]:
    """Return a decode batch in physical pages, every row with pages of its own."""
    bucket = engine.buckets.decode(rows, length + 1)
    pages = engine.table.needs.pages_for(length + 1)
    table = np.full((rows, bucket.pages), engine.pool.null_page, np.int32)
    table[:, :pages] = np.arange(rows * pages, dtype=np.int32).reshape(rows, pages)
    ones = np.ones((rows, 1), np.int32)
    tables = (GroupTable(table, np.zeros(rows, np.int32)),)
    return ones, ones[:, 0] * length, ones[:, 0], tables
