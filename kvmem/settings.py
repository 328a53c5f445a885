"""Strict settings: TOML, environment and overrides into one frozen dataclass.

The law: a setting that is not understood is an error, never ignored; and every value
can say where it came from. Later sources win: default, file, environment, override.

    loaded = read(Config, "configs/x.toml", ["pool.page_size=32"], os.environ)
    loaded.value.pool.page_size     # 32
    loaded.settings                 # (Setting("pool.page_size", 32, "--set"), ...)

This room knows no key by name: what may be set is what the dataclass declares.
"""

import dataclasses
import difflib
import operator
import os
import pathlib
import re
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, NewType

import cattrs
from cattrs.gen import make_dict_structure_fn

from kvmem import errors

__all__ = ["ENV_PREFIX", "Loaded", "Nbytes", "Override", "Setting", "parse_nbytes"]
__all__ += ["parse_override", "read", "settle"]

ENV_PREFIX = "KVMEM_"
_NO_SETTINGS = ("KVMEM_CACHE",)  # a folder of the machine: kvmem/model/weights_cache.py

Nbytes = NewType("Nbytes", int)  # bytes; TOML also takes "2GiB", "80GB", "512 MiB"

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{p}b": 1000 ** (i + 1) for i, p in enumerate("kmgt")}
_UNITS |= {f"{p}ib": 1024 ** (i + 1) for i, p in enumerate("kmgt")}


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


def parse_nbytes(text: str | int) -> int:
    """Return bytes from a number or from words such as "2GiB" or "80 GB".

    Raises:
        ConfigError: no number of bytes, or not a whole one.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    unit = _UNITS.get(match[2].lower()) if match else None
    nbytes = float(match[1]) * unit if match and "." in match[1] and unit else None
    if match and unit and nbytes is None:
        return int(match[1]) * unit
    if nbytes is None or not nbytes.is_integer():
        raise errors.ConfigError(
            errors.say(
                f"{text!r} as a number of bytes",
                "bytes are a whole number with a unit of 1000 or 1024",
                'Write for example 2147483648, "2GiB" or "80GB"',
            )
        )
    return int(nbytes)


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


def settle(owner: Any) -> None:
    """Hold a dataclass made in Python to the types that it declares; for __post_init__.

    What TOML may spell is spelled so here too: memory="1MiB" becomes bytes, a list a
    tuple, a path its text, an integer of numpy an int. Nothing else is converted.

    Raises:
        ConfigError: every field of a wrong type at once.
    """
    hints, faults = typing.get_type_hints(type(owner)), []
    for field in dataclasses.fields(owner):
        given, hint = getattr(owner, field.name), hints[field.name]
        try:
            object.__setattr__(owner, field.name, _settled(given, hint))
        except (TypeError, errors.ConfigError) as error:
            faults.append(f"{field.name}: {str(error).rstrip('.')}")
    if faults:
        raise errors.ConfigError(
            errors.say(type(owner).__name__, "; ".join(faults), "Mend these")
        )


def _settled(value: Any, hint: object) -> Any:
    """Return a value as its type wants it, or raise."""
    options = _options(hint)
    if value is None and type(None) in options:
        return None
    (kind,) = [option for option in options if option is not type(None)]
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, kind):
            raise _wrong_type(value, kind.__name__)
        return value
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise _wrong_type(value, "a list")
        item = typing.get_args(kind)[0]
        return tuple(_settled(each, item) for each in value)
    if isinstance(value, os.PathLike) and kind is str:
        return os.fspath(value)
    if kind in (int, Nbytes) and not isinstance(value, bool | str):
        value = _as_integer(value)
    return _CONVERTER.structure(value, kind)


def _as_integer(value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise _wrong_type(value, "an integer") from None


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
        options = _options(hints[field.name])
        table = [o for o in options if dataclasses.is_dataclass(o)]
        found[field.name] = (hints[field.name], table[0] if table else None)
    return found


def _options(hint: object) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return typing.get_args(hint) if is_union else (hint,)


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
        table = _tables(kind).get(name, (None, None))[1]
        if table and isinstance(value, Mapping):
            keys += _flatten(value, table, f"{prefix}{name}.")
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
        else:
            leaves.append((prefix + field.name, inner))
    return leaves


def _apply(data: dict[str, Any], kind: type, override: Override) -> str | None:
    """Set one override in `data`; return what is wrong with it, if anything."""
    *path, leaf = override.key.split(".")
    table: type | None = kind
    for name in path:
        table = _tables(table).get(name, (None, None))[1] if table else None
        if table is None:
            break
        data = data.setdefault(name, {})
        if not isinstance(data, dict):
            return f"{override.source}: {name!r} is not a table in the file"
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


def _from_text(text: str, hint: object) -> object:
    """Read text for a leaf: strings as they stand, other types as TOML values."""
    options = _options(hint)
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
        return _CONVERTER.structure(data, kind), []
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


def _converter() -> cattrs.Converter:
    """Return cattrs' converter with nothing coerced: a type is met or refused."""
    converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=True)
    for plain in (int, float, bool, str):
        converter.register_structure_hook(plain, _as_plain)
    converter.register_structure_hook(Nbytes, _as_nbytes)
    converter.register_structure_hook_func(
        lambda hint: typing.get_origin(hint) is Literal, _as_choice
    )
    converter.register_structure_hook_factory(
        lambda hint: typing.get_origin(hint) is tuple,
        lambda hint: lambda value, _: _as_tuple(converter, value, hint),
    )
    converter.register_structure_hook_factory(
        dataclasses.is_dataclass, lambda hint: _as_table(converter, hint)
    )
    return converter


def _wrong_type(value: object, wanted: str) -> TypeError:
    return TypeError(f"{value!r} is {type(value).__name__}, not {wanted}")


def _as_plain(value: Any, hint: type) -> Any:
    if hint is float and type(value) is int:
        return float(value)
    if hint is float and isinstance(value, float):
        return float(value)
    if type(value) is not hint:
        raise _wrong_type(value, hint.__name__)
    return value


def _as_choice(value: Any, hint: object) -> Any:
    choices = typing.get_args(hint)
    if value not in choices:
        raise TypeError(f"{value!r} is none of {', '.join(map(repr, choices))}")
    return value


def _as_nbytes(value: Any, _: object) -> int:
    if type(value) not in (int, str):
        raise _wrong_type(value, "a number of bytes")
    return parse_nbytes(value)


def _as_tuple(converter: cattrs.Converter, value: Any, hint: Any) -> tuple[Any, ...]:
    if type(value) not in (list, tuple):
        raise _wrong_type(value, "a list")
    return tuple(converter.structure(list(value), list[typing.get_args(hint)[0]]))


def _as_table(converter: cattrs.Converter, hint: Any) -> Any:
    inner = make_dict_structure_fn(hint, converter, _cattrs_forbid_extra_keys=True)

    def structure(value: Any, _: object) -> Any:
        if not isinstance(value, Mapping):
            raise _wrong_type(value, "a table")
        return inner(value, hint)

    return structure


_CONVERTER = _converter()
