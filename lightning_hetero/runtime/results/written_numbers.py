"""Read in the user's code whether a whole number counts the rows of a batch or is a constant.

Python's numbers don't say where they come from: of a micro-batch with one row, `len(x)` and the 1
that counts batches are the same. What is written in the call that logs it says it.
"""

import ast
import linecache
import sys
from functools import lru_cache
from itertools import islice
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lightning_hetero.runtime.callers import is_library
from lightning_hetero.runtime.results.number_kinds import WRITTEN, Kind, Reduction

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_hetero.runtime.results.reductions import Reductions

__all__ = ["TOLD", "Rows", "count_of", "known_by_rows", "may_count", "rows_counted"]

Rows = tuple[int, ...] | None
"""Rows of the tensors that a number counts, none if it is a constant; None if nobody knows."""

TOLD: Rows = (-1,)
"""Of a number that a tensor has told by `.item()`."""
_CONSTANT: Rows = ()
_SAME, _MAKING = {"float", "int"}, {"tensor", "as_tensor"}
"""Functions of one number that return it: Python's and torch's."""


def may_count(value: object) -> bool:
    """Whether a number can be one of rows, if it isn't known to be something else."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.requires_grad
    return type(value) is int or (type(value) is float and value.is_integer())


def count_of(value: Any, num_samples: int) -> Reduction | None:
    """Return what a whole number is if it may count a micro-batch's samples or tokens."""
    is_whole = type(value) is int or (type(value) is float and value.is_integer())
    if not is_whole or not value or not num_samples or value % num_samples:
        return None
    return Reduction(Kind.SUM, count=value, value=value)


def known_by_rows(value: Any, rows: Rows, reductions: "Reductions") -> Reduction | None:
    """Return what a number is of which its call says what it counts.

    Args:
        value: The number.
        rows: What it counts.
        reductions: What is known of others.
    """
    if rows == TOLD:
        return reductions.told.get(value)
    if rows is None or not reductions.num_samples:
        return None
    are_samples = rows and not any(count % reductions.num_samples for count in rows)
    return Reduction(Kind.SUM, count=value, value=value) if are_samples else WRITTEN


def rows_counted(argument: int | str, key: str | None = None) -> Rows:
    """Return what an argument of the user's call counts, of a function that was called by users.

    Args:
        argument: Its place or name.
        key: Of its item, where the call may give a dict.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_library(frame):
        frame = frame.f_back
    if frame is None:
        return None
    function, call = _call_at(frame.f_code, frame.f_lasti)
    if function is None or call is None:
        return None
    try:
        return _Reader(function, frame).read(_argument_of(call, argument, key))
    except (RecursionError, AttributeError, LookupError, TypeError):
        return None


@lru_cache(maxsize=256)
def _call_at(code: CodeType, instruction: int) -> tuple[ast.AST | None, ast.Call | None]:
    """Return the function of a code object, and the call that an instruction makes in it."""
    tree = _tree_of(code.co_filename)
    place = next(islice(code.co_positions(), instruction // 2, None), None)
    if tree is None or place is None or None in place:
        return None, None
    function = next(
        (
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
            and node.name == code.co_name
            and min([node.lineno, *(i.lineno for i in node.decorator_list)]) == code.co_firstlineno
        ),
        None,
    )
    for node in ast.walk(function) if function is not None else ():
        if isinstance(node, ast.Call):
            found = node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
            if found == place:
                return function, node
    return None, None


@lru_cache(maxsize=16)
def _tree_of(filename: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return None


def _argument_of(call: ast.Call, argument: int | str, key: str | None) -> ast.expr | None:
    named = {item.arg: item.value for item in call.keywords}
    if isinstance(argument, str):
        return named.get(argument)
    if key is not None and isinstance(call.func, ast.Attribute) and call.func.attr == "log_dict":
        given = call.args[0] if call.args else named.get("dictionary")
        return _item_of(given, key)
    if argument < len(call.args) and not any(isinstance(i, ast.Starred) for i in call.args):
        return call.args[argument]
    return named.get("value")


def _item_of(given: ast.expr | None, key: str) -> ast.expr | None:
    if not isinstance(given, ast.Dict):
        return None
    pairs = zip(given.keys, given.values, strict=True)
    return next((v for k, v in pairs if isinstance(k, ast.Constant) and k.value == key), None)


@lru_cache(maxsize=64)
def _assignments(function: ast.AST) -> dict[str, list[tuple[ast.expr | None, int | None]]]:
    """Return by name what a function assigns to it, and the item of it if it is unpacked.

    None stands for what isn't written, as in loops. Attributes are there with a point before them.
    """
    found: dict[str, list[tuple[ast.expr | None, int | None]]] = {}
    sources: dict[ast.AST, tuple[ast.expr, int | None]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            sources[target] = node.value, None
            for place, item in enumerate(target.elts if isinstance(target, ast.Tuple) else ()):
                sources[item] = node.value, place
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.setdefault(node.id, []).append(sources.get(node, (None, None)))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found["." + node.attr] = []
    return found


class _Reader:
    """Reads expressions of a function that is running.

    Args:
        function: Its definition.
        frame: Where it runs.
    """

    def __init__(self, function: ast.AST, frame: FrameType) -> None:
        self._function = function
        self._locals: Mapping[str, Any] = frame.f_locals

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
            case ast.Subscript(value=ast.Attribute(value=counted, attr="shape"), slice=dim):
                return self._read_dim(counted, dim)
            case ast.Attribute():
                is_changed = "." + node.attr in _assignments(self._function)
                return _CONSTANT if self._is_of_module(node) and not is_changed else None
        return None

    def _read_call(self, node: ast.Call) -> Rows:
        match node:
            case ast.Call(func=ast.Name(id="len"), args=[counted]):
                return _rows_of(self._value(counted))
            case ast.Call(func=ast.Attribute(value=counted, attr="numel" | "nelement"), args=[]):
                return _rows_of(self._value(counted))
            case ast.Call(func=ast.Attribute(value=counted, attr="size"), args=[dim]):
                return self._read_dim(counted, dim)
            case ast.Call(func=ast.Attribute(attr="item"), args=[]):
                return TOLD
            case ast.Call(func=ast.Name(id=name), args=[inner]) if name in _SAME:
                return self.read(inner)
            case ast.Call(func=ast.Attribute(attr=name), args=[inner]) if name in _MAKING:
                return self.read(inner)
        return None

    def _read_name(self, name: str) -> Rows:
        sources = _assignments(self._function).get(name, [])
        if not sources:
            is_given = name in self._locals and name not in self._indices()
            return None if is_given else _CONSTANT
        value, place = sources[0]
        if len(sources) > 1 or value is None:
            return None
        return self.read(value) if place is None else self._read_unpacked(value, place)

    def _indices(self) -> list[str]:
        """Return the names under which a step gets its batch's index, and its loader's."""
        function = self._function
        if not isinstance(function, ast.FunctionDef) or not function.name.endswith("_step"):
            return []
        return [item.arg for item in function.args.args[2:]]

    def _read_unpacked(self, value: ast.expr, place: int) -> Rows:
        match value:
            case (
                ast.Attribute(value=counted, attr="shape")
                | ast.Call(func=ast.Attribute(value=counted, attr="size"), args=[])
            ):
                return self._read_dim(counted, ast.Constant(place))
            case ast.Tuple(elts=items):
                return self.read(items[place])
        return None

    def _read_dim(self, counted: ast.expr, dim: ast.expr) -> Rows:
        if not isinstance(dim, ast.Constant) or not isinstance(dim.value, int):
            return None
        return _rows_of(self._value(counted)) if dim.value == 0 else _CONSTANT

    def _is_of_module(self, node: ast.expr) -> bool:
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and isinstance(self._locals.get(node.id), nn.Module)

    def _value(self, node: ast.expr) -> Any:
        """Return the object that is meant.

        Raises:
            LookupError: It would have to be computed.
        """
        match node:
            case ast.Name(id=name):
                return self._locals[name]
            case ast.Attribute(value=inner, attr=name):
                return getattr(self._value(inner), name)
            case ast.Subscript(value=inner, slice=ast.Constant(value=key)):
                return self._value(inner)[key]
        raise LookupError(ast.dump(node))


def _rows_of(value: Any) -> Rows:
    if isinstance(value, Tensor):
        return (value.shape[0],) if value.ndim and not isinstance(value, nn.Parameter) else None
    if isinstance(value, list) and not any(isinstance(item, Tensor) for item in value):
        return (len(value),)  # Samples that are no tensors, such as texts.
    # Lightning's batches are lists, tuples and dicts of columns; what others count nobody knows.
    is_known = isinstance(value, list | tuple | dict | str | range | nn.Module)
    return _CONSTANT if is_known else None


def _joined(op: ast.operator, left: Rows, right: Rows) -> Rows:
    if left is None or right is None or TOLD in (left, right):
        return None
    if not left and not right:
        return _CONSTANT
    is_scaled = isinstance(op, ast.Mult) and not (left and right)
    is_sum = isinstance(op, ast.Add) and bool(left and right)
    return (*left, *right) if is_scaled or is_sum else None
