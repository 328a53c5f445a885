"""Attention of a hybrid's layer: a window, learned sinks, a gate, another's cache.

A layer that shares another's keys and values reads the pages of that layer, which came
before it in the same step. The law of `kvmem.model.hybrid.mixing` holds.

Letters: S sequences, Q new tokens, G query heads and H KV heads of a rank, D elements.
"""

import jax

from kvmem.model import dense
from kvmem.model.attention import View, attend_written, write_rows
from kvmem.model.hybrid.mixing import Caches, Kept, Mixing, places
from kvmem.model.hybrid.step import Step, as_kept
from kvmem.model.rotate import angles, rotate

__all__ = ["AttentionLayer"]


class AttentionLayer(Mixing):
    """Attention over keys and values; `facts` is an `Attention`."""

    @property
    def owner(self) -> str:
        """The layer whose keys and values are read."""
        return self.facts.shares or self.name

    def paged(
        self, pages: jax.Array, step: Step, x: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Write the new keys and values, then attend to those in sight."""
        view = View(self.facts.window)
        envelope, table = step.group(self.owner)
        q, gate = self._queries(x, step.positions)
        if self.facts.shares is None:
            k, v = self._keys_and_values(x, step.positions)
            new = k, v, table, step.starts, step.num_new
            pages = write_rows(pages, envelope, self.name, *new, view)
        seen = attend_written(
            pages,
            envelope,
            self.owner,
            q,
            step.positions,
            table,
            step.lengths,
            self.facts.scale,
            view,
            self._sinks(),
        )
        return pages, self._gated(seen, gate)

    def dense(self, x: jax.Array, caches: Caches, kept: Kept) -> jax.Array:
        """Attend over whole texts; `kept` gets the keys and values of this layer."""
        q, gate = self._queries(x, places(x))
        if self.facts.shares is None:
            k, v = self._keys_and_values(x, places(x))
            cache = caches[self.name]
            kept[self.name] = as_kept(k, cache, "k"), as_kept(v, cache, "v")
        k, v = kept[self.owner]
        view = View(self.facts.window)
        seen = dense.attend(q, k, v, self.facts.scale, view, self._sinks())
        return self._gated(seen, gate)

    def _queries(
        self, x: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return rotated queries [S, Q, G, D], and the gates of the output, if any."""
        facts, gate = self.facts, None
        q = self._heads("q_proj", x)
        if facts.gated:  # a head's rows are its query's, then its gate's
            q, gate = q[:, :, 0::2], q[:, :, 1::2]
        if facts.qk_norm:
            q = self.normed("q_norm", q)
        return rotate(
            q, *angles(facts.rope, facts.head_dim, positions), facts.rope
        ), gate

    def _keys_and_values(
        self, x: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return rotated keys and plain values, [S, Q, H, D] both."""
        facts = self.facts
        k = self._heads("k_proj", x)
        if facts.qk_norm:
            k = self.normed("k_norm", k)
        cos, sin = angles(facts.rope, facts.head_dim, positions)
        return rotate(k, cos, sin, facts.rope), self._heads("v_proj", x)

    def _heads(self, name: str, x: jax.Array) -> jax.Array:
        return self.rows(name, x).reshape(*x.shape[:2], -1, self.facts.head_dim)

    def _sinks(self) -> jax.Array | None:
        """Return the learned sinks of the rank's query heads, if the layer has any."""
        return self.weights["sinks"][...] if self.facts.learned_sinks else None

    def _gated(self, seen: jax.Array, gate: jax.Array | None) -> jax.Array:
        if gate is not None:
            seen = seen * jax.nn.sigmoid(gate)
        return seen.reshape(*seen.shape[:2], -1)
