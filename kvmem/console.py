"""The console: how a command of kvmem ends, and what a person sees of it.

The law of exit codes, everywhere: 0 the job was done; 1 the run's own check failed, or
damage was found; 2 the input was bad, with a message in three beats. A traceback is
shown with --debug only.

    sys.exit(guard(lambda: verb.run(arguments), debug=arguments.debug))
"""

import dataclasses
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from kvmem import errors

__all__ = ["BAD_INPUT", "CHECK_FAILED", "DONE", "Common", "Overrides", "count"]
__all__ += ["guard", "out", "parse", "table"]

DONE, CHECK_FAILED, BAD_INPUT = 0, 1, 2


Overrides = Annotated[
    tyro.conf.UseAppendAction[tuple[str, ...]],
    tyro.conf.arg(metavar="A.B=C", help="override a setting; may be repeated."),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Common:
    """Options that every command has.

    Args:
        debug: show the traceback of an error.
    """

    debug: bool = False


def parse[T](kind: type[T], argv: Sequence[str], prog: str) -> T:
    """Return the arguments of one command; a bad one ends the process with 2."""
    config = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes)
    return tyro.cli(kind, args=list(argv), prog=prog, config=config)


def guard(job: Callable[[], int], debug: bool) -> int:
    """Run a command's job and return its exit code, errors told in words."""
    try:
        return job()
    except errors.CorruptPage as error:
        code = CHECK_FAILED
        words = str(error)
    except (errors.KVMemError, OSError) as error:
        code = BAD_INPUT
        words = str(error)
    except KeyboardInterrupt:
        code, words = CHECK_FAILED, "interrupted"
    except Exception as error:
        code = CHECK_FAILED
        words = errors.say(
            f"{type(error).__name__}: {error}",
            "this is a fault of kvmem, not of its input",
            "Run again with --debug and report the traceback",
        )
    if debug:
        traceback.print_exc()
    print(f"kvmem: {words}", file=sys.stderr)
    return code


def out() -> Console:
    """Return the console of this process's stdout."""
    return Console(highlight=False, soft_wrap=False)


def table(title: str, *columns: str) -> Table:
    """Return a plain table; a column named "> x" stands to the right."""
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        name = column.removeprefix("> ")
        made.add_column(name, justify="right" if name != column else "left")
    return made


def count(number: int | None) -> str:
    """Return an integer with its thousands apart, a dash for None."""
    return "-" if number is None else f"{number:,}"
