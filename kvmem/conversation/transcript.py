"""A transcript: what a session's log says, as the token ids that a model is fed.

The law: ids follow from the log and the tokenizer alone. What a model generated stands
in the log with its ids, and is fed again as it was: a text does not always come back
from its own words, and a template may strip some of them. Each memory is encoded by
itself, so that its tokens are its own, and a special token that somebody spells in a
message is words: it begins no other message.

    prompt = transcript.prompt(tokenizer, turns)
    prompt.ids, prompt.spans

A template that does not render message after message (text changes behind it as it
goes on) is rendered whole each time, and then only what comes out equal is reused.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kvmem.conversation.chain import Span
from kvmem.errors import ConfigError
from kvmem.model.tokenizer import Tokenizer
from kvmem.session import Message

__all__ = ["Prompt", "Turn", "ids_part", "prompt", "turns_of"]

_STAND_IN = "words-of-a-message-stand-here"


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
    def memories(self) -> tuple[Mapping, ...]:
        """Its parts that were recalled, and say something."""
        return tuple(
            each
            for each in self.parts
            if each["type"] == "context" and each.get("text") and "uri" in each
        )


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Ids to feed, what they are, and where the reply's own message begins."""

    ids: tuple[int, ...]
    spans: tuple[Span, ...]
    reply_start: int


class _Piece(NamedTuple):
    ids: tuple[int, ...]
    memories: tuple[tuple[str, int, int], ...] = ()  # uri, start, end within the piece


def turns_of(messages: Iterable[Message], actor: str | None) -> tuple[Turn, ...]:
    """Return what an actor's conversation says: what all said, and what it said."""
    return tuple(
        Turn(each.seq, each.role, each.parts)
        for each in messages
        if each.actor in (None, actor)
    )


def ids_part(tokenizer: Tokenizer, ids: Sequence[int]) -> dict:
    """Return the part of a message that says which ids it was generated as."""
    return {"type": "tokens", "tokenizer": tokenizer.identity, "ids": list(ids)}


def prompt(tokenizer: Tokenizer, turns: Sequence[Turn]) -> Prompt:
    """Return the ids of a conversation, up to where the assistant begins.

    Args:
        tokenizer: the model's, with a chat template.
        turns: in order; at least one.
    """
    chat = _Chat(tokenizer, turns)
    if not chat.grows:
        return _rendered_whole(tokenizer, turns, chat)
    ids: list[int] = []
    spans: list[Span] = []
    for at, turn in enumerate(turns):
        frame = chat.frame(at)
        generated = _generated(tokenizer, turn) if frame else None
        if generated is None:
            piece = _encoded(tokenizer, chat.piece(at), turn, frame)
        else:
            piece = _again(tokenizer, chat.header, frame.closing, generated)
        start = len(ids)
        ids += piece.ids
        spans.append(Span(turn.seq, start, len(ids)))
        spans += [
            Span(turn.seq, start + first, start + end, uri)
            for uri, first, end in piece.memories
        ]
    header = tokenizer.encode(chat.header, add_special_tokens=False)
    return Prompt((*ids, *header), tuple(spans), len(ids))


class _Frame(NamedTuple):
    """What a template puts before and behind the words of one message."""

    opening: str
    closing: str


class _Chat:
    """A conversation's renderings, each made when it is asked for."""

    def __init__(self, tokenizer: Tokenizer, turns: Sequence[Turn]):
        self._tokenizer = tokenizer
        self._messages = [{"role": t.role, "content": t.text} for t in turns]
        self.answered = tokenizer.render_chat(self._messages)
        self._until = [""]
        try:
            for count in range(1, len(turns) + 1):
                until = tokenizer.render_chat(
                    self._messages[:count], add_generation_prompt=False
                )
                self._until.append(until)
        except ConfigError:  # a template that takes no beginning of it
            self.grows = False
            return
        each = (*self._until, self.answered)
        self.grows = all(
            later.startswith(sooner)
            for sooner, later in zip(each, each[1:], strict=False)
        )

    @property
    def header(self) -> str:
        """What stands between the last message and the assistant's first word."""
        return self.answered[len(self._until[-1]) :]

    def piece(self, at: int) -> str:
        """Return what message `at` adds to the rendering of those before it."""
        return self._until[at + 1][len(self._until[at]) :]

    def frame(self, at: int) -> _Frame | None:
        """Return what stands around the words of message `at`, whatever they are.

        That is found with other words in their place: a message that says "m" is
        found in <|im_end|> too. None where a template does not say them once.
        """
        other = {**self._messages[at], "content": _STAND_IN}
        try:
            said = self._tokenizer.render_chat(
                [*self._messages[:at], other], add_generation_prompt=False
            )
        except ConfigError:  # these words it does not take
            return None
        before = self._until[at]
        if not said.startswith(before) or said.count(_STAND_IN, len(before)) != 1:
            return None
        return _Frame(*said[len(before) :].split(_STAND_IN))


def _generated(tokenizer: Tokenizer, turn: Turn) -> tuple[int, ...] | None:
    """Return the ids that an answer was generated as, by this tokenizer.

    A log takes any part from whoever may append to it: ids that do not say what the
    message says are not fed.
    """
    if turn.role != "assistant":
        return None
    for part in turn.parts:
        if part["type"] == "tokens" and part.get("tokenizer") == tokenizer.identity:
            ids = part.get("ids")
            return tuple(ids) if _say(tokenizer, ids, turn.text) else None
    return None


def _say(tokenizer: Tokenizer, ids: object, text: str) -> bool:
    """Say whether ids are ids, and spell a text, or one that a stop text cut off."""
    if not isinstance(ids, list) or not all(type(each) is int for each in ids):
        return False
    if ids and not 0 <= min(ids) <= max(ids) <= tokenizer.max_id:
        return False
    spelled = tokenizer.decode(ids)
    return spelled == text or (text != "" and spelled.startswith(text))


def _again(tokenizer, header: str, closing: str, ids: tuple[int, ...]) -> _Piece:
    """Return a generated message as it was fed, and what closes it."""
    if ids and ids[-1] in tokenizer.eos_ids:  # the ids close it, or begin to
        ending = tokenizer.decode(ids[-1:], skip_special_tokens=False)
        if closing.lstrip().startswith(ending):
            closing = closing.lstrip().removeprefix(ending)
    before, behind = (
        tokenizer.encode(text, add_special_tokens=False) for text in (header, closing)
    )
    return _Piece((*before, *ids, *behind))


def _encoded(tokenizer, text: str, turn: Turn, frame: _Frame | None) -> _Piece:
    """Encode a message, each memory in it by itself."""
    ids: list[int] = []
    memories = []
    cuts = _segments(text, turn, frame)
    said = range(0)  # where special tokens are words like others
    if frame is not None and tokenizer.spells_special(turn.text):
        said = range(len(frame.opening), len(text) - len(frame.closing))
        cuts = _cut_at(cuts, said)
    at = 0
    for segment, uri in cuts:
        start = len(ids)
        if at in said:
            ids += tokenizer.encode_words(segment)
        else:
            ids += tokenizer.encode(segment, add_special_tokens=False)
        at += len(segment)
        if uri is not None:
            memories.append((uri, start, len(ids)))
    lost = {part["uri"] for part in turn.memories} - {uri for uri, _, _ in memories}
    # A template that changed a memory's words: the whole message counts as it.
    memories += [(uri, 0, len(ids)) for uri in sorted(lost)]
    return _Piece(tuple(ids), tuple(memories))


def _segments(
    text: str, turn: Turn, frame: _Frame | None
) -> list[tuple[str, str | None]]:
    """Cut a rendered message before and behind each memory that stands in it."""
    begin = _begin(text, turn.text, frame)
    cuts, done = [], 0
    if begin is not None:
        memories, at = turn.memories, begin
        for part in turn.parts:
            if "text" not in part:
                continue
            end = at + len(part["text"])
            if part in memories:
                first, last = (
                    max(at, len(frame.opening)),
                    len(text) - len(frame.closing),
                )
                last = min(end, last)
                cuts += [(text[done:first], None), (text[first:last], part["uri"])]
                done = last
            at = end + 1  # parts are lines
    cuts.append((text[done:], None))
    return [(segment, uri) for segment, uri in cuts if segment]


def _cut_at(
    cuts: list[tuple[str, str | None]], said: range
) -> list[tuple[str, str | None]]:
    """Return segments that lie inside of what was said, or outside of it."""
    found, at = [], 0
    for segment, uri in cuts:
        edges = [0, said.start - at, said.stop - at, len(segment)]
        edges = sorted(min(max(edge, 0), len(segment)) for edge in edges)
        found += [
            (segment[first:end], uri)
            for first, end in zip(edges, edges[1:], strict=False)
            if first < end
        ]
        at += len(segment)
    return found


def _begin(text: str, words: str, frame: _Frame | None) -> int | None:
    """Return where a message's words begin, or would if none were stripped off."""
    if frame is None:
        return None
    if text == frame.opening + words + frame.closing:
        return len(frame.opening)
    if text == frame.opening + words.strip() + frame.closing:
        return len(frame.opening) - (len(words) - len(words.lstrip()))
    return None


def _rendered_whole(tokenizer, turns: Sequence[Turn], chat: _Chat) -> Prompt:
    """Return a prompt of one stretch, which counts as any memory that is in it."""
    ids = tokenizer.encode(chat.answered, add_special_tokens=False)
    spans = [Span(turns[-1].seq, 0, len(ids))]
    uris = {part["uri"] for turn in turns for part in turn.memories}
    spans += [Span(turns[-1].seq, 0, len(ids), uri) for uri in sorted(uris)]
    return Prompt(tuple(ids), tuple(spans), len(ids))
