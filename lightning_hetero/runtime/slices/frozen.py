"""Keep weights that never train: no rank owns them, and each reads those that it needs.

A weight that is frozen when a run is set up has no slices, so it is never pulled, pushed, saved or
kept by standbys. Its values come from its *source*: the folder of a pretrained model, or else the
module as this process has built it. When the plan changes or a rank joins, each rank reads the
weights that it lacks. If a weight is unfrozen, it gets owners, which read their slices from the
source.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from lightning_hetero.core.errors import ModelError
from lightning_hetero.exchange.slices import Interval, PackedSize, ParameterSpec, Slice
from lightning_hetero.models.stored import Box
from lightning_hetero.runtime.slices.known_by_shape import StandIn

Reader = Callable[[Box], Tensor]
"""Returns part of a weight, on the CPU; a box has an interval for each dim."""

_FindOwners = Callable[[Sequence[ParameterSpec]], dict[str, tuple[Slice, ...]]]

STAYS_FROZEN = (
    "Parameter {} is quantized, and can't be trained or cut. Leave it frozen "
    "(requires_grad_(False)), and train adapters beside it."
)
"""Error for training or cutting a quantized parameter, which it names."""
_QUANTIZED = ("whole_reader", "__tensor_flatten__", "quant_state", "SCB")
"""Attributes of weights that are still to be read, of torchao's, and of bitsandbytes' in 4 and 8
bits."""
_LOOKED_AT = 256
"""Number of a weight's first values from which its fingerprint is computed."""


@dataclass(frozen=True)
class InMemory:
    """Reads a weight from the process's own memory."""

    whole: Tensor
    """The weight, on the CPU."""

    def __call__(self, box: Box) -> Tensor:
        """Return a box as a view."""
        return self.whole[tuple(slice(*ends) for ends in box)]


@dataclass(frozen=True)
class Opaque:
    """A weight that only its module can use, such as a quantized one; it is never cut or cast."""

    like: nn.Parameter
    """The weight, or its parameter on the meta device, whose `whole_reader` reads it."""

    def __call__(self, box: Box) -> Tensor:
        """Return the whole weight for any box, since its shape may be that of packed values."""
        read: Callable[[], Tensor] = getattr(self.like, "whole_reader", lambda: self.like)
        return read()

    @property
    def is_stored(self) -> bool:
        """Whether it is read only when a rank needs it."""
        return hasattr(self.like, "whole_reader")


def is_opaque(parameter: Tensor) -> bool:
    """Return whether a parameter is of a class of its own, as quantized weights are."""
    return type(parameter) not in (nn.Parameter, Tensor)


def is_quantized(parameter: Tensor) -> bool:
    """Return whether the values of a parameter are, or will be, quantized."""
    return any(hasattr(parameter, name) for name in _QUANTIZED)


def packed_size(parameter: Tensor) -> PackedSize | None:
    """Return the size of a quantized weight, also of one that hasn't been read yet."""
    if isinstance(parameter, StandIn):
        source = parameter.source
        return packed_size(source.like) if isinstance(source, Opaque) else None
    if hasattr(parameter, "whole_reader"):
        size: PackedSize = parameter.whole_reader.size
        return size
    if not is_opaque(parameter):
        return None
    state = getattr(parameter, "quant_state", None)  # of bitsandbytes' 4-bit weights
    if state is not None:
        scales = [state.absmax, getattr(state.state2, "absmax", None)]
        num_bytes = sum(item.nbytes for item in (parameter.data, *scales) if item is not None)
        return PackedSize(prod(state.shape), num_bytes)
    if hasattr(parameter, "__tensor_flatten__"):  # torchao's
        parts = [getattr(parameter, name) for name in parameter.__tensor_flatten__()[0]]
        return PackedSize(parameter.numel(), sum(part.nbytes for part in parts))
    return PackedSize(parameter.numel(), parameter.nbytes)


class FrozenWeights:
    """The weights without owners, and those of them that this rank computes with.

    Args:
        sources: Reads each weight, by parameter; the same names on all ranks.
        find_owners: Returns the owners of parameters that are unfrozen.
    """

    def __init__(
        self,
        sources: dict[str, Reader] | None = None,
        find_owners: Callable[
            [Sequence[ParameterSpec]], dict[str, tuple[Slice, ...]]
        ] = lambda _: {},
    ) -> None:
        self.sources = {} if sources is None else sources
        self.find_owners = find_owners
        self.held: dict[str, tuple[tuple[Interval, ...], nn.Parameter]] = {}
        """Rows and values of the weights that this rank computes with."""

    def __contains__(self, name: str) -> bool:
        return name in self.sources

    def whole(self, spec: ParameterSpec) -> Tensor:
        """Return a whole weight, on the CPU."""
        return self.sources[spec.name](tuple((0, size) for size in spec.shape))

    def rows(self, spec: ParameterSpec, intervals: Sequence[Interval]) -> Tensor:
        """Return rows of the cut dim, concatenated, on the CPU."""
        if not spec.shape or tuple(intervals) == ((0, spec.cut_length),):
            return self.whole(spec)
        if is_opaque(self.whole(spec)):
            raise ModelError(STAYS_FROZEN.format(spec.name))
        read, dim = self.sources[spec.name], spec.cut_dim
        ends = [(0, size) for size in spec.shape]
        boxes = ((*ends[:dim], rows, *ends[dim + 1 :]) for rows in intervals)
        return torch.cat([read(box) for box in boxes], dim)

    def hold(
        self,
        spec: ParameterSpec,
        intervals: tuple[Interval, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> nn.Parameter:
        """Return the rows that this rank computes with; read them if it doesn't have them yet."""
        known = self.held.get(spec.name)
        if known is None or known[0] != intervals:
            rows = self.rows(spec, intervals)
            self.held[spec.name] = known = intervals, _computed_with(rows, dtype, device)
        return known[1]

    def replace(self, spec: ParameterSpec, whole: Tensor) -> None:
        """Replace the value of a weight, for instance by one from a checkpoint's file."""
        before = self.whole(spec)
        if torch.equal(before, whole.to("cpu", before.dtype)):
            return
        self.sources[spec.name] = InMemory(whole.to("cpu", before.dtype, copy=True))
        if spec.name in self.held:
            intervals, weight = self.held[spec.name]
            weight.data.copy_(self.rows(spec, intervals))

    def thaw(self, spec: ParameterSpec, intervals: Sequence[Interval]) -> Tensor:
        """Return the rows that this rank keeps of a weight that has owners from now on.

        Raises:
            ModelError: It is quantized.
        """
        if isinstance(self.sources[spec.name], Opaque):
            raise ModelError(STAYS_FROZEN.format(spec.name))
        rows = self.rows(spec, intervals or [(0, 0)])
        del self.sources[spec.name]
        self.held.pop(spec.name, None)
        return rows

    def fingerprint(self, spec: ParameterSpec) -> int:
        """Return a number that depends on the first values of a weight."""
        return fingerprint_of(self.sources[spec.name], spec.shape)


def fingerprint_of(read: Reader, shape: Sequence[int]) -> int:
    """Return a number that depends on the first values of a weight, as a reader returns them."""
    left, box = _LOOKED_AT, list[Interval]()
    for size in reversed(shape):
        box.insert(0, (0, min(size, max(left, 1))))
        left //= max(size, 1)
    first = read(tuple(box)).detach()
    if is_opaque(first) and hasattr(first, "dequantize"):
        first = first.dequantize()
    first = torch.as_tensor(first).contiguous().reshape(-1)[:_LOOKED_AT]
    return zlib.crc32(first.cpu().view(torch.uint8).numpy().tobytes())


def _computed_with(rows: Tensor, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    if is_opaque(rows):
        moved = rows.to(device)
        if isinstance(moved, nn.Parameter):
            return moved
        return nn.Parameter(moved, requires_grad=False)  # Some of torchao's become bare tensors.
    kind = dtype if rows.is_floating_point() else rows.dtype
    weight = rows.to(device, kind, memory_format=torch.contiguous_format)
    return nn.Parameter(weight, requires_grad=False)
