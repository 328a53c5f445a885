"""Branches: where new tokens stand that do not follow each other.

A tree of drafted tokens is several chains that go on from one text. Its tokens lie in
consecutive slots, chain behind chain, but the first of each chain follows the text, and
none sees a chain beside its own. The law: a token's keys, values and logits are those
that it has where its own chain alone is read behind the text.

    Branches([[7, 8, 9, 8, 9]], [[8, 8, 8, 8, 8]], [[8, 8, 8, 10, 10]])

is a last token at 7, a chain of two at 8 and 9 (slots 8 and 9), and another at 8 and 9
(slots 10 and 11) that does not see the first.
"""

import dataclasses

import jax

__all__ = ["Branches"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Branches:
    """The places of a step's new tokens in their texts, and what they do not see."""

    positions: jax.Array  # i32[S, Q] where each stands in the text of its own chain
    gap_firsts: jax.Array  # i32[S, Q] slots from here ..
    gap_ends: jax.Array  # i32[S, Q] .. to before here are not seen
