"""Text used again at another place: what it saves, and what it costs in quality.

Three documents of Python's own reference stand in changed order, a question behind
them. Each prompt is answered with everything computed; then, ratio by ratio, over
blended pages, token by token of the same answer. The time to the first token is taken
in turns with a prefill at the best of the chunks offered, nothing cached on either
side. The law: quality is that of all prompts together, time of one prompt's rounds.

    python -m experiments run configs/blend.toml
"""

import dataclasses
import functools
import pathlib
import statistics
from collections.abc import Iterator, Mapping, Sequence

from experiments import blend_picture
from experiments.harness import Check, Record, Rounds, RunConfig, Timed, interleave
from kvmem import config as configs
from kvmem import errors
from kvmem.blend import BlendConfig, gate, texts
from kvmem.blend.quality import Quality
from kvmem.blend.texts import Prompt
from kvmem.config import ModelConfig, PoolConfig
from kvmem.serve import Engine, ServeConfig, blend_check

__all__ = ["Config", "Targets", "run"]


@dataclasses.dataclass(frozen=True)
class Targets:
    """What must be reached at one ratio, each a check.

    Args:
        ratio: at which.
        speedup: seconds of the best prefill over those of a blended first token.
        agreement: share of next tokens that are those of a full recompute.
    """

    ratio: float = 0.15
    speedup: float = 2.0
    agreement: float = 0.9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """The whole truth of a run.

    Args:
        model: what answers.
        pool: its pages.
        serve: its batching.
        blend: but for the ratio.
        ratios: shares that are recomputed.
        tokens: of the documents of a prompt, together.
        prompts: orders and questions that quality is taken over.
        answer: next tokens of each prompt that are compared.
        rounds: turns of the times.
        chunks: sizes offered to the prefill that is to be beaten.
        targets: what must be reached.
        picture: where the picture goes.
    """

    model: ModelConfig
    pool: PoolConfig
    serve: ServeConfig
    blend: BlendConfig = BlendConfig()
    ratios: tuple[float, ...] = (0.0, 0.05, 0.15, 0.3, 1.0)
    tokens: int = 1_476
    prompts: int = 6
    answer: int = 16
    rounds: int = 5
    chunks: tuple[int, ...] = (256, 512)
    targets: Targets = Targets()
    picture: str = "runs/blend/blend.png"

    def __post_init__(self):
        if self.targets.ratio not in self.ratios:
            raise errors.ConfigError(
                errors.say(
                    f"targets.ratio = {self.targets.ratio} with ratios {self.ratios}",
                    "what is to be reached is measured",
                    "Give one of the ratios",
                )
            )
        for ratio in self.ratios:
            dataclasses.replace(self.blend, ratio=ratio)  # refuses what is none
        counts = ("tokens", "prompts", "answer", "rounds")
        low = [name for name in counts if getattr(self, name) < 1]
        if low:
            raise errors.ConfigError(
                errors.say(
                    f"{', '.join(low)} below 1",
                    "a figure is of something that was measured",
                    "Give 1 or more",
                )
            )


def run(config: Config) -> Iterator[Record]:
    """Yield the quality at every ratio, and the times."""
    whole = configs.Config(
        config.model, pool=config.pool, serve=config.serve, blend=config.blend
    )
    engine = whole.engine(gated=False)
    encode, corpus = engine.tokenizer.encode, texts.python_topics()
    prompts = texts.arranged(corpus, encode, config.tokens, config.prompts)
    documents = texts.documents(corpus, encode, config.tokens)
    print(f"registering {len(documents)} documents, answering {len(prompts)} prompts")
    blend_check.registered(engine, documents)
    known = blend_check.answers(engine, prompts, config.answer)
    found = {}
    for ratio in config.ratios:
        print(f"quality at ratio {ratio}")
        _recompute(engine, ratio)
        found[ratio] = blend_check.compared(engine, known)
    yield _quality(config, engine, prompts, found)
    print(f"first tokens in turns, {config.rounds} rounds")
    rounds, reused = _times(config, engine, prompts[0])
    yield _speed(config, rounds, reused, len(prompts[0].tokens))
    _draw(config, rounds, found)


def _recompute(engine: Engine, ratio: float) -> None:
    engine.blender.config = dataclasses.replace(engine.blender.config, ratio=ratio)


def _quality(
    config: Config,
    engine: Engine,
    prompts: Sequence[Prompt],
    found: Mapping[float, Sequence[Quality]],
) -> Record:
    """Return the record of next tokens."""
    target, figures = config.targets, {}
    for ratio, each in found.items():
        for name in Quality._fields:
            mean = statistics.mean(getattr(quality, name) for quality in each)
            figures[f"{name}_at_{ratio}"] = round(float(mean), 4)
    agreement = figures[f"agreement_at_{target.ratio}"]
    count = len(prompts) * config.answer
    checks = [
        Check(
            f"next tokens agree at ratio {target.ratio}",
            agreement >= target.agreement,
            f"{agreement:.3f} of {count}, aim {target.agreement}",
        )
    ]
    if 1.0 in found:
        equal = figures["agreement_at_1.0"] == 1 and figures["kl_at_1.0"] == 0
        detail = f"divergence {figures['kl_at_1.0']} nats"
        checks.append(Check("ratio 1 is a full recompute", equal, detail))
    return Record(
        "quality",
        "correctness",
        "next tokens over blended pages are mostly those of a full recompute",
        "xla",
        checks=tuple(checks),
        measurements=figures,
        facts={
            "compared": f"{config.answer} tokens of {len(prompts)} prompts",
            "orders": [" ".join(prompt.order) for prompt in prompts],
            "prompt_tokens": [len(prompt.tokens) for prompt in prompts],
            "stale_selector": list(gate.stale_layers(engine.groups)),
        },
    )


def _times(
    config: Config, engine: Engine, prompt: Prompt
) -> tuple[Rounds, dict[float, tuple[int, int]]]:
    """Time every way to the first token in turns."""
    usual, reused = engine.scheduler.prefill_chunk, {}

    def prefilled(chunk: int) -> Timed:
        engine.scheduler.prefill_chunk = chunk
        seconds, output = blend_check.first_token(engine, prompt.tokens, reuse=False)
        assert output.reused_tokens + output.cached_tokens == 0
        return Timed(seconds)

    def blended(ratio: float) -> Timed:
        engine.scheduler.prefill_chunk = usual
        _recompute(engine, ratio)
        seconds, output = blend_check.first_token(engine, prompt.tokens, reuse=True)
        reused[ratio] = output.reused_tokens, output.recomputed_tokens
        return Timed(seconds)

    jobs = {_chunk(size): functools.partial(prefilled, size) for size in config.chunks}
    jobs |= {str(ratio): functools.partial(blended, ratio) for ratio in config.ratios}
    rounds = interleave(jobs, config.rounds)
    engine.scheduler.prefill_chunk = usual
    return rounds, reused


def _chunk(size: int) -> str:
    return f"chunk {size}"


def _best(config: Config, rounds: Rounds) -> str:
    return min(map(_chunk, config.chunks), key=rounds.median)


def _speed(
    config: Config, rounds: Rounds, reused: Mapping[float, tuple], length: int
) -> Record:
    """Return the record of times."""
    target, best = config.targets, _best(config, rounds)
    figures = {}
    for side in rounds.seconds:
        name = side.replace(" ", "_")
        figures[f"first_token_{name}_s"] = round(rounds.median(side), 4)
        figures[f"speedup_{name}"] = round(rounds.ratio(best, side), 3)
    ratio = rounds.ratio(best, str(target.ratio))
    check = Check(
        f"first token of {length} at ratio {target.ratio} against {best}",
        ratio >= target.speedup,
        f"{ratio:.2f} times sooner, aim {target.speedup}",
    )
    counts = {str(key): value for key, value in reused.items()}
    return Record(
        "first tokens",
        "measurement",
        "the first token over blended pages comes sooner than after a prefill",
        "xla",
        repetitions=config.rounds,
        checks=(check,),
        measurements=figures,
        facts={
            "best_prefill": best,
            "timed_tokens": length,
            "reused_and_recomputed": counts,
            "picture": config.picture,
        },
    )


def _draw(
    config: Config, rounds: Rounds, found: Mapping[float, Sequence[Quality]]
) -> None:
    best = _best(config, rounds)
    blend_picture.draw(
        pathlib.Path(config.picture),
        config.ratios,
        [rounds.median(str(ratio)) for ratio in config.ratios],
        rounds.median(best),
        [statistics.mean(q.agreement for q in found[ratio]) for ratio in config.ratios],
        [statistics.mean(q.kl for q in found[ratio]) for ratio in config.ratios],
    )
