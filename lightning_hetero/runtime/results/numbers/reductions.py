"""Follow torch functions to know which numbers of a step are means, sums or extremes over samples.

They are followed before and after the layers. A full mean is a mean over its input's elements, and
later operations follow the rules of `kinds`. Dim 0 is assumed to count samples (or tokens).
Results that mix samples other than by sums, means and extremes are `TOGETHER`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise, starmap
from typing import Any

from torch import Tensor

from lightning_hetero.runtime.results.numbers.formulas import Formulas
from lightning_hetero.runtime.results.numbers.kinds import (
    CONSTANT,
    JOINABLE,
    LINEAR,
    OPERATIONS,
    TOGETHER,
    UNKNOWN,
    Kind,
    Reduction,
    fold,
    operation_called,
)
from lightning_hetero.runtime.results.numbers.reduction_rules import (
    FACTORIES,
    FLOORS,
    JOINING,
    KEEPING,
    NONLINEAR,
    NOT_BY_ELEMENT,
    REDUCTIONS,
    REORDERING,
    ZERO,
    constant_of,
    made_anew,
    of_one,
    reduced,
    some_dims,
)
from lightning_hetero.runtime.results.numbers.sample_places import (
    CHOOSING,
    TURNING,
    TURNS,
    SampleParts,
    chooses_samples,
    gives_other_places,
    turns_samples,
)
from lightning_hetero.runtime.results.numbers.torch_calls import (
    NO_NUMBERS,
    NO_TENSORS,
    PRODUCTS,
    TorchCall,
    is_outer,
    is_parameter,
    name_of,
    tensors_among,
)

__all__ = ["Reductions"]

_NO_TENSORS = NO_TENSORS | {slice}
_LISTS = frozenset((list, tuple))
_BY_CHANCE = {"randperm", "rand", "randn"}
_CONSTANTS = {id(CONSTANT), id(ZERO)}
_NO_REDUCTIONS = _CONSTANTS | {id(None)}


class Reductions:
    """The known numbers of one micro-batch.

    Args:
        constants: Tensors that don't depend on the samples, besides parameters.
        num_samples: Samples of the micro-batch; 0 if unknown. Dim 0 of a tensor is taken to count
            samples, or a multiple of them, where its size allows it.
    """

    def __init__(self, constants: Iterable[Tensor] = (), num_samples: int = 0) -> None:
        self._known: dict[int, tuple[Any, Reduction]] = {
            id(item): (item, CONSTANT) for item in constants
        }
        self.num_samples = num_samples
        """Samples of the micro-batch; 0 if unknown."""
        self.formulas = Formulas(self.of, num_samples)
        """Numbers that are functions of those over samples."""
        self.told: dict[int, Reduction | None] = {}
        """Integers that were read from tensors, with what is known of these."""
        self.averaged: list[int] = []
        """For each mean along dims other than the first: the elements per sample it averages."""
        self._turned: dict[int, Tensor] = {}
        """Tensors of samples whose first dim doesn't count samples."""
        self.parts = SampleParts(num_samples)
        """Tensors of some of the batch's samples, taken by position."""
        self._shuffles: dict[int, Tensor] = {}
        """Random permutations, and random numbers that may become some."""

    def of(self, value: Any) -> Reduction | None:
        """Return what is known of a tensor or number; None if it is no reduction."""
        found = self._known.get(id(value))
        if found is not None:
            return found[1]
        return CONSTANT if is_parameter(value) else None

    def is_constant(self, value: Any) -> bool:
        """Whether a tensor is known not to depend on the samples."""
        return id(self.of(value)) in _CONSTANTS

    def is_any_together(self, values: Iterable[Any]) -> bool:
        """Whether samples were mixed in any of these tensors and numbers."""
        for value in values:
            found = self._known.get(id(value))
            if found is not None and found[1].kind is Kind.TOGETHER:
                return True
        return False

    def are_samples(self, values: Iterable[Any]) -> bool:
        """Whether nothing is known of any of these, unless it is a constant."""
        for value in values:
            found = self._known.get(id(value))
            if found is not None and id(found[1]) not in _CONSTANTS:
                return False
        return True

    def keep(self, value: Any, reduction: Reduction | None) -> None:
        """Remember what is known of a function's result."""
        if reduction is not None:
            # The object is held, so that no other one gets its id.
            self._known[id(value)] = value, reduction
        else:
            self._known.pop(id(value), None)

    def snapshot(self) -> dict[int, tuple[Any, Reduction]]:
        """Return what is known now."""
        return dict(self._known)

    def restore(self, known: dict[int, tuple[Any, Reduction]]) -> None:
        """Return to what was known when `snapshot` returned `known`."""
        self._known = dict(known)

    @property
    def has_shuffled(self) -> bool:
        """Whether random permutations were drawn."""
        return bool(self._shuffles)

    def forget(self) -> None:
        """Forget all that is known, and hold no objects of a step."""
        self._known, self.told = {}, {}
        self._turned, self._shuffles = {}, {}
        if self.parts.are_any:
            self.parts.forget()
        self.formulas.forget()

    def follow(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Note what a call of a torch function tells of its result."""
        if type(result) in NO_NUMBERS:
            if type(result) is int and name_of(func) in ("item", "int"):
                self.told[result] = self.of(args[0])
            return
        name = "t" if func in TURNING else name_of(func)
        if type(result) is Tensor or isinstance(result, Tensor):
            self._see_one(name, args, kwargs, result)
        elif isinstance(result, tuple | list):
            self._see_several(TorchCall(name, args, kwargs), result)
        elif name == "setitem" and self.is_constant(args[0]):
            written = [self.of(item) for item in tensors_among(args[1:])]
            if any(id(item) not in _CONSTANTS for item in written):
                self.keep(args[0], TOGETHER if TOGETHER in written else None)
        elif type(result) is float and name in ("item", "float"):
            self.keep(result, self.of(args[0]))
            self.formulas.follow(TorchCall(name, args, kwargs), result)

    def _see_one(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor
    ) -> None:
        source = self._source(name, args, kwargs)
        if source is None:
            self._keep_judged(TorchCall(name, args, kwargs), result)
        elif source is CONSTANT:
            self._known[id(result)] = result, CONSTANT
        else:
            if id(result) in self._known:  # A constant that was changed in place.
                del self._known[id(result)]
            if name in TURNS or self._turned or self.parts.are_any:
                self._note_place(name, source, result)
        if self._shuffles or name in _BY_CHANCE:
            self._note_random(name, args, result)

    def _note_place(self, name: str, source: Any, result: Tensor) -> None:
        """Note if the result's samples are along another dim, or only some of the batch's."""
        is_turned = id(source) in self._turned
        if name in TURNS and turns_samples(source, result, self.num_samples, is_turned=is_turned):
            is_turned = not is_turned
        if is_turned and result.ndim == source.ndim:
            self._turned[id(result)] = result
        if self.parts.has((source,)):
            self.parts.keep(result, (source,))

    def _keep_judged(self, call: TorchCall, result: Tensor) -> None:
        known = self._judge(call, result)
        self.keep(result, known)
        is_one = known is not None and known.kind in (*JOINABLE, Kind.CONSTANT)
        if not result.ndim and (known is None or known.others or not is_one):
            self.formulas.follow(call, result)

    def _note_random(self, name: str, args: Sequence[Any], result: Tensor) -> None:
        """Note random numbers, and permutations made of them."""
        is_kept = name in KEEPING or name == "argsort"
        # Orders have one dim; noise, which may be large, isn't held.
        if (name in _BY_CHANCE and result.ndim == 1) or (
            is_kept and args and id(args[0]) in self._shuffles
        ):
            self._shuffles[id(result)] = result

    def _see_several(self, call: TorchCall, results: Sequence[Any]) -> None:
        """Note what is known of the results of a function with several."""
        known = [self.of(item) for item in call.tensors()]
        if TOGETHER in known or (known and set(map(id, known)) <= _CONSTANTS):
            for item in tensors_among(results):
                self.keep(item, TOGETHER if TOGETHER in known else CONSTANT)
        elif call.name in CHOOSING:
            self._see_chosen(call, results)
        elif known == [None]:
            self.parts.take(call, results)

    def _see_chosen(self, call: TorchCall, results: Sequence[Any]) -> None:
        """Note what is known of values that are chosen along a dim, and of their indices."""
        source = call.argument(0, "input")
        if not chooses_samples(call, source) or not self._has_samples(source):
            return
        if self.of(source) is None and id(source) not in self._shuffles:
            for item in results[: 1 if call.name == "sort" else 2]:  # Sorting indices mix none.
                self.keep(item, TOGETHER)

    def _has_samples(self, tensor: Tensor, *others: Tensor) -> bool:
        """Whether dim 0 may count samples or, for several tensors, one of the first two dims."""
        sizes = tensor.shape[: 2 if others else 1]
        return any(not (self.num_samples and size % self.num_samples) for size in sizes)

    def _source(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor | Reduction | None:
        """Return the samples, or CONSTANT, that a result is made of in simple cases, else None.

        In simple cases samples are made of samples, alone or with constants, or constants of
        constants. These are most calls of steps, and need less time here than in `_judge`.
        """
        known, is_product = self._known, name in PRODUCTS
        may_be_samples = is_product or name not in NOT_BY_ELEMENT
        samples: list[Tensor] = []
        has_constants = False
        for item in (*args, *kwargs.values()) if kwargs else args:
            kind, key = type(item), id(item)
            if kind in _NO_TENSORS or (kind in _LISTS and {*map(type, item)} <= _NO_TENSORS):
                if kind is float and known.get(key, (item, CONSTANT))[1] is not CONSTANT:
                    return None
                continue
            found = known[key][1] if key in known else None
            if found is CONSTANT or (found is None and kind is not Tensor and is_parameter(item)):
                has_constants = True
            elif found is ZERO:
                continue
            elif found is not None or not may_be_samples:
                return None
            elif kind is Tensor or isinstance(item, Tensor):
                samples += (item,)
            else:
                return None
        if not samples:
            return CONSTANT if has_constants else None
        if len(samples) > 1 and (is_product or any(starmap(is_outer, pairwise(samples)))):
            return None
        is_first = not is_product or (bool(args) and samples[0] is args[0])
        has_dims = samples[0].ndim or any(item.ndim for item in samples[1:])
        return samples[0] if is_first and has_dims else None

    def _judge(self, call: TorchCall, result: Tensor) -> Reduction | None:
        """Return what is known of a function's result."""
        try:
            return self._judge_tensors(call, call.tensors(), result)
        except (TypeError, ValueError, IndexError):
            # Arguments in forms that no rule expects are no reason to end a step.
            return UNKNOWN

    def _judge_tensors(
        self, call: TorchCall, tensors: Sequence[Tensor], result: Tensor
    ) -> Reduction | None:
        given = *call.args, *call.kwargs.values()
        floats = [item for item in given if type(item) is float and id(item) in self._known]
        known = [self.of(item) for item in (*tensors, *floats)]
        kinds = set(map(id, known))
        if call.name in FACTORIES:
            return made_anew(call, result)
        if known and kinds <= _CONSTANTS:
            return known[0] if call.name in KEEPING else CONSTANT
        if self._needs_all(call, known):
            return TOGETHER
        if kinds <= _NO_REDUCTIONS:
            return self._judge_samples(call, tensors, known, result)
        return self._judge_numbers(call, known)

    def _judge_samples(
        self,
        call: TorchCall,
        tensors: Sequence[Tensor],
        known: Sequence[Reduction | None],
        result: Tensor,
    ) -> Reduction | None:
        """Judge a function of tensors none of which is a reduction."""
        if call.name == "stack" and call.argument(1, "dim", 0) == 0:
            self._turned[id(result)] = result
        dims = some_dims(call, tensors)
        if call.name == "mean" and dims and 0 not in dims:
            self.averaged.append(math.prod(tensors[0].shape[dim] for dim in dims))
        if dims and (id(tensors[0]) in self._turned or not self._has_samples(tensors[0])):
            if 0 not in dims:
                self._turned[id(result)] = result
            is_second = self._has_samples(tensors[0].transpose(0, 1))
            return None if is_second and 1 not in dims else UNKNOWN
        if self.parts.are_any and self.parts.has(tensors[:1]):
            # Sums over all parts add up to the batch's sum.
            kind = REDUCTIONS.get(call.name)
            if kind and (kind is not Kind.SUM or self.parts.are_written(tensors[:1])):
                return UNKNOWN
            self.parts.keep(result, tensors[:1])
        else:
            self.parts.take(call, (result,))
        if tensors and result.ndim and not any(tensor.ndim for tensor in tensors):
            return UNKNOWN  # Made of scalars of which nothing is known: they are no samples.
        judged = reduced(call, tensors, known, result) if tensors else None
        return UNKNOWN if judged is TOGETHER and not self._has_samples(*tensors) else judged

    def _judge_numbers(self, call: TorchCall, known: Sequence[Reduction | None]) -> Reduction:
        """Judge a function of tensors some of which are reductions."""
        if UNKNOWN in known and not any(item and item.kind is Kind.SUM for item in known):
            return UNKNOWN
        first = known[0]
        if len(known) == 1 and first is not None:
            kept = of_one(call, first)
            if kept is not None:
                return kept
        if call.name in FLOORS and first is not None and first.kind is Kind.SUM:
            return first if set(map(id, known[1:])) <= _CONSTANTS else UNKNOWN
        if call.name in JOINING:
            # With one sample it may be a list of samples' numbers, or a list of losses.
            is_open = len(known) == self.num_samples == 1
            return UNKNOWN if is_open else fold([item or UNKNOWN for item in known])
        return self._combine(call)

    def _needs_all(self, call: TorchCall, known: Sequence[Reduction | None]) -> bool:
        """Whether a function's result, even one row of it, needs all samples of the batch."""
        name = call.name
        if TOGETHER in known:
            return True
        if name == "batch_norm":
            return bool(call.argument(5, "training"))
        if name in NONLINEAR and len(known) == 1:
            return known[0] not in (None, UNKNOWN)
        if name in OPERATIONS and len(known) == 2 and None in known:
            # Samples less their mean, and the like.
            kinds = [item and item.kind for item in known]
            rows = next(item for item in tensors_among(call.args) if self.of(item) is None)
            is_scaled = ("mul" in name or "div" in name) and {Kind.MAX, Kind.MIN} & {*kinds}
            return bool(Kind.MEAN in kinds or is_scaled) and self._has_samples(rows)
        return name in REORDERING and self._reorders(call)

    def _reorders(self, call: TorchCall) -> bool:
        """Whether a function changes the positions of samples, of which nothing else is known."""
        source = call.argument(0, "input")
        if not isinstance(source, Tensor) or not self._has_samples(source):
            return False
        if self.of(source) is not None or id(source) in self._shuffles:
            return False
        return gives_other_places(call, source, self._shuffles)

    def _combine(self, call: TorchCall) -> Reduction:
        pair = (*call.args, *call.kwargs.values())[:2]
        operation, is_reflected = operation_called(call.name)
        if operation is None or len(pair) < 2:
            return UNKNOWN
        pair = pair[::-1] if is_reflected else pair
        left, right = (self._operand(item, is_left=not place) for place, item in enumerate(pair))
        if left.kind is right.kind is Kind.CONSTANT:
            return next((item for item in (left, right) if item.count), CONSTANT)
        if operation is OPERATIONS["div"] and {left.kind, right.kind} <= set(LINEAR):
            # A mean, unless each sample's gradient depends on the others by the divisor.
            needs_all = isinstance(pair[1], Tensor) and pair[1].requires_grad
            return TOGETHER if needs_all else operation(left, right)
        return operation(left, right)

    def _operand(self, value: Any, *, is_left: bool) -> Reduction:
        if isinstance(value, Tensor):
            return self.of(value) or UNKNOWN
        known = self.of(value) or constant_of(value, is_left=is_left)
        return (known.count and known.kind is Kind.CONSTANT and self.told.get(value)) or known
