"""Convert plain data from users' files to dataclasses with pydantic, by their type hints.

Dataclasses that users write in files are marked with `readable`. The result is always a valid
object or one of our own errors, which names the place in the file, the wrong value and what to
write instead. A dataclass checks ranges of values itself, in `__post_init__`.

Numbers may be texts such as "80 GiB", "400 Gbit/s" and "20 us" where the field's name ends in a
unit, as everywhere in this package: `memory_bytes`, `inter_node_bytes_per_s`, `latency_s`,
`peak_flops_per_s`. A bare number is in that unit.
"""

import datetime
import difflib
import functools
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any, TypeVar, cast, dataclass_transform

from pydantic import BeforeValidator, ConfigDict, InstanceOf, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from lightning_hetero.core.errors import ConfigurationError, HeteroError
from lightning_hetero.core.texts import show

_T = TypeVar("_T")
_LARGEST = 2**63 - 1
_SLOWEST_LINK = 1_000.0
"""Bytes per second below which a number without a unit is probably meant in another unit."""
_KEYS: set[str] = set()
"""Names of all fields of readable dataclasses, for "did you mean"."""
_WANTED = {
    "bool": "true or false",
    "dataclass": "a mapping",
    "datetime": "a date, such as 2026-01-31T12:00:00+00:00",
    "dict": "a mapping",
    "int": "a whole number",
    "invalid": "a text, as all keys are",
    "string": "a text; put it in quotes",
    "tuple": "a list",
}
"""What a value must be, by the first word of pydantic's type of error."""
_RANGE = re.compile(r"\s*(?:range\s*)?[\[(]?\s*(?:(\d{1,18})\s*,\s*)?(\d{1,18})\s*[\])]?\s*")
_INNER_CAPITAL = re.compile(r"(?<!^)(?=[A-Z])")


class Choice(StrEnum):
    """Base of options that are one of a few words; the error for other words lists these.

    ::

        class OnFull(Choice):
            WAIT = "wait"

        OnFull("go")  # on_full is 'go'; it must be one of 'wait'.
    """

    @classmethod
    def _missing_(cls, value: object) -> None:
        name = _INNER_CAPITAL.sub("_", cls.__name__).lower()
        words = ", ".join(repr(str(choice)) for choice in cls)
        raise ConfigurationError(f"{name} is {value!r}; it must be one of {words}.")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def readable(schema: type[_T]) -> type[_T]:
    """Make a class a frozen dataclass that `build` reads; refuse unknown keys, NaN and infinity.

    ::

        @readable
        class Node:
            device: str
            count: int = 1
    """
    made = dataclass(frozen=True, kw_only=True)(schema)
    config = ConfigDict(extra="forbid", allow_inf_nan=False)
    made.__pydantic_config__ = config  # type: ignore[attr-defined]
    _KEYS.update(field.name for field in fields(made) if field.init)  # type: ignore[arg-type]
    return made


def check_numbers(
    error: type[HeteroError], what: str, least: float, *, is_above: bool = False, **values: Any
) -> None:
    """Raise an `error` unless all values that aren't None are `least` or more, or above it.

    Args:
        error: Type of the error, which names the value.
        what: What has these values, in the message.
        least: The least value.
        is_above: Whether `least` itself is too little.
        values: The values by the names of their fields; NaN is refused.
    """
    for name, value in values.items():
        if value is not None and not (value > least if is_above else value >= least):
            wanted = f"above {least}" if is_above else f"{least} or more"
            raise error(f"{what} has {name} {value}; it must be {wanted}, or left out.")


def parse_range(value: Any) -> range:
    """Return the range that [0, 4], "range(0, 4)", "range(4)" or "[0, 4]" means.

    The message of a ValueError says what to write instead.
    """
    if isinstance(value, range):
        return value
    if isinstance(value, str) and (found := _RANGE.fullmatch(value)):
        value = (int(found[1] or 0), int(found[2]))
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("a range, written [first, last + 1]")
    if any(type(item) is not int or abs(item) > _LARGEST for item in value):
        raise ValueError("a range of whole numbers")
    return range(*value)


LayerRange = Annotated[InstanceOf[range], BeforeValidator(parse_range)]
"""A range of layers; files write it as [first, last + 1]."""


def build(schema: type[_T], data: Any, what: str, error: type[HeteroError]) -> _T:
    """Return a dataclass built from `data`, a mapping with its fields' names.

    Args:
        schema: A dataclass, `readable` as are the dataclasses in its fields.
        data: Plain data from a parser.
        what: Name of the whole in messages: "cluster".
        error: Type of the errors to raise, which name the place, the value and what to write.
    """
    try:
        built: _T = _adapter(cast("Any", schema)).validate_python(_without_units(data, ""))
        _refuse_truths(data, built, "")
    except ValidationError as problem:
        raise error(_message(problem.errors(), what)) from problem
    except RecursionError:
        raise error(f"The {what} is nested too deeply to be read.") from None
    except _WrongError as problem:
        raise error(str(problem)) from None
    return built


def plain(value: Any) -> Any:
    """Return data that `build` reads, ready for JSON, without fields that have their defaults."""
    if is_dataclass(value):
        pairs = ((field, getattr(value, field.name)) for field in fields(value) if field.init)
        return {field.name: plain(item) for field, item in pairs if item != field.default}
    if isinstance(value, range):
        return [value.start, value.stop]
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


class _WrongError(Exception):
    """A number's unit is wrong; the message says where it is and what should be there."""


def _refuse_truths(given: Any, built: Any, where: str) -> None:
    """Raise _WrongError where a number was built of true, as which YAML also reads yes and on."""
    if isinstance(given, bool) and not isinstance(built, bool):
        raise _WrongError(f"`{where}` is {show(given)}; it must be a number.")
    if isinstance(given, Mapping):
        is_mapping = isinstance(built, Mapping)
        values = built.values() if is_mapping else [getattr(built, str(key)) for key in given]
        for (key, item), made in zip(given.items(), values, strict=False):
            _refuse_truths(item, made, f"{where}.{key}".lstrip("."))
    elif isinstance(given, list | tuple) and isinstance(built, tuple):
        for index, (item, made) in enumerate(zip(given, built, strict=False)):
            _refuse_truths(item, made, f"{where}[{index}]")


@functools.cache
def _adapter(schema: Any) -> TypeAdapter[Any]:
    return TypeAdapter(schema)


def _without_units(value: Any, where: str, name: str = "") -> Any:
    """Return plain data with numbers instead of texts such as "80 GiB", `name`'s ending in a unit.

    The value is at `where`, in a field or list called `name`.
    """
    if isinstance(value, Mapping):
        return {
            key: _without_units(item, f"{where}.{key}".lstrip("."), str(key))
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_without_units(item, f"{where}[{n}]", name) for n, item in enumerate(value)]
    unit = unit_of_field(name)
    if unit is None:
        return value
    number = value
    if isinstance(value, str):
        try:
            number = parse_quantity(value, unit)
        except ValueError as problem:
            raise _WrongError(f"`{where}` is {show(value)}; it must be {problem}.") from None
    is_bare = not (isinstance(value, str) and value.strip()[-1:].isalpha())
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if unit is MeasureUnit.BYTES_PER_S and is_bare and is_number and 0 < number < _SLOWEST_LINK:
        warnings.warn(
            f"`{where}` is {show(value)}, in bytes/s. Write '{number:g} GB/s' or "
            f"'{number:g} Gbit/s' if that is meant.",
            UserWarning,
            stacklevel=2,
        )
    return number


def _message(problems: list[ErrorDetails], what: str) -> str:
    """Return the error message for the most informative of pydantic's findings: first keys."""
    unknown = [found for found in problems if found["type"] == "unexpected_keyword_argument"]
    lacks = [found["loc"][-1] for found in problems if found["type"] == "missing"]
    missing = [key for key in lacks if isinstance(key, str)]
    found = (unknown or problems)[0]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in found["loc"])
    place = f"`{where.lstrip('.')}`" if where else f"The {what}"
    if unknown:
        return f"{place} is an unknown key. {_remedy(str(found['loc'][-1]), missing)}"
    if found["type"] == "missing":
        return f"{place} is missing. Add {', '.join(missing) or 'it'}."
    cause = found.get("ctx", {}).get("error")
    if isinstance(cause, HeteroError):
        return f"In {place}: {cause}" if where else str(cause)
    said = found["msg"].removeprefix("Value error, ").removeprefix("Input should be ").rstrip(".")
    wanted = _WANTED.get(found["type"].partition("_")[0], said)
    return f"{place} is {show(found['input'])}; it must be {wanted}."


def _remedy(key: str, missing: list[str]) -> str:
    """Return what to write instead of an unknown key, where the keys `missing` are missing."""
    longer = [name for name in sorted(_KEYS) if key and name.startswith(f"{key}_")]
    close = longer or difflib.get_close_matches(key, missing or _KEYS, n=1)
    if close:
        return f"Did you mean {close[0]} instead of {show(key)}?"
    return f"Remove {show(key)}{' and add ' if missing else ''}{', '.join(missing)}."


class MeasureUnit(StrEnum):
    """The unit of a number, as messages name it."""

    BYTES = "bytes"
    BYTES_PER_S = "bytes/s"
    FLOPS_PER_S = "FLOP/s"
    SECONDS = "seconds"


_SECONDS = {
    "s": 1,
    "ms": 1e-3,
    "us": 1e-6,
    "µs": 1e-6,
    "μs": 1e-6,
    "ns": 1e-9,
    "min": 60,
    "h": 3600,
}
_SIZE = re.compile(r"(|[kKMGTP]|[KMGTP]i)(B|bytes?|b|bits?)(/s|ps)?")
_RATE = re.compile(r"([kKMGTP]?)(?:FLOP/s|FLOPs|FLOPS|flop/s|flops)")
_EXAMPLES = {
    MeasureUnit.BYTES: "80 GiB",
    MeasureUnit.BYTES_PER_S: "12.5 GB/s' or '400 Gbit/s",
    MeasureUnit.FLOPS_PER_S: "312 TFLOP/s",
    MeasureUnit.SECONDS: "20 us",
}
_TEXT = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,4})?)\s*([^\d\s.]\S*)?\s*")


def unit_of_field(name: str) -> MeasureUnit | None:
    """Return the unit that a field's name ends in, None if it counts something else."""
    for ending, unit in (
        ("bytes_per_s", MeasureUnit.BYTES_PER_S),
        ("flops_per_s", MeasureUnit.FLOPS_PER_S),
        ("_bytes", MeasureUnit.BYTES),
        ("_s", MeasureUnit.SECONDS),
    ):
        if name.endswith(ending):
            return unit
    return None


def parse_quantity(text: str, unit: MeasureUnit | None) -> float:
    """Return a text's number in `unit`; the message of a ValueError says what to write instead."""
    found = _TEXT.fullmatch(text)
    wanted = "a number" if unit is None else f"a number of {unit}, such as '{_EXAMPLES[unit]}'"
    if found is None or len(text) > 100:
        raise ValueError(wanted)
    number, name = found.groups()
    if name is None:
        return float(number)
    factor = _factor(name, unit)
    if factor is None:
        raise ValueError(wanted)
    # With decimals, so that 20 us is exactly 20e-6.
    return float(Decimal(number) * Decimal(repr(factor)))


def _factor(name: str, unit: MeasureUnit | None) -> float | None:
    """Return how many of `unit` a unit's name means; None if it is none of this kind."""
    if unit is None:
        return None
    if unit is MeasureUnit.SECONDS:
        return _SECONDS.get(name)
    if unit is MeasureUnit.FLOPS_PER_S:
        rate = _RATE.fullmatch(name)
        return None if rate is None else _multiple(rate[1])
    size = _SIZE.fullmatch(name)
    if size is None or (size[3] is None) != (unit is MeasureUnit.BYTES):
        return None
    return _multiple(size[1]) / (8 if size[2] in ("b", "bit", "bits") else 1)


def _multiple(prefix: str) -> int:
    """Return the factor of a prefix, such as "", "k", "G" or "Gi"."""
    base = 1024 if prefix.endswith("i") else 1000
    power: int = base ** " KMGTP".index(prefix[:1].upper() or " ")
    return power
