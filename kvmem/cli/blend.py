"""Check whether a model may reuse text that was computed elsewhere.

    kvmem blend check configs/models/smollm2.toml --set blend.ratio=0.15 -o gate.json

Answers a set of real texts with everything computed and over blended pages, and reports
the agreement of next tokens, their divergence, and the time to the first token. Exit
code 1: the model does not pass the limits of [blend]. A model that cannot be blended is
refused with the law that it breaks, before any weight is read. The config's store takes
no part: what it has would be timed as if it were computed.
"""

import dataclasses
import json
import os
import pathlib
from typing import Annotated, Literal

import tyro

from kvmem import config, console, errors
from kvmem.blend import BlendConfig, Verdict, texts
from kvmem.serve import blend_check

__all__ = ["Arguments", "run"]

_QUESTION = "What is this about?"
_MORE_TOKENS = 128  # of a head, a question and an answer

_Out = Annotated[
    str,
    tyro.conf.arg(
        metavar="FILE", aliases=("-o",), help_behavior_hint="(default: none)"
    ),
]


@dataclasses.dataclass(frozen=True)
class Arguments(console.Common):
    """Check whether a model may reuse text that was computed elsewhere.

    Args:
        action: what to do.
        path: a TOML config.
        out: write the record that blend.gate names.
        texts: files of plain text to blend, two or more; none: three topics of Python's
            own reference.
        question: what is asked behind them.
        tokens: of all documents together.
        prompts: how many: orders of the documents, questions.
        answer: next tokens of each prompt that are compared.
        json: print the record instead of a table.
    """

    action: tyro.conf.Positional[Literal["check"]]
    path: tyro.conf.Positional[str]
    out: _Out = ""
    texts: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    question: str = _QUESTION
    tokens: int = 1_440
    prompts: int = 6
    answer: int = 16
    set: console.Overrides = ()
    json: bool = False


def run(arguments: Arguments) -> int:
    """Check a model; 1 where it does not pass."""
    _require_positive(arguments)
    corpus = texts.python_topics()
    if arguments.texts:
        corpus = texts.files(arguments.texts, arguments.question)
    loaded = _loaded(arguments)
    with loaded.engine(gated=False) as engine:
        encode = engine.tokenizer.encode
        documents = texts.documents(corpus, encode, arguments.tokens)
        prompts = texts.arranged(corpus, encode, arguments.tokens, arguments.prompts)
        verdict = blend_check.check(engine, prompts, documents, arguments.answer)
    objections = verdict.objections(loaded.blend)
    record = verdict.as_json() | {"passed": not objections}
    if arguments.out:
        _write(arguments.out, record)
    if arguments.json:
        print(json.dumps(record, indent=2))
    else:
        _show(verdict, objections)
    return console.CHECK_FAILED if objections else console.DONE


def _loaded(arguments: Arguments) -> config.Config:
    """Return the config, with a table [blend] of defaults where it has none, room for
    the longest prompt, and no store: what lies in it would be neither computed nor
    blended."""
    loaded = config.load(arguments.path, arguments.set, os.environ)
    needed = arguments.tokens + arguments.answer + _MORE_TOKENS
    if loaded.serve.max_length < needed:
        raise errors.ConfigError(
            errors.say(
                f"a check with {arguments.tokens} tokens of documents",
                f"with a question and its answer they are up to {needed}, and "
                f"serve.max_length is {loaded.serve.max_length}",
                f"Give --set serve.max_length={needed}, or fewer --tokens",
            )
        )
    if loaded.blend is None:
        loaded = dataclasses.replace(loaded, blend=BlendConfig())
    return dataclasses.replace(loaded, store=config.StoreConfig())


def _require_positive(arguments: Arguments) -> None:
    low = [n for n in ("tokens", "prompts", "answer") if getattr(arguments, n) < 1]
    if low:
        flags = ", ".join(f"--{name}" for name in low)
        raise errors.ConfigError(
            errors.say(
                f"{flags} below 1", "there is nothing to check", "Give 1 or more"
            )
        )


def _write(path: str, record: dict) -> None:
    try:
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        pathlib.Path(path).write_text(json.dumps(record, indent=2) + "\n")
    except OSError as error:
        raise errors.ConfigError(
            errors.say(f"--out {path}", str(error), "Give a file that can be written")
        ) from None


def _show(verdict: Verdict, objections: tuple[str, ...]) -> None:
    shown = console.table("blended against everything computed", "what", "> figure")
    shown.add_row("ratio, check layer", f"{verdict.ratio}, {verdict.check_layer}")
    shown.add_row("prompts", console.count(verdict.num_texts))
    compared = f"{verdict.agreement:.3f} of {verdict.num_tokens}"
    shown.add_row("next tokens that agree", compared)
    shown.add_row("first ones that agree", f"{verdict.first_agreement:.3f}")
    shown.add_row("mean divergence, nats", f"{verdict.kl:.4f}")
    shown.add_row("first token, blended", f"{verdict.blended_s * 1e3:,.0f} ms")
    shown.add_row("first token, computed", f"{verdict.recomputed_s * 1e3:,.0f} ms")
    shown.add_row("blended is faster by", f"{verdict.speedup:.2f}")
    if verdict.stale_selector:
        shown.add_row("selectors at old places", ", ".join(verdict.stale_selector))
    console.out().print(shown)
    for objection in objections:
        console.out().print(f"does not pass: {objection}")
    if not objections:
        console.out().print("passes")
