"""Forks writers out of one warmed process and kills them where they are told to die.

A line of JSON on stdin is one writer: {"root", "limits", "puts": [[start, stop], …],
"die": {"at": step, "how": "before" | "half"} | {"in_orbax_of": put, "share": 0.3}}.
A line of JSON on stdout is what became of it: its steps, the puts that it acknowledged,
and the signal it died of. The warmed process has imported Orbax and started no thread,
so what it forks is a process like any other.
"""

import json
import os
import signal
import sys
import threading
import time
import warnings

import numpy as np
import orbax.checkpoint  # noqa: F401  (warm: this is what takes seconds)

from kvmem import store
from kvmem.store.io import Disk

CHUNK, RECORD = 4, 96


def chunks(num: int, seed: int = 0):
    """The same chunks that the fixture `make_chunks` makes."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 49152, (num, CHUNK), dtype=np.int32)
    records = random.integers(0, 256, (num * CHUNK, RECORD), dtype=np.uint8)
    return store.chain_keys("m/f", tokens.ravel(), CHUNK), tokens, records


class Doomed(Disk):
    """Counts and tells its steps, and kills the process at one of them."""

    def __init__(self, say, die: dict):
        self._say, self._die = say, die
        self._count, self._lock = 0, threading.Lock()

    def perform(self, step, action):
        with self._lock:  # one step at a time, so that a number means one step
            number, self._count = self._count, self._count + 1
            self._say(step=step.verb, path=step.path.name)
            if number == self._die.get("at"):
                if self._die["how"] == "half":
                    action()
                    os.truncate(step.path, step.path.stat().st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            started = time.perf_counter()
            result = action()
            if step.verb == "orbax":
                self._say(orbax_s=time.perf_counter() - started)
            return result


def write(order: dict, say) -> None:
    """Be the writer: open, put, and say what was acknowledged."""
    most = max((stop for _, stop in order["puts"]), default=0)
    keys, tokens, records = chunks(most)
    disk = Doomed(say, order.get("die", {}))
    st = store.PageStore.open(
        order["root"], "m", "f", RECORD, CHUNK, io=disk, **order.get("limits", {})
    )
    for start, stop in order["puts"]:
        rows = records[start * CHUNK : stop * CHUNK]
        parent = keys[start - 1] if start else None
        st.put(keys[start:stop], tokens[start:stop], rows, parent)
        say(acked=stop)
    if order.get("gc"):
        st.gc()
        say(acked=most)
    st.close()


def run(order: dict) -> dict:
    """Fork one writer and return what it said and what it died of."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reading)

        def say(**word):
            os.write(writing, json.dumps(word).encode() + b"\n")

        status = 1
        try:
            write(order, say)
            status = 0
        except BaseException as error:
            say(error=repr(error))
        finally:
            os._exit(status)
    os.close(writing)
    words = listen(os.fdopen(reading), pid, order.get("die", {}))
    _, status = os.waitpid(pid, 0)
    return {"words": words, "status": os.waitstatus_to_exitcode(status)}


def listen(pipe, pid: int, die: dict) -> list[dict]:
    """Take a writer's words down, and kill it inside Orbax when that was asked."""
    words, saves, took = [], 0, 0.0
    for line in pipe:
        words.append(word := json.loads(line))
        took = word.get("orbax_s", took)
        if word.get("step") == "orbax":
            if saves == die.get("in_orbax_of"):
                time.sleep(die["share"] * took)
                os.kill(pid, signal.SIGKILL)
            saves += 1
    return words


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # jax dislikes forks; no thread of it runs here
    print("warm", flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
