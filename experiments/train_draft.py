"""Training of draft layers, by distillation on text that the model itself wrote.

The model answers questions; draft layers learn to say what it says there. Texts, what
the model thought of them and the state of training are kept on disk, so a run that was
stopped goes on where it was. The law: what is measured are texts about topics that were
not trained on, with the layers as they are stored.

    python -m experiments run configs/train_draft.toml
    python -m experiments run configs/speculation.toml --set weights=...
"""

import dataclasses
import pathlib
import time
from collections.abc import Iterator
from typing import Literal

import numpy as np
import orbax.checkpoint as ocp

from experiments import dflash_training, draft_begin, draft_texts, tiny_decoder
from experiments.draft_texts import Lessons, Writing
from experiments.draft_training import Learning, State, Trainer
from experiments.harness import Check, Record, RunConfig
from kvmem import config as configs
from kvmem import errors
from kvmem.config import ModelConfig, PoolConfig
from kvmem.config.speculative import SpeculativeConfig
from kvmem.model import draft_layers
from kvmem.model.loaded import LoadedModel
from kvmem.serve import SamplingParams, ServeConfig

__all__ = ["Config", "run"]

_Prompts = list[list[int]]
_MOST_LOST = 0.02  # of agreement, by storing a byte an element


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """The whole truth of a run.

    Args:
        model: what drafts are trained for.
        pool, serve: of the engine that drafts with them in the end.
        draft: whose layers, by the names of [speculative].
        prompts: questions, with {} for a topic.
        topics: that they are asked about; those that are held out come last.
        held_out: topics that are measured and not trained on.
        length: tokens of a text, question and answer.
        temperature, kept, dtype: of the writing; see `draft_texts.Writing`.
        layers: of the draft.
        depth: passes behind each other, or masks of a block; see `Trainer`.
        steps: of training, over which its rate falls to nothing.
        until: stop after so many steps of them, to go on later; None: after all.
        batch: texts of a step.
        learning_rate: of Adam, at its highest.
        every: steps between two checkpoints.
        words, others, alone: see `draft_training.Learning`.
        draft_tokens: proposed at most, where the layers draft in the end.
        answered: of the questions held out, how many are answered so.
        least: tokens a step that are wanted there.
        seed: of texts, of batches, and of the first weights of a block draft.
        folder: where checkpoints and layers go.
        texts: where texts are kept, for drafts of every kind; None: in `folder`.
    """

    model: ModelConfig
    pool: PoolConfig
    serve: ServeConfig
    draft: Literal["mtp", "dflash"] = "mtp"
    prompts: tuple[str, ...]
    topics: tuple[str, ...]
    held_out: int = 1
    length: int = 128
    temperature: float = 0.4
    kept: int = 16
    dtype: str = "float32"
    layers: int = 1
    depth: int = 3
    steps: int = 200
    until: int | None = None
    batch: int = 4
    learning_rate: float = 1e-3
    every: int = 50
    words: int = 4096
    others: int = 512
    alone: float = 0.4
    draft_tokens: int = 3
    answered: int = 16
    least: float = 1.0
    seed: int = 0
    folder: str = "runs/train_draft"
    texts: str | None = None

    def __post_init__(self):
        faults = [
            f"{prompt!r} has no {{}}" for prompt in self.prompts if "{}" not in prompt
        ]
        if not 0 < self.held_out < len(self.topics):
            faults.append(f"held_out = {self.held_out} of {len(self.topics)} topics")
        if self.until is not None and not 0 < self.until <= self.steps:
            faults.append(f"until = {self.until} of {self.steps} steps")
        if faults:
            raise errors.ConfigError(
                errors.say(
                    "; ".join(faults),
                    "every prompt asks about each topic; some are trained on, the last "
                    "are measured alone, and training may stop early, never late",
                    "Mend the values named",
                )
            )

    @property
    def questions(self) -> list[str]:
        """Every prompt about the first topic, then about the next."""
        return [
            prompt.replace("{}", topic)
            for topic in self.topics
            for prompt in self.prompts
        ]


def questions_of(config: Config, loaded: LoadedModel) -> _Prompts:
    """Return each question as the tokens of a user's turn."""
    turns = ([{"role": "user", "content": text}] for text in config.questions)
    return [loaded.tokenizer.apply_chat(turn) for turn in turns]


def lessons_of(config: Config, loaded: LoadedModel, prompts: _Prompts) -> Lessons:
    """Return what the model writes behind each question, from the folder if it did."""
    writing = Writing(
        config.length,
        config.temperature,
        config.kept,
        seed=config.seed,
        dtype=config.dtype,
    )
    kept = config.texts or pathlib.Path(config.folder) / "texts"
    return draft_texts.read(loaded, prompts, writing, pathlib.Path(kept))


def run(config: Config) -> Iterator[Record]:
    """Yield what the layers say of texts that they were not trained on."""
    model, loaded = tiny_decoder.load(config.model)
    config = dataclasses.replace(config, model=model)
    prompts = questions_of(config, loaded)
    lessons = lessons_of(config, loaded, prompts)
    held_out = config.held_out * len(config.prompts)
    trained_on, others = (
        lessons.of(slice(-held_out)),
        lessons.of(slice(-held_out, None)),
    )
    trainer = _trainer(config, loaded, trained_on, prompts)
    before, _ = trainer.held_out(trainer.start(), others)
    first, state, seconds = _trained(config, trainer, trained_on)
    after, agreement = trainer.held_out(state, others)
    path = pathlib.Path(config.folder).absolute() / "layers.safetensors"
    draft_layers.save(path, trainer.layers(state), loaded, int8=True)
    stored = draft_layers.load(path, loaded, config.layers, trainer.complete)
    _, of_stored = trainer.held_out(trainer.start(stored), others)
    yield _learned(before, after, agreement, of_stored, path, first, len(prompts))
    yield drafted(config, loaded, prompts[-held_out:][: config.answered], path)
    yield _clock(config, seconds)


def _trainer(
    config: Config, loaded: LoadedModel, lessons: Lessons, prompts: _Prompts
) -> Trainer:
    """Return what trains the draft of a config, from its first weights."""
    learning = Learning(
        draft_texts.room(prompts, config.length),
        config.depth,
        config.learning_rate,
        config.steps,
        config.words,
        config.others,
        config.alone,
    )
    if config.draft == "dflash":
        begun = dflash_training.begun(loaded, config.layers)
        return dflash_training.BlockTrainer(loaded, begun, lessons, learning)
    begun = draft_begin.begun(loaded, lessons, learning.taught, config.layers)
    return Trainer(loaded, begun, lessons, learning)


def _trained(
    config: Config, trainer: Trainer, lessons: Lessons
) -> tuple[int, State, list[float]]:
    """Train as the config says, from the last checkpoint on if there is one.

    Returns:
        The steps that were found done, the state after the last, and the seconds of
        each step that was done now.
    """
    state, seconds = trainer.start(), []
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    folder = pathlib.Path(config.folder).absolute() / "state"
    with ocp.CheckpointManager(folder, options=options) as kept:
        done = first = kept.latest_step() or 0
        if done:
            like = ocp.args.StandardRestore(state)
            state = kept.restore(done, args=like)
        last = config.steps if config.until is None else config.until
        while done < last:
            start = time.perf_counter()
            texts = texts_of(done, len(lessons.tokens), config)
            state, loss = trainer.step(state, lessons.of(texts), done)
            seconds.append(time.perf_counter() - start)
            done += 1
            if done % config.every == 0 or done == last:
                print(f"step {done}: {loss:.3f} nats")
                kept.save(done, args=ocp.args.StandardSave(state))
                kept.wait_until_finished()
    return first, state, seconds


def texts_of(step: int, count: int, config: Config) -> np.ndarray:
    """Return which texts a step reads: all of them in turn, each time reshuffled."""
    places = step * config.batch + np.arange(config.batch)
    turns = {turn: _shuffled(count, config.seed, turn) for turn in {*places // count}}
    return np.asarray([turns[place // count][place % count] for place in places])


def _shuffled(count: int, *seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(count)


def _learned(
    before: float,
    after: float,
    agreement: list[float],
    stored: list[float],
    path: pathlib.Path,
    first: int,
    texts: int,
) -> Record:
    """Return the record of what the layers say, and of what int8 took from it."""
    size, lost = path.stat().st_size, max(np.subtract(agreement, stored))
    return Record(
        "layers",
        "correctness",
        "draft layers say more of what the model says, about what they were not shown",
        "xla",
        checks=(
            Check(
                "the divergence falls",
                after < before,
                f"{before:.3f} nats before, {after:.3f} after",
            ),
            Check(
                "a byte an element says the same",
                lost < _MOST_LOST,
                f"{lost:+.4f} of agreement lost at most, less than {_MOST_LOST}",
            ),
        ),
        measurements={
            "divergence_before": round(before, 4),
            "divergence_after": round(after, 4),
        }
        | {f"agreement_{at + 1}": round(x, 4) for at, x in enumerate(agreement)}
        | {f"agreement_{at + 1}_stored": round(x, 4) for at, x in enumerate(stored)},
        facts={
            "layers": str(path),
            "layers_nbytes": size,
            "texts": texts,
            "resumed_at": first,
        },
    )


def drafted(
    config: Config, loaded: LoadedModel, prompts: _Prompts, path: pathlib.Path
) -> Record:
    """Return the record of tokens a step, where an engine drafts with the layers."""
    asked = SpeculativeConfig(
        config.draft,
        draft_tokens=config.draft_tokens,
        layers=config.layers,
        weights=str(path),
    )
    engine = configs.Config(
        config.model, pool=config.pool, serve=config.serve, speculative=asked
    ).engine(loaded)
    count = draft_texts.room(prompts, config.length)
    engine.generate(prompts, SamplingParams(max_tokens=count, ignore_eos=True))
    found = engine.stats().drafting
    return Record(
        "drafting",
        "correctness",
        "tokens for each step of the target, answering what was held out",
        "xla",
        checks=(
            Check(
                "layers draft what the model says",
                found.tokens_per_step >= config.least,
                f"{found.tokens_per_step:.3f} tokens a step, aim {config.least}",
            ),
        ),
        measurements={
            "tokens_per_step": round(found.tokens_per_step, 3),
            "accept_rate": round(found.accept_rate, 4),
        },
        facts={"questions": len(prompts), "draft_tokens": config.draft_tokens},
    )


def _clock(config: Config, seconds: list[float]) -> Record:
    """Return the record of what a step of training took."""
    figures = {}
    if seconds:
        figures = {"step_ms": round(1e3 * float(np.median(seconds)), 2)}
    return Record(
        "training",
        "measurement",
        f"time of a step of {config.batch} texts, the model not being asked",
        "xla",
        repetitions=len(seconds),
        measurements=figures,
    )
