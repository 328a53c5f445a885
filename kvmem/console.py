"""The console: how a command of kvmem ends, and what a person sees of it.

The law of exit codes, everywhere: 0 the job was done; 1 the run's own check failed, or
damage was found; 2 the input was bad, with a message in three beats. A traceback is
shown with --debug only.

    sys.exit(guard(lambda: verb.run(arguments), debug=arguments.debug))
"""

import dataclasses
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from kvmem import errors

__all__ = ["BAD_INPUT", "CHECK_FAILED", "DONE", "Common", "Overrides", "count"]
__all__ += ["guard", "of_setting", "out", "parse", "table"]

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
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc()
        code, words = _verdict(error)
        print(f"kvmem: {words}", file=sys.stderr)
        return code


def _verdict(error: BaseException) -> tuple[int, str]:
    """Return the exit code of an error and what a person is told."""
    if isinstance(error, KeyboardInterrupt):
        return CHECK_FAILED, "interrupted"
    if isinstance(error, errors.KVMemError):
        damage = isinstance(error, errors.CorruptPage)
        return CHECK_FAILED if damage else BAD_INPUT, str(error)
    if isinstance(error, OSError):
        cure = "Give a path that can be used"
        return BAD_INPUT, errors.say(str(error.filename), str(error.strerror), cure)
    return CHECK_FAILED, errors.say(
        f"{type(error).__name__}: {error}",
        "this is a fault of kvmem, not of its input",
        "Run again with --debug and report the traceback",
    )


def out() -> Console:
    """Return the console of this process's stdout."""
    return Console(highlight=False, soft_wrap=False)


def of_setting(owner: type, name: str, metavar: str, kind: type = str) -> Any:
    """Return the type of a flag that overrides one setting of a config dataclass.

    Its help is the setting's line in the dataclass's docstring, and its default is
    said as "the config's, else ..." with the dataclass's own.
    """
    fields = {field.name: field.default for field in dataclasses.fields(owner)}
    default = fields[name]
    said = "the config's" + (f", else {default}" if default is not None else "")
    note = tyro.conf.arg(
        help=_doc_line(owner, name),
        help_behavior_hint=f"(default: {said})",
        metavar=metavar,
    )
    return Annotated[kind | None, note]


def _doc_line(owner: type, name: str) -> str:
    """Return what a dataclass's docstring says of one of its fields."""
    doc = inspect.getdoc(owner) or ""
    found = re.search(rf"^    {name}: (.*(?:\n     .*)*)", doc, re.MULTILINE)
    assert found, f"{owner.__name__} does not describe {name}"
    return " ".join(found[1].split())


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
