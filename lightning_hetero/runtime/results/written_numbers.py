"""Read in the user's code whether a whole number counts the rows of a batch or is a constant.

Python's numbers don't say where they come from: of a micro-batch with one row, `len(x)` and the 1
that counts batches are the same. What is written in the call that logs it, or where a loss is
divided by it, says it.
"""

import ast
import linecache
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import islice
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from lightning_hetero.runtime.callers import is_library
from lightning_hetero.runtime.results.number_kinds import WRITTEN, Kind, Reduction

if TYPE_CHECKING:
    from lightning_hetero.runtime.results.reductions import Reductions

__all__ = [
    "TOLD",
    "Rows",
    "count_of",
    "known_by_rows",
    "may_count",
    "rows_counted",
    "rows_of_operand",
]

Rows = tuple[int, ...] | None
"""Rows of the tensors that a number counts, none if it is a constant; None if nobody knows."""

_Function = ast.FunctionDef | ast.Lambda

TOLD: Rows = (-1,)
"""Of a number that a tensor has told by `.item()`."""
_CONSTANT: Rows = ()


def _is_whole(value: object) -> bool:
    return type(value) is int or (type(value) is float and value.is_integer())


def may_count(value: object) -> bool:
    """Whether a number can be one of rows, if it isn't known to be something else."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.requires_grad
    return _is_whole(value)


def count_of(value: Any, num_samples: int) -> Reduction | None:
    """Return what a whole number is if it may count a micro-batch's samples or tokens."""
    if not _is_whole(value) or not value or not num_samples or value % num_samples:
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
    return _read_in_code(lambda node: _argument_of(node, argument, key))


def rows_of_operand(*, is_left: bool) -> Rows:
    """Return what the number counts with which the user's code multiplies or divides a tensor.

    Args:
        is_left: Whether it stands before the tensor.
    """
    return _read_in_code(lambda node: _operand_of(node, is_left=is_left))


def _read_in_code(find: Callable[[ast.AST], ast.expr | None]) -> Rows:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_library(frame):
        frame = frame.f_back
    found = None if frame is None else _node_at(frame.f_code, frame.f_lasti)
    if frame is None or found is None:
        return None
    function, node = found
    try:
        return _Reader(function, frame.f_locals).read(find(node))
    except (RecursionError, AttributeError, LookupError, TypeError):
        return None


@lru_cache(maxsize=256)
def _node_at(code: CodeType, instruction: int) -> tuple[_Function, ast.AST] | None:
    """Return the function of a code object, and the call or operation of an instruction in it."""
    place = next(islice(code.co_positions(), instruction // 2, None), None)
    for function in _functions_in(code.co_filename):
        decorators: list[ast.expr] = getattr(function, "decorator_list", [])
        first = min([function.lineno, *(item.lineno for item in decorators)])
        name = getattr(function, "name", "<lambda>")
        if (name, first) == (code.co_name, code.co_firstlineno):
            for node in ast.walk(function):
                is_one = isinstance(node, ast.Call | ast.BinOp | ast.AugAssign)
                if is_one and _place_of(node) == place:
                    return function, node
    return None


def _place_of(node: Any) -> tuple[int | None, ...]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


@lru_cache(maxsize=16)
def _functions_in(filename: str) -> list[_Function]:
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return []
    return [node for node in ast.walk(tree) if isinstance(node, _Function)]


def _operand_of(node: ast.AST, *, is_left: bool) -> ast.expr | None:
    match node:
        case ast.BinOp(left=left, right=right):
            return left if is_left else right
        case ast.AugAssign(value=value):
            return value
        case ast.Call(args=[*_, value], keywords=[]):
            return value
    return None


def _argument_of(call: ast.AST, argument: int | str, key: str | None) -> ast.expr | None:
    if not isinstance(call, ast.Call):
        return None
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
def _assignments(function: _Function) -> dict[str, ast.expr | None]:
    """Return by name what a function assigns to it; None where that isn't written, as in loops.

    Attributes are there with a point before them.
    """
    written: dict[ast.expr, ast.expr] = {}
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=items)], value=ast.Tuple(elts=values)):
                written.update(zip(items, values, strict=False))
            case ast.Assign(targets=[ast.Tuple(elts=items)], value=value):
                of_value = (ast.Subscript(value, ast.Constant(i)) for i in range(len(items)))
                written.update(zip(items, of_value, strict=True))
            case ast.Assign(targets=[target], value=value):
                written[target] = value
    found: dict[str, ast.expr | None] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else "." + node.attr
            found[name] = None if name in found else written.get(node)
    return found


class _Reader(NamedTuple):
    """Reads expressions of a function that is running."""

    function: _Function
    values: Mapping[str, Any]
    """Its local variables."""

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
            case ast.Subscript(
                value=ast.Attribute(value=counted, attr="shape")
                | ast.Call(func=ast.Attribute(value=counted, attr="size"), args=[]),
                slice=dim,
            ):
                return self._read_dim(counted, dim)
            case ast.Attribute():
                is_changed = "." + node.attr in _assignments(self.function)
                return _CONSTANT if self._is_of_module(node) and not is_changed else None
        return None

    def _read_call(self, node: ast.Call) -> Rows:
        match node:
            case (
                ast.Call(func=ast.Name(id="len"), args=[counted])
                | ast.Call(func=ast.Attribute(value=counted, attr="numel" | "nelement"), args=[])
            ):
                return _rows_of(self._value(counted))
            case ast.Call(func=ast.Attribute(value=counted, attr="size"), args=[dim]):
                return self._read_dim(counted, dim)
            case ast.Call(func=ast.Attribute(attr="item"), args=[]):
                return TOLD
            case ast.Call(
                func=ast.Name(id="float" | "int") | ast.Attribute(attr="tensor" | "as_tensor"),
                args=[inner],
            ):
                return self.read(inner)
        return None

    def _read_name(self, name: str) -> Rows:
        assigned = _assignments(self.function)
        if name in assigned:
            return self.read(assigned[name])
        # A step gets its batch's index, and its loader's.
        is_step = getattr(self.function, "name", "").endswith("_step")
        given = self.function.args.args[2:] if is_step else []
        is_index = any(item.arg == name for item in given)
        return None if name in self.values and not is_index else _CONSTANT

    def _read_dim(self, counted: ast.expr, dim: ast.expr) -> Rows:
        if not isinstance(dim, ast.Constant) or not isinstance(dim.value, int):
            return None
        return _rows_of(self._value(counted)) if dim.value == 0 else _CONSTANT

    def _is_of_module(self, node: ast.expr) -> bool:
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and isinstance(self.values.get(node.id), nn.Module)

    def _value(self, node: ast.expr) -> Any:
        """Return the object that is meant.

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
