"""Resume: how much of what was computed for a conversation serves its next turn.

The law: any doubt shortens what is reused, with a reason, and never changes what is
answered. The reason of what ends it first is kept:

    None          all of it is there
    new           nothing was fed before
    damaged       the manifest cannot be read
    format        it is of another model, tokenizer, format or size of chunks
    salt          its pages are under another owner's keys
    log_shorter   it holds messages that the log does not
    edited        the log says something else than what was fed
    not_found, evicted, checksum, …    what the page store says of a chunk

    judged = resume.judge(blob, fault, facts, newest)
    resume.of(judged, prompt_ids, output)
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvmem.conversation.chain import Chain, Facts, read
from kvmem.serve.request import Output

__all__ = ["Judged", "Resume", "expected", "judge", "of"]


@dataclasses.dataclass(frozen=True)
class Judged:
    """A manifest that may be built on, None if none, and why it is less than it was."""

    chain: Chain | None
    reason: str | None


@dataclasses.dataclass(frozen=True)
class Resume:
    """What one turn took over.

    Args:
        num_prompt: tokens of the prompt.
        num_expected: of these, in whole chunks, those that the chain has rows of.
        num_reused: found in this process's pages or in the page store.
        reason: why that is less than what was computed before; None if it is not.
    """

    num_prompt: int
    num_expected: int
    num_reused: int
    reason: str | None


def judge(blob: bytes | None, fault: str | None, facts: Facts, newest: int) -> Judged:
    """Read a manifest and cut it to what the log still holds.

    Args:
        blob: the manifest's bytes, None without one.
        fault: why a manifest that is there cannot be read.
        facts: of pages that are written now.
        newest: number of the newest message of the log, -1 without one.
    """
    if blob is None:
        return Judged(None, "damaged" if fault else "new")
    chain = read(blob)
    if chain is None:
        return Judged(None, "damaged")
    if chain.facts._replace(salt=facts.salt) != facts:
        return Judged(None, "format")
    if chain.facts.salt != facts.salt:
        return Judged(None, "salt")
    ahead = [span.start for span in chain.spans if span.seq > newest]
    if ahead:
        return Judged(chain.cut(min(ahead)), "log_shorter")
    return Judged(chain, None)


def expected(chain: Chain | None, prompt_ids: Sequence[int]) -> int:
    """Return the tokens of a prompt, in whole chunks, that a chain has rows of."""
    if chain is None:
        return 0
    rows = np.asarray(chain.tokens[: chain.num_kept], np.int32)
    length = min(len(rows), len(prompt_ids))
    asked = np.asarray(prompt_ids[:length], np.int32)
    differing = np.flatnonzero(rows[:length] != asked)
    common = int(differing[0]) if len(differing) else length
    return common // chain.facts.chunk_tokens * chain.facts.chunk_tokens


def of(judged: Judged, prompt_ids: Sequence[int], output: Output) -> Resume:
    """Return what a turn took over of what was judged to be there."""
    want = expected(judged.chain, prompt_ids)
    reused = output.cached_tokens + output.stored_tokens
    reason = judged.reason
    if reason is None and want < judged.chain.num_kept:
        reason = "edited"
    if reason is None and reused < want:
        reason = output.store_reason or output.miss_reason
    return Resume(len(prompt_ids), want, reused, reason)
