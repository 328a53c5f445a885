"""A transcript: what a session's log says, as the token ids that a model is fed.

The law: ids follow from the log and the tokenizer alone. What a model generated stands
in the log with its ids, and is fed again as it was: a text does not always come back
from its own words, and a template may strip some of them (`pieces`). What a
`Transcript` keeps from one turn to the next changes nothing of that: a conversation
that begins as the last one did costs what is new of it, and any other is read anew.

    prompt = transcript.prompt(tokenizer, turns)
    prompt.ids, prompt.spans

A template that does not render message after message (text changes behind it as it
goes on) is rendered whole each time, and then only what comes out equal is reused.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from kvmem.conversation import pieces
from kvmem.conversation.chain import Span
from kvmem.conversation.pieces import Frame, Piece
from kvmem.conversation.turns import Turn, chat_of, taken, turns_of
from kvmem.errors import ConfigError
from kvmem.model.tokenizer import Tokenizer

__all__ = ["Prompt", "Transcript", "Turn", "ids_part", "prompt", "turns_of"]

_STAND_IN = "words-of-a-message-stand-here"


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Ids to feed, what they are, and where the reply's own message begins."""

    ids: tuple[int, ...]
    spans: tuple[Span, ...]
    reply_start: int


class _Rendered(NamedTuple):
    """A message and what the template makes of the conversation up to it.

    `until` is None where that does not go on from the messages before.
    """

    turn: Turn
    until: str | None
    frame: Frame | None = None


def ids_part(tokenizer: Tokenizer, ids: Sequence[int]) -> dict:
    """Return the part of a message that says which ids it was generated as."""
    return {"type": "tokens", "tokenizer": tokenizer.identity, "ids": list(ids)}


def prompt(tokenizer: Tokenizer, turns: Sequence[Turn]) -> Prompt:
    """Return the ids of a conversation, up to where the assistant begins.

    Args:
        tokenizer: the model's, with a chat template.
        turns: in order; at least one.

    Raises:
        ConfigError: the template refuses them.
    """
    return Transcript(tokenizer).prompt(turns)


class Transcript:
    """One conversation, whose beginning is kept as it was rendered and encoded."""

    def __init__(self, tokenizer: Tokenizer):
        """Know nothing of it yet."""
        self._tokenizer = tokenizer
        self._known: list[_Rendered] = []
        self._pieces: list[Piece] = []  # of the first of them
        self._header: str | None = None  # that these were made under
        self._last: tuple[tuple[Turn, ...], Prompt] | None = None

    def prompt(self, turns: Sequence[Turn]) -> Prompt:
        """Return the ids of a conversation; see `prompt`."""
        if self._last is None or self._last[0] != tuple(turns):
            self._last = tuple(turns), self._made(turns)
        return self._last[1]

    def _made(self, turns: Sequence[Turn]) -> Prompt:
        turns, answered = taken(self._tokenizer, turns)
        self._read(turns)
        until = self._known[-1].until
        if until is None or not answered.startswith(until):
            return _rendered_whole(self._tokenizer, turns)
        self._encode(answered[len(until) :])
        ids: list[int] = []
        spans: list[Span] = []
        for (turn, _, _), piece in zip(self._known, self._pieces, strict=True):
            start = len(ids)
            ids += piece.ids
            spans.append(Span(turn.seq, start, len(ids)))
            spans += [
                Span(memory.seq, start + first, start + end, memory.uri)
                for memory, first, end in piece.memories
            ]
        header = self._tokenizer.encode(self._header, add_special_tokens=False)
        return Prompt((*ids, *header), tuple(spans), len(ids))

    def _read(self, turns: Sequence[Turn]) -> None:
        """Render what is not known of a conversation, message after message."""
        chat, same = chat_of(turns), 0
        if self._known and self._rendered(chat[:1]) == self._known[0].until:
            while same < min(len(turns), len(self._known)):
                if turns[same] != self._known[same].turn:
                    break
                same += 1
        # Else all of it is another: a template may say what day it is.
        del self._known[same:], self._pieces[same:]
        for at in range(same, len(turns)):
            before = self._known[-1].until if self._known else ""
            until = None if before is None else self._rendered(chat[: at + 1])
            if until is None or not until.startswith(before):
                self._known.append(_Rendered(turns[at], None))
                continue
            frame = self._frame(chat[:at], chat[at], before)
            self._known.append(_Rendered(turns[at], until, frame))

    def _encode(self, header: str) -> None:
        """Encode what is not encoded yet; answers stand behind the header."""
        if header != self._header:
            self._header = header
            self._pieces.clear()
        for at in range(len(self._pieces), len(self._known)):
            turn, until, frame = self._known[at]
            before = self._known[at - 1].until if at else ""
            ids = pieces.generated(self._tokenizer, turn) if frame else None
            if ids is None:
                text = until[len(before) :]
                piece = pieces.encoded(self._tokenizer, text, turn, frame)
            else:
                piece = pieces.again(self._tokenizer, header, frame.closing, ids)
            self._pieces.append(piece)

    def _rendered(self, chat: list[dict]) -> str | None:
        """Return a beginning of a conversation; None: the template takes none."""
        try:
            return self._tokenizer.render_chat(chat, add_generation_prompt=False)
        except ConfigError:
            return None

    def _frame(self, chat: list[dict], message: dict, before: str) -> Frame | None:
        """Return what stands around the words of a message, whatever they are.

        That is found with other words in their place: a message that says "m" is
        found in <|im_end|> too. None where a template does not say them once.
        """
        said = self._rendered([*chat, {**message, "content": _STAND_IN}])
        if said is None or not said.startswith(before):
            return None
        if said.count(_STAND_IN, len(before)) != 1:
            return None
        return Frame(*said[len(before) :].split(_STAND_IN))


def _rendered_whole(tokenizer: Tokenizer, turns: Sequence[Turn]) -> Prompt:
    """Return a prompt of one stretch, which counts as any memory that is in it."""
    ids, last = tokenizer.apply_chat(chat_of(turns)), turns[-1].seq
    spans = [Span(last, 0, len(ids))]
    uris = {part["uri"] for turn in turns for part in turn.memories}
    spans += [Span(last, 0, len(ids), uri) for uri in sorted(uris)]
    return Prompt(tuple(ids), tuple(spans), len(ids))
