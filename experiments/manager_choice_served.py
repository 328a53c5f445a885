"""Two managers under a model that runs: how many sequences one pool serves at once.

The same requests are served twice, by engines that differ in one thing: whether every
group may have every page, or each has its fixed half. A prompt ends a little before the
page that its answer ends in, so a running sequence holds the same pages from its first
token to its last, and how many run at once is a matter of memory alone.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from kvmem import config as configs
from kvmem import manage
from kvmem.config import ModelConfig, PoolConfig, ServeConfig
from kvmem.serve import SamplingParams
from kvmem.serve.engine import Engine

__all__ = ["Run", "Served", "members_of", "serve"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """What is served.

    Args:
        model: full attention and windows, with weights drawn from a seed.
        page_size: tokens of a page.
        pages: of the pool.
        requests: all asked for at once; more than any manager fits.
        prompt_tokens: of each request, no two alike.
        new_tokens: of each answer.
        prefill_chunk: tokens of a prompt computed in one step.
        seed: of the prompts.
    """

    model: ModelConfig
    page_size: int = 32
    pages: int = 260
    requests: int = 16
    prompt_tokens: int = 481
    new_tokens: int = 31
    prefill_chunk: int = 256
    seed: int = 0

    @property
    def length(self) -> int:
        """Tokens that a sequence has in the cache at its end."""
        return self.prompt_tokens + self.new_tokens - 1

    def config(self, manager: str | None = None) -> configs.Config:
        """Return the config of an engine: one pool, no sharing between requests."""
        longest = self.prompt_tokens + self.new_tokens
        return configs.Config(
            model=self.model,
            pool=PoolConfig(
                page_size=self.page_size,
                pages=self.pages,
                manager=manager,
                checked=True,
            ),
            serve=ServeConfig(
                max_batch=self.requests,
                max_length=longest,
                prefill_chunk=self.prefill_chunk,
                batches=(self.requests,),
                chunks=(self.prefill_chunk,),
                widths=(longest,),
                prefix_cache=False,
            ),
        )


@dataclasses.dataclass(frozen=True)
class Run:
    """What one manager did: most sequences at once, answers, pages free at the end."""

    most_running: int
    preempted: int
    answers: tuple[tuple[int, ...], ...]
    free_pages: int


def members_of(served: Served) -> tuple[manage.Member, ...]:
    """Return the model's groups in the pool that they share."""
    config = served.config()
    return manage.members_of(
        config.groups(), config.topology, config.pool.order, config.pool.kind
    )


def serve(served: Served) -> Mapping[str, Run]:
    """Serve the requests under each manager."""
    model = served.model.load()
    return {
        name: _drain(served.config(name).engine(model), served)
        for name in manage.MANAGERS
    }


def _drain(engine: Engine, served: Served) -> Run:
    """Ask for everything, and count what runs until nothing does."""
    dice = np.random.default_rng(served.seed)
    size = (served.requests, served.prompt_tokens)
    prompts = dice.integers(0, engine.model.spec.vocab - 1, size).tolist()
    sampling = SamplingParams(max_tokens=served.new_tokens, ignore_eos=True)
    ids = [engine.add(prompt, sampling) for prompt in prompts]
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, len(engine.scheduler.running))
    answers = [engine.take_output(i).completions[0].output_ids for i in ids]
    preempted = engine.scheduler.num_preempted
    return Run(most, preempted, tuple(map(tuple, answers)), engine.accounts.free)
