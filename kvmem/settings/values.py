"""Values: what a setting may hold, and the types that a dataclass declares.

The law: a type is met or refused, nothing is coerced. `Nbytes` is a number of bytes,
which TOML may spell "2GiB"; `Table` is a table whose keys are not settings of ours.

    parse_nbytes("80 GB")                            # 80,000,000,000
    hash(Table({"layer_types": ["full_attention"]}))  # facts can be hashed
"""

import dataclasses
import operator
import os
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NewType

import cattrs
from cattrs.gen import make_dict_structure_fn

from kvmem import errors

__all__ = ["CONVERTER", "Nbytes", "Table", "options_of", "parse_nbytes"]
__all__ += ["require_positive", "settle"]

Nbytes = NewType("Nbytes", int)  # bytes; TOML also takes "2GiB", "80GB", "512 MiB"

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{p}b": 1000 ** (i + 1) for i, p in enumerate("kmgt")}
_UNITS |= {f"{p}ib": 1024 ** (i + 1) for i, p in enumerate("kmgt")}


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


class Table(Mapping[str, Any]):
    """A table whose keys are another's business, kept as it was written.

    Frozen and hashable: tables inside are `Table`s and lists are tuples. `plain()` is
    what a JSON reader would have given.

    Raises:
        ConfigError: a key that is no text, or a value that no TOML file can hold.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any]):
        self._values = {key: _frozen(key, value) for key, value in values.items()}

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return f"Table({self._values!r})"

    def plain(self) -> dict[str, Any]:
        """Return dicts and lists of the same values."""
        return {key: _thawed(value) for key, value in self._values.items()}


def _frozen(key: object, value: Any) -> Any:
    """Return a value of a table, or refuse it in words."""
    if isinstance(key, str) and isinstance(value, Mapping):
        return value if isinstance(value, Table) else Table(value)
    if isinstance(key, str) and isinstance(value, list | tuple):
        return tuple(_frozen(key, each) for each in value)
    if not isinstance(key, str) or not isinstance(value, str | int | float):
        raise errors.ConfigError(
            errors.say(
                f"{key!r} = {value!r} in a table of facts",
                "a fact is a number, a text, true or false, a list or a table of them",
                "Leave it out, or write it as one of these",
            )
        )
    return value


def _thawed(value: Any) -> Any:
    if isinstance(value, Table):
        return value.plain()
    return [_thawed(each) for each in value] if isinstance(value, tuple) else value


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
    options = options_of(hint)
    if value is None and type(None) in options:
        return None
    (kind,) = [option for option in options if option is not type(None)]
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, kind):
            raise _wrong_type(value, kind.__name__)
        return value
    if kind is Table and isinstance(value, Table):
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
    return CONVERTER.structure(value, kind)


def _as_integer(value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise _wrong_type(value, "an integer") from None


def require_positive(**values: int | None) -> None:
    """Refuse counts below one, all of a table at once."""
    low = [f"{k} = {v}" for k, v in values.items() if v is not None and v < 1]
    if low:
        raise errors.ConfigError(
            errors.say(", ".join(low), "counts start at one", "Give an integer >= 1")
        )


def options_of(hint: object) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return typing.get_args(hint) if is_union else (hint,)


def _converter() -> cattrs.Converter:
    """Return cattrs' converter with nothing coerced: a type is met or refused."""
    converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=True)
    for plain in (int, float, bool, str):
        converter.register_structure_hook(plain, _as_plain)
    converter.register_structure_hook(Nbytes, _as_nbytes)
    converter.register_structure_hook(Table, _as_facts)
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


def _as_facts(value: Any, _: object) -> Table:
    if not isinstance(value, Mapping):
        raise _wrong_type(value, "a table")
    return Table(value)


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


CONVERTER = _converter()
