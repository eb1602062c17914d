"""Logs with a JSON object a line, to which processes append that may die in the middle of one.

A torn line is ended by whoever appends next, and left out, with a warning, by whoever reads.
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["append_line", "read_lines"]

_log = logging.getLogger(__name__)


def append_line(path: Path, entry: Mapping[str, Any]) -> None:
    """Append an entry at once, as a line of its own, whatever is at the end of the file.

    A disk that takes no more costs the line, with a warning, and not the run.
    """
    line = json.dumps(entry).encode() + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        # One call, so that lines of several processes don't mix.
        os.write(descriptor, line)
    except OSError as error:
        _log.warning("%s lacks a line that couldn't be written: %s", path, error)
    finally:
        os.close(descriptor)


def read_lines(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Yield the number and the content of each whole line; one that is being written is left out.

    Raises:
        OSError: The file can't be read.
        UnicodeDecodeError: It is no text.
    """
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError:
                if number < len(lines):
                    _log.warning("%s, line %d is torn and left out: %.80s", path, number, line)
