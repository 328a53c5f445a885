"""Budget terms: one claim on memory, with its owner.

A term says what a token costs and what is owed before the first token, on one rank. The
law: whoever allocates bytes has a term, and nobody sizes a pool from a second formula.

    Term("target kv", "target", bytes_per_token=65_536).at(1_024)   # 67,108,864
"""

import dataclasses
from fractions import Fraction

__all__ = ["Term"]


@dataclasses.dataclass(frozen=True)
class Term:
    """A claim on one rank's memory.

    Args:
        name: what the bytes are.
        owner: who allocates them ("target", "draft", ...).
        bytes_per_token: bytes a rank keeps for each row of its target pool, replicas
            and padding included; a fraction where a page's bytes divide into no whole
            number of them, or a group has a row for only some.
        fixed_bytes: bytes owed before the first token.
        replicas: on how many head shards each byte stands.
    """

    name: str
    owner: str
    bytes_per_token: int | Fraction
    fixed_bytes: int = 0
    replicas: int = 1

    def at(self, tokens: int) -> int | Fraction:
        """Return the bytes claimed on one rank for `tokens` rows of its target pool."""
        return self.fixed_bytes + tokens * self.bytes_per_token
