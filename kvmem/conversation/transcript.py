"""A transcript: what a session's log says, as the token ids that a model is fed.

The law: ids that were fed once are fed again as they were. A text that was generated
does not always come back from its own words, and a template may strip some of them, so
only a message that the chain does not hold, or that the log says otherwise now, is
rendered and encoded. Each memory is encoded by itself: its tokens are its own.

    prompt = transcript.prompt(tokenizer, turns, chain)
    prompt.ids, prompt.spans

Where a template does not render message after message (text changes behind it as it
goes on), the whole is rendered each time, and only what comes out equal is reused.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kvmem.conversation.chain import Chain, Span
from kvmem.model.tokenizer import Tokenizer
from kvmem.session import Message

__all__ = ["Prompt", "Turn", "prompt", "turns_of"]


class Turn(NamedTuple):
    """One message as a template takes it: its number, who said it, and its parts."""

    seq: int
    role: str
    parts: tuple[Mapping, ...]

    @property
    def text(self) -> str:
        """Its parts' texts, a part a line."""
        return "\n".join(part["text"] for part in self.parts if "text" in part)

    @property
    def digest(self) -> str:
        """What tells whether it says the same."""
        said = json.dumps([self.role, list(self.parts)], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()[:32]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Ids to feed, what they are, and where the reply's own message begins."""

    ids: tuple[int, ...]
    spans: tuple[Span, ...]
    reply_start: int


class _Piece(NamedTuple):
    ids: tuple[int, ...]
    memories: tuple[tuple[str, int, int], ...]  # uri, start, end within the piece


def turns_of(messages: Iterable[Message], actor: str | None) -> tuple[Turn, ...]:
    """Return what an actor's conversation says: what all said, and what it said."""
    return tuple(
        Turn(each.seq, each.role, each.parts)
        for each in messages
        if each.actor in (None, actor)
    )


def prompt(tokenizer: Tokenizer, turns: Sequence[Turn], chain: Chain | None) -> Prompt:
    """Return the ids of a conversation, up to where the assistant begins.

    Args:
        tokenizer: the model's, with a chat template.
        turns: in order; at least one.
        chain: what was fed before; None: nothing.
    """
    chat = _Chat(tokenizer, turns)
    if not chat.grows:
        return _rendered_whole(tokenizer, turns, chat)
    ids: list[int] = []
    spans: list[Span] = []
    for at, turn in enumerate(turns):
        piece = _piece(tokenizer, chat, at, turn, chain)
        start = len(ids)
        ids += piece.ids
        spans.append(Span(turn.seq, start, len(ids), turn.digest))
        spans += [
            Span(turn.seq, start + first, start + end, "", uri)
            for uri, first, end in piece.memories
        ]
    header = tokenizer.encode(chat.header, add_special_tokens=False)
    return Prompt((*ids, *header), tuple(spans), len(ids))


class _Chat:
    """A conversation's renderings, each made when it is asked for."""

    def __init__(self, tokenizer: Tokenizer, turns: Sequence[Turn]):
        self._tokenizer = tokenizer
        self._messages = [{"role": t.role, "content": t.text} for t in turns]
        self.whole = tokenizer.render_chat(self._messages, add_generation_prompt=False)
        self.answered = tokenizer.render_chat(self._messages)
        heads = [self.until(at) for at in (len(turns) - 1, len(turns) // 2)]
        self.grows = self.answered.startswith(self.whole) and all(
            self.whole.startswith(head) for head in heads
        )

    @property
    def header(self) -> str:
        """What stands between the last message and the assistant's first word."""
        return self.answered[len(self.whole) :]

    def until(self, count: int) -> str:
        """Return the rendering of the first messages."""
        if not count:
            return ""
        return self._tokenizer.render_chat(
            self._messages[:count], add_generation_prompt=False
        )

    def piece(self, at: int) -> str:
        """Return what message `at` adds to the rendering of those before it."""
        return self.until(at + 1)[len(self.until(at)) :]


def _piece(tokenizer, chat, at, turn: Turn, chain: Chain | None) -> _Piece:
    """Return a message's ids: as they were fed, else encoded now."""
    span = chain.of_message(turn.seq, turn.digest) if chain else None
    if span is None:
        return _encoded(tokenizer, chat.piece(at), turn)
    ids = chain.tokens[span.start : span.end]
    memories = tuple(
        (each.uri, each.start - span.start, each.end - span.start)
        for each in chain.inside(span)
    )
    if span.is_open:
        closing = _closing(tokenizer, chat.piece(at), turn, ids)
        ids = (*ids, *tokenizer.encode(closing, add_special_tokens=False))
    return _Piece(ids, memories)


def _closing(tokenizer, text: str, turn: Turn, ids: Sequence[int]) -> str:
    """Return what a template puts behind a message whose words were fed already."""
    said = turn.text.strip()
    closing = text[text.rindex(said) + len(said) :] if said in text else ""
    if ids and ids[-1] in tokenizer.eos_ids:
        ending = tokenizer.decode(ids[-1:], skip_special_tokens=False)
        closing = closing.lstrip().removeprefix(ending)
    return closing


def _encoded(tokenizer, text: str, turn: Turn) -> _Piece:
    """Encode a message, each memory in it by itself."""
    ids: list[int] = []
    memories = []
    for segment, uri in _segments(text, turn):
        start = len(ids)
        ids += tokenizer.encode(segment, add_special_tokens=False)
        if uri is not None:
            memories.append((uri, start, len(ids)))
    whole = {part["uri"] for part in turn.parts if _is_memory(part)}
    lost = whole - {uri for uri, _, _ in memories}  # a template changed its words
    memories += [(uri, 0, len(ids)) for uri in sorted(lost)]
    return _Piece(tuple(ids), tuple(memories))


def _segments(text: str, turn: Turn) -> list[tuple[str, str | None]]:
    """Cut a rendered message before and behind each memory that stands in it."""
    done = max(0, text.rfind(turn.text)) if turn.text else 0
    cuts: list[tuple[str, str | None]] = [(text[:done], None)]
    for part in turn.parts:
        if not _is_memory(part):
            continue
        at = text.find(part["text"], done)
        if at < 0:
            continue
        cuts += [(text[done:at], None), (part["text"], part["uri"])]
        done = at + len(part["text"])
    cuts.append((text[done:], None))
    return [(segment, uri) for segment, uri in cuts if segment]


def _is_memory(part: Mapping) -> bool:
    return part["type"] == "context" and bool(part.get("text"))


def _rendered_whole(tokenizer, turns: Sequence[Turn], chat: _Chat) -> Prompt:
    """Return a prompt of one stretch, which counts as any memory that is in it."""
    ids = tokenizer.encode(chat.answered, add_special_tokens=False)
    said = "".join(turn.digest for turn in turns)
    digest = hashlib.sha256(said.encode()).hexdigest()[:32]
    spans = [Span(turns[-1].seq, 0, len(ids), digest)]
    uris = {p["uri"] for turn in turns for p in turn.parts if _is_memory(p)}
    spans += [Span(turns[-1].seq, 0, len(ids), "", uri) for uri in sorted(uris)]
    return Prompt(tuple(ids), tuple(spans), len(ids))
