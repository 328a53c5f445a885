"""The object store: `PageStore`'s verbs on s3://, without a folder and without Orbax.

    _store.json                              see object_root.py
    _writer.json                             the one writer's lease
    <model_id>/<format_id>/…                 see object_segment.py

The law: what `put` returned from is on the server, committed by one object put last;
one process writes, by lease, and a second one that believes itself alone is refused at
its commit. A chunk is served only for its tokens and with its bytes. Nothing read ever
deletes anything.

    with ObjectStore.open("s3://bucket/kv", model_id, format_id, 46_080) as store:
        store.put(keys, tokens, records)

Objects of a writer that died before its commit are never read, and swept by the next.
With a budget, room is made as on a disk; without one, what a bucket costs is its
owner's to limit.
"""

from kvmem.errors import ConfigError, StoreLocked, say
from kvmem.store import bucket, object_root, root_folder
from kvmem.store.bucket import Bucket
from kvmem.store.bucket_shelf import BucketShelf
from kvmem.store.segment import Facts
from kvmem.store.segment_store import SegmentStore, check_limits
from kvmem.store.shelf import extend
from kvmem.store.writer_lease import WriterLease, take

LEASE_S = 60.0
_WRITE_S = 300.0  # the longest that one write may hold up the next


class ObjectStore(SegmentStore):
    """Chunks of one model id and format id in a bucket; make it with `open`."""

    def __init__(
        self,
        objects: Bucket,
        facts: Facts,
        lease: WriterLease | None,
        max_nbytes: int | None = None,
    ):
        """Read every manifest; `open` has checked the root and taken the lease."""
        self.root, self._bucket, self._lease = objects.url, objects, lease
        shelf = BucketShelf(objects, facts, lease)
        super().__init__(shelf, max_nbytes, _WRITE_S, None)
        self.swept = shelf.sweep(self._index) if lease else ()

    @classmethod
    def open(
        cls,
        root: str,
        model_id: str,
        format_id: str,
        record_nbytes: int,
        chunk_tokens: int = 16,
        read_only: bool = False,
        *,
        max_nbytes: int | None = None,
        endpoint: str | None = None,
        region: str | None = None,
        lease_s: float = LEASE_S,
    ) -> "ObjectStore":
        """Open a bucket's prefix for this model and format, making it if it is new.

        Args:
            root: s3://bucket/prefix.
            model_id: whose bytes (weights, tokenizer).
            format_id: what the bytes mean.
            record_nbytes: bytes of one token's record.
            chunk_tokens: tokens a chunk; belongs to the root.
            read_only: take no lease and put nothing.
            max_nbytes: what the objects of this model and format may take together,
                but for some hundred bytes that a segment leaves when it goes.
            endpoint: address of the server, None for Amazon's.
            region: of the bucket; None: the environment's.
            lease_s: seconds after which a silent writer may be taken over.

        Raises:
            StoreLocked: another writer has the root open.
            FormatMismatch: the root holds another chunk or record size.
            ConfigError: the server has no conditional put, or no such scheme.
        """
        facts = Facts(model_id, format_id, int(chunk_tokens), int(record_nbytes))
        root_folder.check_facts(facts)
        check_limits(max_nbytes=max_nbytes, lease_s=lease_s)
        if not 0 < lease_s < float("inf"):
            raise ConfigError(
                say(
                    f"lease_s={lease_s}",
                    "a lease of no time holds nothing, and an endless one outlives a "
                    "writer that died",
                    f"Use seconds above 0, {LEASE_S:g} by default",
                )
            )
        objects = bucket.open_bucket(root, endpoint, region)
        if read_only:
            object_root.check(objects, chunk_tokens)
            return cls(objects, facts, None)
        object_root.make(objects, chunk_tokens)
        lease = take(objects, lease_s)
        try:
            return cls(objects, facts, lease, max_nbytes)
        except BaseException:
            lease.release()
            raise

    @property
    def writable(self) -> bool:
        """Say whether this object holds the writer's lease, as far as it knows."""
        return self._lease is not None and self._lease.is_held

    def put_beside(self, name: str, data: bytes) -> None:
        """Put an object that no segment lists, unless it stands there already."""
        self._require_writer("put")
        self._lease.renew()
        if self._bucket.read(name) != data:
            self._bucket.put(name, data)

    def _let_go(self) -> None:
        self._lease.release()

    def _before_writing(self) -> None:
        self._require_writer("put")
        self._lease.renew()
        if self._shelf.is_unsure:  # a commit whose answer was lost may have stood
            extend(self._index, self._shelf)

    def _require_writer(self, verb: str) -> None:
        if not self.writable:
            raise StoreLocked(
                say(
                    f"{verb} into {self.root}, opened read-only, closed or taken over",
                    "only the holder of the writer's lease writes",
                    "Open the store with read_only=False and put before close",
                )
            )
