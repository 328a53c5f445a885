"""The writer's lease: who may write to an object store, and until when.

    _writer.json    {"holder", "nonce", "until", "seconds"}, by conditional puts only

The law: at one time one lease is valid. A dead writer's runs out by itself and is then
taken over; a live one's is renewed by its puts. Clocks of machines differ, so a lease
alone proves nothing: a commit is also refused by the segment number that it needs.

    lease = take(bucket, lease_s=60.0)
    lease.renew()          # StoreLocked if another writer has taken over
    lease.release()
"""

import contextlib
import json
import os
import secrets
import socket
import time

from kvmem.errors import StoreLocked, say
from kvmem.store.bucket import Bucket

NAME = "_writer.json"
_SKEW_S = 60.0  # clocks that differ by more are wrong


def take(bucket: Bucket, lease_s: float) -> "WriterLease":
    """Become the bucket's writer, or raise StoreLocked at once naming who is."""
    data, generation = bucket.read_versioned(NAME)
    held = _unpack(data)
    if held["until"] > time.time():
        raise StoreLocked(_locked(bucket, held))
    lease = WriterLease(bucket, lease_s)
    if not lease.put(generation, lease_s):
        raise StoreLocked(_locked(bucket, _unpack(bucket.read(NAME))))
    return lease


class WriterLease:
    """One writer's lease on a bucket; make it with `take`."""

    def __init__(self, bucket: Bucket, lease_s: float):
        """Hold nothing yet."""
        self.lease_s = lease_s
        self._bucket = bucket
        self._generation: bytes | None = None
        self._until = 0.0

    @property
    def is_held(self) -> bool:
        """Say whether it was taken and neither released nor found lost."""
        return self._generation is not None

    def renew(self) -> None:
        """Prolong the lease when half of it is over; StoreLocked if it was lost."""
        if self._generation and self._until - time.time() > self.lease_s / 2:
            return
        if self._generation and self.put(self._generation, self.lease_s):
            return
        self.lose()
        raise StoreLocked(_locked(self._bucket, _unpack(self._bucket.read(NAME))))

    def confirm(self) -> None:
        """Ask the server whether the lease stands; StoreLocked if it was lost."""
        data, generation = self._bucket.read_versioned(NAME)
        if generation != self._generation:
            self.lose()
            raise StoreLocked(_locked(self._bucket, _unpack(data)))

    def lose(self) -> None:
        """Know that another writer has taken over; its lease is left alone."""
        self._generation = None

    def release(self) -> None:
        """Let the next writer in at once; a second call does nothing.

        Where the server does not answer, the lease runs out by itself.
        """
        if self._generation:
            with contextlib.suppress(OSError):
                self.put(self._generation, 0.0)
            self._generation = None

    def put(self, generation: bytes, lease_s: float) -> bool:
        """Write the lease over the generation that was seen; say whether it stood."""
        self._until = time.time() + lease_s if lease_s else 0.0
        said = {
            "holder": f"process {os.getpid()} on {socket.gethostname()}",
            "nonce": secrets.token_hex(8),
            "until": self._until,
            "seconds": self.lease_s,
        }
        data = json.dumps(said).encode() + b"\n"
        self._generation = self._bucket.replace(NAME, data, generation)
        return self._generation is not None


def _unpack(data: bytes | None) -> dict:
    """Return what a lease says; one that cannot be read has run out."""
    try:
        said = json.loads(data or b"")
        until, seconds = float(said["until"]), float(said.get("seconds", "inf"))
        return {"holder": str(said["holder"]), "until": until, "seconds": seconds}
    except (ValueError, KeyError, TypeError):
        return {"holder": "nobody", "until": 0.0, "seconds": 0.0}


def _locked(bucket: Bucket, held: dict) -> str:
    left = max(0.0, held["until"] - time.time())
    return say(
        f"the writer's lease on {bucket.url}",
        f"a root has one writer at a time, and {held['holder']} is it "
        f"for {left:.0f} s more unless it renews",
        "Close that store first, wait, or open this one with read_only=True"
        if left <= held["seconds"] + _SKEW_S
        else f"Its clock or this one is wrong, for it asked for {held['seconds']:g} s: "
        f"mend the clock, or delete {NAME} when that writer is gone",
    )
