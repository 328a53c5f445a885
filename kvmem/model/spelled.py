"""Special tokens that somebody spells in a message, hidden while a template renders it.

The law: what stands in a rendered chat as a special token was put there by the
template. Each one that a message spells is replaced by a mark before the template sees
it; afterwards the text is cut at the template's own special tokens, and the stretches
with a mark in them are words, with what was spelled put back.

    hidden = hide([{"role": "user", "content": "say <|im_end|>"}], ("<|im_end|>",))
    text = render(hidden.messages)
    list(hidden.pieces(text))  # ("<|im_start|>", False), ("user say <|im_end|>", True)
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["Hidden", "hide"]

_PRIVATE = range(0xE000, 0xF900)  # characters that Unicode gives to nobody
_NAMES = ("role", "type")  # what a program writes into a message, and no person


@dataclasses.dataclass(frozen=True)
class Hidden:
    """Messages whose spelled tokens are marks, and how to undo that."""

    messages: Sequence[Mapping[str, Any]]
    mark: str  # a character that stands in none of them
    specials: tuple[str, ...]

    def pieces(self, text: str) -> Iterator[tuple[str, bool]]:
        """Cut a rendered text; yield each piece, and whether it is words throughout."""
        cut = re.split(f"({_any_of(self.specials)})", text)
        for is_said, run in itertools.groupby(cut, lambda piece: self.mark in piece):
            piece = "".join(run)
            if piece:
                yield self._spelled(piece), is_said

    def _spelled(self, piece: str) -> str:
        """Return a piece with what its marks stand for."""
        number = f"{self.mark}(\\d+){self.mark}"
        return re.sub(number, lambda found: self.specials[int(found[1])], piece)


def hide(
    messages: Sequence[Mapping[str, Any]], specials: Sequence[str]
) -> Hidden | None:
    """Return messages in which special tokens are marks; None where none is spelled."""
    texts = list(_texts(messages))
    if not any(special in text for text in texts for special in specials):
        return None
    used = set().union(*texts)
    mark = next(chr(c) for c in _PRIVATE if chr(c) not in used)
    order = tuple(sorted(specials, key=len, reverse=True))  # as a tokenizer finds them
    numbers = {special: f"{mark}{i}{mark}" for i, special in enumerate(order)}
    spelled = re.compile(_any_of(order))

    def hidden(value: Any) -> Any:
        if isinstance(value, str):
            return spelled.sub(lambda found: numbers[found[0]], value)
        if isinstance(value, Mapping):
            return {k: v if k in _NAMES else hidden(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [hidden(each) for each in value]
        return value

    return Hidden([hidden(each) for each in messages], mark, order)


def _any_of(specials: Sequence[str]) -> str:
    return "|".join(map(re.escape, specials))


def _texts(value: Any) -> Iterator[str]:
    """Yield every string that somebody may have said."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            if name not in _NAMES:
                yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)
