"""Which pages to forget: eviction policies on one trace of chats, beside the optimum.

A trace of chats is replayed through the engine's own page table, for each policy and
pool size: what is cached is shared, the rest is handed out, whole pages are published.
Belady's rule knows the trace's future and shows how much any order could find.

    python -m experiments run configs/eviction.toml
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence

from experiments import chat_trace, eviction_picture
from experiments.chat_trace import ChatTraffic, Request, Uses
from experiments.harness import Check, Record, RunConfig
from kvmem import errors, pool
from kvmem.prefix import PrefixCache, policy
from kvmem.serve.page_table import PageTable

__all__ = ["Config", "Replay", "replay", "run"]

_OPTIMUM = "belady"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """The whole truth of a run.

    Args:
        traffic: of the trace.
        page_size: tokens of a page.
        shares: pool sizes, as shares of the different pages of the trace.
        policies: that are compared with the optimum.
        picture: where the picture goes.
    """

    traffic: ChatTraffic = ChatTraffic()
    page_size: int = 16
    shares: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4, 0.8)
    policies: tuple[str, ...] = ("lru", "lfu", "size_aware")
    picture: str = "runs/eviction/eviction.png"

    def __post_init__(self):
        unknown = sorted(set(self.policies) - policy.NAMED.keys())
        if unknown or not self.shares or not all(0 < s <= 1 for s in self.shares):
            raise errors.ConfigError(
                errors.say(
                    f"policies {self.policies} at shares {self.shares}",
                    f"policies are of {', '.join(policy.NAMED)}, shares in (0, 1]",
                    "Change the values named",
                )
            )


@dataclasses.dataclass(frozen=True)
class Replay:
    """What one policy found in a pool of one size."""

    prompt_tokens: int
    cached_tokens: int
    evicted_pages: int
    objections: tuple[str, ...]

    @property
    def hit_rate(self) -> float:
        """Prompt tokens found in the cache, over all."""
        return self.cached_tokens / self.prompt_tokens


def run(config: Config) -> Iterator[Record]:
    """Yield the hit rates of every policy at every pool size."""
    requests = chat_trace.make(config.traffic)
    uses = Uses(requests, config.page_size)
    largest = max(-(-len(r.tokens) // config.page_size) for r in requests)
    sizes = [max(largest, int(share * uses.num_pages)) for share in config.shares]
    found = {
        name: [replay(name, requests, uses, config.page_size, pages) for pages in sizes]
        for name in (*config.policies, _OPTIMUM)
    }
    rates = {name: [done.hit_rate for done in row] for name, row in found.items()}
    eviction_picture.draw(pathlib.Path(config.picture), sizes, rates)
    yield Record(
        "eviction_policies",
        "correctness",
        "shares of prompt tokens found again, by policy and pool size",
        "host",
        checks=_checks(found, sizes),
        measurements={
            f"{name}_hit_rate_{pages}_pages": round(rate, 4)
            for name, row in rates.items()
            for pages, rate in zip(sizes, row, strict=True)
        },
        facts={
            "requests": len(requests),
            "different_pages": uses.num_pages,
            "pool_pages": sizes,
            "picture": config.picture,
        },
    )


def replay(
    name: str,
    requests: Sequence[Request],
    uses: Uses,
    page_size: int,
    num_pages: int,
) -> Replay:
    """Serve a trace, one request after the other, out of a pool of `num_pages`.

    Args:
        name: of the policy, or "belady".
        requests: the trace.
        uses: of its pages.
        page_size: tokens of a page.
        num_pages: of the pool; the largest request fits.
    """
    now, name_of = 0, {}

    def next_use(vpage: int) -> float:
        return uses.next(name_of[vpage], now)

    chosen = policy.belady(next_use) if name == _OPTIMUM else policy.NAMED[name]()
    table = PageTable(pool.Ledger(num_pages), PrefixCache(page_size, chosen))
    found, objections = 0, []
    for now, request in enumerate(requests):  # noqa: B007 (next_use reads it)
        hit = table.match(request.tokens[: request.num_prompt])
        held = table.begin(hit, request.tokens)
        name_of |= dict(zip(held.columns[0], uses.names[now], strict=False))
        table.publish(request.tokens[:-1], held)
        objections += table.objections([held])
        table.give_back(held)
        found += hit.num_tokens
    asked = sum(request.num_prompt for request in requests)
    return Replay(asked, found, table.num_evicted, tuple(objections[:4]))


def _checks(found: dict[str, list[Replay]], sizes: Sequence[int]) -> tuple[Check, ...]:
    """Check the books of every replay, and that no policy beats the optimum."""
    replays = [done for row in found.values() for done in row]
    broken = [said for done in replays for said in done.objections]
    checks = [
        Check(
            "every page's holders add up after every request",
            not broken,
            "; ".join(broken[:4]) or f"{len(replays)} replays",
        )
    ]
    for at, pages in enumerate(sizes):
        rates = {name: row[at].hit_rate for name, row in found.items()}
        shown = ", ".join(f"{name} {rate:.3f}" for name, rate in rates.items())
        best = rates[_OPTIMUM] >= max(rates.values())
        checks.append(Check(f"{pages} pages: nobody beats the optimum", best, shown))
    return tuple(checks)
