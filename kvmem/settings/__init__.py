"""Strict settings: TOML, environment and overrides into one frozen dataclass.

The law: a setting that is not understood is an error, never ignored; and every value
can say where it came from. Later sources win: default, file, environment, override.

    loaded = read(Config, "configs/x.toml", ["pool.page_size=32"], os.environ)
    loaded.value.pool.page_size     # 32
    loaded.settings                 # (Setting("pool.page_size", 32, "--set"), ...)

This room knows no key by name: what may be set is what the dataclass declares.
"""

from kvmem.settings.loader import (
    ENV_PREFIX,
    Loaded,
    Override,
    Setting,
    parse_override,
    read,
)
from kvmem.settings.values import (
    Nbytes,
    Table,
    parse_nbytes,
    require_positive,
    settle,
)

__all__ = [
    "ENV_PREFIX",
    "Loaded",
    "Nbytes",
    "Override",
    "Setting",
    "Table",
    "parse_nbytes",
    "parse_override",
    "read",
    "require_positive",
    "settle",
]
