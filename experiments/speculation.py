"""Drafts of every kind on one model: tokens a step, and tokens a second.

Four kinds of text are continued greedily: quotes and code that repeat themselves, a
chat, a summary, and questions of the kind that draft layers were trained on, about what
was held out. Each kind is continued without a draft, then with each one, in turns.
The law: the tokens are those without a draft (but where two of them are as likely), so
only the counts and the clock differ.

    python -m experiments run configs/speculation.toml
"""

import dataclasses
import functools
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence

from experiments import greedy, speculation_picture, tiny_decoder
from experiments.harness import Check, Record, Rounds, RunConfig, Timed, interleave
from kvmem import config as configs
from kvmem import errors
from kvmem.config import ModelConfig, PoolConfig
from kvmem.config.speculative import SpeculativeConfig
from kvmem.model.loaded import LoadedModel
from kvmem.serve import Engine, SamplingParams, ServeConfig

__all__ = ["Config", "Texts", "run"]

_PLAIN = "none"
_WITH_LAYERS = ("two_engine", "frozen_kv")  # of the target's first ones
_WEIGHTS = {"mtp": "weights", "dspark": "weights", "dflash": "block_weights"}


@dataclasses.dataclass(frozen=True)
class Texts:
    """Beginnings of each kind, as they stand or as a user's turn."""

    quotes: tuple[str, ...] = ()
    chat: tuple[str, ...] = ()
    summary: tuple[str, ...] = ()
    lessons: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """The whole truth of a run.

    Args:
        model: what is served.
        pool: its pages.
        serve: its batching.
        texts: that are continued.
        modes: who drafts, by the names of [speculative].
        draft_tokens: proposed for a sequence at most.
        layers: of the target's first ones, for drafts that are cut out of it.
        weights: trained draft layers of mtp and dspark; None: drawn from a seed.
        block_weights: of dflash.
        tokens: of each continuation.
        rounds: turns of the times.
        ngram_on_quotes, ngram_elsewhere: least tokens a second over those without a
            draft, each a check.
        trained: least tokens a step of mtp on lessons, if its layers are trained.
        picture: where the picture goes.
    """

    model: ModelConfig
    pool: PoolConfig
    serve: ServeConfig
    texts: Texts
    modes: tuple[str, ...] = ("ngram", "two_engine", "frozen_kv", "mtp", "dspark")
    draft_tokens: int = 3
    layers: int | None = None
    weights: str | None = None
    block_weights: str | None = None
    tokens: int = 64
    rounds: int = 3
    ngram_on_quotes: float = 1.3
    ngram_elsewhere: float = 0.95
    trained: float = 2.0
    picture: str = "runs/speculation/speculation.png"

    def __post_init__(self):
        lacking = [kind for kind, texts in vars(self.texts).items() if not texts]
        if lacking or not self.modes:
            raise errors.ConfigError(
                errors.say(
                    f"modes {self.modes} and no text of {', '.join(lacking) or 'any'}",
                    "every mode continues texts of every kind",
                    "Name modes, and give texts of each kind",
                )
            )


def run(config: Config) -> Iterator[Record]:
    """Yield what each draft gave on each kind of text."""
    model, loaded = tiny_decoder.load(config.model)
    config = dataclasses.replace(config, model=model)
    engines = {mode: _engine(config, loaded, mode) for mode in (_PLAIN, *config.modes)}
    steps, speeds, wrong = {}, {}, []
    for kind in vars(config.texts):
        print(f"{kind}: {len(engines)} engines, {config.rounds} rounds")
        prompts = _prompts(engines[_PLAIN], config, kind)
        known = _reference(engines[_PLAIN], prompts, config.tokens)
        rounds, tokens = _raced(engines, prompts, config, known)
        wrong += [f"{kind}, {words}" for words in tokens]
        speeds[kind] = {mode: rounds.ratio(_PLAIN, mode) for mode in config.modes}
        steps[kind] = {mode: _per_step(engines[mode]) for mode in config.modes}
        yield _seconds(config, kind, rounds, speeds[kind])
    yield _tokens(config, steps, wrong)
    yield _aims(config, steps, speeds)
    speculation_picture.draw(pathlib.Path(config.picture), steps, speeds)


def _engine(config: Config, loaded: LoadedModel, mode: str) -> Engine:
    """Return an engine that drafts in one mode, and keeps no prefixes."""
    asked = SpeculativeConfig()
    if mode != _PLAIN:
        asked = SpeculativeConfig(
            mode,
            draft_tokens=config.draft_tokens,
            layers=config.layers if mode in _WITH_LAYERS else None,
            weights=getattr(config, _WEIGHTS[mode]) if mode in _WEIGHTS else None,
        )
    whole = configs.Config(
        config.model,
        pool=config.pool,
        serve=dataclasses.replace(config.serve, prefix_cache=False),
        speculative=asked,
    )
    return whole.engine(loaded)


def _prompts(engine: Engine, config: Config, kind: str) -> list[list[int]]:
    """Return the token ids of a kind: all but quotes are a user's turn."""
    texts, tokenizer = getattr(config.texts, kind), engine.tokenizer
    if kind == "quotes":
        return [tokenizer.encode(text) for text in texts]
    turns = ([{"role": "user", "content": text}] for text in texts)
    return [tokenizer.apply_chat(turn) for turn in turns]


def _sampling(tokens: int, logprobs: int | None = None) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=logprobs)


def _reference(
    engine: Engine, prompts: Sequence[Sequence[int]], tokens: int
) -> list[greedy.Continuation]:
    """Return what follows each prompt without a draft, and by what margin."""
    outputs = engine.generate(prompts, _sampling(tokens, logprobs=2))
    return [
        greedy.Continuation(
            output.output_ids,
            [
                probs.top[0][1] - probs.top[1][1]
                for probs in output.completions[0].logprobs
            ],
        )
        for output in outputs
    ]


def _raced(
    engines: Mapping[str, Engine],
    prompts: Sequence[Sequence[int]],
    config: Config,
    known: Sequence[greedy.Continuation],
) -> tuple[Rounds, list[str]]:
    """Continue the prompts with each engine in turns; return times, and what differs.

    Counts of drafting are those of each engine's last turn.
    """
    wrong: list[str] = []

    def job(mode: str) -> Timed:
        engine, start = engines[mode], time.perf_counter()
        if engine.verifier is not None:
            engine.verifier.counts = type(engine.verifier.counts)()
        outputs = engine.generate(prompts, _sampling(config.tokens))
        took = time.perf_counter() - start
        verdict = greedy.judge([output.output_ids for output in outputs], known)
        wrong.extend(f"{mode}: {words}" for words in verdict.differences)
        return Timed(took)

    jobs = {mode: functools.partial(job, mode) for mode in engines}
    return interleave(jobs, config.rounds), wrong


def _per_step(engine: Engine) -> float:
    return engine.stats().drafting.tokens_per_step


def _seconds(
    config: Config, kind: str, rounds: Rounds, speeds: Mapping[str, float]
) -> Record:
    """Return the record of one kind's times."""
    count = len(getattr(config.texts, kind)) * config.tokens
    figures = {
        f"{kind}_{mode}_tokens_per_s": round(count / rounds.median(mode), 2)
        for mode in (_PLAIN, *config.modes)
    }
    figures |= {f"{kind}_{mode}_speedup": round(x, 3) for mode, x in speeds.items()}
    return Record(
        f"drafts_on_{kind}",
        "measurement",
        f"tokens a second of {kind} continued together, prompts computed too",
        "xla",
        repetitions=config.rounds,
        measurements=figures,
    )


def _tokens(
    config: Config, steps: Mapping[str, Mapping[str, float]], wrong: Sequence[str]
) -> Record:
    """Return the record of tokens a step, and of tokens that differ."""
    return Record(
        "tokens_a_step",
        "correctness",
        "drafts change how many tokens a step gives, and no token",
        "xla",
        checks=(
            Check(
                "every continuation is that without a draft",
                not wrong,
                "; ".join(wrong[:4]) or f"{config.rounds + 1} turns of each",
            ),
        ),
        measurements={
            f"{kind}_{mode}_tokens_per_step": round(each, 3)
            for kind, row in steps.items()
            for mode, each in row.items()
        },
        facts={
            "draft_tokens": config.draft_tokens,
            "layers": config.layers,
            "trained": config.weights is not None,
            "trained_block": config.block_weights is not None,
            "picture": config.picture,
        },
    )


def _aims(
    config: Config,
    steps: Mapping[str, Mapping[str, float]],
    speeds: Mapping[str, Mapping[str, float]],
) -> Record:
    """Return the record of what was to be reached."""
    checks = []
    if "ngram" in config.modes:
        for kind, row in speeds.items():
            is_repeating = kind == "quotes"
            aim = config.ngram_on_quotes if is_repeating else config.ngram_elsewhere
            detail = f"{row['ngram']:.2f} times, aim {aim}"
            checks.append(Check(f"ngram on {kind}", row["ngram"] >= aim, detail))
    if config.weights is not None and "mtp" in config.modes:
        found = steps["lessons"]["mtp"]
        detail = f"{found:.2f} tokens a step, aim {config.trained}"
        what = "trained layers on what they were trained for"
        checks.append(Check(what, found >= config.trained, detail))
    return Record(
        "aims",
        "measurement",
        "drafts against none, by the aims of the config",
        "xla",
        repetitions=config.rounds,
        checks=tuple(checks),
    )
