"""How a command ends: its exit code, and what a person is told on the way out.

The law of exit codes, everywhere: 0 the job was done; 1 the run's own check failed, or
damage was found, or it was interrupted; 2 the input was bad, with a message in three
beats. A traceback is shown with --debug only. What was printed is flushed here, so that
an output that cannot be written ends a command in words too.

    sys.exit(guard(lambda: verb.run(arguments), debug=arguments.debug))

Whoever only asks for help loads this file: it imports next to nothing.
"""

import contextlib
import errno
import os
import re
import sys
import traceback
from collections.abc import Callable

from kvmem import errors

__all__ = ["BAD_INPUT", "CHECK_FAILED", "DONE", "guard", "verdict"]

DONE, CHECK_FAILED, BAD_INPUT = 0, 1, 2

_NO_BACKEND = re.compile(r"Unable to initialize backend|Unknown backend")
_STARTS_BACKENDS = "xla_bridge.py"  # where jax starts them, or asserts that it could
_CURES = {
    errno.ENOSPC: "Free space there, or give a path on another disk",
    errno.EDQUOT: "Free space within the quota, or give a path on another disk",
    errno.EROFS: "Give a path on a disk that can be written",
    errno.EACCES: "Give a path that this user may read and write",
    errno.EPERM: "Give a path that this user may read and write",
    errno.EMFILE: "Raise the limit of open files (ulimit -n)",
    errno.ENOMEM: "Use a machine with more memory, or a smaller size",
    errno.ECONNREFUSED: "Check that the server is up and its address right",
}


def guard(job: Callable[[], int], debug: bool) -> int:
    """Run a command's job and return its exit code, errors told in words."""
    _spell_what_has_no_code()
    try:
        return _flushed(job)
    except BrokenPipeError:  # the reader of our output has seen enough
        _abandon_stdout()
        return DONE
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc()
        code, words = verdict(error)
    try:
        _flush()
    except OSError:
        _abandon_stdout()
    with contextlib.suppress(OSError):
        print(f"kvmem: {words}", file=sys.stderr)
    return code


def verdict(error: BaseException) -> tuple[int, str]:
    """Return the exit code of an error and what a person is told."""
    if isinstance(error, KeyboardInterrupt):
        return CHECK_FAILED, "interrupted"
    if isinstance(error, errors.KVMemError):
        damage = isinstance(error, errors.CorruptPage)
        return CHECK_FAILED if damage else BAD_INPUT, str(error)
    if isinstance(error, OSError):
        return BAD_INPUT, _of_the_machine(error)
    if isinstance(error, UnicodeEncodeError):
        return BAD_INPUT, errors.say(
            f"text {ascii(error.object[:40])}",
            f"it cannot be written as {error.encoding}: {error.reason}",
            "Give text in UTF-8, and a UTF-8 locale (PYTHONUTF8=1)",
        )
    if _has_no_backend(error):
        why, *_ = str(error).splitlines() or ["no such backend could be started"]
        return BAD_INPUT, errors.say(
            f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}",
            f"jax finds no such device here ({why})",
            "Unset JAX_PLATFORMS, or name a platform that this machine has, as cpu",
        )
    return CHECK_FAILED, errors.say(
        f"{type(error).__name__}: {error}",
        "this is a fault of kvmem, not of its input",
        "Run again with --debug and report the traceback",
    )


def _has_no_backend(error: BaseException) -> bool:
    """Say whether jax could not start the devices that it was told to use."""
    if isinstance(error, RuntimeError) and _NO_BACKEND.search(str(error)):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    last = os.path.basename(frames[-1].filename) if frames else ""
    return isinstance(error, AssertionError) and last == _STARTS_BACKENDS


def _of_the_machine(error: OSError) -> str:
    """Say what the operating system refused, of which file, and what would work."""
    names = [str(n) for n in (error.filename, error.filename2) if n is not None]
    cure = "Give a path that can be used" if names else "Mend that and run again"
    return errors.say(
        " to ".join(names) or "the output, or a file without a name",
        error.strerror or str(error) or type(error).__name__,
        _CURES.get(error.errno, cure),
    )


def _flushed(job: Callable[[], int]) -> int:
    """Run a job, and write out what it printed; help pages end by SystemExit."""
    try:
        code = job()
    except SystemExit:
        _flush()
        raise
    _flush()
    return code


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _abandon_stdout() -> None:
    """Send what is still buffered to nowhere, or Python complains at its end."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _spell_what_has_no_code() -> None:
    r"""Print characters that the output's encoding lacks as \u escapes."""
    if getattr(sys.stdout, "errors", None) == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
