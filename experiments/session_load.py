"""Sessions under load: a service that is killed loses, doubles and mixes nothing.

Clients of several users append, capture, recall, remember and read at once over HTTP,
all users under the same session ids, while the service is killed (SIGKILL) and started
again at random. Afterwards every message that was ever sent is in its session once, in
its client's order, and nobody was told of another user or another's actor. Then recall
over many items is held against the bare FTS5 query that it rests on.

    python -m experiments run configs/session_load.toml
"""

import dataclasses
import itertools
import pathlib
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from experiments.harness import Check, Record, Rounds, RunConfig, interleave
from experiments.session_clients import Plan, Service, Worker, misplaced
from kvmem import errors
from kvmem.session import SessionStore, item_rows, resident, search
from kvmem.session.keys import KeyRing

__all__ = ["Config", "run"]

_ACCOUNT = "lab"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """The whole truth of a run.

    Args:
        users: of one account.
        clients: at once; each user has as many as any other.
        actors: of a user; each client acts as one.
        operations: of all clients together.
        kills: of the service, at random times.
        kill_every_s: seconds that it lives at most between two kills.
        items: that recall is measured over.
        rounds: of that measurement.
        max_ratio: of a recall to the bare query.
        seed: of everything that is random.
    """

    users: int = 4
    clients: int = 32
    actors: int = 8
    operations: int = 20_000
    kills: int = 10
    kill_every_s: float = 6.0
    items: int = 10_000
    rounds: int = 15
    max_ratio: float = 20.0
    seed: int = 0

    def __post_init__(self):
        if self.clients % self.users or self.operations % self.clients:
            raise errors.ConfigError(
                errors.say(
                    f"{self.operations} operations of {self.clients} clients of "
                    f"{self.users} users",
                    "users have equally many clients, and clients operations",
                    "Give multiples",
                )
            )


def run(config: Config) -> Iterator[Record]:
    """Load the service, judge what is left, then measure recall."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="kvmem-load-"))
    try:
        yield from _load(config, folder / "served")
        yield _recall(config, folder / "items")
    finally:
        shutil.rmtree(folder)


def _load(config: Config, root: pathlib.Path) -> Iterator[Record]:
    service, ring = Service(root), KeyRing(root)
    per_user = config.clients // config.users
    plan = Plan(
        config.operations // config.clients, config.actors, per_user, config.seed
    )
    workers = [
        Worker(i, service.url, ring.add(_ACCOUNT, f"user{i // per_user}"), plan)
        for i in range(config.clients)
    ]
    service.start()
    start = time.perf_counter()
    _run_under_kills(config, service, workers)
    wall_s = time.perf_counter() - start
    service.stop()
    yield _judged(config, root, workers, service.num_kills)
    yield _timed(workers, wall_s)


def _run_under_kills(
    config: Config, service: Service, workers: Sequence[Worker]
) -> None:
    """Run all clients to their end, the service killed at random meanwhile."""
    threads = [threading.Thread(target=worker.run) for worker in workers]
    [thread.start() for thread in threads]
    rng = random.Random(config.seed)
    for _ in range(config.kills):
        time.sleep(rng.uniform(0.1, 1.0) * config.kill_every_s)
        if not any(thread.is_alive() for thread in threads):
            break  # a kill of an idle service shows nothing
        service.kill()
        service.start()
    [thread.join() for thread in threads]


def _judged(
    config: Config, root: pathlib.Path, workers: Sequence[Worker], num_kills: int
) -> Record:
    """Return whether everything that was acknowledged is there, and nothing else."""
    store = SessionStore.open(root)
    wrong, unsound, num_messages = [], [], 0
    for user in range(config.users):
        me = store.principal(_ACCOUNT, f"user{user}")
        mine = [worker for worker in workers if worker.user == user]
        for name in {n for worker in mine for n in worker.sent} | set(me.sessions()):
            sent = {w.number: w.sent[name] for w in mine if name in w.sent}
            found = [message.text for message in me.session(name).messages()]
            num_messages += len(found)
            wrong += [f"{name}: {words}" for words in misplaced(sent, found)]
            unsound += [f"{name}: {v}" for v in store.fsck(me.session(name))]
    store.close()
    faults = [worker.fault for worker in workers if worker.fault]
    leaks = [leak for worker in workers for leak in worker.leaks]
    repeats = sum(worker.num_repeats for worker in workers)
    sent = sum(len(texts) for worker in workers for texts in worker.sent.values())
    return Record(
        "acknowledged",
        "correctness",
        "what was acknowledged is there once, in order, and its user's alone",
        "host",
        checks=(
            Check("every client did all it had to", not faults, _first(faults)),
            Check("every message is there once, in order", not wrong, _first(wrong)),
            Check("as many as were sent", sent == num_messages, f"{num_messages}"),
            Check("no read of another scope", not leaks, _first(leaks)),
            Check("every session is sound", not unsound, _first(unsound)),
            Check("it was killed", num_kills == config.kills, f"{num_kills} times"),
        ),
        facts={"kills": num_kills, "repeated_requests": repeats, "messages": sent},
    )


def _timed(workers: Sequence[Worker], wall_s: float) -> Record:
    """Return how long requests took that no kill met."""
    measurements: dict[str, float] = {}
    verbs = sorted({verb for worker in workers for verb in worker.times_s})
    num_requests = 0
    for verb in verbs:
        times_s = sorted(
            itertools.chain.from_iterable(w.times_s.get(verb, ()) for w in workers)
        )
        num_requests += len(times_s)
        measurements |= _percentiles(verb, times_s)
    measurements["requests_per_s"] = round(num_requests / wall_s, 1)
    return Record(
        "latency",
        "measurement",
        "milliseconds from request to answer over loopback, kills and repeats left out",
        "host",
        repetitions=num_requests,
        measurements=measurements,
    )


def _percentiles(verb: str, times_s: Sequence[float]) -> Mapping[str, float]:
    if len(times_s) < 2:
        return {}
    cuts = statistics.quantiles(times_s, n=100, method="inclusive")
    return {
        f"{verb}_p50_ms": round(cuts[49] * 1e3, 2),
        f"{verb}_p99_ms": round(cuts[98] * 1e3, 2),
    }


def _recall(config: Config, root: pathlib.Path) -> Record:
    """Return what recall costs beside the query that it rests on."""
    store = SessionStore.open(root)
    me = store.principal(_ACCOUNT, "ann")
    _fill(store, config)
    unsynced = SessionStore.open(root, durability="process")
    you = unsynced.principal(_ACCOUNT, "ann")
    never = resident(lambda *_: ())  # cooled: each serves anew, and records it
    served = {"session": me.session("served"), "cooldown": never}
    lightly = {"session": you.session("unsynced"), "cooldown": never}
    held = me.session("held")
    measurements, checks = {}, []
    sql = "SELECT rowid, rank FROM words WHERE words MATCH ? ORDER BY rank LIMIT 8"
    for kind, query in (
        ("rare", f"n{config.items // 2}"),
        ("mixed", "w20 w400 w1500"),
        ("common", "w0 w1 w5"),
    ):
        match = search.match_of(query)
        with store.book(_ACCOUNT, "ann").read() as cursor:
            found: Rounds = interleave(
                {
                    "bare": lambda c=cursor, m=match: c.execute(sql, (m,)).fetchall(),
                    "items": lambda q=query: me.items.search(q),
                    "recall": lambda q=query: me.recall(q),
                    "recorded": lambda q=query: me.recall(q, **served),
                    "held_back": lambda q=query: me.recall(q, session=held),
                    "unsynced": lambda q=query: you.recall(q, **lightly),
                },
                config.rounds,
            )
        ratio = found.ratio("recall", "bare")
        measurements |= {
            f"{kind}_bare_query_ms": round(found.median("bare") * 1e3, 3),
            f"{kind}_search_ratio": round(found.ratio("items", "bare"), 2),
            f"{kind}_recall_ratio": round(ratio, 2),
        }
        for how in ("recorded", "held_back", "unsynced"):
            measurements |= {
                f"{kind}_{how}_recall_ms": round(found.median(how) * 1e3, 3),
                f"{kind}_{how}_recall_ratio": round(found.ratio(how, "bare"), 2),
            }
        name = f"recall of {kind} words under {config.max_ratio:g} bare queries"
        checks.append(Check(name, ratio < config.max_ratio, f"{ratio:.2f}"))
    store.close()
    unsynced.close()
    return Record(
        "recall",
        "measurement",
        f"recall over {config.items:,} items beside the bare FTS5 query; recorded: "
        "each serving made durable in a session's ledger; unsynced: without waiting "
        "for the disk; held_back: where most is cooled, and recalls are counted",
        "host",
        repetitions=config.rounds,
        checks=tuple(checks),
        measurements=measurements,
    )


def _fill(store: SessionStore, config: Config) -> None:
    """Keep items whose words are as frequent as those of a text (Zipf's law)."""
    rng = random.Random(config.seed)
    words = [f"w{i}" for i in range(3000)]
    weights = [1 / (i + 1) for i in range(len(words))]
    with store.book(_ACCOUNT, "ann").change() as cursor:
        for i in range(config.items):
            text = " ".join(rng.choices(words, weights, k=20))
            item_rows.write(cursor, f"memories/{i}", f"{text} n{i}", None)


def _first(wrong: Sequence[str]) -> str:
    return f"{len(wrong)} wrong: {wrong[0]}" if wrong else "none wrong"
