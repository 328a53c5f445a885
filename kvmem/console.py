"""The console: what a person types and sees; how a command ends is `kvmem.exits`.

sys.exit(guard(lambda: verb.run(arguments), debug=arguments.debug))
console.out().print(console.table("devices", "name", "> bytes"))
"""

import dataclasses
import inspect
import re
from collections.abc import Sequence
from typing import Annotated, Any

import tyro
from rich import box
from rich import console as rich_console
from rich.table import Table

from kvmem.exits import BAD_INPUT, CHECK_FAILED, DONE, guard

__all__ = ["BAD_INPUT", "CHECK_FAILED", "DONE", "Common", "Overrides", "count"]
__all__ += ["guard", "of_setting", "out", "parse", "table"]


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


class Console(rich_console.Console):
    """A console that leaves a reader who has seen enough to `guard`."""

    def on_broken_pipe(self) -> None:
        """Let BrokenPipeError go on, where rich would end the process with 1."""
        raise  # noqa: PLE0704, rich calls this where it has caught the error


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
