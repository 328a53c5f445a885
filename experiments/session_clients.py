"""Clients that load a session service which is killed under them, and a judge.

The law: a client repeats what was not acknowledged, under the same key, until it is;
so in the end every message it ever sent is in its session once, and its own messages
are there in its own order. What it reads must be its user's, and what it recalls its
actor's.

    workers = [Worker(i, url, keys[i], plan) for i in range(32)]
"""

import collections
import dataclasses
import pathlib
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import httpx

from kvmem import errors
from kvmem.session import messages
from kvmem.session.capture import Capture
from kvmem.session.client import Client

__all__ = ["Plan", "Service", "Worker", "misplaced"]

_START_S = 60.0
_SHARE = {"append": 50, "recall": 25, "push": 10, "get": 10, "remember": 5}
_USER = re.compile(r"\buser-(\d+)\b")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What every client does."""

    operations: int  # of one client
    actors: int
    clients_per_user: int
    seed: int


class Service:
    """`kvmem sessions serve` as a process that can be killed and started again."""

    def __init__(self, root: pathlib.Path):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._root, self._process, self.num_kills = root, None, 0
        self.url = f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start the process and return when it answers."""
        command = [sys.executable, "-m", "kvmem.cli", "sessions", "serve"]
        options = ["--root", str(self._root), "--port", str(self._port)]
        self._process = subprocess.Popen(
            [*command, *options], stdout=subprocess.PIPE, text=True
        )
        if not self._process.stdout.readline():
            raise RuntimeError("the service did not start")

    def kill(self) -> None:
        """Kill the process where it stands (SIGKILL)."""
        self._process.kill()
        self.num_kills += 1
        self._reap()

    def stop(self) -> None:
        """End the process, its requests answered."""
        self._process.terminate()
        self._reap()

    def _reap(self) -> None:
        self._process.wait(timeout=_START_S)
        self._process.stdout.close()


class Worker:
    """One client: one key, one user, one actor."""

    def __init__(self, number: int, url: str, key: str, plan: Plan):
        self.number, self.plan = number, plan
        self.user = number // plan.clients_per_user
        self.actor = f"actor-{number % plan.actors}"
        self.sent: dict[str, list[str]] = collections.defaultdict(list)
        self.times_s: dict[str, list[float]] = collections.defaultdict(list)
        self.leaks: list[str] = []
        self.num_repeats, self.fault = 0, ""
        self._random = random.Random(plan.seed * 1009 + number)
        self._client = Client(url, key, actor=self.actor, timeout_s=30.0)
        self._capture, self._history = Capture(self._client), []
        self._me = f"user-{self.user} client-{number}"

    def run(self) -> None:
        """Do all operations, each until it is acknowledged; note what went wrong."""
        verbs = self._random.choices(
            list(_SHARE), list(_SHARE.values()), k=self.plan.operations
        )
        try:
            with self._client:
                for i, verb in enumerate(verbs):
                    getattr(self, f"_{verb}")(i)
        except Exception as error:
            self.fault = f"client {self.number}: {error!r}"

    def _append(self, i: int) -> None:
        """Append one to three messages, to the user's session or to one's own."""
        name = self._random.choice(["shared", f"own-{self.number}"])
        count = self._random.randint(1, 3)
        texts = [f"{self._me} operation-{i} part-{k}" for k in range(count)]
        batch = [{"role": "user", "content": text} for text in texts]
        session = self._client.session(name)
        key = f"client-{self.number}-{i}"
        self._until_done("append", lambda: session.append(batch, key=key))
        self.sent[name] += texts

    def _push(self, i: int) -> None:
        """Capture a history that grew by a question and an answer."""
        name = f"agent-{self.number}"
        for role in ("user", "assistant"):
            text = f"{self._me} {role} turn-{i}"
            self._history.append({"id": f"{i}-{role}", "role": role, "content": text})
            self.sent[name].append(text)
        job = lambda: self._capture.push(self._history, session=name)  # noqa: E731
        self._until_done("push", job)

    def _remember(self, i: int) -> None:
        """Keep a fact of the user, or of the actor."""
        text = f"{self._me} {self.actor} likes tea number {i}"
        peer = self._random.choice([None, self.actor])
        key = f"client-{self.number}-{i}"
        job = lambda: self._client.remember(text, peer=peer, key=key)  # noqa: E731
        self._until_done("remember", job)

    def _recall(self, i: int) -> None:
        """Ask for memories; they must be the user's, and the actor's or nobody's."""
        session = self._client.session(self._random.choice(["shared", "quiet"]))
        found = self._until_done(
            "recall",
            lambda: self._client.recall(
                f"tea number {self._random.randint(0, i)}",
                session=session,
                cooldown=messages(2),
            ),
        )
        self._judge([entry.text for entry in found.entries])
        self.leaks += [
            f"{self.actor} was told of {entry.peer}"
            for entry in found.entries
            if entry.peer not in (None, self.actor)
        ]

    def _get(self, i: int) -> None:
        """Read the end of the session that all of the user's clients write to."""
        session = self._client.session("shared")
        clock = self._until_done("clock", lambda: session.clock)
        since = max(0, clock - 20)
        found = self._until_done("get", lambda: session.messages(since))
        self._judge([message.text for message in found])

    def _judge(self, texts: Sequence[str]) -> None:
        """Note every text that says it is another user's."""
        self.leaks += [
            f"user {self.user} was told: {text}"
            for text in texts
            if {int(n) for n in _USER.findall(text)} != {self.user}
        ]

    def _until_done[T](self, verb: str, job: Callable[[], T]) -> T:
        """Repeat a job until it is acknowledged; time it if it was the first."""
        repeats = 0
        while True:
            start = time.perf_counter()
            try:
                done = job()
            except (httpx.TransportError, errors.Busy):
                repeats += 1
                time.sleep(min(0.05 * repeats, 0.5))
                continue
            if not repeats:
                self.times_s[verb].append(time.perf_counter() - start)
            self.num_repeats += repeats
            return done


def misplaced(
    sent: Mapping[int, Sequence[str]], found: Sequence[str]
) -> tuple[str, ...]:
    """Return what is wrong with a session, in words; () when nothing is.

    Args:
        sent: client -> the texts it sent there, in its order, all acknowledged.
        found: the texts of the session, in the log's order.
    """
    counts = collections.Counter(found)
    expected = [text for texts in sent.values() for text in texts]
    wrong = [f"{t!r} is there {counts[t]} times" for t in expected if counts[t] != 1]
    wrong += [f"{t!r} was sent by nobody" for t in counts.keys() - set(expected)]
    place = {text: i for i, text in enumerate(found)}
    for client, texts in sent.items():
        places = [place[text] for text in texts if text in place]
        if places != sorted(places):
            wrong.append(f"messages of client {client} are out of order")
    return tuple(wrong)
