"""Find the code that has called torch, from inside of what watches torch's functions."""

import ast
import linecache
import sys
from functools import lru_cache
from itertools import islice
from types import CodeType, FrameType

__all__ = [
    "called_by_library",
    "calling_frame",
    "is_library",
    "is_of_library",
    "takes_written_rows",
]

_OWN, _PASSED = "lightning_hetero.", ("torch.", "copy.")
_LIBRARIES = (_OWN, *_PASSED, "lightning.", "pytorch_lightning.", "torchmetrics.", "functools.")
_WATCHING = "__torch_function__"


def calling_frame() -> FrameType | None:
    """Return the frame in which torch was called, out of a mode's `__torch_function__`.

    It may be one of this package.
    """
    frame = _asking_frame()
    while frame is not None and _module_of(frame).startswith(_PASSED):
        frame = frame.f_back
    return frame


def called_by_library() -> bool:
    """Whether code of torch, Lightning or this package has called the function that asks."""
    return is_library(sys._getframe(2))


def is_library(frame: FrameType) -> bool:
    """Whether code is torch's, Lightning's or this package's."""
    return _module_of(frame).startswith(_LIBRARIES)


def is_of_library(module: str) -> bool:
    """Whether a Python module is torch's, Lightning's or this package's."""
    return f"{module}.".startswith(_LIBRARIES)


def _asking_frame() -> FrameType | None:
    """Return the frame that called a mode's `__torch_function__`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != _WATCHING:
        frame = frame.f_back
    while frame is not None and frame.f_code.co_name == _WATCHING:
        frame = frame.f_back
    return frame


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")) + "."


def takes_written_rows(frame: FrameType) -> bool:
    """Whether the subscript that a frame evaluates takes rows by numbers that stand in the code.

    `x[0]` and `x[:2, 1]` do, `x[i]` doesn't. Without the source nobody knows.
    """
    return _takes_written_rows(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=256)
def _takes_written_rows(code: CodeType, instruction: int) -> bool:
    place = next(islice(code.co_positions(), instruction // 2, None), None)
    if place is None or None in place:
        return False
    first, last, start, stop = (int(item or 0) for item in place)
    lines = [linecache.getline(code.co_filename, i).encode() for i in range(first, last + 1)]
    lines[-1] = lines[-1][:stop]
    lines[0] = lines[0][start:]
    try:
        node = ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
    except (SyntaxError, ValueError):
        return False
    if not isinstance(node, ast.Subscript):
        return False
    index = node.slice
    taken = index.elts[0] if isinstance(index, ast.Tuple) and index.elts else index
    bounds = (taken.lower, taken.upper) if isinstance(taken, ast.Slice) else (taken,)
    return all(item is None or _is_integer(item) for item in bounds)


def _is_integer(node: ast.expr) -> bool:
    try:
        return type(ast.literal_eval(node)) is int
    except ValueError:
        return False
