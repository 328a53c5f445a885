"""What an engine found again and why not: counters, and the report of a reset.

The law: every request that was admitted either found tokens of its prompt in memory or
stands in `misses` under the reason why it found none.

    engine.stats().misses      # {"shorter than one page": 2}
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from kvmem.serve.balance import ManagerStats
from kvmem.serve.draft.counts import DraftStats
from kvmem.serve.page_table import Accounts
from kvmem.serve.request import Sequence

__all__ = ["Counts", "EngineStats", "ResetReport"]


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """Counters since the engine began, and where its pages are now.

    Tokens are those of prompts, when requests were first admitted; a request is one
    prompt, whatever its samples.
    """

    admitted: int  # requests
    hits: int  # of them, those that found any token of their prompt
    misses: Mapping[str, int]  # of them, those that found none, by reason
    finished: int
    aborted: int
    prompt_tokens: int
    cached_tokens: int  # found in pages of this process
    stored_tokens: int  # found in the page store
    output_tokens: int
    accounts: Accounts
    waiting: int  # sequences
    running: int  # sequences
    preempted: int  # times that a sequence gave its pages back and began anew
    evicted_pages: int
    weights_epoch: int
    manager: ManagerStats  # which divides the pool, why, and what each group holds
    drafting: DraftStats | None  # None where nobody drafts


@dataclasses.dataclass(frozen=True)
class ResetReport:
    """What a reset did: physical pages that became free, those of a draft's own pool
    among them, and who holds the others.

    The pages still in use are in no cache any more; they become free as those requests
    end.
    """

    weights_epoch: int
    num_freed: int
    still_in_use: tuple[int, ...]  # virtual pages of the first group
    running: tuple[int, ...]  # requests that hold them


class Counts:
    """The counters behind `EngineStats`."""

    def __init__(self):
        self._sums: collections.Counter[str] = collections.Counter()
        self._misses: collections.Counter[str] = collections.Counter()

    def admitted(self, sequence: Sequence, store_reason: str | None) -> None:
        """Count a request's first admission, and give it its reason for a miss.

        Args:
            sequence: its first sample.
            store_reason: why the store's part ends where it does; None without one.
        """
        found = sequence.cached_tokens + sequence.stored_tokens
        if found:
            sequence.miss_reason = None
        elif store_reason is not None:
            sequence.miss_reason = f"{sequence.miss_reason}; in the store: " + (
                store_reason
            )
        self._sums["admitted"] += 1
        self._sums["hits"] += found > 0
        self._sums["prompt_tokens"] += sequence.num_prompt
        self._sums["cached_tokens"] += sequence.cached_tokens
        self._sums["stored_tokens"] += sequence.stored_tokens
        if not found:
            self._misses[sequence.miss_reason] += 1

    def ended(self, samples: Iterable[Sequence]) -> None:
        """Count a request whose samples have all ended."""
        samples = tuple(samples)
        is_aborted = any(s.finish_reason == "abort" for s in samples)
        self._sums["aborted" if is_aborted else "finished"] += 1
        self._sums["output_tokens"] += sum(len(s.output_ids) for s in samples)

    def stats(self, accounts: Accounts, **now: Any) -> EngineStats:
        """Return the counters with what holds now."""
        names = ("admitted", "hits", "finished", "aborted", "prompt_tokens")
        names += ("cached_tokens", "stored_tokens", "output_tokens")
        sums = {name: self._sums[name] for name in names}
        return EngineStats(misses=dict(self._misses), accounts=accounts, **sums, **now)
