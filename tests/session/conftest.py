"""What tests of sessions share: stores, a served one, and retrievers that are told.

The interpreter of vectors, the disk in memory and the deaths of a script are files
beside this one.
"""

import contextlib
import importlib.util
import itertools
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from kvmem.session import Hit, SessionStore
from kvmem.session.client import Client
from kvmem.session.keys import KeyRing
from kvmem.session.service import Limits, create_app


class Told:
    """A retriever that finds what it is told to, whoever asks."""

    def __init__(self, *uris: str):
        self.hits = [Hit(uri, f"text of {uri}", 0.5) for uri in uris]

    def search(self, principal, query, limit, actor, peer_scope):
        return self.hits[:limit]


class Served:
    """A running service, and clients of its users."""

    def __init__(self, root, url: str, store: SessionStore):
        self.root, self.url, self.store = root, url, store
        self._ring, self._clients = KeyRing(root), []

    def key(self, account: str, user: str) -> str:
        return self._ring.add(account, user)

    def client(self, account: str, user: str, **options) -> Client:
        client = Client(self.url, self.key(account, user), **options)
        self._clients.append(client)
        return client

    def close(self) -> None:
        for client in self._clients:
            client.close()


@contextlib.contextmanager
def serving(app) -> Iterator[str]:
    """Run an app on a free port of loopback; yield its address."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="warning", lifespan="on")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    while not server.started:
        time.sleep(0.005)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join()
    listener.close()


@pytest.fixture
def told():
    """The class of retrievers that find what they are told to."""
    return Told


@pytest.fixture
def store(tmp_path) -> Iterator[SessionStore]:
    """An empty store under the default rules."""
    store = SessionStore.open(tmp_path / "root")
    yield store
    store.close()


@pytest.fixture
def me(store):
    """One user of it."""
    return store.principal("lab", "ann")


@pytest.fixture
def served(tmp_path) -> Iterator[Served]:
    """A service of an empty root, with limits that no test meets by chance."""
    root = tmp_path / "served"
    store = SessionStore.open(root)
    limits = Limits(requests_per_s=10_000.0)
    with serving(create_app(store, KeyRing(root), limits)) as url:
        made = Served(root, url, store)
        yield made
        made.close()


def _load(name: str):
    """Return a module that stands beside this file."""
    full_name = f"kvmem_tests_session_{name}"
    if full_name not in sys.modules:
        path = Path(__file__).with_name(f"{name}.py")
        spec = importlib.util.spec_from_file_location(full_name, path)
        sys.modules[full_name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[full_name]


@pytest.fixture(scope="session")
def interpreter():
    """Return the module that runs vectors from their data."""
    return _load("interpreter")


@pytest.fixture(scope="session")
def memory_disk():
    """Return the module of the disk that knows what was synced."""
    return _load("memory_disk")


@pytest.fixture(scope="session")
def deaths():
    """Return the module that lets a script die at every step."""
    return _load("deaths")


@pytest.fixture(scope="session")
def turns():
    """Return the module of threads that take turns."""
    return _load("turns")


@pytest.fixture
def make_world(tmp_path, interpreter):
    """Make worlds of the vectors, each in a root of its own."""
    numbers = itertools.count()

    def make(rules: str = "kvmem", io=None):
        return interpreter.World(tmp_path / f"root{next(numbers)}", rules, io)

    return make


@pytest.fixture
def open_store(tmp_path):
    """Open the one root of this test, again and again."""

    def open_store(**more) -> SessionStore:
        return SessionStore.open(tmp_path / "root", **more)

    return open_store


@pytest.fixture
def ann(open_store):
    return open_store().principal("lab", "ann")
