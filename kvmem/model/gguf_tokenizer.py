"""The tokenizer a GGUF file declares, built from its `tokenizer.ggml.*` metadata.

The file names its pre-tokenisation rule (`tokenizer.ggml.pre`) rather than holding it.
Law: a rule that is not in the table below is refused; a guess would cut text at other
places than the model was trained on and nothing would say so.

    gguf_tokenizer.build(metadata).encode("3  4")      # [35, 256, 36] under "smollm"
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from kvmem.errors import FormatMismatch, say
from kvmem.model.tokenizer import Tokenizer

__all__ = ["build"]

_CONTROL, _USER_DEFINED = 3, 4  # gguf.TokenType
_ROLES = ("bos", "eos", "unknown", "padding")
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Rule(NamedTuple):
    """How text is cut before byte pairs are merged."""

    steps: tuple[pre_tokenizers.PreTokenizer, ...]
    ignore_merges: bool = False  # a whole piece in the vocabulary is taken as it is
    adds_bos: bool = False  # unless the file says otherwise


_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_SMOLLM = _Rule((pre_tokenizers.Digits(individual_digits=True), _GPT2))
_LLAMA3 = _Rule(
    (
        pre_tokenizers.Split(tokenizers.Regex(_LLAMA3_SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ),
    ignore_merges=True,
    adds_bos=True,
)
_RULES = {
    "gpt-2": _Rule((_GPT2,)),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "smollm": _SMOLLM,
}


def build(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the declared tokenizer.

    Args:
        metadata: the file's key-values as Python data.

    Raises:
        FormatMismatch: the file declares a tokenizer or a rule that is not known.
    """
    rule = _rule(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    core = tokenizers.Tokenizer(
        models.BPE(
            vocab={text: index for index, text in enumerate(tokens)},
            merges=[tuple(m.split(" ")) for m in metadata["tokenizer.ggml.merges"]],
            ignore_merges=rule.ignore_merges,
        )
    )
    core.pre_tokenizer = pre_tokenizers.Sequence(list(rule.steps))
    core.decoder = decoders.ByteLevel()
    core.add_tokens(_added(tokens, metadata["tokenizer.ggml.token_type"]))
    special = _special(metadata, tokens)
    if metadata.get("tokenizer.ggml.add_bos_token", rule.adds_bos):
        bos = special["bos_token"]
        core.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, tokens.index(bos))]
        )
    return Tokenizer(
        core,
        special,
        eos_ids(metadata),
        metadata.get("tokenizer.chat_template"),
        _identity(metadata),
    )


def eos_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """List the ids that end a text: end of sequence, of turn, of message."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(metadata[key] for key in keys if key in metadata))


def _rule(metadata: Mapping[str, Any]) -> _Rule:
    """Look up the declared rule, or refuse."""
    kind = metadata.get("tokenizer.ggml.model")
    pre = metadata.get("tokenizer.ggml.pre")
    if kind == "gpt2" and pre in _RULES:
        return _RULES[pre]
    raise FormatMismatch(
        say(
            f"a GGUF tokenizer of model {kind!r}, pre {pre!r}",
            "a rule that is not known exactly would cut text at other places than the "
            "model was trained on",
            f"Use a file of model 'gpt2' with pre in {', '.join(sorted(_RULES))}, or a "
            "checkpoint directory with its tokenizer.json",
        )
    )


def _added(tokens: Sequence[str], types: Sequence[int]) -> list[tokenizers.AddedToken]:
    """List the tokens that are matched as whole texts before anything is cut."""
    return [
        tokenizers.AddedToken(text, special=kind == _CONTROL, normalized=False)
        for text, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _special(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, str]:
    """Name special tokens as chat templates do: `bos_token`, `pad_token`, …"""
    short = {"unknown": "unk", "padding": "pad"}
    found = {}
    for role in _ROLES:
        index = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if index is not None:
            found[f"{short.get(role, role)}_token"] = tokens[index]
    return found


def _identity(metadata: Mapping[str, Any]) -> str:
    """Digest every `tokenizer.ggml.*` key; scores and chat template are left out."""
    declared = {
        key: value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.") and key != "tokenizer.ggml.scores"
    }
    text = json.dumps(declared, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(b"tokenizer.ggml\0" + text.encode()).hexdigest()
