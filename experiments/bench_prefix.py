"""How fast the prefix index and the books answer, where peers fall off cliffs.

Texts that share their beginnings are entered, found, and half of them evicted; batches
of sequences give their pages back to a large pool. The figures beside are those that
sglang-jax's radix cache and allocator reached on the same work, scaled to this machine
by dict look-ups in the same turns.

    python -m experiments run configs/bench_prefix.toml
"""

import dataclasses
import functools
from collections.abc import Iterator

from experiments import prefix_race
from experiments.harness import Check, Record, Rounds, RunConfig, interleave
from experiments.prefix_race import Forest

__all__ = ["Config", "Peer", "Targets", "run"]

_LOOKUP = "dict_lookups"


@dataclasses.dataclass(frozen=True)
class Peer:
    """What sglang-jax reached (its RadixCache at one page size, its paged allocator).

    Args:
        lookups_per_s: dict look-ups of a quiet machine of that kind.
        page_size: of its figures.
        inserts_per_s: texts entered.
        matches_per_s: texts found whole.
        evict_half_s: seconds to evict half of the tree.
        frees_per_s: sequences freed, of a batch, in a large pool.
    """

    lookups_per_s: float = 25e6
    page_size: int = 16
    inserts_per_s: float = 30_000
    matches_per_s: float = 15_000
    evict_half_s: float = 2.0
    frees_per_s: float = 105


@dataclasses.dataclass(frozen=True)
class Targets:
    """How many times the peer's scaled figure must be reached."""

    insert: float = 1.0
    match: float = 1.0
    evict_half: float = 20.0
    free: float = 100.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """The whole truth of a run.

    Args:
        peer: figures that ours are held against.
        targets: of the checks.
        rounds: turns of every comparison.
        requests: texts.
        tokens: of a text.
        stems: beginnings that the texts share.
        shared_tokens: of a beginning.
        page_sizes: that are recorded; the peer's one is checked.
        slack: size of the larger pool, over what the texts need.
        slack_requests: texts of that part.
        pool_pages: of the pool that batches free into.
        batch: sequences of a batch.
        sequence_pages: pages of a sequence.
    """

    peer: Peer = Peer()
    targets: Targets = Targets()
    rounds: int = 5
    requests: int = 2000
    tokens: int = 1024
    stems: int = 16
    shared_tokens: int = 512
    page_sizes: tuple[int, ...] = (1, 16, 64)
    slack: int = 4
    slack_requests: int = 500
    pool_pages: int = 65_536
    batch: int = 256
    sequence_pages: int = 4


def run(config: Config) -> Iterator[Record]:
    """Yield what the index and the books do, a page size at a time."""
    known = functools.partial(
        prefix_race.texts,
        tokens=config.tokens,
        stems=config.stems,
        shared=config.shared_tokens,
    )
    texts = known(config.requests)
    for page_size in config.page_sizes:
        yield _index(config, Forest(texts, page_size), f"page_{page_size}", page_size)
    few = known(config.slack_requests)
    forest = Forest(few, config.peer.page_size, config.slack)
    yield _index(config, forest, f"slack_{config.slack}", None)
    yield _frees(config)


def _index(config: Config, forest: Forest, name: str, page_size: int | None) -> Record:
    """Time a tree's life; check it where the peer has figures for its page size."""
    timed = interleave(
        {_LOOKUP: prefix_race.lookup_job()} | forest.jobs(), config.rounds
    )
    count = config.requests if page_size else config.slack_requests
    rates = {part: count / timed.median(part) for part in ("insert", "match", "miss")}
    figures = {f"{name}_{part}_per_s": round(rate) for part, rate in rates.items()}
    figures[f"{name}_evict_half_ms"] = round(timed.median("evict_half") * 1e3, 3)
    figures[f"{name}_lookups_per_s"] = round(_lookups_per_s(timed))
    return Record(
        f"index_{name}",
        "measurement",
        f"{count} texts of {config.tokens} tokens over {config.stems} beginnings: "
        "entered, found, missed, half of the pages evicted and released",
        "host",
        repetitions=config.rounds,
        checks=_index_checks(config, timed)
        if page_size == config.peer.page_size
        else (),
        measurements=figures,
    )


def _index_checks(config: Config, timed: Rounds) -> tuple[Check, ...]:
    peer, targets, count = config.peer, config.targets, config.requests
    scaled = {
        "insert": count / peer.inserts_per_s,
        "match": count / peer.matches_per_s,
        "evict_half": peer.evict_half_s,
    }
    return tuple(
        _times(f"{part} at page {peer.page_size}", config, timed, part, seconds, least)
        for part, seconds in scaled.items()
        for least in [getattr(targets, part)]
    )


def _frees(config: Config) -> Record:
    """Let the sequences of a batch give their pages back."""
    job = prefix_race.free_job(config.pool_pages, config.batch, config.sequence_pages)
    timed = interleave({_LOOKUP: prefix_race.lookup_job(), "free": job}, config.rounds)
    name = f"frees of a batch of {config.batch} in {config.pool_pages:,} pages"
    peer_s = config.batch / config.peer.frees_per_s
    return Record(
        "frees",
        "measurement",
        f"each sequence of a batch gives {config.sequence_pages} pages back",
        "host",
        repetitions=config.rounds,
        checks=(_times(name, config, timed, "free", peer_s, config.targets.free),),
        measurements={
            "frees_per_s": round(config.batch / timed.median("free")),
            "frees_lookups_per_s": round(_lookups_per_s(timed)),
        },
    )


def _lookups_per_s(timed: Rounds) -> float:
    return prefix_race.LOOKUPS / timed.median(_LOOKUP)


def _times(
    name: str, config: Config, timed: Rounds, side: str, peer_s: float, least: float
) -> Check:
    """Check how many times as fast a side is as the peer would be on this machine."""
    calibrated = prefix_race.LOOKUPS / config.peer.lookups_per_s
    ratio = timed.ratio(_LOOKUP, side) * peer_s / calibrated
    ours_ms = timed.median(side) * 1e3
    detail = f"{ratio:.2f} x the peer's, at least {least:g}: {ours_ms:.2f} ms"
    return Check(name, ratio >= least, detail)
