"""Training of draft layers, by distillation on text that the model itself generated.

The model continues prompts with samples of its own; draft layers learn to say what it
says there. Texts and state are kept on disk, so a run that was stopped goes on where it
was. The law: what is measured are texts that were not trained on.

    python -m experiments run configs/train_draft.toml
    python -m experiments run configs/speculation.toml --set weights=...
"""

import dataclasses
import pathlib
from collections.abc import Iterator

import numpy as np
import orbax.checkpoint as ocp

from experiments import tiny_decoder
from experiments.draft_training import State, Trainer
from experiments.harness import Check, Record, RunConfig
from kvmem import config as configs
from kvmem import errors
from kvmem.config import ModelConfig, PoolConfig
from kvmem.model import draft_layers, mtp
from kvmem.model.loaded import LoadedModel
from kvmem.serve import SamplingParams, ServeConfig

__all__ = ["Config", "run"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """The whole truth of a run.

    Args:
        model: what drafts are trained for.
        pool: its pages, while it generates.
        serve: its batching, while it generates.
        prompts: that it continues; those that are not trained on come last.
        samples: continuations of each prompt.
        held_out: prompts that are measured and not trained on.
        length: tokens of a text, prompt and continuation.
        temperature: of the samples.
        layers: of the draft.
        depth: passes behind each other; see `draft_training.Trainer`.
        steps: of training, in all runs of this folder together.
        batch: texts of a step.
        learning_rate: of Adam.
        every: steps between two checkpoints.
        seed: of first weights, samples and batches.
        folder: where texts, checkpoints and layers go.
    """

    model: ModelConfig
    pool: PoolConfig
    serve: ServeConfig
    prompts: tuple[str, ...]
    samples: int = 4
    held_out: int = 1
    length: int = 128
    temperature: float = 0.7
    layers: int = 1
    depth: int = 2
    steps: int = 200
    batch: int = 4
    learning_rate: float = 1e-3
    every: int = 50
    seed: int = 0
    folder: str = "runs/train_draft"

    def __post_init__(self):
        if not 0 < self.held_out < len(self.prompts):
            raise errors.ConfigError(
                errors.say(
                    f"held_out = {self.held_out} of {len(self.prompts)} prompts",
                    "some are trained on, and some are measured alone",
                    "Give more prompts, or hold fewer out",
                )
            )


def run(config: Config) -> Iterator[Record]:
    """Yield what the layers say of texts that they were not trained on."""
    model, loaded = tiny_decoder.load(config.model)
    config = dataclasses.replace(config, model=model)
    folder = pathlib.Path(config.folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    texts = _texts(config, loaded, folder / "texts.npy")
    kept = config.held_out * config.samples
    trained_on, others = texts[:-kept], texts[-kept:]
    draft = mtp.draw(loaded, config.layers, config.seed)
    trainer = Trainer(loaded, draft, config.learning_rate, config.depth)
    before, _ = trainer.held_out(trainer.start(), others)
    first, state = _trained(config, trainer, trained_on, folder / "state")
    after, agreement = trainer.held_out(state, others)
    path = folder / "layers.safetensors"
    layers = trainer.layers(state)
    own = layers.spec.own_parameters()
    half = {name: layers.params[name].astype(np.float16) for name in own}
    draft_layers.save(path, dataclasses.replace(layers, params=half), loaded)
    falls = f"{before:.3f} nats before, {after:.3f} after {config.steps} steps"
    yield Record(
        "layers",
        "correctness",
        "draft layers say more of what the model says, on texts it was not shown",
        "xla",
        checks=(Check("the divergence falls", after < before, falls),),
        measurements={
            "divergence_before": round(before, 4),
            "divergence_after": round(after, 4),
        }
        | {f"agreement_{at + 1}": round(x, 4) for at, x in enumerate(agreement)},
        facts={
            "layers": str(path),
            "layers_nbytes": path.stat().st_size,
            "texts": len(texts),
            "resumed_at": first,
        },
    )


def _texts(config: Config, loaded: LoadedModel, path: pathlib.Path) -> np.ndarray:
    """Return texts i32[N, L] that the model wrote, those of a prompt together."""
    if path.exists():
        return np.load(path)
    engine = configs.Config(config.model, pool=config.pool, serve=config.serve).engine(
        loaded
    )
    found = []
    for at, prompt in enumerate(config.prompts):
        tokens = engine.tokenizer.apply_chat([{"role": "user", "content": prompt}])
        sampling = SamplingParams(
            max_tokens=config.length - len(tokens),
            temperature=config.temperature,
            n=config.samples,
            seed=config.seed + at,
            ignore_eos=True,
        )
        (output,) = engine.generate([tokens], sampling)
        found += [[*tokens, *each.output_ids] for each in output.completions]
    texts = np.asarray(found, np.int32)
    scratch = path.with_suffix(".tmp.npy")
    np.save(scratch, texts)
    scratch.replace(path)
    return texts


def _trained(
    config: Config, trainer: Trainer, texts: np.ndarray, folder: pathlib.Path
) -> tuple[int, State]:
    """Train up to the config's steps, from the last checkpoint on if there is one.

    Returns:
        The steps that were found done, and the state after the last.
    """
    state = trainer.start()
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(folder, options=options) as kept:
        done = first = kept.latest_step() or 0
        if done:
            like = ocp.args.StandardRestore(state)
            state = kept.restore(done, args=like)
        while done < config.steps:
            rng = np.random.default_rng((config.seed, done))
            rows = rng.integers(0, len(texts), config.batch)
            state, loss = trainer.step(state, texts[rows])
            done += 1
            if done % config.every == 0 or done == config.steps:
                print(f"step {done}: {loss:.3f} nats")
                kept.save(done, args=ocp.args.StandardSave(state))
                kept.wait_until_finished()
    return first, state
