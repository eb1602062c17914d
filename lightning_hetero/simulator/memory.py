"""The terms of a rank's peak of memory, and how much of a device a plan may fill.

Planner, simulator, data module and the summary at the start of a run all use these terms; a
`CostModel` computes how large each is (`stage_memory`). Pull and push wait until there are no
activations, so their buffers count only as far as they exceed what lives while a micro-batch is
computed. A run that goes out of memory writes a `MemoryCorrection`, so that later plans use less.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeVar

from lightning_hetero.core.actions import Action, ActionKind
from lightning_hetero.core.arrays import FloatArray
from lightning_hetero.core.errors import ProfileError

_Number = TypeVar("_Number", float, FloatArray)

MicroBatchShape = tuple[int, ...]
"""Tokens of each sequence of one micro-batch."""


class MemoryTerms(NamedTuple):
    """Bytes of one rank of a stage at its peak, by what they hold; their sum is the peak.

    ::

        memory = cost.stage_memory(cost.shape_of(stage), 2, [(4096,)] * 8, num_in_flight=3)
        print(memory.total, memory.activations)
    """

    weights: float = 0.0
    """Trainable weights that it computes with."""
    gradients: float = 0.0
    """Gradients that it sums over micro-batches, in fp32 by default."""
    owned: float = 0.0
    """Masters, optimizer states and summed gradients of slices that it owns or keeps copies of."""
    activations: float = 0.0
    """Activations that micro-batches in flight keep for their backward."""
    recomputed: float = 0.0
    """Activations of the one layer that is being recomputed."""
    head: float = 0.0
    """Logits, their softmax and its gradient."""
    messages: float = 0.0
    """Activations and their gradients between stages: kept to be sent, sent or received."""
    exchange: float = 0.0
    """Buffers of pull and push beyond the bytes of activations, head and messages."""
    frozen: float = 0.0
    """Weights that never train, and the values of a quantized matrix while it is multiplied."""

    @property
    def total(self) -> float:
        """The peak."""
        return sum(self)

    @property
    def states(self) -> float:
        """Bytes that don't depend on micro-batches."""
        return self.weights + self.frozen + self.gradients + self.owned

    @classmethod
    def of_chunks(cls, stages: Sequence["MemoryTerms"]) -> "MemoryTerms":
        """Return the peak of a rank that runs several stages: one at a time computes."""
        sums = cls(*map(sum, zip(*stages, strict=True)))
        return sums._replace(
            recomputed=max(terms.recomputed for terms in stages),
            head=max(terms.head for terms in stages),
        )

    def with_states(
        self, *, weights: float, gradients: float, owned: float, buffers: float
    ) -> "MemoryTerms":
        """Return these terms with those of states.

        Of the `buffers` of pull and push only what exceeds activations, head and messages counts.
        """
        beyond = max(0.0, buffers - (self.total - self.frozen))
        return self._replace(weights=weights, gradients=gradients, owned=owned, exchange=beyond)


def in_flight_tokens(microbatches: Sequence[MicroBatchShape], num_in_flight: int) -> int:
    """Return the largest number of tokens in any `num_in_flight` consecutive micro-batches."""
    if len(set(microbatches)) == 1:
        return sum(microbatches[0]) * min(num_in_flight, len(microbatches))
    tokens = [sum(microbatch) for microbatch in microbatches]
    window = sum(tokens[:num_in_flight])
    most = window
    for index in range(num_in_flight, len(tokens)):
        window += tokens[index] - tokens[index - num_in_flight]
        most = max(most, window)
    return most


def held_tokens(
    order: Sequence[Action], microbatches: Sequence[MicroBatchShape], layers: Mapping[int, int]
) -> dict[int, int]:
    """Return the tokens that a rank holds in each stage when it holds the most bytes.

    A micro-batch is held from its forward to the end of its backward; of its W, if that is split.

    Args:
        order: The rank's actions, in their order.
        microbatches: Its micro-batches.
        layers: The number of layers of each of its stages.
    """
    held = dict.fromkeys(layers, 0)
    most, now, found = 0, 0, dict(held)
    for action in order:
        stage, tokens = action.stage_index, sum(microbatches[action.microbatch_index])
        if action.kind is ActionKind.INPUT:
            continue
        sign = 1 if action.kind is ActionKind.FORWARD else -1
        held[stage] += sign * tokens
        now += sign * tokens * layers[stage]
        if now > most:
            most, found = now, dict(held)
    return found


def push_buffer_bytes(
    held: _Number, owned: _Number, num_pipelines: _Number, bytes_per_param: float
) -> _Number:
    """Return the bytes of a push's buffers on a rank, kept until its last gradient has arrived.

    They hold what it sends to owners, and what other holders of its own slices send.

    Args:
        held: Parameters that it holds.
        owned: Parameters that it owns: of those it holds up to an equal share, else of others.
        num_pipelines: Pipelines of the plan.
        bytes_per_param: Bytes of a gradient on its way.
    """
    claim = held / num_pipelines
    kept = (claim + owned - abs(claim - owned)) / 2  # The lesser of both.
    arriving = kept * (num_pipelines - 1) + (owned - kept) * num_pipelines
    return (held - kept + arriving) * bytes_per_param


def reserved_bytes(memory_bytes: float) -> float:
    """Return how much of a device's memory no plan may fill.

    It is 1 GiB for the CUDA context and communication buffers, and 4 % for the allocator's slack;
    on small (emulated) devices it is 10 % at most.
    """
    return min(2**30 + 0.04 * memory_bytes, 0.1 * memory_bytes)


def usable_bytes(memory_bytes: float) -> float:
    """Return how much of a device's memory a plan may fill."""
    return memory_bytes - reserved_bytes(memory_bytes)


def whole_bytes(usable: int) -> int:
    """Return the memory of a device with this many usable bytes: the inverse of `usable_bytes`."""
    return int(min((usable + 2**30) / 0.96, usable / 0.9))


class StageFacts(NamedTuple):
    """Device, memory and load of one stage; None where unknown."""

    device: str
    """The type of its devices, the slowest if they differ."""
    memory: MemoryTerms | None = None
    """The bytes that each of its ranks needs, by terms."""
    device_bytes: float | None = None
    """All memory of its device."""
    busy: float | None = None
    """Share of the iteration in which it computes, 0 to 1."""
    recompute_s: float = 0.0
    """Seconds of recomputation in an iteration, part of its computation."""

    @property
    def used_bytes(self) -> float | None:
        """Memory that each of its ranks needs."""
        return None if self.memory is None else self.memory.total

    @property
    def reserved_bytes(self) -> float | None:
        """Memory of its device that no plan fills."""
        return None if self.device_bytes is None else reserved_bytes(self.device_bytes)

    @property
    def usable_bytes(self) -> float | None:
        """Memory of its device that a plan may fill."""
        return None if self.device_bytes is None else usable_bytes(self.device_bytes)

    @property
    def lacking_bytes(self) -> float:
        """Memory that its device lacks, 0 or less if it lacks none or it isn't known."""
        used, usable = self.used_bytes, self.usable_bytes
        return 0.0 if used is None or usable is None else used - usable


@dataclass(frozen=True, kw_only=True)
class MemoryCorrection:
    """Corrections that planners add to their predictions; the default changes nothing."""

    activation_factor: float = 1.0
    """Factor on the predicted bytes of activations, logits and messages, 1 or more."""
    usable_bytes: int | None = None
    """The largest number of bytes that fit on the device; None if as many as expected."""

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
        """Return the memory to plan a device with, so that a plan fills no more than fits."""
        if self.usable_bytes is None:
            return memory_bytes
        return max(1, min(memory_bytes, whole_bytes(self.usable_bytes)))
