"""Convert files to plain data, JSON or YAML without duplicate keys, and values to texts.

Both parsers raise many types of errors for malformed texts (deep nesting, numbers of 5,000 digits,
impossible dates); each is converted to the type that the caller passes.
"""

import difflib
import json
import reprlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from lightning_hetero.core.errors import HeteroError

_T = TypeVar("_T")
_SHOWN = 80

_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxother = 3, 60, 60
_short.maxlist = _short.maxtuple = _short.maxdict = _short.maxset = 6


def show(value: object) -> str:
    """Return a value for an error message, shortened to 80 characters at most."""
    try:
        text = _short.repr(value)
    except (ValueError, RecursionError):
        # An integer of more digits than Python prints.
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def nearest(name: str, names: Iterable[str]) -> str:
    """Return " Did you mean …?" with the known name closest to `name`; "" if none is close."""
    lower = {known.lower(): known for known in names}
    close = difflib.get_close_matches(name[:_SHOWN].lower(), lower, n=1)
    return f" Did you mean {lower[close[0]]}?" if close else ""


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return left-aligned columns two spaces apart, the header first, without trailing blanks."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    )
    return "\n".join(lines)


def read_text(path: str | Path, what: str, error: type[HeteroError]) -> str:
    """Return a file's text; an `error` names the file and says why it can't be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise error(f"Can't read the {what} {path}: it isn't UTF-8 text.") from problem
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise error(f"Can't read the {what} {path}: {reason}.") from problem


def load_file(
    path: str | Path, what: str, error: type[HeteroError], parse: Callable[[str], _T]
) -> _T:
    """Return the result of `parse` for a file's text; an `error` names the file."""
    text = read_text(path, what, error)
    try:
        return parse(text)
    except error as problem:
        raise error(f"{path}: {problem}") from problem


def parse_json(
    text: str | bytes, what: str, error: type[HeteroError], *, is_ours: bool = True
) -> Any:
    """Return a JSON text's data; raise an `error` if it isn't valid, or has a key twice.

    With `is_ours=False`, for files of other programs, a key may occur twice and numbers may be NaN.
    """
    try:
        if not is_ours:
            return json.loads(text)
        return json.loads(text, object_pairs_hook=_mapping, parse_constant=_refuse_constant)
    except RecursionError as problem:
        raise error(f"The {what} is nested too deeply to be read.") from problem
    except ValueError as problem:
        raise error(f"The {what} is not valid JSON: {_one_line(problem)}.") from problem


def parse_yaml(text: str, what: str, error: type[HeteroError]) -> Any:
    """Return a YAML text's data; raise an `error` if it isn't valid, or has a key twice.

    Dates stay texts, as in JSON.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError as problem:
        raise error(f"The {what} is nested too deeply to be read.") from problem
    except Exception as problem:
        # PyYAML's constructors let any exception through: `!!int ''` is an IndexError.
        raise error(f"The {what} is not valid YAML: {_one_line(problem)}.") from problem


def _one_line(problem: Exception) -> str:
    text = " ".join(str(problem).split()).rstrip(".") or type(problem).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = max(counts, key=lambda name: counts[name])
        raise ValueError(f"the key {show(twice)} stands twice in one place; keep one")
    return data


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} isn't a number in JSON")


class _Loader(yaml.SafeLoader):
    """A SafeLoader that refuses duplicate keys, and leaves dates as texts."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own way
        first: [entry for entry in entries if entry[0] != "tag:yaml.org,2002:timestamp"]
        for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, *deep: Any, **more: Any) -> dict[Any, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {show(key)} stands twice; keep one", key_node.start_mark
                )
            if isinstance(key, Hashable):
                seen.add(key)
        return super().construct_mapping(node, *deep, **more)
