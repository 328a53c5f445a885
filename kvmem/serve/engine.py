"""The engine: prompts in, tokens out, over one pool that it owns.

The verbs that a caller has; each is one passage through the engine's guard, and what a
step does is the loop's (`kvmem.serve.loop`). The law: between two verbs the device's
books equal the host's, and every page is free, cached, or held by a sequence that is
still going.

    engine = kvmem.config.load("configs/models/smollm2.toml").engine()
    engine.generate(["The capital of France is"], SamplingParams(max_tokens=8))[0].text

One thread drives an engine, and a second is refused; Ctrl-C waits for the end of a
step. It cannot be called inside a jax transformation.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as ListLike

import jax
import jax.numpy as jnp

from kvmem import errors
from kvmem.blend import BlendConfig
from kvmem.budget import Budget
from kvmem.geometry import LifecycleGroup, Topology
from kvmem.manage import Knobs, Selection
from kvmem.model.loaded import LoadedModel
from kvmem.serve import sampler
from kvmem.serve.answers import Answers
from kvmem.serve.blending import Blender
from kvmem.serve.buckets import Bucket, ServeConfig
from kvmem.serve.draft.protocol import Draft
from kvmem.serve.identity import PLAIN, Identity
from kvmem.serve.prompts import Prompt, as_prompts, as_token_ids, one_each
from kvmem.serve.request import Delta, Output, SamplingParams, Sequence
from kvmem.serve.requests import require_kept
from kvmem.serve.stats import ResetReport
from kvmem.store import RecordStore

__all__ = ["Engine"]


class Engine(Answers):
    """A model, its pool and its requests.

    Args:
        model: weights, tokenizer and facts, as a loader returns them.
        groups: its lifecycle groups, one or several: what its cache keeps, how long,
            and the page size. They share the pages of one pool.
        budget: pages of each rank, solved for these groups and topology.
        topology: ranks; more than one runs on a mesh of as many devices.
        order: page order.
        config: batching.
        store: where records are looked up and, if it is writable, those of finished
            requests are kept; None: nowhere.
        poison: fill fresh pools with NaN bytes.
        checked: after every step, check the laws of the books and the mirror.
        certified: before the first request, send numbered elements through the real
            write path, sharding and executor, and refuse to start unless they come out
            as the canonical records that they should be.
        executor: "auto", or "vmap" to run all ranks on one device (for tests).
        blend: reuse registered texts at any place of a prompt; None: at none.
        manager: which manager divided the budget, and why; None: as it is divided.
        rebalance: when the shares of groups follow the texts that came.
        draft: who proposes tokens that the model then verifies several at a time;
            None: nobody. See `kvmem.serve.draft`.
    """

    def __init__(
        self,
        model: LoadedModel,
        groups: LifecycleGroup | ListLike[LifecycleGroup],
        budget: Budget,
        topology: Topology | None = None,
        *,
        order: str = "head_major",
        config: ServeConfig | None = None,
        store: RecordStore | None = None,
        poison: bool = False,
        checked: bool = False,
        certified: bool = False,
        executor: str = "auto",
        blend: BlendConfig | None = None,
        manager: Selection | None = None,
        rebalance: Knobs | None = None,
        draft: Draft | None = None,
    ):
        super().__init__(
            model,
            (groups,) if isinstance(groups, LifecycleGroup) else tuple(groups),
            budget,
            topology or Topology(),
            order=order,
            config=config or ServeConfig(),
            store=store,
            poison=poison,
            checked=checked,
            certified=certified,
            executor=executor,
            blend=blend,
            manager=manager,
            rebalance=rebalance,
            draft=draft,
        )

    def __enter__(self) -> "Engine":
        """Return the engine."""
        return self

    def __exit__(self, *_) -> None:
        """Close the engine."""
        self.close()

    def close(self) -> None:
        """Close the store, so that another process may write; requests may go on."""
        if self.recall is not None:
            self.recall.store.close()

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: SamplingParams | ListLike[SamplingParams] | None = None,
        identity: Identity | ListLike[Identity] = PLAIN,
    ) -> list[Output]:
        """Answer prompts together; return their outputs in the same order.

        Args:
            prompts: texts or lists of token ids; one or many.
            sampling: for all of them, or one a prompt; None: greedy, 16 tokens.
            identity: of all of them, or one a prompt; see `Identity`.

        Raises:
            OutOfPages, ConfigError: a request that can never run; then none has begun.
            NotKept: all is answered, and the store could not keep some records; the
                outputs are the error's.
        """
        prompts = as_prompts(prompts)
        requests = zip(
            prompts,
            one_each(sampling or SamplingParams(), SamplingParams, len(prompts)),
            one_each(identity, Identity, len(prompts)),
            strict=True,
        )
        begun: list[int] = []
        try:
            for request in requests:
                begun.append(self.add(*request))
            while any(self._requests.is_open(request_id) for request_id in begun):
                self.step()
        except BaseException:
            self._forget(begun)
            raise
        outputs = [self.take_output(request_id) for request_id in begun]
        require_kept(outputs)
        return outputs

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        identity: Identity = PLAIN,
    ) -> Iterator[Delta]:
        """Yield tokens of one request as they come; leaving early aborts it.

        Other requests may be served between two tokens, by other streams too.

        Raises:
            NotKept: after the last token, if the store could not keep the records.
        """
        request_id = self.add(prompt, sampling, identity)
        try:
            yield from self.follow(request_id)
            output = self._requests.output(request_id)
            require_kept([output] if output else [])
        finally:
            self._forget([request_id])

    def follow(self, request_id: int) -> Iterator[Delta]:
        """Yield tokens of a queued request as they come; its output stays to be taken.

        Other requests may be served between two tokens.
        """
        mine = self._requests.listen(request_id)
        try:
            while mine or self._requests.is_open(request_id):
                if not mine:
                    self.step()
                while mine:
                    yield mine.popleft()
        finally:
            self._requests.deafen(request_id)

    def add(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        identity: Identity = PLAIN,
    ) -> int:
        """Queue a request; return its id.

        Args:
            prompt: a text, or token ids.
            sampling: None: greedy, 16 tokens.
            identity: whose text it is; only equal identities share memory.

        Raises:
            OutOfPages: it could never fit the pool.
            ConfigError: it is outside what this engine serves, or for other weights.
            InvalidId: a token id outside the vocabulary.
        """
        with self._guard("add", asks_first=True):
            prompt_ids = self._prompt_ids(prompt)
            leader = Sequence(
                self._requests.next_id(),
                0,
                prompt_ids,
                sampling or SamplingParams(),
                self.tokenizer.stream(),
                identity,
            )
            self.scheduler.add(leader)
            self._requests.open(leader)
        return leader.request_id

    def step(self) -> list[Delta]:
        """Run one prefill chunk or one decode batch; return the tokens it gave.

        Records that the store cannot keep do not end a step: the request's output says
        so in `store_error`.
        """
        _require_outside_of_traces()
        with self._guard("step"):
            deltas = self._turn()
            self._requests.hear(deltas)
        return deltas

    def abort(self, request_id: int) -> bool:
        """End a request now; its pages return. Say whether it was still going.

        Samples that had not begun are no part of its output.
        """
        with self._guard("abort"):
            samples = self._requests.samples(request_id)
            going = [s for s in samples if not s.finish_reason]
            for sequence in going:
                sequence.finish_reason = "abort"
                self.scheduler.drop(sequence)
            if going:
                self._conclude(request_id)
        return bool(going)

    def _forget(self, request_ids: list[int]) -> None:
        """End what is still going and drop the outputs; nobody will take them."""
        for request_id in request_ids:
            if self._requests.is_open(request_id):
                self.abort(request_id)
            self._requests.forget(request_id)

    def reset(self, weights_epoch: int | None = None) -> ResetReport:
        """Forget every cached page, because the weights have changed; say what it did.

        Sequences that run keep their pages, which are named in the report, and what
        they computed is neither cached nor stored. Waiting ones begin under the new
        weights. The store is left alone: its keys name the epoch, so an epoch means
        the same weights in every process of a store; 0 are those of the model's files.

        Args:
            weights_epoch: of the weights now; None: one more than before, where
                nothing is stored.

        Raises:
            ConfigError: a negative epoch, or none with a store.
        """
        if weights_epoch is None and self.recall is not None:
            raise errors.ConfigError(
                errors.say(
                    "a reset to the next epoch, with a store",
                    "an epoch names the same weights in every process of a store, and "
                    "a count of this one's resets does not",
                    "Give weights_epoch a number that only these weights have, for "
                    "example of their checkpoint; 0 if they are the model's files'",
                )
            )
        epoch = self.scheduler.weights_epoch + 1
        epoch = epoch if weights_epoch is None else weights_epoch
        PLAIN.at_epoch(epoch)  # refuses what is no epoch
        with self._guard("reset"):
            free = self.accounts.free
            of_draft = self.scheduler.reset(epoch)
        in_use = {v for s in self.scheduler.running for v in s.vpages}
        return ResetReport(
            weights_epoch=epoch,
            num_freed=self.accounts.free - free + of_draft,
            still_in_use=tuple(sorted(in_use)),
            running=tuple(sorted({s.request_id for s in self.scheduler.running})),
        )

    def disown(self) -> None:
        """Let what the sequences that run compute be neither cached nor stored.

        They go on, and are answered. What is cached already stays: see `reset`.
        """
        with self._guard("disown"):
            self.scheduler.disown()

    def register(self, text: Prompt, identity: Identity = PLAIN) -> int:
        """Compute a text exactly, so that it is found at any place of later prompts.

        Other requests go on between its steps.

        Args:
            text: a text, or token ids; from the beginning, as if nothing came before.
            identity: whose text it is; only equal identities share it.

        Returns:
            Its number, for `forget_text`.

        Raises:
            ConfigError: this engine does not blend, the text has images, is shorter
                than a chunk or longer than a sequence.
            OutOfPages: it could never fit the pool.
            InvalidId: meanwhile its request was aborted, or the weights changed.
        """
        blender = self._blending("registering a text")
        tokens = self._prompt_ids(text)
        blender.require_registrable(tokens, identity)
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        request_id = self.add(tokens, sampling, identity)
        blender.learn(request_id)
        try:
            while self._requests.is_open(request_id):
                self.step()
        finally:
            self._forget([request_id])
            number = blender.learned(request_id)
        if number is None:
            raise errors.InvalidId(
                errors.say(
                    f"registering a text of {len(tokens)} tokens",
                    f"its request {request_id} was aborted, or the weights changed "
                    "before it was computed",
                    "Register it again",
                )
            )
        return number

    def forget_text(self, number: int, identity: Identity = PLAIN) -> None:
        """Drop a registered text.

        Raises:
            InvalidId: there is none of that number under this identity.
            ConfigError: this engine does not blend.
        """
        identity = identity.at_epoch(self.scheduler.weights_epoch)
        self._blending("forgetting a text").forget(number, identity)

    def _blending(self, asked: str) -> Blender:
        if self.blender is None:
            raise errors.ConfigError(
                errors.say(
                    asked,
                    "this engine uses text where it was computed only",
                    "Give the engine a BlendConfig, or its config a table [blend]",
                )
            )
        return self.blender

    def warm_up(self, buckets: Iterable[Bucket] | None = None) -> int:
        """Compile steps before traffic; return how many were traced now.

        Args:
            buckets: which; None: every declared one.
        """
        before = sum(self.stepper.num_traces.values())
        for bucket in self.buckets.all() if buckets is None else buckets:
            batch = self.stepper.pack((), bucket)
            with self._guard("warm_up"):
                self.pool, logits, *_ = self.stepper(self.pool, batch)
                sampler.greedy(logits).block_until_ready()
        drafting = 0 if self.verifier is None else self.verifier.proposer.warm_up()
        return sum(self.stepper.num_traces.values()) - before + drafting

    def _prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt))
        return as_token_ids(prompt, self.model.spec.vocab)


def _require_outside_of_traces() -> None:
    # Inside a trace even a fresh constant is a tracer; jax has no public question.
    if isinstance(jnp.zeros(()), jax.core.Tracer):
        raise errors.ConfigError(
            errors.say(
                "an engine's step inside a jax transformation",
                "an engine changes as time passes, and a trace would keep its values",
                "Call it outside jit, or use kvmem.serve.step and the pool's verbs",
            )
        )
