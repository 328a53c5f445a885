"""Texts to blend: real documents in changed order, with questions behind them.

Python carries its own language reference (`pydoc_data.topics`): long prose about
different things, the same on every machine with that version. Other texts are files.

    corpus = python_topics()
    prompts = arranged(corpus, encode, tokens=1_500, count=6)
    prompts[0].tokens, prompts[0].order          # ids; ("with", "try", "import")
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Sequence
from pydoc_data import topics

from kvmem import errors

__all__ = ["Corpus", "Prompt", "arranged", "documents", "files", "python_topics"]

_HEAD = "Documentation of Python.\n\n"
_TOPICS = {
    "try": "What does the finally clause do?",
    "import": "What happens when a module is imported for the first time?",
    "with": "What is a context manager?",
}

Encode = Callable[[str], list[int]]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents and a question about each."""

    head: str  # what every prompt begins with
    documents: dict[str, str]
    questions: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Documents in one order, then a question about one of them."""

    order: tuple[str, ...]
    question: str
    tokens: tuple[int, ...]


def python_topics() -> Corpus:
    """Return three topics of Python's own reference."""
    return Corpus(_HEAD, {name: topics.topics[name] for name in _TOPICS}, dict(_TOPICS))


def files(paths: Sequence[str | pathlib.Path], question: str) -> Corpus:
    """Return the texts of files, with one question for all.

    Raises:
        ConfigError: fewer than two files, or one that cannot be read as text.
    """
    try:
        found = {
            pathlib.Path(path).name: pathlib.Path(path).read_text() for path in paths
        }
    except (OSError, UnicodeError) as error:
        raise errors.ConfigError(
            errors.say("texts to blend", str(error), "Give files of plain text")
        ) from None
    if len(found) < 2:
        raise errors.ConfigError(
            errors.say(
                f"{len(found)} text to blend",
                "a text is moved where another one comes before it",
                "Give two files or more, of different names",
            )
        )
    return Corpus("", found, dict.fromkeys(found, question))


def documents(corpus: Corpus, encode: Encode, tokens: int) -> dict[str, list[int]]:
    """Return the ids of each document, cut so that all together have `tokens`."""
    most = tokens // len(corpus.documents)
    return {name: encode(text)[:most] for name, text in corpus.documents.items()}


def arranged(
    corpus: Corpus, encode: Encode, tokens: int, count: int
) -> tuple[Prompt, ...]:
    """Return `count` prompts: every order of the documents in turn, and in each a
    question about a document that is not the first; the same prompt comes again only
    when every order has had every such question."""
    cut, made = documents(corpus, encode, tokens), []
    orders = list(itertools.permutations(cut))
    for number in range(count):
        order = orders[-number % len(orders)]
        again, place = divmod(number, len(orders))
        asked = place // 2 + again  # another question when an order comes again
        topic = order[1 + asked % (len(order) - 1)]
        question = f"\n\nQuestion: {corpus.questions[topic]}\nAnswer:"
        ids = [*encode(corpus.head)] if corpus.head else []
        ids += [token for name in order for token in cut[name]]
        ids += encode(question)
        made.append(Prompt(order, corpus.questions[topic], tuple(ids)))
    return tuple(made)
