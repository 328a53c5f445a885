"""What the service counts, as Prometheus reads it (text format 0.0.4).

    metrics = Metrics()
    metrics.answered("recall", 200, 0.004)
    metrics.text()  # kvmem_requests_total{verb="recall",status="200"} 1 ...

The law: a label is a verb, a status or a recall's status, from a list of the service's
own; no account, user, session, actor or text can become one.
"""

import threading
from collections import Counter

__all__ = ["MEDIA_TYPE", "Metrics"]

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class Metrics:
    """Counters of one process, safe among threads."""

    def __init__(self):
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._recalls: Counter[str] = Counter()
        self._messages = 0
        self._buckets: Counter[tuple[str, float]] = Counter()
        self._seconds: Counter[str] = Counter()

    def answered(self, verb: str, status: int, seconds: float) -> None:
        """Count one answer and how long it took."""
        with self._lock:
            self._requests[verb, status] += 1
            self._seconds[verb] += seconds
            for bound in _BOUNDS_S:
                self._buckets[verb, bound] += seconds <= bound

    def recalled(self, status: str) -> None:
        """Count one recall by its status."""
        with self._lock:
            self._recalls[status] += 1

    def appended(self, num_messages: int) -> None:
        """Count messages that were acknowledged."""
        with self._lock:
            self._messages += num_messages

    def text(self) -> str:
        """Return everything that was counted."""
        with self._lock:
            return "\n".join([*self._counts(), *self._histogram(), ""])

    def _counts(self) -> list[str]:
        lines = _head("kvmem_requests_total", "counter", "Answers by verb and status.")
        lines += [
            f'kvmem_requests_total{{verb="{verb}",status="{status}"}} {count}'
            for (verb, status), count in sorted(self._requests.items())
        ]
        lines += _head("kvmem_recalls_total", "counter", "Recalls by status.")
        lines += [
            f'kvmem_recalls_total{{status="{status}"}} {count}'
            for status, count in sorted(self._recalls.items())
        ]
        name = "kvmem_messages_appended_total"
        lines += _head(name, "counter", "Messages that were acknowledged.")
        return [*lines, f"{name} {self._messages}"]

    def _histogram(self) -> list[str]:
        name = "kvmem_request_seconds"
        lines = _head(name, "histogram", "Seconds from a request's head to its answer.")
        totals: Counter[str] = Counter()
        for (verb, _), count in self._requests.items():
            totals[verb] += count
        for verb in sorted(totals):
            lines += [
                f'{name}_bucket{{verb="{verb}",le="{bound}"}} '
                f"{self._buckets[verb, bound]}"
                for bound in _BOUNDS_S
            ]
            lines += [
                f'{name}_bucket{{verb="{verb}",le="+Inf"}} {totals[verb]}',
                f'{name}_sum{{verb="{verb}"}} {self._seconds[verb]:.6f}',
                f'{name}_count{{verb="{verb}"}} {totals[verb]}',
            ]
        return lines


def _head(name: str, kind: str, words: str) -> list[str]:
    return [f"# HELP {name} {words}", f"# TYPE {name} {kind}"]
