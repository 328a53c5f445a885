"""Reading: the logits of a given text, in an engine's own pages, generating nothing.

What an engine would say at each of a text's last tokens, computed as it computes
prompts: by its own steps, with or without the texts that it has registered. The law:
the engine is idle before and after, and nothing that is read is cached or stored.

    logits = Reader(engine).logits(tokens, count=16)              # f32[16, V]
    blended = Reader(engine).logits(tokens, count=16, reuse=True)
"""

from collections.abc import Sequence as ListLike

import numpy as np

from kvmem import errors
from kvmem.prefix import Hit
from kvmem.serve.engine import Engine
from kvmem.serve.request import SamplingParams, Sequence
from kvmem.serve.work import Row

__all__ = ["Reader"]

_NO_REQUEST = -1


class Reader:
    """Reads texts through one engine that has no work."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def logits(
        self, tokens: ListLike[int], count: int, reuse: bool = False
    ) -> np.ndarray:
        """Return f32[count, V]: what follows each of the last `count` tokens.

        Args:
            tokens: a text.
            count: of how many of its last tokens.
            reuse: use registered texts before them; else compute everything.

        Raises:
            ConfigError: the engine has work, or a text not longer than `count`.
            OutOfPages: the text does not fit the pool.
        """
        engine = self.engine
        self._require_idle(len(tokens), count)
        sequence = Sequence(
            _NO_REQUEST,
            0,
            tuple(tokens),
            SamplingParams(max_tokens=1),
            engine.tokenizer.stream(),
        )
        sequence.identity = sequence.identity.at_epoch(engine.scheduler.weights_epoch)
        sequence.held = engine.table.begin(Hit(0, (), None), sequence.tokens)
        if sequence.held is None:
            raise errors.OutOfPages(
                errors.say(
                    f"reading a text of {len(tokens)} tokens",
                    f"the pages are {engine.accounts}",
                    "Shorten it, or give the pool more memory",
                )
            )
        try:
            return self._read(sequence, count, reuse)
        finally:
            engine.table.give_back(sequence.held)

    def _read(self, sequence: Sequence, count: int, reuse: bool) -> np.ndarray:
        engine, length = self.engine, len(sequence.tokens)
        engine.pool = engine.table.apply(engine.pool)
        if reuse:
            engine.pool, found = engine.blender.fill(engine.pool, sequence, left=count)
            sequence.num_computed += found.num_tokens
        while (start := sequence.num_computed) < length - count:
            chunk = min(engine.config.prefill_chunk, length - count - start)
            self._step(Row(sequence, start, chunk))
            sequence.num_computed += chunk
        return np.asarray(self._step(Row(sequence, start, count), count))[0]

    def _step(self, row: Row, logits: int = 1):
        engine = self.engine
        bucket = engine.buckets.prefill(row.count, row.start + row.count)
        batch = engine.stepper.pack([row.feed], bucket._replace(logits=logits))
        engine.pool, found = engine.stepper(engine.pool, batch)
        return found

    def _require_idle(self, length: int, count: int) -> None:
        if self.engine.has_work:
            asked, law = "reading a text", "an engine reads when it has nothing to do"
            cure = "Finish or abort its requests"
        elif not 1 <= count < length:
            asked = f"the logits of {count} of {length} tokens"
            law, cure = (
                "at least one comes before them",
                "Ask for fewer, and at least one",
            )
        else:
            return
        raise errors.ConfigError(errors.say(asked, law, cure))
