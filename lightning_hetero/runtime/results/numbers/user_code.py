"""Find the user's code that has called a function, as a syntax tree.

If there is no source, as in an interactive session, nothing is found.
"""

import ast
import linecache
import sys
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from types import CodeType, FrameType
from typing import Any

from lightning_hetero.runtime.callers import is_library

__all__ = [
    "Function",
    "argument_of",
    "assignments",
    "frame_of_user",
    "functions_in",
    "has_number",
    "node_at",
    "operands_of",
]

Function = ast.FunctionDef | ast.Lambda


def frame_of_user() -> FrameType | None:
    """Return the innermost frame of the user's code among this function's callers, if any."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_library(frame):
        frame = frame.f_back
    return frame


@lru_cache(maxsize=256)
def has_number(code: CodeType, instruction: int) -> bool:
    """Whether an operand of an operation is a literal, as in most operations with a number."""
    found = node_at(code, instruction)
    node = None if found is None else found[1]
    sides = (node.left, node.right) if isinstance(node, ast.BinOp) else ()
    return any(isinstance(side, ast.Constant) for side in sides)


@lru_cache(maxsize=256)
def node_at(code: CodeType, instruction: int) -> tuple[Function, ast.AST] | None:
    """Return the function of a code object, and the call or operation of one of its instructions.

    None if the source doesn't show them.
    """
    place = next(islice(code.co_positions(), instruction // 2, None), None)
    for function in functions_in(code.co_filename):
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
def functions_in(filename: str) -> list[Function]:
    """Return the functions of a file, also nested ones."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return []
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def operands_of(node: ast.AST, *, is_left: bool) -> Sequence[ast.expr]:
    """Return the expressions that may be an operation's left, or right, operand."""
    match node:
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return left, right  # Torch calls `2 * x` and `x * 2` alike.
        case ast.BinOp(left=left, right=right) | ast.Call(args=[left, *_, right], keywords=[]):
            return [left if is_left else right]
        case ast.AugAssign(value=value) | ast.Call(args=[value], keywords=[]):
            return [value]
    return ()


def argument_of(call: ast.AST, argument: int | str, key: str | None) -> ast.expr | None:
    """Return an argument of a call by its position or name, or an item of `log_dict`'s dict."""
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
def assignments(function: Function) -> dict[str, list[ast.expr | None]]:
    """Return by name the expressions that a function assigns to it; None for others, as in loops.

    Names of attributes begin with a dot.
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
