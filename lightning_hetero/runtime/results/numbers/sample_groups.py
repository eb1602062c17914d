"""Notice which groups of samples a step asks for, and which of them aren't there.

Losses of tasks or classes are summed group by group: `if mask.any(): loss += f(x[mask], y[mask])`.
A micro-batch without a group leaves that group's mean out, where one device, with the whole batch,
takes it in. What is left has the form of a mean that fits a weight, and fits the means of other
micro-batches only if these leave out the same groups.
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
        num_samples: Of the micro-batch; 0 if nobody knows.
    """

    def __init__(self, num_samples: int) -> None:
        self.absent = 0.0
        """A number for the groups that were asked for and aren't there: 0 for none of them, and
        another one for others."""
        self._shape = (num_samples,)
        self._num_questions = 0
        self._masks: dict[int, Tensor] = {}
        self._counts: dict[int, tuple[Tensor, Tensor]] = {}
        """By the id of what may be asked: that, and what is 0 where the group is absent."""
        self._chosen: dict[int, Tensor] = {}
        """What was made of samples that such a mask has chosen."""

    def follow(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Look at a call of a torch function."""
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
        """Note the answer to a question, for which the step has waited already."""
        self._num_questions += 1
        if not count:
            self.absent += math.sqrt(1 + self._num_questions)

    def are_in(self, value: object) -> bool:
        """Whether groups are absent of which others have made a number."""
        return bool(self.absent) and id(value) in self._chosen

    def forget(self) -> None:
        """Hold nothing that a step has made."""
        self._masks, self._counts, self._chosen = {}, {}, {}
