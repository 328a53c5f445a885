"""Turns: what a log says, message after message, as a chat template takes it.

The law: what a template takes is fed as it was said. Some templates want user and
assistant in turn, and a log need not be so: an answer that was cut off leaves a message
of the user's without one, two actors speak one after the other, and a commit may leave
an answer as the first message. Where a template refuses a conversation, neighbours of
one role become one message, their words a line each, and where an assistant speaks
first a user who says nothing stands before it. What is refused even so is an error.

    turns = taken(tokenizer, turns_of(session.live(), actor))
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kvmem.errors import ConfigError
from kvmem.model.tokenizer import Tokenizer
from kvmem.session import Message

__all__ = ["Turn", "chat_of", "taken", "turns_of"]


class Turn(NamedTuple):
    """One message as a template takes it: its number, who said it, and its parts.

    `owners` is the number of the message that each part stands in, where that is not
    `seq`: a turn that is made of several has the last one's number.
    """

    seq: int
    role: str
    parts: tuple[Mapping, ...]
    owners: tuple[int, ...] = ()

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

    def owner(self, place: int) -> int:
        """Return the number of the message that part `place` stands in."""
        return self.owners[place] if self.owners else self.seq


def turns_of(messages: Iterable[Message], actor: str | None) -> tuple[Turn, ...]:
    """Return what an actor's conversation says: what all said, and what it said."""
    return tuple(
        Turn(each.seq, each.role, each.parts)
        for each in messages
        if each.actor in (None, actor)
    )


def chat_of(turns: Sequence[Turn]) -> list[dict]:
    """Return turns as messages of a template."""
    return [{"role": turn.role, "content": turn.text} for turn in turns]


def taken(tokenizer: Tokenizer, turns: Sequence[Turn]) -> tuple[tuple[Turn, ...], str]:
    """Return turns in a form that the template takes, and what it makes of them.

    Raises:
        ConfigError: it takes them in no form; what it said of them as they are.
    """
    turns = tuple(turns)
    try:
        return turns, tokenizer.render_chat(chat_of(turns))
    except ConfigError as refused:
        joined = _joined(turns)
        for other, sooner in ((joined, turns), (_begun(joined), joined)):
            if other == sooner:  # it was refused already
                continue
            try:
                return other, tokenizer.render_chat(chat_of(other))
            except ConfigError:
                continue
        raise refused


def _joined(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Return turns of which no neighbours are the user's, or the assistant's, both."""
    found: list[Turn] = []
    for turn in turns:
        if found and turn.role == found[-1].role and turn.role in ("user", "assistant"):
            turn = _one(found.pop(), turn)
        found.append(turn)
    return tuple(found)


def _one(first: Turn, second: Turn) -> Turn:
    owners = [
        turn.owner(place)
        for turn in (first, second)
        for place in range(len(turn.parts))
    ]
    parts = (*first.parts, *second.parts)
    return Turn(second.seq, second.role, parts, tuple(owners))


def _begun(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """Return turns in which a user who says nothing stands before a first answer."""
    at = next((i for i, turn in enumerate(turns) if turn.role != "system"), 0)
    if at == len(turns) or turns[at].role != "assistant":
        return turns
    return (*turns[:at], Turn(-1, "user", ()), *turns[at:])
