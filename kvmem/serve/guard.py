"""One caller at a time, and a step that is whole or not trusted any more.

An engine's verbs change its books on the host and its pool on the device together. The
law: an interrupt waits for the end of a verb; a second thread is refused; and an engine
whose step did not come to its end says so at the next call instead of going on.

    with guard("step"):
        ...
"""

import contextlib
import signal
import threading
from collections.abc import Iterator

from kvmem import errors

__all__ = ["Guard", "interrupts_deferred"]


class Guard:
    """What stands before every verb of one engine."""

    def __init__(self):
        self._lock = threading.Lock()
        self._broken: str | None = None

    @contextlib.contextmanager
    def __call__(self, verb: str, asks_first: bool = False) -> Iterator[None]:
        """Enter a verb.

        Args:
            verb: its name, for messages.
            asks_first: its `KVMemError`s are refusals made before anything changed.

        Raises:
            Busy: another thread is inside.
            CorruptPage: an earlier verb broke off half-way.
        """
        with interrupts_deferred():
            if not self._lock.acquire(blocking=False):
                raise errors.Busy(
                    errors.say(
                        f"{verb} while another thread is inside this engine",
                        "one thread drives an engine",
                        "Call it from one thread, or lock around every call",
                    )
                )
            try:
                self._require_whole(verb)
                yield
            except BaseException as error:
                refused = asks_first and isinstance(error, errors.KVMemError)
                if self._broken is None and not refused:
                    self._broken = f"{verb} ended with {type(error).__name__}: {error}"
                raise
            finally:
                self._lock.release()

    def _require_whole(self, verb: str) -> None:
        if self._broken is not None:
            raise errors.CorruptPage(
                errors.say(
                    f"{verb} after a verb that broke off",
                    f"books and pages may disagree since {self._broken}",
                    "Make a new engine; what its store acknowledged is there",
                )
            )


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block; the main thread alone receives it."""
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(before):
        yield
        return
    came: list[tuple] = []
    signal.signal(signal.SIGINT, lambda *arguments: came.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            before(*came[0])
