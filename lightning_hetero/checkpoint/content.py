"""The state that one rank saves, requests and gets back.

A rank saves the slices that it owns (see `exchange.slices`), each with its optimizer state. After a
restart it requests the slices that it owns then, under any plan and world size.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lightning_hetero.checkpoint.manifest import WEIGHT, CheckpointId, Scalar
from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.core.plan import ParallelPlan

OF_CALLBACKS = "callback:"
"""Prefix of state that belongs to a callback, such as averaged weights, not to the optimizer."""


@dataclass(frozen=True, kw_only=True)
class SliceContent:
    """One owned slice of a parameter with its optimizer state.

    Raises:
        CheckpointError: Two parts of the optimizer state have the same name.
    """

    parameter: str
    """Name of the parameter in the module."""
    unit: int
    """The unit that it is stored with: its layer, -1 before the layers, `num_layers` after them."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    dim: int
    """Dim along which it is cut."""
    start: int
    """First row of the slice along `dim`."""
    stop: int
    """One past its last row."""
    weight: torch.Tensor
    """The master copy of the slice, on any device."""
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Optimizer state; tensors of the slice's shape may be cut, others may not."""
    whole_state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Optimizer state that must never be cut, even if it has the slice's shape."""
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    """Optimizer state that is a plain number, text, boolean or None."""

    def __post_init__(self) -> None:
        if len(self.tensors) != 1 + len(self.state) + len(self.whole_state):
            raise CheckpointError(
                f"Optimizer state of {self.parameter} uses a name of {list(self.tensors)} twice; "
                "'weight' is the slice itself."
            )

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All its tensors by key: the weight first."""
        return {WEIGHT: self.weight, **self.state, **self.whole_state}

    def is_by_rows(self, key: str) -> bool:
        """Whether a tensor may be cut into other rows; if not, it is only taken whole."""
        shape = self.tensors[key].shape
        # A parameter without dims is one row; state without dims is a count that slices share.
        is_cut = shape == self.slice_shape and (key == WEIGHT or len(shape) > 0)
        return is_cut and key not in self.whole_state

    def first_dim(self, key: str) -> int:
        """Return which dim of a tensor comes first in files."""
        return self.dim if self.shape and self.is_by_rows(key) else 0

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "SliceContent":
        """Return the slice with other tensors, such as copies; in the order of `tensors`."""
        return replace(
            self,
            weight=change(self.weight),
            state={key: change(tensor) for key, tensor in self.state.items()},
            whole_state={key: change(tensor) for key, tensor in self.whole_state.items()},
        )

    @property
    def slice_shape(self) -> tuple[int, ...]:
        """Shape of the slice: the parameter's with the cut dim shortened."""
        if not self.shape:
            return ()
        return (*self.shape[: self.dim], self.stop - self.start, *self.shape[self.dim + 1 :])


@dataclass(frozen=True, kw_only=True)
class CheckpointContent:
    """Everything that one rank saves at a step boundary."""

    id: CheckpointId
    """Step and attempt, the same on all ranks."""
    global_rank: int
    """The rank that saves."""
    world_size: int
    """Number of ranks that save; the checkpoint is complete when it has the parts of all."""
    num_layers: int
    """Number of layers of the model, for the names of the units."""
    slices: tuple[SliceContent, ...]
    """All slices that the rank owns."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Loops, LR schedulers, sampler, callbacks: the same on all ranks; rank 0's is saved.

    `export` expects Lightning's names of a checkpoint's entries here, with parameter names in
    `optimizer_states[i]["param_groups"][j]["params"]`.
    """
    rank_metadata: Mapping[str, Any] = field(default_factory=dict)
    """State that differs between ranks, such as random number generators."""
    plan: ParallelPlan | None = None
    """The plan that ran."""


@dataclass(frozen=True, kw_only=True)
class RestoredSlice:
    """A recovered slice, on the CPU."""

    parameter: str
    """Name of the parameter."""
    weight: torch.Tensor
    """The slice."""
    state: Mapping[str, torch.Tensor]
    """Optimizer state: cut like the slice if it has the slice's shape, else whole."""
    scalars: Mapping[str, Scalar]
    """Optimizer state that is a plain value."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All its tensors by key: the weight first."""
        return {WEIGHT: self.weight, **self.state}

    @property
    def optimizer_state(self) -> dict[str, Any]:
        """The slice's entry of the optimizer's `state_dict`."""
        tensors = {k: v for k, v in self.state.items() if not k.startswith(OF_CALLBACKS)}
        return {**tensors, **self.scalars}


def optimizer_state_dict(
    groups: Sequence[Mapping[str, Any]], slices: Mapping[str, RestoredSlice]
) -> dict[str, Any]:
    """Return an optimizer's `state_dict`, with numbers in place of the parameters' names.

    Args:
        groups: The optimizer's groups, with names as "params".
        slices: Recovered slices by name; a parameter without one gets no state.
    """
    state: dict[int, dict[str, Any]] = {}
    numbered: list[dict[str, Any]] = []
    first = 0
    for group in groups:
        names = group["params"]
        numbered.append({**group, "params": list(range(first, first + len(names)))})
        for number, name in enumerate(names, first):
            if name in slices and (values := slices[name].optimizer_state):
                state[number] = values
        first += len(names)
    return {"state": state, "param_groups": numbered}


@dataclass(frozen=True, slots=True)
class SliceNeed:
    """The rows of one parameter, along `dim`, that a rank asks for with their optimizer state."""

    parameter: str
    shape: tuple[int, ...]
    """Shape of the whole parameter in the model that requests it."""
    dim: int
    rows: tuple[tuple[int, int], ...]
    """One or more intervals [start, stop)."""
    is_optional: bool = False
    """Whether a checkpoint may lack the parameter, as it lacks frozen weights without owners."""

    def is_just(self, dim: int, start: int, stop: int) -> bool:
        """Whether exactly these rows are needed.

        All rows along one dim are all rows along any other.
        """
        if (self.dim, self.rows) == (dim, ((start, stop),)):
            return True
        own, other = num_rows(self.shape, self.dim), num_rows(self.shape, dim)
        return self.rows == ((0, own),) and (start, stop) == (0, other)


def num_rows(shape: Sequence[int], dim: int) -> int:
    """Return a parameter's number of rows along a dim; a scalar has one."""
    return shape[dim] if shape else 1


def refuse_nonfinite(slices: Sequence[SliceContent | RestoredSlice], where: str) -> None:
    """Raise CheckpointError if a tensor has a NaN, or a weight that trains has an infinity.

    A mask that never trains may be infinite, and so may optimizer state.

    Args:
        slices: The slices to check.
        where: The end of the error's first sentence.
    """
    for item in slices:
        for key, tensor in item.tensors.items():
            # `aminmax` doesn't support float8; for other dtypes it returns NaN if any value is.
            if tensor.numel() and tensor.is_floating_point() and tensor.element_size() > 1:
                low, high = (float(bound) for bound in torch.aminmax(tensor))
                is_trained = key == WEIGHT and len(item.tensors) > 1
                if math.isnan(low) or (is_trained and math.isinf(high - low)):
                    raise CheckpointError(
                        f"{item.parameter}'s {key} isn't finite {where}. Find the step that made "
                        "it so: a loss or a gradient was NaN or infinite."
                    )
