"""Pieces: one message's token ids, and where the memories in it lie.

The law: each memory is encoded by itself, so that its tokens are its own, and a special
token that somebody spells in a message is words: it begins no other message. What a
model generated is fed again by the ids that it was generated as, where they say what
the message says.

    piece = encoded(tokenizer, rendered, turn, frame)
    piece.ids, piece.memories
"""

from typing import NamedTuple

from kvmem.conversation.turns import Turn
from kvmem.model.tokenizer import Tokenizer

__all__ = ["Frame", "Memory", "Piece", "again", "encoded", "generated"]


class Frame(NamedTuple):
    """What a template puts before and behind the words of one message."""

    opening: str
    closing: str


class Memory(NamedTuple):
    """A memory in a message: the message's number, and the memory's name."""

    seq: int
    uri: str


class Piece(NamedTuple):
    """A message's ids, and (memory, start, end) of the memories within."""

    ids: tuple[int, ...]
    memories: tuple[tuple[Memory, int, int], ...] = ()


_Cut = tuple[str, Memory | None]  # a stretch of a rendered message, and what it is


def generated(tokenizer: Tokenizer, turn: Turn) -> tuple[int, ...] | None:
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


def again(
    tokenizer: Tokenizer, header: str, closing: str, ids: tuple[int, ...]
) -> Piece:
    """Return a generated message as it was fed, and what closes it."""
    if ids and ids[-1] in tokenizer.eos_ids:  # the ids close it, or begin to
        ending = tokenizer.decode(ids[-1:], skip_special_tokens=False)
        if closing.lstrip().startswith(ending):
            closing = closing.lstrip().removeprefix(ending)
    before, behind = (
        tokenizer.encode(text, add_special_tokens=False) for text in (header, closing)
    )
    return Piece((*before, *ids, *behind))


def encoded(tokenizer: Tokenizer, text: str, turn: Turn, frame: Frame | None) -> Piece:
    """Encode a message, each memory in it by itself."""
    ids: list[int] = []
    memories = []
    cuts = _segments(text, turn, frame)
    said = range(0)  # where special tokens are words like others
    if frame is not None and tokenizer.spells_special(turn.text):
        said = range(len(frame.opening), len(text) - len(frame.closing))
        cuts = _cut_at(cuts, said)
    at = 0
    for segment, memory in cuts:
        start = len(ids)
        if at in said:
            ids += tokenizer.encode_words(segment)
        else:
            ids += tokenizer.encode(segment, add_special_tokens=False)
        at += len(segment)
        if memory is not None:
            memories.append((memory, start, len(ids)))
    lost = set(_named(turn).values()) - {memory for memory, _, _ in memories}
    # A template that changed a memory's words: the whole message counts as it.
    memories += [(memory, 0, len(ids)) for memory in sorted(lost)]
    return Piece(tuple(ids), tuple(memories))


def _named(turn: Turn) -> dict[int, Memory]:
    """Return the memories of a turn, each by the place of its part."""
    held = turn.memories
    return {
        place: Memory(turn.owner(place), part["uri"])
        for place, part in enumerate(turn.parts)
        if part in held
    }


def _say(tokenizer: Tokenizer, ids: object, text: str) -> bool:
    """Say whether ids are ids, and spell a text, or one that a stop text cut off."""
    if not isinstance(ids, list) or not all(type(each) is int for each in ids):
        return False
    if ids and not 0 <= min(ids) <= max(ids) <= tokenizer.max_id:
        return False
    spelled = tokenizer.decode(ids)
    return spelled == text or (text != "" and spelled.startswith(text))


def _segments(text: str, turn: Turn, frame: Frame | None) -> list[_Cut]:
    """Cut a rendered message before and behind each memory that stands in it."""
    begin = _begin(text, turn.text, frame)
    cuts, done = [], 0
    if begin is not None:
        memories, at = _named(turn), begin
        for place, part in enumerate(turn.parts):
            if "text" not in part:
                continue
            end = at + len(part["text"])
            if place in memories:
                first = max(at, len(frame.opening))
                last = min(end, len(text) - len(frame.closing))
                cuts += [(text[done:first], None), (text[first:last], memories[place])]
                done = last
            at = end + 1  # parts are lines
    cuts.append((text[done:], None))
    return [(segment, memory) for segment, memory in cuts if segment]


def _cut_at(cuts: list[_Cut], said: range) -> list[_Cut]:
    """Return segments that lie inside of what was said, or outside of it."""
    found, at = [], 0
    for segment, memory in cuts:
        edges = [0, said.start - at, said.stop - at, len(segment)]
        edges = sorted(min(max(edge, 0), len(segment)) for edge in edges)
        found += [
            (segment[first:end], memory)
            for first, end in zip(edges, edges[1:], strict=False)
            if first < end
        ]
        at += len(segment)
    return found


def _begin(text: str, words: str, frame: Frame | None) -> int | None:
    """Return where a message's words begin, or would if none were stripped off."""
    if frame is None:
        return None
    if text == frame.opening + words + frame.closing:
        return len(frame.opening)
    if text == frame.opening + words.strip() + frame.closing:
        return len(frame.opening) - (len(words) - len(words.lstrip()))
    return None
