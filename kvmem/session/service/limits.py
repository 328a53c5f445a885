"""Limits of the service: how much one request may bring, and how many a key may send.

    limiter = Limiter(rate=50.0)
    limiter.wait_s("key-1")  # 0.0: go on; else the seconds until the next may come

The law: each key has a bucket of its own, which holds one second's requests and fills
at the rate; a refused request takes nothing out of it, and no key can slow another.
"""

import dataclasses
import threading
import time
from collections.abc import Callable

__all__ = ["Limiter", "Limits"]


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the service takes."""

    max_body_nbytes: int = 1 << 20
    max_messages: int = 100  # of one batch
    requests_per_s: float = 50.0  # of one key


class Limiter:
    """A token bucket a key."""

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic):
        self._rate, self._clock = rate, clock
        self._lock = threading.Lock()
        self._buckets: dict[str, tuple[float, float]] = {}  # (tokens, at second)

    def wait_s(self, key: str) -> float:
        """Take one request of a key and return 0, or the seconds until one is there."""
        with self._lock:
            now = self._clock()
            full = max(self._rate, 1.0)
            tokens, at = self._buckets.get(key, (full, now))
            tokens = min(full, tokens + (now - at) * self._rate)
            if tokens < 1.0:
                self._buckets[key] = (tokens, now)
                return (1.0 - tokens) / self._rate
            self._buckets[key] = (tokens - 1.0, now)
            return 0.0
