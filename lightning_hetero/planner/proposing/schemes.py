"""Ways to run a pipeline, and what no plan of such pipelines can beat (Hydraulis §7).

A *scheme* k is one way to run a pipeline; a pipeline of it takes N[k, t] devices of type t, of
which the cluster has N_t, and W[k](l) seconds for a sequence of l tokens. Let devices of type t
have any prices p_t. However sequences are given to pipelines, by T these have worked for at most
T·Σ_t p_t·N_t of device-seconds times prices, and no sequence costs less than on its cheapest
scheme. So T is at least ::

    Σ_l min_k (W[k](l)·Σ_t p_t·N[k, t]) / Σ_t p_t·N_t

Good prices are the speeds of the types: the tokens that a device computes in a second.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from lightning_hetero.assign.pipeline_cost import CostTable, PipelineCost, as_lengths
from lightning_hetero.core.arrays import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """One way to run a pipeline: its cost and the devices it takes."""

    cost: PipelineCost
    """Latency coefficients and limits."""
    devices: tuple[tuple[str, int], ...]
    """Device types and how many of each; the stages of one pipeline may use several types."""


class SchemeTable:
    """K schemes on a cluster, as arrays.

    Args:
        schemes: The schemes.
        num_devices: How many devices of each type there are.
    """

    def __init__(self, schemes: Sequence[Scheme], num_devices: Mapping[str, int]) -> None:
        self.costs = [scheme.cost for scheme in schemes]
        self.table = CostTable.of(self.costs)
        rows = [dict(scheme.devices) for scheme in schemes]
        types = sorted({*num_devices, *(name for row in rows for name in row)})
        self.devices: IntArray = np.array(
            [[row.get(name, 0) for name in types] for row in rows], np.int64
        ).reshape(len(rows), len(types))
        """[K, types] devices of each type that a pipeline takes."""
        self.available: IntArray = np.array([num_devices.get(name, 0) for name in types])
        """[types] devices of the cluster."""
        self.usable: BoolArray = np.asarray((self.devices <= self.available).all(axis=1))
        """[K] whether the cluster has the devices of one pipeline."""

    def alone_s(self, longest: IntArray) -> FloatArray:
        """Return the least seconds of sequences [...] that have a pipeline to themselves, [...]."""
        fits = self.usable & (longest[..., None] <= self.table.max_len)
        least_s: FloatArray = np.where(fits, self.table.alone_s(longest), np.inf).min(axis=-1)
        return least_s


def work_lower_bound_s(
    lengths: ArrayLike, schemes: Sequence[Scheme], num_devices: Mapping[str, int]
) -> float:
    """Return seconds below which the devices can't do the work; infinite if they never can.

    Args:
        lengths: [B] tokens of the iteration's sequences.
        schemes: Schemes that a pipeline may have.
        num_devices: How many devices of each type there are.
    """
    sizes, found = as_lengths(lengths), SchemeTable(schemes, num_devices)
    table, tokens = found.table, sizes[:, None]
    fits = found.usable & (tokens <= table.max_len)
    if not fits.any(axis=1).all():
        return math.inf
    # Every micro-batch takes c, and holds MaxLen tokens at most.
    work_s = np.where(fits, table.times_s(sizes) + table.c * tokens / table.max_len, np.inf)
    per_s = (fits * tokens).sum(axis=0) / np.where(fits, work_s, 1e-30).sum(axis=0)
    is_alone = (found.devices > 0).sum(axis=1, keepdims=True) == 1
    speeds = is_alone * per_s[:, None] / np.maximum(found.devices, 1) * (found.devices > 0)
    prices = speeds.max(axis=0)
    if not prices.any():  # All schemes use several types.
        prices = np.ones(len(prices))
    costs = np.where(fits, work_s, 0.0) * (found.devices @ prices)  # A price may be 0.
    cheapest = np.where(fits, costs, np.inf).min(axis=1)
    all_s = float(cheapest.sum() / (found.available @ prices))
    return max(all_s, float(found.alone_s(sizes.max())))
