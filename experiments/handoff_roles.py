"""The processes of the handoff: one that writes, those that read, one that knows.

Each role runs in a process of its own, on as many forced host devices as it has ranks,
and shares nothing with the others but the store's folder. A job comes in on standard
input, lines of JSON go out: progress, then the result, or the error in its own words.

    result = run_role(Job(role="write", ...), on_progress=print)
"""

import dataclasses
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from kvmem import errors
from kvmem.config import Config, ModelConfig, PoolConfig, StoreConfig
from kvmem.geometry import Topology
from kvmem.serve import SamplingParams, ServeConfig
from kvmem.serve.engine import Engine
from kvmem.serve.group_recall import GroupRecall

__all__ = ["Job", "Side", "run_role"]

_XLA_FLAGS = "--xla_force_host_platform_device_count={}"
_PATIENT = "--xla_cpu_collective_call_terminate_timeout_seconds=600"


@dataclasses.dataclass(frozen=True)
class Side:
    """One engine's share of the facts.

    Args:
        tp: ranks that share the heads.
        page_size: slots of a page; its tokens, where dcp is 1.
        pages: pages of the pool.
        dcp: ranks that share the tokens, for each of tp.
    """

    tp: int
    page_size: int
    pages: int
    dcp: int = 1

    @property
    def topology(self) -> Topology:
        """The ranks."""
        return Topology(self.tp, self.dcp)

    def __str__(self) -> str:
        """Name the side as tables do."""
        return f"TP={self.tp}" + f" DCP={self.dcp}" * (self.dcp > 1)


@dataclasses.dataclass(frozen=True)
class Job:
    """What one process does: continue `prompt_ids` by `tokens` greedy tokens.

    "know" keeps no store, "write" keeps its records, "read" resumes from them and then
    times the first token, resumed and prefilled again in turns.
    """

    role: Literal["know", "write", "read"]
    side: Side
    model: ModelConfig
    serve: ServeConfig
    prompt_ids: tuple[int, ...]
    tokens: int
    store_root: str
    chunk_tokens: int
    repetitions: int


def run_role(job: Job, on_progress: Callable[[str], None]) -> dict[str, Any]:
    """Run a job in a fresh process; return its result.

    Raises:
        KVMemError: of the type and in the words that the process met.
        Busy: the process ended without a result; its last words are in the message,
            all of them in the error's cause.
    """
    flags = f"{_XLA_FLAGS.format(job.side.topology.ranks)} {_PATIENT}"
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(
            [sys.executable, "-m", "experiments.handoff_roles"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        ) as child,
    ):
        try:
            result = _converse(child, job, on_progress)
        except BaseException:
            child.kill()
            raise
        if child.wait() or result is None:
            said.seek(0)
            words = said.read().decode(errors="replace").strip()
            raise errors.Busy(
                errors.say(
                    f"the {job.role} process at {job.side}",
                    f"it ended with code {child.returncode}: "
                    f"{words.rpartition(chr(10))[2] or 'without a word'}",
                    "Mend what it says, or run again with --debug to see all of it",
                )
            ) from RuntimeError(words)
    return result


def _converse(
    child: subprocess.Popen, job: Job, on_progress: Callable[[str], None]
) -> dict[str, Any] | None:
    """Hand a job to a process and listen until it closes its output."""
    try:
        child.stdin.write(pickle.dumps(job))
        child.stdin.close()
    except BrokenPipeError:
        return None  # it ended at once; its own words say why
    result = None
    for line in child.stdout:
        said = json.loads(line)
        if "error" in said:
            kind = getattr(errors, said["error"]["type"], errors.KVMemError)
            raise kind(said["error"]["words"])
        result = said.get("result", result)
        if "progress" in said:
            on_progress(said["progress"])
    return result


class PartsSeen:
    """What the first fetch of several groups left in our pages, against the store.

    A state moves on with the first step, so it is compared as soon as it has landed.
    """

    def __init__(self, recall: GroupRecall):
        self.verified = 0  # tokens, if every row of every part is the store's
        self.nbytes = 0
        self._fetch, self._recall = recall.fetch, recall

    def fetch(self, pool, sequence):
        """Fetch, and compare what landed with what the store says."""
        pool, fetched = self._fetch(pool, sequence)
        self._recall.fetch = self._fetch
        chunk = self._recall.store.facts.chunk_tokens
        count = fetched.num_tokens // chunk
        known = sequence.tokens[: count * chunk]
        found = self._recall.store.get(self._recall.keys(known), known)
        equal = [
            np.array_equal(
                found.rows[part.name].rows,
                self._recall.rows(
                    pool, sequence, part, found.rows[part.name].ordinals
                ).rows,
            )
            for part in self._recall.store.parts
        ]
        self.verified = fetched.num_tokens * all(equal)
        self.nbytes = fetched.nbytes
        return pool, fetched


def parts_seen(engine: Engine) -> PartsSeen | None:
    """Watch the first fetch of an engine of several groups, None for one group."""
    if not isinstance(engine.recall, GroupRecall):
        return None
    seen = PartsSeen(engine.recall)
    engine.recall.fetch = seen.fetch
    return seen


class Role:
    """One process's engine and the seconds of its stages."""

    def __init__(self, job: Job):
        self.job = job
        self.stages: dict[str, float] = {}
        self._last = time.perf_counter()
        say("loading the model")
        self.config = Config(
            model=job.model,
            topology=job.side.topology,
            pool=PoolConfig(
                page_size=job.side.page_size, pages=job.side.pages, checked=True
            ),
            # What windows and states have passed is kept out of the prefix cache.
            serve=dataclasses.replace(job.serve, prefix_cache=job.role == "write"),
            store=StoreConfig(
                None if job.role == "know" else job.store_root,
                job.chunk_tokens,
                read_only=job.role == "read",
            ),
        )
        self.engine = self.config.engine()
        self.parts = parts_seen(self.engine) if job.role == "read" else None
        self.done("load")
        say("compiling")
        self.engine.warm_up()
        self.done("compile")

    def done(self, stage: str, less: float = 0.0) -> None:
        """Give the time since the last stage to this one, but for `less` of it."""
        now = time.perf_counter()
        self.stages[stage] = self.stages.get(stage, 0.0) + now - self._last - less
        self._last = now

    def continue_text(self) -> dict[str, Any]:
        """Generate, and say what was read, written and verified."""
        say(f"{self.job.tokens} tokens")
        sampling = SamplingParams(
            max_tokens=self.job.tokens, ignore_eos=True, logprobs=2
        )
        request_id = self.engine.add(self.job.prompt_ids, sampling)
        self.engine.step()
        verified = self.verified(request_id)
        while self.engine.has_work:
            self.engine.step()
        output = self.engine.take_output(request_id)
        recall = self.engine.recall
        kept, fetched = (recall.keep_s, recall.fetch_s) if recall else (0.0, 0.0)
        self.done("generate", less=kept + fetched)
        self.stages |= {"write the store": kept, "read the store": fetched}
        tops = [probs.top for probs in output.completions[0].logprobs]
        return {
            "output_ids": output.output_ids,
            "margins": [top[0][1] - top[1][1] for top in tops],
            "stored_tokens": output.stored_tokens,
            "verified_tokens": verified,
        }

    def verified(self, request_id: int) -> int:
        """Count the fetched tokens whose records in our pages equal the store's."""
        if self.job.role != "read":
            return 0
        if self.parts is not None:
            return self.parts.verified
        recall, prompt = self.engine.recall, self.job.prompt_ids
        keys = recall.keys(prompt[:-1])
        whole = len(keys) * self.job.chunk_tokens
        stored = recall.store.get(keys, prompt[:whole]).records
        ours = self.engine.records(request_id)[: len(stored)]
        return int((ours == stored).all(axis=1).sum())

    def first_token_times(self) -> dict[str, list[float]]:
        """Time the first token in turns: resumed from the store, and prefilled."""
        times: dict[str, list[float]] = {"resumed": [], "prefilled": []}
        recall = self.engine.recall
        one = SamplingParams(max_tokens=1, ignore_eos=True)
        for turn in range(self.job.repetitions):
            say(f"first token {turn + 1} of {self.job.repetitions}")
            for name in times:
                self.engine.recall = recall if name == "resumed" else None
                (output,) = self.engine.generate(self.job.prompt_ids, one)
                times[name].append(output.first_token_s)
        self.engine.recall = recall
        self.done("time first tokens")
        return times


def say(progress: str) -> None:
    """Send one line of progress to the parent."""
    print(json.dumps({"progress": progress}), flush=True)


def perform(job: Job) -> dict[str, Any]:
    """Do a job in this process."""
    role = Role(job)
    result = role.continue_text()
    if job.role == "read":
        result["first_token_s"] = role.first_token_times()
    engine, budget = role.engine, role.config.budget()
    result |= {
        "text": engine.tokenizer.decode(result["output_ids"]),
        "predicted_nbytes": budget.used_nbytes * job.side.topology.ranks,
        "pool_nbytes": engine.pool.pages.nbytes,
        "paddings": [str(padding) for padding in role.config.partition.paddings],
        "model_id": engine.model.model_id,
        "stages": role.stages,
    }
    if engine.recall:
        stats = engine.recall.store.stats()
        row_nbytes = engine.recall.store.facts.row_nbytes
        result["chunks_written"] = stats.written
        result["chunks_read"] = result["stored_tokens"] // job.chunk_tokens
        written, read = stats.written * row_nbytes, result["chunks_read"] * row_nbytes
        if isinstance(engine.recall, GroupRecall):
            written = stats.written_nbytes
            read = role.parts.nbytes if role.parts else 0
        result |= {"nbytes_written": written, "nbytes_read": read}
        engine.recall.store.close()
    return result


def main() -> int:
    """Do the job that stands on standard input, and say how it ended."""
    try:
        said = {"result": perform(pickle.load(sys.stdin.buffer))}
    except errors.KVMemError as error:
        said = {"error": {"type": type(error).__name__, "words": str(error)}}
    print(json.dumps(said), flush=True)
    return "error" in said


if __name__ == "__main__":
    sys.exit(main())
