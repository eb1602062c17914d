"""A correction learnt from running out of memory on a device, so that no plan does it again."""

import math
from dataclasses import dataclass
from typing import Self

from lightning_hetero.core.errors import ProfileError
from lightning_hetero.simulator.memory import MemoryTerms, whole_bytes

__all__ = ["MemoryCorrection", "OutOfMemory"]


@dataclass(frozen=True, kw_only=True)
class MemoryCorrection:
    """Corrections that planners add to their predictions; the default changes nothing."""

    activation_factor: float = 1.0
    """Bytes of activations, logits and messages over what is predicted of them, 1 or more."""
    usable_bytes: int | None = None
    """The most that fits on the device, where that is less than it was taken for."""

    def __post_init__(self) -> None:
        usable = self.usable_bytes
        if not 1 <= self.activation_factor < math.inf or not (usable is None or usable >= 0):
            raise ProfileError(
                f"A correction has activation_factor {self.activation_factor} and usable_bytes "
                f"{usable}; the first must be 1 or more, the second 0 or more. Delete its file."
            )

    def join(self, other: Self) -> "MemoryCorrection":
        """Return the stricter of both."""
        limits = [item for item in (self.usable_bytes, other.usable_bytes) if item is not None]
        return MemoryCorrection(
            activation_factor=max(self.activation_factor, other.activation_factor),
            usable_bytes=min(limits, default=None),
        )

    def corrected_bytes(self, memory_bytes: int) -> int:
        """Return the memory of a device of which a plan may fill no more than fits on it."""
        if self.usable_bytes is None:
            return memory_bytes
        return max(1, min(memory_bytes, whole_bytes(self.usable_bytes)))


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """A rank's memory when an allocation failed.

    With P_s and P_m the predicted bytes of states and of micro-batches, k of K of which were in
    flight, the factor of the latter is what was live beside states over P_m as of k. The corrected
    peak P_s + factor · P_m exceeds what may be used of the device as it is corrected, so the plan
    that has failed is never taken again.
    """

    predicted: MemoryTerms
    """The peak of its stage by the plan; states alone if nothing more was predicted."""
    live_bytes: int
    """Bytes that were in use."""
    requested_bytes: int
    """Bytes that were asked for and didn't fit beside them; 0 if that isn't known."""
    state_bytes: int
    """Weights, gradients and owned states of those in use."""
    usable_bytes: float
    """Bytes of the device that the plan expected to be free to use."""
    in_flight: float = 1.0
    """Share of the plan's micro-batches in flight that was, above 0 to 1."""

    def correct(self, known: MemoryCorrection) -> MemoryCorrection:
        """Return what planners must know from now on.

        Args:
            known: What the prediction counted with already.
        """
        predicted, needed = self.predicted, self.live_bytes + self.requested_bytes
        passing = predicted.recomputed + predicted.head + predicted.messages
        so_far = predicted.activations * self.in_flight + passing
        if so_far <= 0:
            return MemoryCorrection(usable_bytes=self.live_bytes).join(known)
        factor = max(1.0, (needed - self.state_bytes) / so_far)
        peak = predicted.states + max(
            predicted.total - predicted.states, factor * (predicted.activations + passing)
        )
        usable = None
        if min(needed, peak) <= self.usable_bytes:
            # The device holds less than it was taken for; what was there did fit.
            usable = max(0, min(self.live_bytes, math.ceil(peak) - 1))
        found = MemoryCorrection(
            activation_factor=factor * known.activation_factor, usable_bytes=usable
        )
        return found.join(known)
