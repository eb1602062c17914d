"""Read in the user's code whether a whole number counts the rows of a batch or is a constant.

A number in Python doesn't show where it comes from: for a micro-batch with one row, `len(x)` and
the 1 that counts batches are the same. So the expression is read in the call that logs the number,
or where a loss is multiplied or divided by it.
"""

import ast
import linecache
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import FrameType, FunctionType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from lightning_hetero.runtime.callers import is_of_library
from lightning_hetero.runtime.results.numbers.kinds import WRITTEN, Kind, Reduction
from lightning_hetero.runtime.results.numbers.user_code import (
    Function,
    argument_of,
    assignments,
    frame_of_user,
    functions_in,
    has_number,
    node_at,
    operands_of,
)

__all__ = [
    "TOLD",
    "Rows",
    "count_of",
    "known_by_rows",
    "may_count",
    "rows_counted",
    "rows_in_argument",
    "rows_of_operand",
]

Rows = tuple[int, ...] | None
"""Rows of the tensors that a number counts, none if it is a constant; None if unknown."""

TOLD: Rows = (-1,)
"""For a number that was read from a tensor by `.item()`."""
_CONSTANT: Rows = ()
_SOMEHOW: Rows = (-2,)
"""For a number that depends on rows, but not in proportion to them, or in an unknown way."""
_ONCE = {"__init__", "setup", "configure_model"}
"""Functions that run without a batch."""
_SIZES = {"len", "shape", "size", "numel", "nelement"}
_COPYING = {"array", "asarray", "tensor", "as_tensor"}
_SAME_ROWS = {"numpy", "cpu", "detach", "float", "long", "contiguous", "clone"}
"""Methods whose result has as many rows."""
_AS_NUMBERS = {"float", "int", "float32", "float64", "int32", "int64"}


def _is_whole(value: object) -> bool:
    if isinstance(value, np.generic):
        value = value.item()
    return type(value) is int or (type(value) is float and value.is_integer())


def may_count(value: object) -> bool:
    """Whether a number may count rows, if it isn't known to be something else."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.requires_grad
    return _is_whole(value)


def count_of(value: Any, num_samples: int) -> Reduction | None:
    """Return a SUM if a whole number may count a micro-batch's samples or tokens, else None."""
    if not _is_whole(value) or not value or not num_samples or value % num_samples:
        return None
    return Reduction(Kind.SUM, count=value, value=value)


def known_by_rows(
    value: Any, rows: Rows, told: Mapping[int, Reduction | None], num_samples: int
) -> Reduction | None:
    """Return what is known of a number by the rows that it counts; None if nothing.

    Args:
        value: The number.
        rows: The rows that it counts.
        told: What is known of integers that were read from tensors.
        num_samples: Samples of the micro-batch; 0 if unknown.
    """
    if rows == TOLD:
        return told.get(value)
    if rows is None or not num_samples:
        return None
    are_samples = rows and not any(count % num_samples for count in rows)
    return Reduction(Kind.SUM, count=value, value=value) if are_samples else WRITTEN


def rows_counted(argument: int | str, key: str | None = None) -> Rows:
    """Return what an argument counts in the user's call that is running; None if unknown.

    Args:
        argument: Its position or name.
        key: Key of its item, if the call may be of `log_dict`.
    """
    rows = _read_in_code(lambda node: [argument_of(node, argument, key)], frame_of_user())
    return None if rows == _SOMEHOW else rows


def rows_in_argument(place: int) -> Rows:
    """Return what an argument counts, in proportion to rows or not; see `rows_counted`."""
    return _read_in_code(lambda node: [argument_of(node, place, None)], frame_of_user())


def rows_of_operand(*, is_left: bool) -> Rows:
    """Return what a number counts that is the other operand of a tensor in the user's code.

    It needn't be in proportion to the rows.

    Args:
        is_left: Whether the number is the left operand.
    """
    frame = frame_of_user()
    if frame is not None and has_number(frame.f_code, frame.f_lasti):
        return _CONSTANT
    return _read_in_code(lambda node: operands_of(node, is_left=is_left), frame)


def _read_in_code(
    find: Callable[[ast.AST], Sequence[ast.expr | None]], frame: FrameType | None
) -> Rows:
    """Return what the expressions of `find` count: the first of them that counts anything."""
    found = None if frame is None else node_at(frame.f_code, frame.f_lasti)
    if frame is None or found is None:
        return None
    function, node = found
    try:
        rows = [*map(_Reader(function, frame.f_locals, set()).read, find(node))]
        return next(filter(None, rows), _CONSTANT if _CONSTANT in rows else None)
    except (RecursionError, AttributeError, LookupError, TypeError):
        return None


@lru_cache(maxsize=256)
def _sets_sizes(filename: str, attribute: str) -> bool | None:
    """Whether functions of a file set an attribute to a value made of sizes; None if none sets it.

    Functions in `_ONCE` are ignored.
    """
    lines = linecache.getlines(filename)
    if not any("." + attribute in line for line in lines):
        return None  # Most files of libraries are long.
    values = [
        value
        for function in functions_in(filename)
        if getattr(function, "name", None) not in _ONCE
        for value in assignments(function).get("." + attribute, ())
    ]
    return any(map(_mentions_sizes, filter(None, values))) if values else None


def _mentions_sizes(value: ast.expr) -> bool:
    nodes = ast.walk(value)
    return any({getattr(node, "id", None), getattr(node, "attr", None)} & _SIZES for node in nodes)


def _rows_of_attribute(owner: object, name: str) -> Rows:
    """Return what a module's attribute counts, as far as the code of its classes shows."""
    rows = _CONSTANT
    for kind in type(owner).__mro__:
        if is_of_library(kind.__module__):
            continue
        functions = [item for item in vars(kind).values() if isinstance(item, FunctionType)]
        if isinstance(vars(kind).get(name), property):
            rows = rows or None
        for filename in {item.__code__.co_filename for item in functions}:
            are_sizes = _sets_sizes(filename, name)
            if are_sizes is not None:
                rows = _SOMEHOW if are_sizes else rows or None
    return rows


class _Reader(NamedTuple):
    """Reads expressions of a function that is running."""

    function: Function
    values: Mapping[str, Any]
    """Its local variables."""
    under_way: set[str]
    """Names that are being read, which may be made of what they were before."""

    def read(self, node: ast.expr | None) -> Rows:
        """Return what an expression counts."""
        match node:
            case ast.Constant():
                return _CONSTANT
            case ast.Name(id=name):
                return self._read_name(name)
            case ast.UnaryOp(operand=operand):
                return self.read(operand)
            case ast.BinOp(left=left, op=op, right=right):
                return _joined(op, self.read(left), self.read(right))
            case ast.Call():
                return self._read_call(node)
            case ast.Subscript(value=shape, slice=dim):
                whole = self._shaped(shape)
                return self._read_inside(node) if whole is None else self._read_dim(whole, dim)
            case ast.Attribute(value=counted, attr="shape"):
                return _SOMEHOW if _rows_of(self._value(counted)) else None
            case ast.Attribute(value=owner, attr="size") if not self._is_of_module(node):
                return _rows_of(self._value(owner))  # Of an array, which has it as a number.
            case ast.Attribute(value=owner, attr=name):
                is_known = self._is_of_module(node)
                return _rows_of_attribute(self._value(owner), name) if is_known else None
        return self._read_inside(node)

    def _read_inside(self, node: ast.expr | None) -> Rows:
        """Return what an expression of any other form counts."""
        items = [] if node is None else ast.iter_child_nodes(node)
        counts = any(self.read(item) for item in items if isinstance(item, ast.expr))
        return _SOMEHOW if counts else None

    def _read_call(self, node: ast.Call) -> Rows:
        match node:
            case ast.Call(func=ast.Name(id="len"), args=[counted]):
                return _rows_of(self._value(counted))
            case (
                ast.Call(func=ast.Attribute(value=given, attr="numel" | "nelement"), args=[])
                | ast.Call(func=ast.Name(id="prod") | ast.Attribute(attr="prod"), args=[given])
            ):
                whole = self._shaped(given)
                is_of_part = whole is None and _name_called(node) == "prod"
                return self.read(given) if is_of_part else _rows_of(self._value(whole or given))
            case ast.Call(func=ast.Attribute(value=counted, attr="size"), args=[dim]):
                return self._read_dim(counted, dim)
            case ast.Call(func=ast.Attribute(value=inner, attr="item"), args=[]):
                found = self.read(inner)
                return TOLD if found in (None, _SOMEHOW) else found
            case ast.Call(args=[inner]) if _name_called(node) in _AS_NUMBERS | _COPYING:
                return self.read(inner)
            case ast.Call(func=ast.Attribute(attr="size"), args=[]):
                return _SOMEHOW
        return self._read_inside(node)

    def _shaped(self, node: ast.expr) -> ast.expr | None:
        """Return the expression of the tensor whose shape is given, in any form; None if none."""
        match node:
            case (
                ast.Attribute(value=counted, attr="shape")
                | ast.Call(func=ast.Attribute(value=counted, attr="size"), args=[])
            ):
                return counted
            case ast.Call(args=[inner]) if _name_called(node) in _COPYING | {"tuple", "list"}:
                return self._shaped(inner)
            case ast.Name(id=name):
                assigned = [*filter(None, assignments(self.function).get(name, ()))]
                return self._shaped(assigned[0]) if len(assigned) == 1 else None
        return None

    def _read_name(self, name: str) -> Rows:
        if name in self.under_way:
            return _CONSTANT  # Its earlier value decides.
        assigned = assignments(self.function).get(name)
        if assigned is not None:
            self.under_way.add(name)
            found = [self.read(value) for value in assigned]
            self.under_way.remove(name)
            is_clear = len(found) == 1 or not (None in found or any(found))
            return found[0] if is_clear else _SOMEHOW if any(found) else None
        # A step gets its batch's index, and its loader's.
        is_step = getattr(self.function, "name", "").endswith("_step")
        given = self.function.args.args[2:] if is_step else []
        is_index = any(item.arg == name for item in given)
        return None if name in self.values and not is_index else _CONSTANT

    def _read_dim(self, counted: ast.expr, dim: ast.expr) -> Rows:
        """Return what one of a tensor's sizes counts, or several of them."""
        rows = _rows_of(self._value(counted))
        match dim:
            case ast.Constant(value=int(place)):
                return rows if place == 0 else _CONSTANT
            case ast.Slice(lower=ast.Constant(value=int(place))) if place > 0:
                return _CONSTANT
            case ast.Slice() if rows:
                return _SOMEHOW
        return None

    def _is_of_module(self, node: ast.expr) -> bool:
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and isinstance(self.values.get(node.id), nn.Module)

    def _value(self, node: ast.expr) -> Any:
        """Return the object that an expression refers to.

        Raises:
            LookupError: It would have to be computed.
        """
        match node:
            case ast.Name(id=name):
                return self.values[name]
            case ast.Attribute(value=inner, attr=name):
                return getattr(self._value(inner), name)
            case ast.Subscript(value=inner, slice=ast.Constant(value=key)):
                return self._value(inner)[key]
            case ast.Call(func=ast.Attribute(value=inner, attr=name), args=[]) if (
                name in _SAME_ROWS
            ):
                return self._value(inner)
        raise LookupError(ast.dump(node))


def _name_called(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def _rows_of(value: Any) -> Rows:
    if isinstance(value, Tensor | np.ndarray):
        return (value.shape[0],) if value.ndim and not isinstance(value, nn.Parameter) else None
    if isinstance(value, list) and not any(isinstance(item, Tensor) for item in value):
        return (len(value),)  # Samples that are no tensors, such as texts.
    # Lightning's batches are lists, tuples and dicts of columns; for other types it is unknown.
    is_known = isinstance(value, list | tuple | dict | str | range | nn.Module)
    return _CONSTANT if is_known else None


def _joined(op: ast.operator, left: Rows, right: Rows) -> Rows:
    known = [rows for rows in (left, right) if rows and rows != TOLD]
    if not known:
        return None if None in (left, right) or TOLD in (left, right) else _CONSTANT
    is_scaled = isinstance(op, ast.Mult) and () in (left, right)
    is_scaled |= isinstance(op, ast.Div) and right == ()
    is_sum = isinstance(op, ast.Add) and len(known) == 2
    is_in_proportion = (is_scaled or is_sum) and _SOMEHOW not in known
    return sum(known, ()) if is_in_proportion else _SOMEHOW
