"""Find out which parameters outside the layers each end of a pipeline really uses.

All stages of a pipeline run the code before the layers. Its result is usually the first layer's
input, which later stages don't use: the last stage looks up the embedding in vain, unless the head
shares its weight. So a watch follows everything that is computed from a parameter, through the
memory of tensors, until it is used. It watches the first iteration of each phase (training,
validation, test, prediction) in an epoch, in which both ends hold these parameters. For the rest of
the epoch, a parameter that was used at only one end so far is held at that end only.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
    _pop_mode_temporarily,
)

from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.exchange.slices import OuterRole, ParameterSpec
from lightning_hetero.runtime.unknown import Unknown, tensors_in

_BOTH_ENDS = frozenset({OuterRole.FIRST, OuterRole.LAST})
_LOOKS_AT_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class OuterRoles:
    """At which ends of pipelines outer parameters were used so far; the same on every rank."""

    def __init__(self) -> None:
        self._roles: dict[str, set[OuterRole]] = {}
        self._watched: dict[int, int] = {}
        """For each phase the last epoch in which uses were watched."""

    @property
    def are_known(self) -> bool:
        """Whether any iteration has been watched."""
        return bool(self._watched)

    def is_due(self, phase: int, epoch: int) -> bool:
        """Whether uses must be watched: the iteration is the first of its phase in an epoch."""
        return self._watched.get(phase) != epoch

    def learn(
        self, plan: ParallelPlan, reads: Mapping[int, Sequence[str]], *, phase: int, epoch: int
    ) -> None:
        """Record the uses that were watched in an iteration."""
        for pipeline in plan.pipelines:
            if pipeline.stages[0].ranks == pipeline.stages[-1].ranks:
                continue  # Ranks that run both ends hold them in any case.
            for stage_index, role in ((0, OuterRole.FIRST), (-1, OuterRole.LAST)):
                for rank in pipeline.stages[stage_index].ranks:
                    for name in reads.get(rank, ()):
                        self._roles.setdefault(name, set()).add(role)
        self._watched[phase] = epoch

    def apply(self, specs: Iterable[ParameterSpec], *, known: bool) -> tuple[ParameterSpec, ...]:
        """Return parameters with their roles: both ends if not `known`, or if never used so far."""

        def roles(name: str) -> frozenset[OuterRole]:
            return frozenset(self._roles.get(name, _BOTH_ENDS)) if known else _BOTH_ENDS

        return tuple(
            spec if spec.layer is not None else replace(spec, roles=roles(spec.name))
            for spec in specs
        )


class ReadWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which parameters are used in one pass of a micro-batch.

    Args:
        parameters: The stage's parameters outside the layers.
        reads: Names of parameters that are used are added here.
        is_first: Whether the stage is the first one, which uses all that it reads.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], reads: set[str], *, is_first: bool
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uses_all = is_first
        """Whether reading counts as using: on first stages, and once the stage's layers have
        begun."""
        self._reads = reads
        self._kept: list[UntypedStorage] = []
        """Memory that must not be freed, because its address identifies what was computed there."""
        self._names: dict[int, frozenset[str]] = {}
        for name, parameter in parameters.items():
            self._mark((parameter,), frozenset({name}))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation; mark its results with the parameters that it reads."""
        names = self._names_in((args, kwargs))
        made = func(*args, **(kwargs or {}))
        if names:
            if self.uses_all or _looks_at_values(func, args):
                self._reads |= names
            self._mark(_tensors(made), names)
        return made

    def pause(self) -> AbstractContextManager[Any]:
        """Return a context in which operations aren't watched."""
        if _get_current_dispatch_mode() is self:
            return _pop_mode_temporarily()
        return _disable_current_modes()  # The step has entered a mode that can't stay alone.

    def reach_layers(self, given: Any) -> None:
        """Note that the stage's own layers begin: their arguments count as used."""
        self.use(given)
        self.uses_all = True

    def use(self, value: Any) -> None:
        """Note that a value is used, and with it the parameters from which it was computed."""
        self._reads |= self._names_in(value)

    def _names_in(self, value: Any) -> frozenset[str]:
        found = (self._names.get(item.untyped_storage()._cdata) for item in _tensors(value))
        return frozenset().union(*(names for names in found if names is not None))

    def _mark(self, tensors: Iterable[Tensor], names: frozenset[str]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._kept.append(storage)
            key = storage._cdata
            self._names[key] = self._names.get(key, frozenset()) | names


def _looks_at_values(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operation returns values of a tensor, or a shape that depends on them."""
    if func._schema.name == "aten::index":
        return any(item.dtype is torch.bool for item in _tensors(args[1]))
    return not _LOOKS_AT_VALUES.isdisjoint(func.tags)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tensors_in(value) if not isinstance(leaf, Unknown)]
