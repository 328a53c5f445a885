"""Builders of the store's tests: small random chunks, and processes of their own."""

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from kvmem import store
from kvmem.store import bucket, row_files

CHUNK, RECORD = 4, 96


class Chunks(NamedTuple):
    """Tokens, their keys and random records; n chunks."""

    keys: tuple[store.PageKey, ...]
    tokens: np.ndarray  # i32[n, CHUNK]
    records: np.ndarray  # u8[n * CHUNK, RECORD]

    def part(self, start: int, stop: int) -> "Chunks":
        rows = slice(start * CHUNK, stop * CHUNK)
        return Chunks(
            self.keys[start:stop], self.tokens[start:stop], self.records[rows]
        )


@pytest.fixture(scope="session")
def make_chunks() -> Callable[..., Chunks]:
    def make(num: int, seed: int = 0) -> Chunks:
        random = np.random.default_rng(seed)
        tokens = random.integers(0, 49152, (num, CHUNK), dtype=np.int32)
        records = random.integers(0, 256, (num * CHUNK, RECORD), dtype=np.uint8)
        keys = store.chain_keys("m/f", tokens.ravel(), CHUNK)
        return Chunks(keys, tokens, records)

    return make


@pytest.fixture
def open_store(tmp_path: Path) -> Callable[..., store.PageStore]:
    """Open the test's root with small sizes; every store is closed at the end."""
    opened = []

    def open_(model_id="m", format_id="f", **overrides) -> store.PageStore:
        sizes = {"record_nbytes": RECORD, "chunk_tokens": CHUNK} | overrides
        opened.append(
            store.PageStore.open(tmp_path / "root", model_id, format_id, **sizes)
        )
        return opened[-1]

    yield open_
    for each in opened:
        each.close()


@pytest.fixture
def a_file_a_row(monkeypatch):
    """Rows as small as these would share one file, and damage needs its own."""
    monkeypatch.setattr(row_files, "FILE_NBYTES", 1)


@pytest.fixture(scope="session")
def run_python(repo_root: Path) -> Callable[..., str]:
    """Run code in a fresh process and return what it printed."""

    def run(code: str, **environment: str | None) -> str:
        env = dict(os.environ) | {"PYTHONPATH": str(repo_root)}
        for name, value in environment.items():
            env.pop(name, None)
            if value is not None:
                env[name] = value
        command = [sys.executable, "-W", "error", "-c", code]
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout

    return run


class Bucket(NamedTuple):
    """A bucket of the test's own on a real S3 server."""

    url: str
    endpoint: str
    region: str = "us-east-1"

    @property
    def place(self) -> dict[str, str]:
        """How a store is told where the server is."""
        return {"endpoint": self.endpoint, "region": self.region}

    def objects(self):
        """Return the bucket's objects, seen without any store."""
        return bucket.open_bucket(self.url, **self.place)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Return the address of moto's S3 server, in a process of its own, puts in turn."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("s3_server.py")
    command = [sys.executable, str(script), str(port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quiet) as server:
        endpoint = f"http://127.0.0.1:{port}"
        try:
            for _ in range(300):
                with contextlib.suppress(OSError), urllib.request.urlopen(endpoint):
                    break
                assert server.poll() is None, "the S3 server did not start"
                time.sleep(0.1)
            yield endpoint
        finally:
            server.terminate()


@pytest.fixture
def s3(s3_server: str, monkeypatch) -> Bucket:
    """Make an empty bucket; credentials stand in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    name = f"kv-{secrets.token_hex(6)}"
    asked = urllib.request.Request(f"{s3_server}/{name}", method="PUT")
    urllib.request.urlopen(asked).close()
    return Bucket(f"s3://{name}/some/prefix", s3_server)


@pytest.fixture
def open_objects(s3: Bucket) -> Iterator[Callable[..., store.ObjectStore]]:
    """Open the test's bucket with small sizes; every store is closed at the end."""
    opened = []

    def open_(model_id="m", format_id="f", **overrides) -> store.ObjectStore:
        sizes = {"record_nbytes": RECORD, "chunk_tokens": CHUNK} | overrides
        opened.append(
            store.ObjectStore.open(s3.url, model_id, format_id, **sizes | s3.place)
        )
        return opened[-1]

    yield open_
    for each in opened:
        each.close()
