"""Blend check: what blending costs in quality and saves in time, on real texts.

For each prompt an engine first answers by itself, everything computed; then the same
tokens are read over blended pages, and the logits of every token of the answer are
compared. The law: both sides see the same tokens, so one early difference is counted
once and not for all that follows; and both are timed in turns, from a prompt's arrival
to its first token, with nothing cached.

    verdict = check(engine, config, prompts, documents)
    verdict.objections(config)         # () where the gate opens
"""

import statistics
import time
from collections.abc import Mapping
from collections.abc import Sequence as ListLike
from typing import NamedTuple

import numpy as np

from kvmem import errors
from kvmem.blend import Verdict, gate
from kvmem.blend.quality import Quality, compare
from kvmem.blend.texts import Prompt
from kvmem.serve.engine import Engine
from kvmem.serve.reading import Reader
from kvmem.serve.request import Output, SamplingParams

__all__ = ["Answer", "answers", "check", "compared", "first_token", "registered"]


class Answer(NamedTuple):
    """A prompt, what was answered with everything computed, and the logits of that."""

    tokens: tuple[int, ...]  # the prompt and all of its answer but the last token
    logits: np.ndarray  # f32[n, V]


def registered(engine: Engine, documents: Mapping[str, ListLike[int]]) -> None:
    """Register every document once."""
    for tokens in documents.values():
        engine.register(tokens)
    engine.table.clear_cache()


def answers(engine: Engine, prompts: ListLike[Prompt], num_tokens: int) -> list[Answer]:
    """Answer each prompt greedily, with everything computed."""
    found, sampling = [], SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    for prompt in prompts:
        output = _without_texts(engine, prompt.tokens, sampling)
        tokens = (*prompt.tokens, *output.output_ids[:-1])
        found.append(Answer(tokens, Reader(engine).logits(tokens, num_tokens)))
    return found


def compared(engine: Engine, known: ListLike[Answer]) -> list[Quality]:
    """Compare what the engine says over blended pages with known answers."""
    reader = Reader(engine)
    return [
        compare(
            answer.logits, reader.logits(answer.tokens, len(answer.logits), reuse=True)
        )
        for answer in known
    ]


def first_token(
    engine: Engine, tokens: ListLike[int], reuse: bool
) -> tuple[float, Output]:
    """Return seconds from arrival to the first token, with nothing cached before."""
    engine.table.clear_cache()
    sampling = SamplingParams(max_tokens=1, ignore_eos=True)
    started = time.perf_counter()
    if reuse:
        (output,) = engine.generate([tokens], sampling)
    else:
        output = _without_texts(engine, tokens, sampling)
    seconds = time.perf_counter() - started
    engine.table.clear_cache()
    return seconds, output


def check(
    engine: Engine,
    prompts: ListLike[Prompt],
    documents: Mapping[str, ListLike[int]],
    num_tokens: int = 16,
) -> Verdict:
    """Measure a model; return what the gate judges.

    Args:
        engine: idle, and blends.
        prompts: with the documents in them, in changed orders.
        documents: token ids by name, registered here.
        num_tokens: next tokens of each prompt that are compared.

    Raises:
        ConfigError: an engine with a store: what it has would be timed as computed.
    """
    if engine.recall is not None:
        raise errors.ConfigError(
            errors.say(
                "a check of blending in an engine with a store",
                "both sides are timed with nothing kept from before, and a store keeps "
                "what the first of them computed",
                "Make the engine without a store",
            )
        )
    registered(engine, documents)
    config = engine.blender.config
    found = compared(engine, answers(engine, prompts, num_tokens))
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for turn, prompt in enumerate([prompts[0], *prompts]):  # the first one compiles
        for reuse in (True, False):
            took, _ = first_token(engine, prompt.tokens, reuse)
            seconds[reuse] += [took] * (turn > 0)
    stale = gate.stale_layers(engine.groups) if config.allow_stale_selector else ()
    return Verdict(
        model_id=engine.model.model_id,
        kv_dtype=engine.groups[0].layers[0].dtype,
        ratio=config.ratio,
        check_layer=config.check_layer,
        stale_selector=stale if not config.recomputes_all else (),
        num_texts=len(prompts),
        num_tokens=len(prompts) * num_tokens,
        agreement=statistics.mean(quality.agreement for quality in found),
        first_agreement=statistics.mean(quality.first for quality in found),
        kl=statistics.mean(quality.kl for quality in found),
        blended_s=statistics.median(seconds[True]),
        recomputed_s=statistics.median(seconds[False]),
    )


def _without_texts(
    engine: Engine, tokens: ListLike[int], sampling: SamplingParams
) -> Output:
    """Answer a prompt as if no text were registered."""
    blender, engine.blender = engine.blender, None
    try:
        (output,) = engine.generate([list(tokens)], sampling)
    finally:
        engine.blender = blender
    engine.table.clear_cache()
    return output
