"""Run an experiment, or list them.

    python -m experiments list
    python -m experiments run configs/handoff.toml --set tokens=16

Exit codes: 0 every check held, 1 one did not, 2 bad input.
"""

import ast
import dataclasses
import importlib
import os
import pathlib
import sys
from collections.abc import Sequence

import tyro

from kvmem import console, errors, settings

_HOME = pathlib.Path(__file__).parent
_CONFIGS = _HOME.parent / "configs"
_USAGE = (
    "usage: python -m experiments run CONFIG [options]    (run --help)\n"
    "       python -m experiments list"
)


@dataclasses.dataclass(frozen=True)
class Arguments(console.Common):
    """Run the experiment of a config: of its stem, or of what a stem like name_x begins
    with.

    Args:
        path: a TOML file of configs/.
        name: the run's folder under runs/.
        busy: publish measurements of a busy machine too, marked as such.
    """

    path: tyro.conf.Positional[str]
    name: str = ""
    set: console.Overrides = ()
    busy: bool = False


def main(argv: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    command, *rest = list(argv) or ["--help"]
    return console.guard(lambda: _perform(command, rest), debug="--debug" in rest)


def _perform(command: str, rest: Sequence[str]) -> int:
    if command in ("-h", "--help"):
        print(_USAGE)
        return console.DONE
    if command == "list" and not rest:
        return _list()
    if command == "run":
        return _run(rest)
    print(f"{' '.join([command, *rest])!r} is no command.\n{_USAGE}", file=sys.stderr)
    return console.BAD_INPUT


def experiments() -> dict[str, str]:
    """Return each experiment's name and first line, without importing any."""
    found = {}
    for path in sorted(_HOME.glob("*.py")):
        tree = ast.parse(path.read_text())
        defined = {getattr(node, "name", None) for node in tree.body}
        if {"Config", "run"} <= defined:
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def _list() -> int:
    shown = console.table("experiments", "name", "config", "what it shows")
    for name, line in experiments().items():
        config = _CONFIGS / f"{name}.toml"
        shown.add_row(name, f"configs/{config.name}" * config.exists(), line)
    console.out().print(shown)
    return console.DONE


def _run(argv: Sequence[str]) -> int:
    arguments = console.parse(Arguments, argv, "python -m experiments run")
    path = pathlib.Path(arguments.path)
    experiment = _experiment_of(path.stem)
    if experiment is None:
        raise errors.ConfigError(
            errors.say(
                f"config {path}",
                f"there is no experiment of that stem, experiments/{path.stem}.py",
                f"Use a config of {', '.join(experiments())}",
            )
        )
    module = importlib.import_module(f"experiments.{experiment}")
    harness = importlib.import_module("experiments.harness")
    loaded = settings.read(module.Config, path, arguments.set, os.environ)
    name = arguments.name or _name(path)
    data = harness.execute(
        name,
        loaded.value,
        module.run(loaded.value),
        loaded.settings,
        allow_busy=arguments.busy,
    )
    _show(name, data)
    return console.DONE if data["ok"] else console.CHECK_FAILED


def _experiment_of(stem: str) -> str | None:
    """Return handoff for the stems handoff and handoff_gemma3, None where none is."""
    fitting = [name for name in experiments() if f"{stem}_".startswith(f"{name}_")]
    return max(fitting, key=len, default=None)


def _name(path: pathlib.Path) -> str:
    """Return handoff for configs/handoff.toml, smoke-x for configs/smoke/x.toml."""
    parts = path.absolute().with_suffix("").parts
    if "configs" in parts:
        return "-".join(parts[len(parts) - parts[::-1].index("configs") :])
    return path.stem


def _show(name: str, data: dict) -> None:
    """Print the checks and where the record stands."""
    checks = console.table("checks", "", "check", "detail")
    for check in data["checks"]:
        checks.add_row(
            "ok" if check["ok"] else "FAILED", check["name"], check["detail"]
        )
    out = console.out()
    out.print(checks)
    if data.get("busy"):
        print(f"measured on a busy machine: {data['busy']}")
    failed = sum(not check["ok"] for check in data["checks"])
    verdict = f"{failed} of {len(data['checks'])} checks failed" if failed else "ok"
    print(f"{verdict}: runs/{name}/record.json")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
