"""A chain: which tokens were fed for a session, and what each stretch of them was.

The manifest that an actor's session keeps of its KV. The records themselves lie in the
page store under keys that follow from the tokens, so a manifest names pages without
listing them. The law: KV is a cache. A manifest that cannot be read, is of another
model, or names what is not there any more is worth less, and never an error.

    chain = Chain(facts, tokens, num_rows, spans)
    Chain.decode(chain.encode()) == chain
    chain.cut(48)                     # what is left once token 50 is forgotten
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from typing import NamedTuple

from kvmem.errors import CorruptPage, FormatMismatch, say
from kvmem.serve.identity import Identity
from kvmem.store import PageKey, chain_keys

__all__ = ["Chain", "Facts", "Span", "read", "salt_tag"]

_VERSION = 1


class Facts(NamedTuple):
    """Under what the pages of a chain are kept."""

    model_id: str
    format_id: str
    chunk_tokens: int
    salt: str  # tells one user's pages from another's, and is no salt itself

    @property
    def namespace(self) -> str:
        """The namespace of the store's keys."""
        return f"{self.model_id}/{self.format_id}"


class Span(NamedTuple):
    """Tokens [start, end) and what they are: a message of the log, or a memory in it.

    Messages follow one another and cover the chain; memories lie inside of them.
    """

    seq: int  # of the message; -1: what stands before the first
    start: int
    end: int
    uri: str | None = None  # of the memory

    def is_at(self, uri: str) -> bool:
        """Say whether it is a memory at a uri, or below it; all are below ""."""
        mine = self.uri
        if mine is None:
            return False
        return not uri or mine == uri or mine.startswith(uri + "/")


@dataclasses.dataclass(frozen=True)
class Chain:
    """One actor's chain.

    Args:
        facts: of its pages.
        tokens: ids as they were fed, or generated, in order.
        num_rows: of these, whose KV was computed: a generated text's last token was
            never fed.
        spans: what they are; see `Span`.
    """

    facts: Facts
    tokens: tuple[int, ...]
    num_rows: int
    spans: tuple[Span, ...]

    @property
    def num_kept(self) -> int:
        """Tokens in whole chunks: what a page store can hold of it."""
        return self.num_rows // self.facts.chunk_tokens * self.facts.chunk_tokens

    @property
    def covers(self) -> int:
        """The newest message that it holds, -1 without one."""
        return max((span.seq for span in self.spans), default=-1)

    def keys(self, identity: Identity) -> tuple[PageKey, ...]:
        """Return the keys of its whole chunks under their owner's identity."""
        return chain_keys(
            self.facts.namespace,
            self.tokens[: self.num_kept],
            self.facts.chunk_tokens,
            identity.extras,
        )

    @property
    def uris(self) -> frozenset[str]:
        """The memories that lie in it."""
        return frozenset(span.uri for span in self.spans if span.uri is not None)

    def without(self, is_gone: Callable[[Span], bool]) -> "Chain":
        """Return the whole chunks before the first memory that is gone."""
        gone = [s.start for s in self.spans if s.uri is not None and is_gone(s)]
        return self.cut(min(gone)) if gone else self

    def cut(self, num_tokens: int) -> "Chain":
        """Return the whole chunks before a token; messages that are cut go."""
        chunk = self.facts.chunk_tokens
        length = min(num_tokens, self.num_rows) // chunk * chunk
        kept = tuple(span for span in self.spans if span.end <= length)
        return Chain(self.facts, self.tokens[:length], length, kept)

    def encode(self) -> bytes:
        """Return the manifest's bytes, with a digest of them in front."""
        fields = dataclasses.asdict(self)
        body = json.dumps({"version": _VERSION, **fields}).encode()
        return hashlib.sha256(body).hexdigest().encode() + b"\n" + body

    @classmethod
    def decode(cls, blob: bytes) -> "Chain":
        """Read a manifest.

        Raises:
            CorruptPage: its bytes changed, or it is none.
            FormatMismatch: another version wrote it.
        """
        digest, _, body = blob.partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != digest:
            asked = f"a chain's manifest of {len(blob)} bytes"
            law = "its digest is not the one it begins with"
            raise CorruptPage(say(asked, law, "It counts as no chain; feed it anew"))
        try:
            fields = json.loads(body)
            version = fields["version"]
            made = _made(fields) if version == _VERSION else None
        except (ValueError, KeyError, TypeError, RecursionError) as bad:
            asked = f"a chain's manifest of {len(blob)} bytes"
            law = f"it says no chain ({bad})"
            cure = "It counts as no chain; feed it anew"
            raise CorruptPage(say(asked, law, cure)) from bad
        if made is None:
            law = f"this kvmem reads version {_VERSION}"
            asked = f"a chain's manifest of version {version!r}"
            raise FormatMismatch(say(asked, law, "It counts as no chain"))
        return made


def read(blob: bytes) -> Chain | None:
    """Return a manifest, None where it cannot be read."""
    try:
        return Chain.decode(blob)
    except (CorruptPage, FormatMismatch):
        return None


def _made(fields: dict) -> Chain:
    """Return the chain that fields say; ValueError or its like: they say none."""
    facts = Facts(*fields["facts"])
    tokens, rows = tuple(fields["tokens"]), fields["num_rows"]
    spans = tuple(Span(*span) for span in fields["spans"])
    names = (facts.model_id, facts.format_id, facts.salt)
    if not all(isinstance(name, str) for name in names):
        raise ValueError("names that are none")
    places = [at for span in spans for at in span[:3]]
    if not all(type(n) is int for n in (facts.chunk_tokens, rows, *tokens, *places)):
        raise ValueError("numbers that are none")
    if facts.chunk_tokens < 1 or not 0 <= rows <= len(tokens):
        raise ValueError(f"{rows} rows of {len(tokens)} tokens")
    if any(not 0 <= token < 2**31 for token in tokens):
        raise ValueError("tokens that no model has")
    for span in spans:
        if span.seq < -1 or not 0 <= span.start <= span.end <= len(tokens):
            raise ValueError(f"a span from {span.start} to {span.end}")
        if not isinstance(span.uri, str | None):
            raise ValueError("a memory without a name")
    return Chain(facts, tokens, rows, spans)


def salt_tag(salt: bytes) -> str:
    """Return what tells salts apart and gives none away."""
    return hashlib.sha256(b"kvmem.conversation.salt\0" + salt).hexdigest()[:32]
