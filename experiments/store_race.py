"""The sides of the store's races: kvmem's page store, TensorStore, Orbax and a dict.

The law: a side's clock runs from its bytes in memory to its bytes on the disk, or back;
making roots, keys and folders, and clearing them away, is nobody's time. TensorStore
syncs what it writes, as it does by default, and reads through a handle that is open.

    jobs = BatchRace(Sizes(chunks=91, record_nbytes=46_080), folder).jobs()
"""

import dataclasses
import itertools
import pathlib
import shutil
import time
from collections.abc import Callable, Sequence

import numpy as np
import tensorstore

from experiments.measure import Timed
from kvmem import store
from kvmem.store import durable, orbax_save, row_files

__all__ = ["BatchRace", "Sizes", "conversation_jobs", "miss_jobs", "open_jobs"]

Jobs = dict[str, Callable[[], object]]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How many chunks of what size.

    Args:
        chunks: of a batch.
        record_nbytes: bytes of a token's record.
        chunk_tokens: tokens of a chunk.
    """

    chunks: int
    record_nbytes: int
    chunk_tokens: int = 16

    @property
    def row_nbytes(self) -> int:
        """Bytes of a chunk's records."""
        return self.chunk_tokens * self.record_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return self.chunks * self.row_nbytes


class BatchRace:
    """One batch of records, put and got by the store and by TensorStore."""

    def __init__(self, sizes: Sizes, folder: pathlib.Path):
        """Make the records and leave one copy on each side to be read."""
        self.sizes, self._folder = sizes, folder
        self._rows = _random_rows(sizes)
        self._tokens = _tokens(sizes)
        self._names = (f"text-{n}" for n in itertools.count())
        self._held, self._keys = self._put(folder / "held")
        self._array = self._write_rows(folder / "array")
        self._held.close()
        self.equal = {"store": self._got_equal(), "tensorstore": self._read_equal()}

    def jobs(self) -> Jobs:
        """Return every side's job."""
        return {
            "store_put": self._put_once,
            "tensorstore_write": self._write_once,
            "tensorstore_write_as_stored": self._write_as_stored,
            "store_get": self._get,
            "tensorstore_read": lambda: self._array.read().result(),
            "checksums": lambda: [durable.digest(row) for row in self._rows],
        }

    def _put(self, root: pathlib.Path) -> tuple[store.PageStore, tuple]:
        keys = store.chain_keys(next(self._names), self._tokens, 16)
        held = _open(root, self.sizes)
        held.put(keys, self._tokens, self._records)
        return held, keys

    def _put_once(self) -> Timed:
        keys = store.chain_keys(next(self._names), self._tokens, 16)
        root = self._folder / "put"
        with _open(root, self.sizes) as held:
            started = time.perf_counter()
            held.put(keys, self._tokens, self._records)
            took = time.perf_counter() - started
        shutil.rmtree(root)
        return Timed(took)

    def _write(
        self, path: pathlib.Path, rows: np.ndarray, file_shape: Sequence[int]
    ) -> tensorstore.TensorStore:
        array = tensorstore.open(
            {
                "driver": "zarr3",
                "kvstore": {"driver": "file", "path": str(path)},
                "metadata": {
                    "shape": list(rows.shape),
                    "data_type": "uint8",
                    "chunk_grid": {
                        "name": "regular",
                        "configuration": {"chunk_shape": list(file_shape)},
                    },
                    "codecs": [{"name": "bytes"}],
                },
            },
            create=True,
        ).result()
        array.write(rows).result()
        return array

    def _write_rows(self, path: pathlib.Path) -> tensorstore.TensorStore:
        """Write the array of rows, a file a row."""
        return self._write(path, self._rows, [1, self.sizes.row_nbytes])

    def _write_once(self) -> Timed:
        path = self._folder / "write"
        started = time.perf_counter()
        self._write_rows(path)
        took = time.perf_counter() - started
        shutil.rmtree(path)
        return Timed(took)

    def _write_as_stored(self) -> Timed:
        """Write the same bytes in the arrays and files that a segment has."""
        path = self._folder / "as_stored"
        per_file = row_files.rows_per_file(*self._rows.shape)
        parts = row_files.cut(len(self._rows), per_file)
        started = time.perf_counter()
        for part in parts:
            flat = self._rows[part.start : part.stop].reshape(-1)
            file_nbytes = part.rows_per_file * self.sizes.row_nbytes
            self._write(path / part.name, flat, [file_nbytes])
        took = time.perf_counter() - started
        shutil.rmtree(path)
        return Timed(took)

    def _get(self) -> store.GetResult:
        return self._held.get(self._keys, self._tokens)

    def _got_equal(self) -> bool:
        found = self._get()
        same = np.array_equal(found.records, self._records)
        return same and found.num_hit == self.sizes.chunks

    def _read_equal(self) -> bool:
        return np.array_equal(self._array.read().result(), self._rows)

    @property
    def _records(self) -> np.ndarray:
        return self._rows.reshape(-1, self.sizes.record_nbytes)


def conversation_jobs(sizes: Sizes, folder: pathlib.Path) -> Jobs:
    """Return a put of many chunks, and Orbax saving their bytes as one array."""
    rows, tokens = _random_rows(sizes), _tokens(sizes)
    records = rows.reshape(-1, sizes.record_nbytes)
    keys = store.chain_keys("conversation", tokens, sizes.chunk_tokens)
    folder.mkdir(parents=True, exist_ok=True)

    def put() -> Timed:
        with _open(folder / "put", sizes) as held:
            started = time.perf_counter()
            done = held.put(keys, tokens, records)
            took = time.perf_counter() - started
        assert done.written == sizes.chunks
        shutil.rmtree(folder / "put")
        return Timed(took)

    def stacked() -> Timed:
        started = time.perf_counter()
        stacked = {"records": (rows.reshape(-1), rows.nbytes)}
        orbax_save.save(folder / "stacked", stacked)
        took = time.perf_counter() - started
        shutil.rmtree(folder / "stacked")
        return Timed(took)

    return {"put_of_chunks": put, "orbax_stacked": stacked}


def miss_jobs(sizes: Sizes, lookups: int, folder: pathlib.Path) -> Jobs:
    """Return look-ups of keys that all miss: one by one, as one get, in a dict."""
    tokens = _tokens(sizes)
    keys = store.chain_keys("held", tokens, sizes.chunk_tokens)
    held = _open(folder, sizes)
    held.put(keys, tokens, _random_rows(sizes).reshape(-1, sizes.record_nbytes))
    asked = np.arange(lookups * sizes.chunk_tokens, dtype=np.int32)
    missing = store.chain_keys("missing", asked, sizes.chunk_tokens)
    table = dict.fromkeys(keys)
    held.close()
    return {
        "contains_one_by_one": lambda: [held.contains([key]) for key in missing][0],
        "get_of_all": lambda: held.get(missing, asked).num_hit,
        "dict_lookups": lambda: [table.get(key) for key in missing][0],
    }


def open_jobs(chunks: Sequence[int], segment_chunks: int, folder: pathlib.Path) -> Jobs:
    """Return a job that opens a root for each number of chunks."""
    jobs: Jobs = {}
    for total in chunks:
        root = folder / str(total)
        sizes = Sizes(segment_chunks, record_nbytes=16)
        rows = _random_rows(sizes).reshape(-1, sizes.record_nbytes)
        with _open(root, sizes) as held:
            for number in range(total // segment_chunks):
                tokens = _tokens(sizes)
                held.put(
                    store.chain_keys(f"text-{number}", tokens, sizes.chunk_tokens),
                    tokens,
                    rows,
                )

        def job(root=root, sizes=sizes, total=total) -> None:
            opened = _open(root, sizes, read_only=True)
            assert opened.stats().num_chunks == total // segment_chunks * segment_chunks

        jobs[f"open_{total}_chunks"] = job
    return jobs


def _open(root: pathlib.Path, sizes: Sizes, **how) -> store.PageStore:
    return store.PageStore.open(
        root, "model", "format", sizes.record_nbytes, sizes.chunk_tokens, **how
    )


def _tokens(sizes: Sizes) -> np.ndarray:
    return np.arange(sizes.chunks * sizes.chunk_tokens, dtype=np.int32)


def _random_rows(sizes: Sizes) -> np.ndarray:
    shape = sizes.chunks, sizes.row_nbytes
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)
