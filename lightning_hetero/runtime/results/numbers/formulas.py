"""Numbers that are functions of means, sums and extremes over samples, such as a perplexity.

The exponential of a batch's mean isn't the mean of its micro-batches' exponentials. So if a step
logs `exp(loss)`, the micro-batches' losses are joined, and the function is called once, on that.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Union

import torch
from torch import Tensor

from lightning_hetero.runtime.results.numbers.kinds import JOINABLE, Kind, Reduction
from lightning_hetero.runtime.results.numbers.reduction_rules import constant_of
from lightning_hetero.runtime.results.numbers.torch_calls import TorchCall

__all__ = ["Formula", "Formulas", "Made"]

_Argument = Union["Formula", int, float, None]

# fmt: off
_OF_ONE: tuple[str, ...] = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "square", "abs",
    "neg", "reciprocal", "sigmoid", "tanh",
)
_OF_TWO: dict[str, Callable[..., Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "truediv": torch.div,
    "true_divide": torch.div, "divide": torch.div, "multiply": torch.mul, "subtract": torch.sub,
    "pow": torch.pow, "radd": torch.add, "rmul": torch.mul,
}
_REFLECTED: dict[str, Callable[..., Tensor]] = {
    "rsub": torch.sub, "rdiv": torch.div, "rtruediv": torch.div, "rpow": torch.pow,
}
# fmt: on
_OF_FLOATS: dict[str, Callable[[float], float]] = {
    "exp": math.exp,
    "exp2": lambda x: 2.0**x,
    "sqrt": math.sqrt,
    "log": math.log,
    "log2": math.log2,
    "log10": math.log10,
}
"""Functions that Python computes, which torch doesn't see."""
_LIMITS = {"clamp", "clip"}
_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    **{name: getattr(torch, name) for name in _OF_ONE},
    **_OF_TWO,
    **_REFLECTED,
    **dict.fromkeys(_LIMITS, torch.clamp),
}
_NUM_ARGUMENTS = {**dict.fromkeys(_OF_ONE, 1), **dict.fromkeys((*_OF_TWO, *_REFLECTED), 2)}
_BY_COUNT = {*_OF_TWO, *_REFLECTED} - {"pow", "rpow"}
_MOST = 8
"""Most parts of a number."""
_KEEPING = {"detach", "float", "double", "clone", "cpu", "item", "to", "squeeze"}
"""Functions of one number that return it."""


@dataclass(frozen=True)
class Formula:
    """An expression of a number's parts, by a function of constants and other formulas."""

    function: str
    """Name of the function; "part" returns the part whose index is the argument."""
    arguments: tuple[_Argument, ...]

    def compute(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the number that the formula gives for these parts."""
        if self.function == "part":
            return parts[int(self.arguments[0])]  # type: ignore[arg-type]
        given: list[Any] = [
            item.compute(parts) if isinstance(item, Formula) else item for item in self.arguments
        ]
        if self.function in _REFLECTED:
            given.reverse()
        function: Callable[..., Tensor] = _FUNCTIONS[self.function]
        return function(torch.as_tensor(given[0]), *given[1:])

    @property
    def num_parts(self) -> int:
        """Number of parts that it takes."""
        if self.function == "part":
            return 1
        return sum(item.num_parts for item in self.arguments if isinstance(item, Formula))

    def after(self, num_parts: int) -> "Formula":
        """Return the formula with `num_parts` added to the indices of its parts."""
        if self.function == "part":
            return _part(int(self.arguments[0]) + num_parts)  # type: ignore[arg-type]
        moved = (i.after(num_parts) if isinstance(i, Formula) else i for i in self.arguments)
        return Formula(self.function, tuple(moved))


@dataclass(frozen=True)
class Made:
    """A number that a function has made."""

    formula: Formula
    parts: tuple[Any, ...]
    """Numbers over samples, and constants."""
    versions: tuple[int, ...]
    """Version of each part, which a change in place increments."""


class Formulas:
    """The numbers of a step that functions have made of numbers over samples.

    Args:
        known: Returns what is known of a number.
        num_samples: Samples of the micro-batch; 0 if unknown.
    """

    def __init__(self, known: Callable[[Any], Reduction | None], num_samples: int) -> None:
        self._known = known
        self._num_samples = num_samples
        self._made: dict[int, tuple[Any, Made]] = {}
        self._told: list[float] = []

    def follow(self, call: TorchCall, result: Any) -> None:
        """Note how a function has made its result of single numbers."""
        made = self._made_by(call)
        if made is not None:
            # With the object, so that no other gets its id.
            self._made[id(result)] = result, made
        else:
            self._made.pop(id(result), None)
        if type(result) is float:
            self._told.append(result)

    def of(self, value: Any) -> Made | None:
        """Return how a number is made, None if that isn't known or it is one over samples."""
        found = self._made.get(id(value))
        if found is not None:
            is_current = tuple(map(_version_of, found[1].parts)) == found[1].versions
            return found[1] if is_current else None
        if not isinstance(value, float):
            return None
        for told, (name, function) in product(self._told, _OF_FLOATS.items()):
            made = self._argument(told)
            if made is not None and _is_function_of(value, told, function):
                return replace(made, formula=Formula(name, (made.formula,)))
        return None

    def forget(self) -> None:
        """Forget all numbers, and hold no objects of a step."""
        self._made.clear()
        self._told.clear()

    def _made_by(self, call: TorchCall) -> Made | None:
        name, given = call.name, list(call.args)
        if name in _LIMITS:
            given = [given[0], call.argument(1, "min"), call.argument(2, "max")]
        elif name in _KEEPING:
            found = self._made.get(id(given[0]))
            return None if found is None else found[1]
        elif call.kwargs or len(given) != _NUM_ARGUMENTS.get(name):
            return None
        arguments: list[_Argument] = []
        parts, versions = tuple[Any, ...](), tuple[int, ...]()
        for item in given:
            made = self._argument(item)
            if made is not None:
                arguments.append(made.formula.after(len(parts)))
                parts, versions = parts + made.parts, versions + made.versions
            elif item is None or type(item) in (int, float):
                arguments.append(item)
            else:
                return None
        if not 0 < len(parts) <= _MOST or (name in _BY_COUNT and self._may_count(name, given)):
            return None
        return Made(Formula(name, tuple(arguments)), parts, versions)

    def _may_count(self, name: str, given: Sequence[Any]) -> bool:
        """Whether a number over samples is combined with one that may count this micro-batch's."""
        known = [None if id(item) in self._made else self._known(item) for item in given]
        kinds = [None if item is None else item.kind for item in known]
        reflects = name in _REFLECTED
        are_others = any(
            kind is Kind.CONSTANT
            or type(item) is float
            or (type(item) is int and self._may_be_rows(item, is_left=is_left))
            for is_left, item, kind in zip((not reflects, reflects), given, kinds, strict=True)
        )
        return are_others and any(kind in JOINABLE for kind in kinds)

    def _may_be_rows(self, number: int, *, is_left: bool) -> bool:
        """Whether a number may count this micro-batch's samples, or a selection of them."""
        may_be_all = not (self._num_samples and number % self._num_samples)
        return may_be_all or bool(constant_of(number, is_left=is_left).count)

    def _argument(self, item: Any) -> Made | None:
        found = self._made.get(id(item))
        if found is not None:
            return found[1]
        known = self._known(item) if isinstance(item, Tensor | float) else None
        is_single = not isinstance(item, Tensor) or item.numel() == 1
        if known is None or not is_single or known.kind not in (*JOINABLE, Kind.CONSTANT):
            return None
        return Made(_part(0), (item,), (_version_of(item),))


def _version_of(item: Any) -> int:
    return item._version if isinstance(item, Tensor) and not item.is_inference() else 0


def _part(place: int) -> Formula:
    return Formula("part", (place,))


def _is_function_of(value: float, told: float, function: Callable[[float], float]) -> bool:
    """Whether a number is recognised as a function of another one; 0 and 1 never are."""
    try:
        made = function(told)
    except (ValueError, OverflowError):
        return False
    return value not in (0.0, 1.0, told) and math.isclose(value, made, rel_tol=1e-14)
