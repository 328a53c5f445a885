"""Show the effective config, each value with its source.

Sources, later ones win: default, file, environment (KVMEM_A__B), --set a.b=c.
"""

import dataclasses
import json
import os

import tyro

from kvmem import config, console

__all__ = ["Arguments", "run"]


@dataclasses.dataclass(frozen=True)
class Arguments(console.Common):
    """Show the effective config, each value with its source.

    Args:
        path: a TOML file of configs/.
        json: print JSON instead of a table.
    """

    path: tyro.conf.Positional[str]
    set: console.Overrides = ()
    json: bool = False


def run(arguments: Arguments) -> int:
    """Print the settings of one config."""
    found = config.explain(arguments.path, arguments.set, os.environ)
    if arguments.json:
        rows = {s.key: {"value": s.value, "source": s.source} for s in found}
        print(json.dumps(rows, indent=2))
        return console.DONE
    shown = console.table(f"config {arguments.path}", "key", "value", "source")
    for setting in found:
        shown.add_row(setting.key, repr(setting.value), setting.source)
    console.out().print(shown)
    return console.DONE
