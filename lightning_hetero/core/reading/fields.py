"""Turn plain data into a dataclass: keys and types follow from its fields.

A field holds what its type hint says: `int`, `float`, `bool`, `str`, a `StrEnum`, a date, a
`range`, another dataclass, tuples and mappings of these, or `None` if the hint allows it. Numbers
must be finite, and whole ones must fit into 64 bits. The dataclass itself checks ranges of values,
in `__post_init__`.
"""

import datetime
import difflib
import functools
import math
import re
import types
import typing
import warnings
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from typing import Any, TypeVar

from lightning_hetero.core.errors import HeteroError
from lightning_hetero.core.reading.quantities import MeasureUnit, parse_quantity, unit_of_field
from lightning_hetero.core.reading.text import show

__all__ = ["build", "parse_range"]

_T = TypeVar("_T")
_LARGEST = 2**63 - 1
_SLOWEST_LINK = 1_000.0
"""Bytes per second below which a bare number is likely meant in another unit."""
_RANGE = re.compile(r"\s*(?:range\s*)?[\[(]?\s*(\d{1,18})\s*,\s*(\d{1,18})\s*[\])]?\s*")


class _WrongError(Exception):
    """A value is wrong; the message says where it is and what should be there."""


def build(schema: type[_T], data: Any, what: str, error: type[HeteroError]) -> _T:
    """Return a dataclass built from `data`, a mapping with its fields' names.

    Args:
        schema: The dataclass.
        data: Plain data from a parser.
        what: Name of the whole in messages: "cluster".
        error: Type of the errors to raise; errors of nested dataclasses are converted to it.
    """
    try:
        built: _T = _dataclass(schema, data, "", what)
    except _WrongError as problem:
        raise error(str(problem)) from None
    except error:
        raise
    except HeteroError as problem:
        raise error(str(problem)) from problem
    return built


def _checked_keys(
    data: Any, where: str, required: Collection[str], optional: Collection[str]
) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise _WrongError(f"{where} is {show(data)}; it must be a mapping with {sorted(required)}.")
    missing = sorted(set(required) - data.keys())
    unknown = [key for key in data if key not in required and key not in optional]
    if missing or unknown:
        raise _WrongError(
            f"{where} has keys {show(sorted(map(_as_key, data)))}; needed: {sorted(required)}, "
            f"allowed besides: {sorted(optional)}.{_remedy(missing, unknown, optional)}"
        )
    return data


def _as_key(key: object) -> str:
    return key if isinstance(key, str) else show(key)


def _remedy(missing: list[str], unknown: list[object], optional: Collection[str]) -> str:
    """Return the remedy for the first wrong key, for a message."""
    if not unknown:
        return f" Add {', '.join(missing)}."
    key = _as_key(unknown[0])
    close = difflib.get_close_matches(key, [*missing, *optional], n=1)
    return f" Did you mean {close[0]} by {show(key)}?" if close else f" Take {show(key)} away."


@functools.cache
def _hints(schema: type) -> Mapping[str, Any]:
    hints = typing.get_type_hints(schema)
    return {item.name: hints[item.name] for item in fields(schema) if item.init}


def _dataclass(schema: Any, data: Any, where: str, what: str = "") -> Any:
    if isinstance(data, schema):
        return data
    hints = _hints(schema)
    optional = {
        item.name
        for item in fields(schema)
        if item.default is not MISSING or item.default_factory is not MISSING
    }
    name = f"`{where}`" if where else f"The {what}"
    known = _checked_keys(data, name, hints.keys() - optional, hints.keys() & optional)
    values = {
        key: _value(hints[key], value, f"{where}.{key}" if where else key, key)
        for key, value in known.items()
    }
    try:
        return schema(**values)
    except HeteroError as problem:
        if not where:
            raise
        raise type(problem)(f"In `{where}`: {problem}") from problem


def _value(hint: Any, value: Any, where: str, name: str) -> Any:
    """Return a value of the hint's type; `name` is the field's, whose ending gives the unit."""
    origin = typing.get_origin(hint)
    if origin is types.UnionType or origin is typing.Union:
        options = typing.get_args(hint)
        if value is None and types.NoneType in options:
            return None
        (hint,) = (option for option in options if option is not types.NoneType)
        return _value(hint, value, where, name)
    if origin is tuple:
        return _tuple(typing.get_args(hint), value, where, name)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(typing.get_args(hint), value, where, name)
    if is_dataclass(hint):
        return _dataclass(hint, value, where)
    if issubclass(hint, StrEnum):
        return _choice(hint, value, where)
    return _PARSERS[hint](value, where, name)


def _choice(hint: type[StrEnum], value: Any, where: str) -> StrEnum:
    try:
        return hint(value)
    except ValueError:
        raise _wrong(where, value, f"one of {', '.join(hint)}") from None


def _tuple(items: tuple[Any, ...], value: Any, where: str, name: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        count = "" if items[-1] is ... else f" of {len(items)}"
        raise _wrong(where, value, f"a list{count}")
    if items[-1] is ...:
        items = (items[0],) * len(value)
    elif len(value) != len(items):
        raise _wrong(where, value, f"a list of {len(items)}")
    return tuple(
        _value(hint, item, f"{where}[{index}]", name)
        for index, (hint, item) in enumerate(zip(items, value, strict=True))
    )


def _mapping(items: tuple[Any, ...], value: Any, where: str, name: str) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise _wrong(where, value, "a mapping")
    key_hint, value_hint = items
    found: dict[Any, Any] = {}
    for key, entry in value.items():
        # JSON has only texts as keys.
        read = int(key) if key_hint is int and _is_digits(key) else key
        read = _value(key_hint, read, f"key of {where}", "")
        if read in found:
            raise _WrongError(f"`{where}` has the key {read} twice. Keep one.")
        found[read] = _value(value_hint, entry, f"{where}[{show(read)}]", name)
    return found


def _is_digits(key: object) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 19


def _float(value: Any, where: str, name: str) -> float:
    unit = unit_of_field(name)
    if isinstance(value, str):
        try:
            number = parse_quantity(value, unit)
        except ValueError as problem:
            raise _wrong(where, value, str(problem)) from None
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(where, value, "a number")
    elif isinstance(value, int) and abs(value) > _LARGEST:
        raise _wrong(where, value, f"a number below {_LARGEST:.3g}")
    else:
        number = float(value)
    if not math.isfinite(number):
        raise _wrong(where, value, "a finite number")
    if unit is MeasureUnit.BYTES_PER_S and 0 < number < _SLOWEST_LINK and not _has_unit(value):
        warnings.warn(
            f"`{where}` is {show(value)}, in bytes/s. Write '{number:g} GB/s' or "
            f"'{number:g} Gbit/s' if that is meant.",
            UserWarning,
            stacklevel=2,
        )
    return number


def _has_unit(value: Any) -> bool:
    return isinstance(value, str) and value.strip()[-1:].isalpha()


def _int(value: Any, where: str, name: str) -> int:
    unit = unit_of_field(name)
    number = value
    # YAML 1.1 reads 4e12 as a text; other texts are refused in fields without a unit.
    if isinstance(value, str) and (unit is not None or re.search(r"\d[eE]", value)):
        number = _float(value, where, name)
    if isinstance(number, float) and math.isfinite(number) and number.is_integer():
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int):
        raise _wrong(where, value, "a whole number" + (f" of {unit}" if unit else ""))
    if abs(number) > _LARGEST:
        raise _wrong(where, value, f"a whole number below {_LARGEST:.3g}")
    return number


def _bool(value: Any, where: str, _name: str) -> bool:
    if not isinstance(value, bool):
        raise _wrong(where, value, "true or false")
    return value


def _str(value: Any, where: str, _name: str) -> str:
    if not isinstance(value, str):
        raise _wrong(where, value, "a text; put it in quotes")
    return value


def _date(value: Any, where: str, _name: str) -> datetime.datetime:
    try:
        return datetime.datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise _wrong(where, value, "a date, such as 2026-01-31T12:00:00+00:00") from None


def parse_range(value: Any) -> range:
    """Return the range that [0, 4], "range(0, 4)" or "[0, 4]" means; ValueError if it is none."""
    if isinstance(value, range):
        return value
    if isinstance(value, str) and (found := _RANGE.fullmatch(value)):
        value = (int(found[1]), int(found[2]))
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"{show(value)} is no range; write [first, last + 1].")
    if any(type(item) is not int or abs(item) > _LARGEST for item in value):
        raise ValueError(f"{show(value)} is no range of whole numbers.")
    return range(*value)


def _range(value: Any, where: str, _name: str) -> range:
    try:
        return parse_range(value)
    except ValueError:
        raise _wrong(where, value, "[first, last + 1], whole numbers") from None


_PARSERS: Mapping[Any, typing.Callable[[Any, str, str], Any]] = {
    float: _float,
    int: _int,
    bool: _bool,
    str: _str,
    datetime.datetime: _date,
    range: _range,
}


def _wrong(where: str, value: object, wanted: str) -> _WrongError:
    return _WrongError(f"`{where}` is {show(value)}; it must be {wanted}.")
