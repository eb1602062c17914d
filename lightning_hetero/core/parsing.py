"""Read what people write, so that an error says which file and which key is wrong."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from lightning_hetero.core.errors import HeteroError

__all__ = ["check_fields", "check_keys", "load_file"]

_T = TypeVar("_T")


def load_file(
    path: str | Path, what: str, error: type[HeteroError], parse: Callable[[str], _T]
) -> _T:
    """Return what `parse` makes of a file's text; an `error` names the file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise error(f"Can't read the {what} {path}: {problem}.") from problem
    try:
        return parse(text)
    except error as problem:
        raise error(f"{path}: {problem}") from problem


def check_keys(
    data: Any,
    what: str,
    error: type[HeteroError],
    *,
    required: Collection[str],
    optional: Collection[str] = (),
) -> Mapping[str, Any]:
    """Return `data`; `error` unless it is a mapping with the required keys and no unknown ones."""
    if not isinstance(data, Mapping):
        raise error(f"The {what} is {data!r}; it must be a mapping with {sorted(required)}.")
    if set(required) - data.keys() or data.keys() - {*required, *optional}:
        raise error(
            f"The {what} has keys {sorted(map(str, data))}; needed: {sorted(required)}, allowed "
            f"besides: {sorted(optional)}."
        )
    return data


def check_fields(data: Any, schema: type, what: str, error: type[HeteroError]) -> Mapping[str, Any]:
    """Return `data`; `error` unless its keys are those of a dataclass, defaults left out or not."""
    optional = {item.name for item in fields(schema) if item.default is not MISSING}
    required = {item.name for item in fields(schema)} - optional
    return check_keys(data, what, error, required=required, optional=optional)
