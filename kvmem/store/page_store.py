"""The page store: token records on disk under chained keys, and their tokens with them.

    <root>/_store.json, _writer.lock         see root_folder.py
           <model_id>/<format_id>/<segment>/   see segment.py

The law: a chunk is served only if its key is held, its tokens equal those asked for
and its bytes have the checksum they were written with; else the answer is a miss that
says why. What `put` returned from is durable. Nothing read ever deletes anything.

    with PageStore.open(root, model_id, format_id, record_nbytes=46080) as store:
        store.put(keys, tokens, records)
        hit = store.get(keys, tokens)     # hit.records u8[n, record], hit.reason

One process writes, and its lock dies with it; readers take no lock. POSIX only.
"""

from pathlib import Path

from kvmem.errors import ConfigError, StoreLocked, say
from kvmem.store import bucket, durable, root_folder
from kvmem.store.folder_shelf import FolderShelf
from kvmem.store.io import DISK, Disk
from kvmem.store.segment import Facts
from kvmem.store.segment_store import SegmentStore, check_limits
from kvmem.store.shared_lock import LockShare


class PageStore(SegmentStore):
    """Chunks of one model id and format id under one root; make it with `open`."""

    def __init__(
        self,
        root: Path,
        facts: Facts,
        lock: durable.WriterLock | LockShare | None,
        disk: Disk = DISK,
        max_nbytes: int | None = None,
        lease_s: float = 300.0,
        deadline_s: float = 30.0,
    ):
        """Rebuild the index; `open` has checked root and facts and taken the lock."""
        self.root, self._lock = root, lock
        self._folder = root / facts.model_id / facts.format_id
        shelf = FolderShelf(self._folder, facts, disk)
        super().__init__(shelf, max_nbytes, lease_s, deadline_s)
        self.swept = shelf.sweep(self._index) if lock else ()

    @classmethod
    def open(
        cls,
        root: str | Path,
        model_id: str,
        format_id: str,
        record_nbytes: int,
        chunk_tokens: int = 16,
        read_only: bool = False,
        *,
        max_nbytes: int | None = None,
        io: Disk | None = None,
        lease_s: float = 300.0,
        deadline_s: float = 30.0,
        lock: LockShare | None = None,
    ) -> "PageStore":
        """Open `root` for this model and format, making it if it is new.

        Args:
            root: the store's folder; a new one is made 0700.
            model_id: whose bytes (weights, tokenizer); safe as a file name.
            format_id: what the bytes mean; safe as a file name.
            record_nbytes: bytes of one token's record.
            chunk_tokens: tokens a chunk; belongs to the root.
            read_only: take no lock and make nothing.
            max_nbytes: what the files of this model and format may take together,
                whatever else the root holds: a root of three models opened with equal
                budgets takes three times as much. Room is made by eviction, least
                recently used and suffixes first.
            io: what every change of the disk goes through.
            lease_s: the longest that one write may hold up the next.
            deadline_s: the longest that a `get` waits, unless it says otherwise.
            lock: a share of the root's lock, where this writer opens several stores of
                one root; given back by `close`.

        Raises:
            StoreLocked: another writer has the root open.
            FormatMismatch: the root holds another chunk or record size.
        """
        refuse_url(root)
        facts = Facts(model_id, format_id, int(chunk_tokens), int(record_nbytes))
        root_folder.check_facts(facts)
        check_limits(max_nbytes=max_nbytes, lease_s=lease_s, deadline_s=deadline_s)
        root = Path(root).absolute()
        if read_only:
            root_folder.check(root, chunk_tokens)
            return cls(root, facts, None, deadline_s=deadline_s)
        disk = io or DISK
        lock = lock or root_folder.take(root, chunk_tokens, disk)
        try:
            durable.make_folder(root / model_id, disk)
            durable.make_folder(root / model_id / format_id, disk)
            return cls(root, facts, lock, disk, max_nbytes, lease_s, deadline_s)
        except BaseException:
            lock.release()
            raise

    @property
    def writable(self) -> bool:
        """Say whether this object holds the writer's lock."""
        return self._lock is not None and self._lock.is_held

    def _let_go(self) -> None:
        self._lock.release()

    def _before_writing(self) -> None:
        self._require_writer("put")
        self._lock.check()

    def _require_writer(self, verb: str) -> None:
        if not self.writable:
            raise StoreLocked(
                say(
                    f"{verb} of {self.root}, opened read-only or closed",
                    "only the holder of the writer's lock writes",
                    "Open the store with read_only=False and call before close",
                )
            )


def refuse_url(root: str | Path) -> None:
    """Raise if the root is a URL: Orbax would write a folder of that name."""
    if bucket.scheme_of(root):
        raise ConfigError(
            say(
                f"a page store at {root}",
                "a page store is a folder, and a URL never reaches Orbax",
                "Use store.open_root, which keeps s3:// on its server",
            )
        )
