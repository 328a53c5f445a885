"""How fast kvmem serves: against transformers, and against its own prefill.

Decode and prefill run in turns with Hugging Face transformers on torch, the same file
in float32, the same tokens, both warm, each in a process that stands still while the
other works. The law: kvmem is timed through `Engine.step`, nothing stripped, the
peer as its library comes; and every target is a check with the ratio that was measured.

    python -m experiments run configs/bench_serve.toml
"""

import dataclasses
import json
import pathlib
import shutil
import uuid
from collections.abc import Iterator, Sequence

import numpy as np

from experiments import (
    compiled_step,
    greedy,
    peer_race,
    resume_race,
    step_parts,
    tiny_decoder,
)
from experiments.engine_clock import EngineClock
from experiments.harness import Check, Record, Rounds, RunConfig
from experiments.peer import Peer, PeerConfig
from experiments.peer_race import OURS, PEER
from kvmem import config as configs
from kvmem.config import ModelConfig, PoolConfig, StoreConfig
from kvmem.model import presets
from kvmem.model.loaded import LoadedModel
from kvmem.serve import Engine, SamplingParams, ServeConfig

__all__ = ["Config", "Targets", "run"]


@dataclasses.dataclass(frozen=True)
class Targets:
    """What the ratios must reach, each a check.

    Args:
        decode: tokens a second over the peer's, every batch.
        prefill: tokens a second over the peer's, every length.
        resume: seconds of the best prefill over those of a resumed first token.
    """

    decode: float = 1.2
    prefill: float = 0.95
    resume: float = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """The whole truth of a run.

    Args:
        prompts: texts that both sides continue greedily.
        model: the file that both sides load; "tiny" writes a checkpoint of its own.
        pool: kvmem's pages.
        serve: kvmem's batching.
        resume_serve: batching of the engine that resumes.
        peer: who is compared with.
        targets: what the ratios must reach.
        rounds: turns of every comparison.
        batches: sequences of a decode step.
        context: tokens before the first timed decode step.
        steps: timed decode steps of a turn; the turn's figure is their median.
        warm_up_steps: decode steps before them.
        prefill_tokens: lengths of prompts.
        prefill_calls: prompts of a turn; the turn's figure is their median.
        resume_tokens: length of the stored text.
        resume_chunks: sizes offered to the prefill that is to be beaten.
        greedy_tokens: length of a continuation.
        profile_rounds: turns of the parts of a step.
        reference: write the peer's continuations to this file.
        seed: of random tokens.
    """

    prompts: tuple[str, ...]
    model: ModelConfig
    pool: PoolConfig
    serve: ServeConfig
    resume_serve: ServeConfig
    peer: PeerConfig = PeerConfig()
    targets: Targets = Targets()
    rounds: int = 9
    batches: tuple[int, ...] = (1, 8)
    context: int = 128
    steps: int = 8
    warm_up_steps: int = 2
    prefill_tokens: tuple[int, ...] = (128, 512)
    prefill_calls: int = 2
    resume_tokens: int = 700
    resume_chunks: tuple[int, ...] = (128, 176, 256, 352, 704)
    greedy_tokens: int = 32
    profile_rounds: int = 5
    reference: str | None = None
    seed: int = 0


def run(config: Config) -> Iterator[Record]:
    """Yield what the compiled step, the peer, the store and the parts show."""
    chosen, model = tiny_decoder.load(config.model)
    config = dataclasses.replace(config, model=chosen)
    engine = _engine(config, model, config.serve)
    print("compiling the decode steps, reading the programs")
    yield _in_place(config, engine)
    if config.peer.run:
        with Peer(config.peer, presets.resolve(chosen.source)) as peer:
            print(f"greedy tokens of {len(config.prompts)} prompts, on both sides")
            yield _same_tokens(config, engine, peer)
            print(f"decode and prefill in turns with the peer, {config.rounds} each")
            yield _against_peer(config, engine, peer)
    print("a decode step by parts")
    yield _profile(config, engine)
    del engine  # its weights and pages, before another engine brings its own
    print(f"first token of {config.resume_tokens}, resumed and prefilled in turns")
    yield from _resumed(config, model)


def _engine(
    config: Config, model: LoadedModel, serve: ServeConfig, root: str | None = None
) -> Engine:
    made = configs.Config(
        model=config.model, pool=config.pool, serve=serve, store=StoreConfig(root)
    )
    return made.engine(model)


def _in_place(config: Config, engine: Engine) -> Record:
    """Read the compiled decode steps."""
    length = config.context + config.steps
    return Record(
        "decode_in_place",
        "correctness",
        "a decode step in steady state copies no pool",
        "xla",
        checks=tuple(
            compiled_step.check(engine, batch, length) for batch in config.batches
        ),
    )


def _same_tokens(config: Config, engine: Engine, peer: Peer) -> Record:
    """Compare greedy continuations of the config's prompts, ids for ids."""
    tokens = config.greedy_tokens
    prompts = [engine.tokenizer.encode(text) for text in config.prompts]
    reference = [
        greedy.Continuation(**peer.ask("greedy", prompt=prompt, tokens=tokens))
        for prompt in prompts
    ]
    if config.reference is not None:
        _write_reference(config, peer, prompts, reference)
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    outputs = engine.generate(prompts, sampling)
    verdict = greedy.judge([output.output_ids for output in outputs], reference)
    name = f"greedy tokens of {len(prompts)} prompts equal the peer's"
    return Record(
        "greedy_tokens",
        "correctness",
        "greedy continuations equal those of transformers in float32",
        "xla",
        checks=(Check(name, verdict.ok, str(verdict)),),
        facts={"peer": peer.about},
    )


def _write_reference(
    config: Config,
    peer: Peer,
    prompts: Sequence[Sequence[int]],
    reference: Sequence[greedy.Continuation],
) -> None:
    """Keep the peer's continuations, so that they can be compared without it."""
    rows = zip(config.prompts, prompts, reference, strict=True)
    data = {
        "source": peer.about | {"model": presets.resolve(config.model.source).name},
        "sequences": [
            {
                "text": text,
                "prompt_ids": list(prompt),
                "output_ids": known.ids,
                "margins": [round(margin, 6) for margin in known.margins],
            }
            for text, prompt, known in rows
        ],
    }
    lines = [f'"source": {json.dumps(data["source"])}', '"sequences": [']
    lines[-1] += ",\n".join(json.dumps(row) for row in data["sequences"]) + "]"
    pathlib.Path(config.reference).write_text("{" + ",\n".join(lines) + "}\n")


def _against_peer(config: Config, engine: Engine, peer: Peer) -> Record:
    """Time decode and prefill in turns with the peer."""
    clock = EngineClock(engine)
    checks, figures, turns = [], {}, {}
    for batch in config.batches:
        timed = peer_race.decode(
            clock,
            peer,
            batch=batch,
            context=config.context,
            steps=config.steps,
            warm_up=config.warm_up_steps,
            rounds=config.rounds,
            seed=config.seed,
        )
        name, least = f"decode_batch_{batch}", config.targets.decode
        checks.append(_reach(name, timed, least))
        figures |= _rates(name, timed, batch)
        turns[name] = timed.seconds
    for length in config.prefill_tokens:
        timed = peer_race.prefill(
            clock,
            peer,
            tokens=length,
            calls=config.prefill_calls,
            rounds=config.rounds,
            seed=config.seed,
        )
        name, least = f"prefill_{length}_tokens", config.targets.prefill
        checks.append(_reach(name, timed, least))
        figures |= _rates(name, timed, length)
        turns[name] = timed.seconds
    return Record(
        "against_transformers",
        "measurement",
        "kvmem's tokens a second over those of transformers, medians of turns",
        "xla",
        repetitions=config.rounds,
        checks=tuple(checks),
        measurements=figures,
        facts={"turns_s": turns},
    )


def _reach(name: str, timed: Rounds, least: float) -> Check:
    """Hold kvmem's rate over the peer's to a target."""
    ratio = timed.ratio(PEER, OURS)
    low, high = _spread(timed)
    detail = f"{ratio:.2f} x (turns from {low:.2f} to {high:.2f}), at least {least}"
    return Check(f"{name} against transformers", ratio >= least, detail)


def _rates(name: str, timed: Rounds, tokens: int) -> dict[str, float]:
    """Return tokens a second of both sides, median and best, and the ratio."""
    figures = {f"{name}_ratio": round(timed.ratio(PEER, OURS), 3)}
    for side in (OURS, PEER):
        figures[f"{name}_{side}_tokens_per_s"] = round(tokens / timed.median(side), 1)
        figures[f"{name}_{side}_best_tokens_per_s"] = round(
            tokens / timed.best(side), 1
        )
    return figures


def _spread(timed: Rounds) -> tuple[float, float]:
    """Return the least and the greatest ratio of a turn."""
    pairs = zip(timed.seconds[PEER], timed.seconds[OURS], strict=True)
    ratios = [peer / ours for peer, ours in pairs]
    return min(ratios), max(ratios)


def _profile(config: Config, engine: Engine) -> Record:
    """Say where the time of a decode step goes, and what a mesh of one costs."""
    clock, rng = EngineClock(engine), np.random.default_rng([config.seed, 1])
    figures, facts = {}, {}
    for batch in config.batches:
        shape = (batch, config.context)
        prompts = rng.integers(0, engine.model.spec.vocab, shape).tolist()
        parts = step_parts.parts_ms(clock, prompts, config.profile_rounds)
        facts[f"decode_batch_{batch}"] = {k: round(v, 2) for k, v in parts.items()}
        timed = step_parts.mesh_of_one(engine, batch, config.context, config.rounds)
        ratio = timed.ratio("plain", "mesh of one")
        figures[f"mesh_of_one_batch_{batch}_ratio"] = round(ratio, 3)
    return Record(
        "where_the_time_goes",
        "measurement",
        "milliseconds of a decode step by part; a mesh of one device over plain",
        "xla",
        repetitions=config.profile_rounds,
        measurements=figures,
        facts={"step_parts_ms": facts},
    )


def _resumed(config: Config, model: LoadedModel) -> Iterator[Record]:
    """Race a stored text against its own prefill."""
    root = pathlib.Path("runs") / "bench_serve" / f"store-{uuid.uuid4().hex[:8]}"
    engine = _engine(config, model, config.resume_serve, str(root))
    try:
        race = resume_race.run(
            engine,
            config.resume_tokens,
            config.resume_chunks,
            config.rounds,
            config.seed,
        )
    finally:
        shutil.rmtree(root, ignore_errors=True)
    whole = race.stored_tokens == race.known_tokens
    yield Record(
        "resumed_text",
        "correctness",
        "a text resumed from the store, checksums verified, continues as it did",
        "xla, host",
        checks=(
            Check(
                "every whole chunk came from the store",
                whole,
                f"{race.stored_tokens} of {race.known_tokens} tokens, at every turn",
            ),
            Check("the next token is that of the writer", race.same_token, "each turn"),
        ),
    )
    ratio, least = race.ratio, config.targets.resume
    yield Record(
        "resumed_first_token",
        "measurement",
        f"seconds to the first token of {config.resume_tokens}: the best prefill over "
        "a resume, in turns, both warm",
        "xla, host",
        repetitions=config.rounds,
        checks=(
            Check(
                "first token resumed against the best prefill",
                ratio >= least,
                f"{ratio:.1f} x against {race.best}, at least {least:g}",
            ),
        ),
        measurements={
            "resume_ratio": round(ratio, 2),
            "resume_fetch_ms": round(race.fetch_s * 1e3, 2),
        }
        | {
            f"first_token_{side.replace(' ', '_')}_ms": round(
                race.rounds.median(side) * 1e3, 1
            )
            for side in race.rounds.seconds
        },
    )
