"""Layers to begin with: what fuses two rows is solved for, the rest is the model's.

Trained from drawn weights, draft layers spend most of a short training on learning to
say the model's own row again. The best linear guess of it, from the row before and the
token, is one least-squares problem over all texts; so the fusing weight begins there.
The layers begin as the model's last ones, which add nothing yet. The law: layers that
begin so say the linear guess, at every place.

    draft = begun(model, lessons, taught=80, layers=1)
"""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.draft_texts import Lessons
from kvmem.model import mtp
from kvmem.model.loaded import LoadedModel

__all__ = ["begun"]

_RIDGE = 1e-4  # of the mean square of an input
_BATCH = 48  # texts that are multiplied together
_SILENT = ("self_attn.o_proj.weight", "mlp.down_proj.weight")  # add to the row


def begun(
    target: LoadedModel, lessons: Lessons, taught: int, layers: int = 1
) -> LoadedModel:
    """Return draft layers that say the linear guess of each row.

    Args:
        target: the model.
        lessons: what it wrote.
        taught: last places of each text that it wrote.
        layers: of the draft.

    Raises:
        IncompatiblePlan: a target without attention.
    """
    spec = mtp.spec_of(target.spec, layers)
    last, params = target.spec.layers, {}
    for name, shape in spec.own_parameters().items():
        dtype = target.params["model.norm.weight"].dtype
        params[name] = np.ones(shape, dtype)
        if name.startswith("model.layers."):
            _, _, index, what = name.split(".", 3)
            of = (last - layers + int(index)) % last
            theirs = target.params[f"model.layers.{of}.{what}"]
            params[name] = theirs * 0 if what in _SILENT else theirs
    params["mtp.fuse.weight"] = _solved(target, lessons, taught).astype(dtype)
    return mtp.with_params(target, layers, params, "solved for")


def _solved(target: LoadedModel, lessons: Lessons, taught: int) -> np.ndarray:
    """Return f64[D, 2 D], the ridge solution over the last places of all texts."""
    embed = jnp.asarray(target.params["model.embed_tokens.weight"])
    eps = target.spec.norm_eps

    @jax.jit
    def products(tokens, rows):
        rows = _unit(rows, eps)
        inputs = jnp.concatenate(
            [rows[:, -taught - 1 : -1], _unit(embed[tokens[:, -taught:]], eps)], -1
        )
        inputs, wanted = (
            x.reshape(-1, x.shape[-1]) for x in (inputs, rows[:, -taught:])
        )
        return inputs.T @ inputs, inputs.T @ wanted

    squares, crossed = 0.0, 0.0
    for first in range(0, len(lessons.tokens), _BATCH):
        part = lessons.of(slice(first, first + _BATCH))
        one, other = products(part.tokens, part.rows)
        squares, crossed = squares + np.float64(one), crossed + np.float64(other)
    ridge = _RIDGE * np.trace(squares) / len(squares)
    return np.linalg.solve(squares + ridge * np.eye(len(squares)), crossed).T


def _unit(rows: jax.Array, eps: float) -> jax.Array:
    """Scale rows to unit mean square, as a norm of ones does."""
    rows = rows.astype(jnp.float32)
    return rows * jax.lax.rsqrt(jnp.mean(rows * rows, -1, keepdims=True) + eps)
