"""Detect which groups of samples a step asks for, and which of them a micro-batch lacks.

Losses of tasks or classes are summed group by group: `if mask.any(): loss += f(x[mask], y[mask])`.
A micro-batch without a group leaves out that group's mean, where one device, with the whole batch,
includes it. The remaining loss looks like a mean with a weight, but it can be joined with other
micro-batches' means only if these lack the same groups.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_hetero.runtime.results.numbers.torch_calls import name_of

__all__ = ["SampleGroups"]

_COUNTING = {"any", "sum", "count_nonzero"}
_COMPARING = {"gt", "ge", "lt", "le", "eq", "ne", "logical_not", "invert"}


class SampleGroups:
    """What a step asks of the samples of one micro-batch.

    Args:
        num_samples: Samples of the micro-batch; 0 if unknown.
    """

    def __init__(self, num_samples: int) -> None:
        self.absent = 0.0
        """A number that identifies the set of groups that were asked for and are absent; 0 for the
        empty set."""
        self._shape = (num_samples,)
        self._num_questions = 0
        self._masks: dict[int, Tensor] = {}
        self._counts: dict[int, tuple[Tensor, Tensor]] = {}
        """By id: a tensor that a step may read, and the count that is 0 if its group is absent."""
        self._chosen: dict[int, Tensor] = {}
        """Tensors made of samples that such a mask has selected."""

    def follow(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Note masks, questions about them, and samples selected by them, in a torch call."""
        source = args[0] if args else None
        if not isinstance(result, Tensor):
            if isinstance(result, int | float) and id(source) in self._counts:
                self._answer(self._counts[id(source)][1])
            return
        name = name_of(func)
        if name in _COUNTING and isinstance(source, Tensor) and source.shape == self._shape:
            self._masks[id(source)] = source
            self._counts[id(result)] = result, result
        elif name in _COMPARING and id(source) in self._counts:
            self._counts[id(result)] = result, self._counts[id(source)][1]
        if self._masks:
            index = args[1] if name == "getitem" else None
            first = index[0] if isinstance(index, tuple) and index else index
            given = (*args, *kwargs.values())
            if id(first) in self._masks or any(id(item) in self._chosen for item in given):
                self._chosen[id(result)] = result

    def _answer(self, count: Tensor) -> None:
        """Note the answer to a question; the step has waited for the count already."""
        self._num_questions += 1
        if not count:
            self.absent += math.sqrt(1 + self._num_questions)

    def are_in(self, value: object) -> bool:
        """Whether groups are absent, and others of them are in a number."""
        return bool(self.absent) and id(value) in self._chosen

    def forget(self) -> None:
        """Forget all masks, and hold no objects of a step."""
        self._masks, self._counts, self._chosen = {}, {}, {}
