"""Loading: TOML, environment and overrides into a dataclass, each source kept.

Later sources win: default, file, environment, override. All faults come at once.
"""

import dataclasses
import difflib
import pathlib
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import cattrs

from kvmem import errors
from kvmem.settings.values import CONVERTER, Nbytes, Table, options_of

__all__ = ["ENV_PREFIX", "Loaded", "Override", "Setting", "parse_override", "read"]

ENV_PREFIX = "KVMEM_"
_NO_SETTINGS = ("KVMEM_CACHE",)  # a folder of the machine: kvmem/model/weights_cache.py


class Setting(NamedTuple):
    """One value of an effective config, and where it came from."""

    key: str
    value: object
    source: str


class Override(NamedTuple):
    """One value given as text, and who gave it."""

    key: str
    text: str
    source: str


class Loaded[T](NamedTuple):
    """A config and its settings, one for each leaf in declared order."""

    value: T
    settings: tuple[Setting, ...]


def parse_override(text: str, source: str = "--set") -> Override:
    """Return the override that "a.b=c" spells."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise errors.ConfigError(
            errors.say(
                f"{source} {text!r}",
                "an override is a key and a value",
                "Write a.b=c",
            )
        )
    return Override(key.strip(), value.strip(), source)


def read[T](
    kind: type[T],
    path: str | pathlib.Path | None = None,
    overrides: Sequence[str | Override] = (),
    env: Mapping[str, str] = types.MappingProxyType({}),
) -> Loaded[T]:
    """Load one config, every fault reported at once.

    Args:
        kind: a frozen dataclass; fields that are dataclasses are its tables.
        path: a TOML file; None means an empty one.
        overrides: "a.b=c" each, or `Override`s; the last one of a key wins.
        env: the environment; KVMEM_A__B sets a.b.

    Raises:
        ConfigError: an unreadable file, unknown keys (with the nearest known one),
            wrong types, missing keys, or values that the dataclass refuses.
    """
    data = {} if path is None else _read_toml(pathlib.Path(path))
    sources = {key: f"file {path}" for key in _flatten(data, kind)}
    given = [
        Override(
            name[len(ENV_PREFIX) :].lower().replace("__", "."), text, f"env {name}"
        )
        for name, text in sorted(env.items())
        if name.startswith(ENV_PREFIX) and name not in _NO_SETTINGS
    ]
    given += [parse_override(o) if isinstance(o, str) else o for o in overrides]
    faults = []
    for override in given:
        fault = _apply(data, kind, override)
        faults += [fault] if fault else []
        sources[override.key] = override.source
    value, more = _structure(data, kind)
    faults += more
    if faults:
        raise errors.ConfigError(
            errors.say(
                f"{'settings' if path is None else path}",
                "; ".join(faults),
                "Mend these and run again",
            )
        )
    settings = tuple(
        Setting(key, leaf, sources.get(key, "default")) for key, leaf in _leaves(value)
    )
    return Loaded(value, settings)


def _read_toml(path: pathlib.Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
    except tomllib.TOMLDecodeError as error:
        why = f"it is not TOML: {error}"
    raise errors.ConfigError(
        errors.say(f"config {path}", why, "Give the path of a TOML file")
    )


def _tables(kind: type) -> dict[str, tuple[object, type | None]]:
    """Map each field to (its type, the dataclass it is a table of, or None)."""
    hints = typing.get_type_hints(kind)
    found = {}
    for field in dataclasses.fields(kind):
        options = options_of(hints[field.name])
        table = [o for o in options if dataclasses.is_dataclass(o)]
        found[field.name] = (hints[field.name], table[0] if table else None)
    return found


def _row_type(hint: object) -> type | None:
    """Return the dataclass that a list of tables holds, None for other leaves."""
    rows = typing.get_args(hint) if typing.get_origin(hint) is tuple else ()
    return rows[0] if rows and dataclasses.is_dataclass(rows[0]) else None


def _known_keys(kind: type, prefix: str = "") -> tuple[str, ...]:
    """List every key, tables included."""
    keys: list[str] = []
    for name, (hint, table) in _tables(kind).items():
        keys.append(prefix + name)
        keys += _known_keys(table, f"{prefix}{name}.") if table else ()
        row = _row_type(hint)
        keys += _known_keys(row, f"{prefix}{name}[].") if row else ()
    return tuple(keys)


def _flatten(data: Mapping[str, Any], kind: type, prefix: str = "") -> list[str]:
    """List the leaf keys that a file sets."""
    keys = []
    for name, value in data.items():
        hint, table = _tables(kind).get(name, (None, None))
        if table and isinstance(value, Mapping):
            keys += _flatten(value, table, f"{prefix}{name}.")
        elif Table in options_of(hint) and isinstance(value, Mapping):
            keys += [key for key, _ in _facts(value, f"{prefix}{name}.")]
        else:
            keys.append(prefix + name)
    return keys


def _leaves(value: Any, prefix: str = "") -> list[tuple[str, object]]:
    """List (key, value) for every leaf of a config."""
    leaves = []
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if dataclasses.is_dataclass(inner):
            leaves += _leaves(inner, f"{prefix}{field.name}.")
        elif isinstance(inner, Table):
            leaves += _facts(inner.plain(), f"{prefix}{field.name}.")
        else:
            leaves.append((prefix + field.name, inner))
    return leaves


def _facts(table: Mapping[str, Any], prefix: str) -> list[tuple[str, object]]:
    """List (key, value) for every leaf of a table that is not ours to know."""
    leaves = []
    for name, value in table.items():
        is_table = isinstance(value, Mapping) and value
        inner = _facts(value, f"{prefix}{name}.") if is_table else None
        leaves += inner or [(prefix + name, value)]
    return leaves


def _apply(data: dict[str, Any], kind: type, override: Override) -> str | None:
    """Set one override in `data`; return what is wrong with it, if anything."""
    *path, leaf = override.key.split(".")
    table: type | None = kind
    for depth, name in enumerate(path):
        hint, table = _tables(table).get(name, (None, None)) if table else (None, None)
        is_facts = Table in options_of(hint)
        if table is None and not is_facts:
            break
        data = data.setdefault(name, {})
        if not isinstance(data, dict):
            return f"{override.source}: {name!r} is not a table in the file"
        if is_facts:
            return _set_fact(data, [*path[depth + 1 :], leaf], override)
    hint, inner = _tables(table).get(leaf, (None, None)) if table else (None, None)
    if inner is not None:
        return f"{override.source}: {override.key} is a table, set a key of it"
    if hint is None:
        return f"{override.source}: {_unknown(override.key, _known_keys(kind))}"
    try:
        data[leaf] = _from_text(override.text, hint)
    except tomllib.TOMLDecodeError:
        return f"{override.source}: {override.key} = {override.text} is no TOML value"
    return None


def _set_fact(
    data: dict[str, Any], keys: Sequence[str], override: Override
) -> str | None:
    """Set one leaf of a table that is not ours to know; what is no TOML is text."""
    for name in keys[:-1]:
        data = data.setdefault(name, {})
        if not isinstance(data, dict):
            return f"{override.source}: {name!r} of {override.key} is not a table"
    try:
        data[keys[-1]] = tomllib.loads(f"value = {override.text}")["value"]
    except tomllib.TOMLDecodeError:
        data[keys[-1]] = override.text
    return None


def _from_text(text: str, hint: object) -> object:
    """Read text for a leaf: strings as they stand, other types as TOML values."""
    options = options_of(hint)
    if text == "" and type(None) in options:
        return None
    if any(o in (str, Nbytes) or typing.get_origin(o) is Literal for o in options):
        return text
    return tomllib.loads(f"value = {text}")["value"]


def _unknown(key: str, known: Sequence[str]) -> str:
    """Say that a key is unknown, with the nearest known one."""
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    last = key.rpartition(".")[2]
    nearest = nearest or [k for k in known if k.rpartition(".")[2] == last]
    hint = f"the nearest known key is {nearest[0]}" if nearest else "known keys are "
    return f"unknown key {key}, {hint}" + ("" if nearest else ", ".join(known))


def _structure(data: Mapping[str, Any], kind: type) -> tuple[Any, list[str]]:
    """Return (config, []) or (None, every fault)."""
    try:
        return CONVERTER.structure(data, kind), []
    except cattrs.BaseValidationError as error:
        return None, _faults(error, "", _known_keys(kind))


def _faults(error: BaseException, at: str, known: Sequence[str]) -> list[str]:
    """Spell every leaf of cattrs' tree of errors, with the key it stands at."""
    if isinstance(error, cattrs.IterableValidationError):
        with_notes, without = error.group_exceptions()
        inner = [(e, f"{at}[{note.index}]") for e, note in with_notes]
        inner += [(e, at) for e in without]
        return [f for e, where in inner for f in _faults(e, where, known)]
    if isinstance(error, cattrs.ClassValidationError):
        with_notes, without = error.group_exceptions()
        inner = [(e, f"{at}.{note.name}".lstrip(".")) for e, note in with_notes]
        inner += [(e, at) for e in without]
        return [f for e, where in inner for f in _faults(e, where, known)]
    if isinstance(error, cattrs.ForbiddenExtraKeysError):
        keys = sorted(f"{at}.{name}".lstrip(".") for name in error.extra_fields)
        return [_unknown(key, known) for key in keys]
    if isinstance(error, KeyError):
        return [f"{at} is required and not set"]
    words = str(error).rstrip(".")
    return [f"{at}: {words}" if at else words]
