"""The log of a run: one JSON object per line, appended by processes that may die while writing.

A line is `{"event": "recovered", "at_s": 1732180000.25, "step": 40, ...}`; `at_s` is in seconds
since 1970. If a crash has left an incomplete line, the next append ends it, and readers skip it
with a warning.
"""

import json
import logging
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)


def append_event(path: Path, event: str, **fields: Any) -> None:
    """Append an event at once, as a line of its own, even after an incomplete line.

    If the disk is full, or gone, the line is lost, with a warning; the run goes on.

    Args:
        path: The file; it and its folder are created if they don't exist.
        event: Name of the event.
        fields: The event's other keys; tensors become numbers, infinities and NaN strings.
    """
    entry = {"event": event, "at_s": time.time(), **fields}
    line = json.dumps(_plain(entry)).encode() + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b", buffering=0) as file:
            size = file.tell()
            if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                line = b"\n" + line
            # One call, so that lines of several processes don't mix.
            file.write(line)
    except OSError as error:
        _log.warning("%s lacks a line that couldn't be written: %s", path, error)


def read_entries(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Yield the number and content of each complete line; incomplete ones are skipped.

    Raises:
        OSError: The file can't be read.
        UnicodeDecodeError: It isn't text.
    """
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError):
                if number < len(lines):
                    _log.warning("%s, line %d is torn and left out: %.80s", path, number, line)


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold: without infinities and tensors."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str | int | None):
        return value
    number = float(value)
    return number if math.isfinite(number) else str(number)
