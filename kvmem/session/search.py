"""Finding items by what they say: the protocol, and FTS5's bm25 as its default.

A retriever answers one question, and may be replaced by any that keeps to it:

    hits = retriever.search(principal, "green tea", 8, actor="wang", peer_scope="actor")

The law: a query is words, never syntax. What a person typed is cut into words, each is
quoted, and the words are joined by OR; no operator, column or wildcard of FTS5 can be
reached. Scripts without blanks between words (Han, kana, Hangul, Thai, ...) are indexed
by the character and asked for by neighbouring pairs.

Scores are bm25 brought into 0..1 by b / (1 + b); they compare within one query only.
bm25 counts words over all items of the user, whatever the actor.
"""

import dataclasses
import itertools
import re
import unicodedata
from typing import Any, Protocol

__all__ = ["Hit", "Retriever", "indexed", "match_of", "score_of"]

MAX_QUERY_CHARS = 4096  # what stands behind them is not looked at
MAX_TERMS = 64  # distinct ones; a limit of FTS5's parser is far above

# Scripts that write no blanks: Thai and Lao, Myanmar, Hangul, Khmer, kana, Han.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3005-\u3007\u3040-\u30ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff]"
)


@dataclasses.dataclass(frozen=True)
class Hit:
    """One item that was found."""

    uri: str
    text: str
    score: float  # 0..1, best first
    peer: str | None = None  # whose part it lies in; None: the user's self


class Retriever(Protocol):
    """What recall asks for memories.

    An answer holds at most `limit` hits, best first, each covered by the scope of
    `actor` and `peer_scope` (`views.covers`) and none of another user. A retriever
    that has `gone(principal, uris) -> frozenset[str]` is asked it before an answer is
    given: what was forgotten while the recall ran is dropped, and not recorded either.
    """

    def search(
        self,
        principal: Any,
        query: str,
        limit: int,
        actor: str | None,
        peer_scope: str,
    ) -> list[Hit]:
        """Return the hits of a query for one user, and never another's."""
        ...


def indexed(text: str) -> str:
    """Return a text as it is indexed: NFKC, characters of unspaced scripts apart."""
    return _UNSPACED.sub(r" \g<0> ", unicodedata.normalize("NFKC", text))


def match_of(query: str) -> str:
    """Return the FTS5 expression of a query, "" where it has no words."""
    terms = dict.fromkeys(_terms(query[:MAX_QUERY_CHARS]))
    quoted = (f'"{term}"' for term in itertools.islice(terms, MAX_TERMS))
    return " OR ".join(quoted)


def score_of(rank: float) -> float:
    """Return FTS5's rank (bm25 with its sign turned) as a score in 0..1."""
    strength = max(-rank, 0.0)
    return strength / (1.0 + strength)


def _terms(query: str):
    """Yield words, and neighbouring pairs of unspaced scripts."""
    text = unicodedata.normalize("NFKC", query)
    words = "".join(c if _is_letter(c) else " " for c in text).split()
    for word in words:
        for is_unspaced, run in itertools.groupby(
            word, lambda c: _UNSPACED.match(c) is not None
        ):
            chars = list(run)
            if not is_unspaced:
                yield "".join(chars)
            elif len(chars) == 1:
                yield chars[0]
            else:
                yield from (f"{a} {b}" for a, b in itertools.pairwise(chars))


def _is_letter(char: str) -> bool:
    """Say whether FTS5 may see a letter, mark or number in a character."""
    category = unicodedata.category(char)
    return category[0] in "LMN" or category == "Co"
