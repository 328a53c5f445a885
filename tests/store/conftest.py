"""Builders of the store's tests: small random chunks, and processes of their own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from kvmem import store
from kvmem.store import segment

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
    monkeypatch.setattr(segment, "FILE_NBYTES", 1)


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
