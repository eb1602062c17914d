"""MaxLen and T(l, P) of a pipeline from sizes, memory and profiled times (Hydraulis Appendix B).

Memory is linear in the length of a micro-batch, so MaxLen is where it meets the capacity of the
tightest stage. Latency coefficients are fitted to the slowest stage's measured times, which decides
the pace of a pipeline of unequal stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from lightning_hetero.assign.cost import PipelineCost
from lightning_hetero.core.errors import AssignmentError
from lightning_hetero.core.time_fit import TimeFit

__all__ = [
    "ModelMemory",
    "StageMemory",
    "max_len",
    "pipeline_cost",
    "util_len",
]

_MULTIPLE = 128


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """What one rank of a stage holds."""

    capacity_bytes: float
    """Memory of the device less a safety margin."""
    state_bytes: float
    """Weights, gradients, optimizer states, embedding: whatever no token adds to."""
    bytes_per_token: float
    """Activations of one micro-batch per token, above 0."""
    num_in_flight: int
    """Micro-batches whose activations the stage holds at once: PP - stage_index under 1F1B."""

    @property
    def max_len(self) -> float:
        """Tokens of a micro-batch with which the stage is full; negative if it is already."""
        per_token = self.bytes_per_token * self.num_in_flight
        return (self.capacity_bytes - self.state_bytes) / per_token


@dataclass(frozen=True, kw_only=True)
class ModelMemory:
    """Memory coefficients of a transformer (B.1).

    On the first of PP stages, with N devices: activations `L·(l·H/TP)·A`, layers
    `L·H²·B·(α/N + (1-α)/(PP·TP))`, embedding `16·H·V·(α/N + (1-α)/TP)`.
    """

    hidden_size: int
    """H."""
    num_layers: int
    """L."""
    vocab_size: int
    """V."""
    activation_bytes: float
    """A: bytes of activations per layer, token and hidden unit."""
    layer_bytes: float
    """B: bytes of model states per layer and squared hidden size."""
    sharded_share: float = 0.75
    """α: the share of model states spread over all devices; 3/4 for fp32 states, 16-bit weights."""

    def first_stage(
        self, *, tp_degree: int, num_stages: int, num_devices: int, capacity_bytes: float
    ) -> StageMemory:
        """Return what a rank of the first of equal stages holds; capacity is without the margin."""
        sharded = self.sharded_share / num_devices
        kept = (1 - self.sharded_share) / tp_degree
        layers = self.num_layers * self.hidden_size**2 * self.layer_bytes
        embedding = 16 * self.hidden_size * self.vocab_size
        per_layer = self.hidden_size / tp_degree * self.activation_bytes
        return StageMemory(
            capacity_bytes=capacity_bytes,
            state_bytes=layers * (sharded + kept / num_stages) + embedding * (sharded + kept),
            bytes_per_token=per_layer * self.num_layers / num_stages,
            num_in_flight=num_stages,
        )


def max_len(stages: Sequence[StageMemory]) -> int:
    """Return the most tokens that every stage can hold, a multiple of 128; 0 if none."""
    least = min(stage.max_len for stage in stages)
    return max(0, int(least) // _MULTIPLE * _MULTIPLE)


def util_len(fit: TimeFit, *, threshold: float = 0.85, limit: int) -> int:
    """Return the least length whose tokens per second reach `threshold` of the best's (App. C).

    `l / (a·l² + b·l + c)` is best at `sqrt(c / a)`, or at `limit` if that is shorter, and reaches
    the threshold at the smaller root of `a·l² + (b - best time per token / threshold)·l + c`.
    """
    if fit.c == 0:
        return 1
    best_at = min(float(limit), np.sqrt(fit.c / fit.a) if fit.a > 0 else np.inf)
    slope_s = fit.b - (fit.a * best_at + fit.b + fit.c / best_at) / threshold
    discriminant = max(0.0, slope_s**2 - 4 * fit.a * fit.c)
    # The smaller root in the form that stays exact for a = 0.
    root = 2 * fit.c / (-slope_s + np.sqrt(discriminant))
    return int(min(max(1, np.ceil(root)), limit))


def pipeline_cost(
    lengths: ArrayLike,
    stage_times_s: ArrayLike,
    stages: Sequence[StageMemory],
) -> PipelineCost:
    """Return the cost of a pipeline from its stages' times and memory.

    Args:
        lengths: [M] tokens at which the stages were timed, at least two different ones.
        stage_times_s: [stages, M] seconds of a forward and backward of one such sequence.
        stages: What a rank of each stage holds.

    Raises:
        AssignmentError: The stages have no memory for tokens, times don't match the stages or
            aren't positive, or there are too few lengths.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    times_s = np.atleast_2d(np.asarray(stage_times_s, dtype=float))
    if len(times_s) != len(stages):
        raise AssignmentError(
            f"{len(times_s)} stages were timed but {len(stages)} have memory; describe the same."
        )
    limit = max_len(stages)
    if limit == 0:
        index = min(range(len(stages)), key=lambda i: stages[i].max_len)
        stage = stages[index]
        raise AssignmentError(
            f"Stage {index} keeps {stage.state_bytes / 2**30:.1f} GiB of states in "
            f"{stage.capacity_bytes / 2**30:.1f} GiB, which leaves room for less than 128 tokens. "
            "Use more stages or more tensor parallelism."
        )
    if times_s.shape[1:] != tokens.shape or len(np.unique(tokens)) < 2 or times_s.min() <= 0:
        raise AssignmentError(
            f"A fit of {tokens.size} lengths to {times_s[0].size} times needs two different "
            "lengths or more, and positive times. Profile at least two lengths."
        )
    slowest_s = times_s.max(axis=0)
    fit = TimeFit.of(
        [((int(n),), float(t)) for n, t in zip(tokens, slowest_s, strict=True)], needs_b=True
    )
    return PipelineCost(
        a=fit.a,
        b=fit.b,
        c=fit.c,
        max_len=limit,
        util_len=util_len(fit, limit=limit),
        num_stages=len(stages),
    )
