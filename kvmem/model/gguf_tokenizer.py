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
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from kvmem.errors import FormatMismatch, say
from kvmem.model.tokenizer import Tokenizer

__all__ = ["build", "eos_ids"]

_CONTROL, _USER_DEFINED = 3, 4  # gguf.TokenType
_SPACE = "\u2581"  # SentencePiece's visible space
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
    _require_whole(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    if metadata.get("tokenizer.ggml.model") == "llama":
        core, adds_bos = _sentence_pieces(metadata, tokens), True
    else:
        rule = _rule(metadata)
        core, adds_bos = _byte_pairs(metadata, tokens, rule), rule.adds_bos
    core.add_tokens(_added(tokens, metadata["tokenizer.ggml.token_type"]))
    special = _special(metadata, tokens)
    if metadata.get("tokenizer.ggml.add_bos_token", adds_bos):
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


def _byte_pairs(
    metadata: Mapping[str, Any], tokens: Sequence[str], rule: _Rule
) -> tokenizers.Tokenizer:
    """Build a byte-level BPE from the declared merges (model "gpt2")."""
    core = tokenizers.Tokenizer(
        models.BPE(
            vocab={text: index for index, text in enumerate(tokens)},
            merges=[tuple(m.split(" ")) for m in metadata["tokenizer.ggml.merges"]],
            ignore_merges=rule.ignore_merges,
        )
    )
    core.pre_tokenizer = pre_tokenizers.Sequence(list(rule.steps))
    core.decoder = decoders.ByteLevel()
    return core


def _sentence_pieces(
    metadata: Mapping[str, Any], tokens: Sequence[str]
) -> tokenizers.Tokenizer:
    """Build a SentencePiece BPE (model "llama"): scored pieces, bytes as fallback."""
    scores = metadata["tokenizer.ggml.scores"]
    core = tokenizers.Tokenizer(
        models.BPE(
            vocab={text: index for index, text in enumerate(tokens)},
            merges=_scored_merges(tokens, scores),
            unk_token=tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    core.normalizer = spaces
    core.decoder = decoders.Sequence(steps)
    return core


def _scored_merges(
    tokens: Sequence[str], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """List every pair that joins to a piece, best-scored pieces first."""
    known = set(tokens)
    merges = []
    for index in sorted(range(len(tokens)), key=lambda i: (-scores[i], i)):
        text = tokens[index]
        pairs = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        merges += [(a, b) for a, b in pairs if a in known and b in known]
    return merges


def _require_whole(metadata: Mapping[str, Any]) -> None:
    """Refuse a tokenizer without its merges, or one that ends every prompt."""
    kind = metadata.get("tokenizer.ggml.model")
    wanted = "scores" if kind == "llama" else "merges"
    faults = []
    if f"tokenizer.ggml.{wanted}" not in metadata:
        faults.append(f"tokenizer.ggml.{wanted} is missing")
    if metadata.get("tokenizer.ggml.add_eos_token", False):
        faults.append("tokenizer.ggml.add_eos_token would end every prompt")
    if faults:
        raise FormatMismatch(
            say(
                f"a GGUF tokenizer of model {kind!r}",
                "; ".join(faults),
                "Use a whole file of a model that generates text",
            )
        )


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
            f"Use model 'llama', or 'gpt2' with pre in {', '.join(sorted(_RULES))}, "
            "or a checkpoint directory with its tokenizer.json",
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
    """Digest every `tokenizer.ggml.*` key and value."""
    declared = {
        key: value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    text = json.dumps(declared, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(b"tokenizer.ggml\0" + text.encode()).hexdigest()
