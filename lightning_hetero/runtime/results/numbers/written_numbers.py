"""Read in the user's code whether a whole number counts the rows of a batch or is a constant.

Python's numbers don't say where they come from: of a micro-batch with one row, `len(x)` and the 1
that counts batches are the same. What is written in the call that logs it, or where a loss is
multiplied or divided by it, says it.
"""

import ast
import linecache
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_hetero.runtime.callers import is_library, is_of_library
from lightning_hetero.runtime.results.numbers.kinds import WRITTEN, Kind, Reduction

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
"""Rows of the tensors that a number counts, none if it is a constant; None if nobody knows."""

_Function = ast.FunctionDef | ast.Lambda

TOLD: Rows = (-1,)
"""Of a number that a tensor has told by `.item()`."""
_CONSTANT: Rows = ()
_SOMEHOW: Rows = (-2,)
"""Of a number that depends on rows, but not in proportion to them, or nobody knows how."""
_ONCE = {"__init__", "setup", "configure_model"}
"""Functions that know of no batch."""
_SIZES = {"len", "shape", "size", "numel", "nelement"}


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


def known_by_rows(
    value: Any, rows: Rows, told: Mapping[int, Reduction | None], num_samples: int
) -> Reduction | None:
    """Return what a number is of which its call says what it counts.

    Args:
        value: The number.
        rows: What it counts.
        told: What whole numbers are that tensors have told.
        num_samples: Of the micro-batch; 0 if nobody knows.
    """
    if rows == TOLD:
        return told.get(value)
    if rows is None or not num_samples:
        return None
    are_samples = rows and not any(count % num_samples for count in rows)
    return Reduction(Kind.SUM, count=value, value=value) if are_samples else WRITTEN


def rows_counted(argument: int | str, key: str | None = None) -> Rows:
    """Return what an argument of the user's call counts, of a function that was called by users.

    Args:
        argument: Its place or name.
        key: Of its item, where the call may give a dict.
    """
    rows = _read_in_code(lambda node: [_argument_of(node, argument, key)], _frame_of_user())
    return None if rows == _SOMEHOW else rows


def rows_in_argument(place: int) -> Rows:
    """Return what is counted in an argument, in proportion or not; see `rows_counted`."""
    return _read_in_code(lambda node: [_argument_of(node, place, None)], _frame_of_user())


def rows_of_operand(*, is_left: bool) -> Rows:
    """Return what the number counts with which the user's code multiplies or divides a tensor.

    It needn't be in proportion to the rows.

    Args:
        is_left: Whether it stands before the tensor.
    """
    frame = _frame_of_user()
    if frame is not None and _has_number(frame.f_code, frame.f_lasti):
        return _CONSTANT
    return _read_in_code(lambda node: _operands_of(node, is_left=is_left), frame)


def _frame_of_user() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_library(frame):
        frame = frame.f_back
    return frame


@lru_cache(maxsize=256)
def _has_number(code: CodeType, instruction: int) -> bool:
    """Whether an operation has a number that is written there: most have."""
    found = _node_at(code, instruction)
    node = None if found is None else found[1]
    sides = (node.left, node.right) if isinstance(node, ast.BinOp) else ()
    return any(isinstance(side, ast.Constant) for side in sides)


def _read_in_code(
    find: Callable[[ast.AST], Sequence[ast.expr | None]], frame: FrameType | None
) -> Rows:
    """Return what the first of some expressions counts that counts anything."""
    found = None if frame is None else _node_at(frame.f_code, frame.f_lasti)
    if frame is None or found is None:
        return None
    function, node = found
    try:
        rows = [*map(_Reader(function, frame.f_locals, set()).read, find(node))]
        return next(filter(None, rows), _CONSTANT if _CONSTANT in rows else None)
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


def _operands_of(node: ast.AST, *, is_left: bool) -> Sequence[ast.expr]:
    match node:
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return left, right  # Torch calls `2 * x` and `x * 2` alike.
        case ast.BinOp(left=left, right=right) | ast.Call(args=[left, *_, right], keywords=[]):
            return [left if is_left else right]
        case ast.AugAssign(value=value) | ast.Call(args=[value], keywords=[]):
            return [value]
    return ()


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
def _assignments(function: _Function) -> dict[str, list[ast.expr | None]]:
    """Return by name all that a function assigns to it; None for what isn't written, as in loops.

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
            case ast.Assign(targets=targets, value=value):
                written.update(dict.fromkeys(targets, value))
            case ast.AugAssign(target=target, op=op, value=value):
                written[target] = ast.BinOp(target, op, value)
    found: dict[str, list[ast.expr | None]] = defaultdict(list)
    for node in ast.walk(function):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else "." + node.attr
            found[name].append(written.get(node))
    return dict(found)


@lru_cache(maxsize=256)
def _sets_sizes(filename: str, attribute: str) -> bool | None:
    """Whether functions of a file set an attribute to what is made of sizes; None if none sets it.

    Without those that know of no batch.
    """
    lines = linecache.getlines(filename)
    if not any("." + attribute in line for line in lines):
        return None  # Most files of libraries are long.
    values = [
        value
        for function in _functions_in(filename)
        if getattr(function, "name", None) not in _ONCE
        for value in _assignments(function).get("." + attribute, ())
    ]
    return any(map(_mentions_sizes, filter(None, values))) if values else None


def _mentions_sizes(value: ast.expr) -> bool:
    nodes = ast.walk(value)
    return any({getattr(node, "id", None), getattr(node, "attr", None)} & _SIZES for node in nodes)


def _rows_of_attribute(owner: object, name: str) -> Rows:
    """Return what a module's attribute counts, as far as the code of its class tells."""
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

    function: _Function
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
            case ast.Subscript(
                value=ast.Attribute(value=counted, attr="shape")
                | ast.Call(func=ast.Attribute(value=counted, attr="size"), args=[]),
                slice=dim,
            ):
                return self._read_dim(counted, dim)
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
        return self._read_inside(node)

    def _read_name(self, name: str) -> Rows:
        if name in self.under_way:
            return _CONSTANT  # What it was before decides.
        assigned = _assignments(self.function).get(name)
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
    known = [rows for rows in (left, right) if rows and rows != TOLD]
    if not known:
        return None if None in (left, right) or TOLD in (left, right) else _CONSTANT
    is_scaled = isinstance(op, ast.Mult) and () in (left, right)
    is_scaled |= isinstance(op, ast.Div) and right == ()
    is_sum = isinstance(op, ast.Add) and len(known) == 2
    is_in_proportion = (is_scaled or is_sum) and _SOMEHOW not in known
    return sum(known, ()) if is_in_proportion else _SOMEHOW
