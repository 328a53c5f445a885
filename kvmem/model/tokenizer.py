"""Text to token ids and back, exactly as a model's files declare it.

A `Tokenizer` wraps the Rust `tokenizers` library with what generation needs beside it:
special tokens, ids that end a text, the chat template. Laws: nothing is guessed (an
undeclared rule is an error); `decode` of a whole list equals the joined pieces of a
`TextStream`, and no piece ever ends inside a character.

    tok = load_gguf.load(path).tokenizer
    tok.encode("The capital of France is")            # [504, 3575, 282, 4649, 314]
    tok.apply_chat([{"role": "user", "content": "Hi"}])
"""

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders

from kvmem.errors import ConfigError, FormatMismatch, say
from kvmem.model import chat_template, spelled

__all__ = ["TextStream", "Tokenizer", "from_checkpoint"]


class Tokenizer:
    """One model's tokenizer; immutable after construction.

    Args:
        core: the tokenizer of the `tokenizers` library.
        special: texts of special tokens by role (`bos_token`, `eos_token`, …).
        eos_ids: ids that end a text.
        template: the chat template's Jinja source, if the files have one.
        identity: digest of the declared data it was built from, part of the model id.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        special: Mapping[str, str],
        eos_ids: Sequence[int],
        template: str | None,
        identity: str,
    ):
        self._core = core
        self._special = dict(special)
        self.eos_ids = tuple(eos_ids)
        self.template = template
        self.identity = identity

    @functools.cached_property
    def max_id(self) -> int:
        """Return the highest id that has a text."""
        return max(self._core.get_vocab().values(), default=-1)

    def spells_special(self, text: str) -> bool:
        """Say whether a special token of the vocabulary is written in a text."""
        return any(special in text for special in self._specials)

    @functools.cached_property
    def _specials(self) -> tuple[str, ...]:
        added = self._core.get_added_tokens_decoder().values()
        return tuple(token.content for token in added if token.special)

    @functools.cached_property
    def _words(self) -> tokenizers.Tokenizer:
        """The core once more, which knows no special tokens in a text."""
        core = tokenizers.Tokenizer.from_str(self._core.to_str())
        core.encode_special_tokens = True
        return core

    def encode_words(self, text: str) -> list[int]:
        """Turn text into ids; special tokens written in it are words like others.

        For what somebody said: it can begin no message and end none.
        """
        return self._words.encode(text, add_special_tokens=False).ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Turn text into ids; special tokens written in the text are recognised.

        A byte for which a vocabulary has neither token nor fallback is dropped, as
        in every user of the `tokenizers` library (SmolLM2 lacks U+0004, for one).

        Args:
            text: any text of whole characters.
            add_special_tokens: whether to add what the files declare around a text (a
                begin-of-text token, if any). A rendered chat already has it.
        """
        try:
            return self._core.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:  # raised for half a surrogate pair, or no string
            raise ConfigError(
                say(
                    f"encoding {text!r:.80}",
                    "a text is a string of whole Unicode characters",
                    'Decode its bytes with errors="replace"',
                )
            ) from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Turn ids into text."""
        return self._core.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token: int) -> str | None:
        """Return one token as the vocabulary spells it, or None beyond its end."""
        return self._core.id_to_token(token)

    def stream(self, skip_special_tokens: bool = True) -> "TextStream":
        """Start decoding token by token."""
        return TextStream(self, self._core, skip_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
    ) -> str:
        """Turn messages into the text the model was trained on."""
        if self.template is None:
            raise ConfigError(
                say(
                    "a chat on a model without a chat template",
                    "the text around messages is the checkpoint's to declare",
                    "Pass a prompt string, or use an instruct checkpoint",
                )
            )
        return chat_template.render(
            self.template, messages, add_generation_prompt, self._special
        )

    def apply_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Turn messages into ids.

        A special token that somebody spells in a message is words: what is said begins
        no other message and ends none. Messages that spell none get the ids that
        transformers gives them. (Whoever wants them taken for special encodes what
        `render_chat` returns.)
        """
        hidden = spelled.hide(messages, self._specials)
        if hidden is None:
            text = self.render_chat(messages, add_generation_prompt)
            return self.encode(text, add_special_tokens=False)
        text = self.render_chat(hidden.messages, add_generation_prompt)
        ids: list[int] = []
        for piece, is_said in hidden.pieces(text):
            ids += self.encode_words(piece) if is_said else self.encode(piece, False)
        return ids

    def state(self) -> dict[str, Any]:
        """Return everything as JSON data; `from_state` makes the same tokenizer."""
        return {
            "core": self._core.to_str(),
            "special": self._special,
            "eos_ids": list(self.eos_ids),
            "template": self.template,
            "identity": self.identity,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Tokenizer":
        """Make the tokenizer that `state` describes."""
        return cls(
            tokenizers.Tokenizer.from_str(state["core"]),
            state["special"],
            state["eos_ids"],
            state["template"],
            state["identity"],
        )


class TextStream:
    """Decodes token by token; a piece is held back until its characters are whole."""

    def __init__(
        self, owner: Tokenizer, core: tokenizers.Tokenizer, skip_special_tokens: bool
    ):
        self._owner = owner
        self._core = core
        self._skip = skip_special_tokens
        self._steps = decoders.DecodeStream(skip_special_tokens=skip_special_tokens)
        self._ids: list[int] = []
        self._emitted = 0

    def push(self, token: int) -> str:
        """Return the text that `token` completes, often empty."""
        self._ids.append(token)
        piece = self._steps.step(self._core, token) or ""
        self._emitted += len(piece)
        return piece

    def finish(self) -> str:
        """Return what was held back: the broken character at the end, if any."""
        whole = self._owner.decode(self._ids, self._skip)
        rest, self._emitted = whole[self._emitted :], len(whole)
        return rest


def from_checkpoint(directory: Path, eos_ids: Sequence[int]) -> Tokenizer:
    """Read `tokenizer.json`, `tokenizer_config.json` and the chat template.

    Args:
        directory: a Hugging Face checkpoint.
        eos_ids: ids that end a text, from the checkpoint's configs.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise FormatMismatch(
            say(
                f"the tokenizer of {directory}",
                "it has no tokenizer.json, and other forms are not read",
                "Save it with `AutoTokenizer.from_pretrained(…).save_pretrained(…)`",
            )
        )
    declared = path.read_bytes()
    core = tokenizers.Tokenizer.from_str(declared.decode("utf-8"))
    core.no_truncation()
    core.no_padding()
    config_path = directory / "tokenizer_config.json"
    config = json.loads(config_path.read_text("utf-8")) if config_path.is_file() else {}
    special = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token") and isinstance(value, str | dict)
    }
    template = _template(directory, config)
    identity = hashlib.sha256(b"tokenizer.json\0" + declared).hexdigest()
    return Tokenizer(core, special, eos_ids, template, identity)


def _template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """Find the chat template: its own file first, then the config's (default) one."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return found
