"""Which GPUs form a group that holds one model replica (AutoHet §III-B, Eq. 2 and 3), exactly.

With G_j = Σ_i g_i·x_ij·(1 - ρ_j) the effective power of group j, ρ_j = (P_j - 1)/(K + P_j - 1) its
bubble share, P_j its number of units and K the number of micro-batches, the programme is

    maximise    (number of groups)·z
    subject to  z ≤ G_j                      for every group j
                Σ_{i in j} memory_i ≥ MIN    for every group j
                every unit in exactly one group, at most `max_stages` units in a group.

Two facts make it small. Units of a type are interchangeable, so groups are counted by composition;
and z is the power of some composition, so for a fixed z the rest is an integer cover. D(z), the
most groups that cover all units with compositions of power ≥ z, falls as z rises, so intervals of z
are bounded by D_LP(lowest z)·(highest z) and searched best first. The linear relaxation has one
dual price a type; a composition whose price exceeds 1 by more than the relaxation's room can be in
no better cover and is dropped before HiGHS sees it.

The search for plans does without it: of 40 clusters, the benchmarks' among them, not one plan is
worse. It is the peer of AutoHet's tables, and what the paper's own formulation is timed against.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.core.errors import PlanningError
from tests.planner.cover import CoverBound, OutOfProgramsError, cover_bound, solve_cover
from tests.planner.patterns import deal_evenly, enumerate_compositions

_COVER_PROGRAMS = 50
"""Linear programmes that a covering programme counts as."""
_COVER_NODES = 2000
"""Nodes of its search, at which a covering programme is given up."""
_LEAST_GAIN = 1e-9
"""Share by which an objective must be above another to count as larger."""
_MOST_DEALS = 1000
"""Numbers of groups that are tried for a start."""


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """Device groups, each a composition: units of every type."""

    groups: tuple[tuple[int, ...], ...]
    """Units of each type in each group, strongest group first."""
    objective: float
    """Number of groups times the least effective power (Eq. 3a)."""
    optimal: bool
    """Whether no grouping is known to have a larger objective: none was looked for below a gap."""
    gap: float
    """(bound - objective) / bound; 0 when optimal."""


def effective_power(
    composition: Sequence[int], powers: Sequence[float], num_microbatches: int
) -> float:
    """Return G of Eq. 2: the units' power less the pipeline bubble."""
    num_units = sum(composition)
    total = sum(count * power for count, power in zip(composition, powers, strict=True))
    return total * num_microbatches / (num_microbatches + num_units - 1)


def group_devices(
    counts: Sequence[int],
    powers: Sequence[float],
    memories_bytes: Sequence[int],
    min_memory_bytes: int,
    num_microbatches: int,
    max_stages: int,
    *,
    max_programs: int = 2000,
    max_gap: float = 0.0,
) -> Grouping:
    """Solve Eq. 3 for units of several types.

    Args:
        counts: Units of each type; a unit is one GPU or one tensor-parallel group.
        powers: Computing power of a unit of each type, in any one measure.
        memories_bytes: Memory of a unit of each type.
        min_memory_bytes: Memory that a group needs to hold the model.
        num_microbatches: K of Eq. 2.
        max_stages: Most units in a group, such as the model's number of layers.
        max_programs: Linear programmes to solve; afterwards the best grouping so far is returned,
            with its gap. A covering programme counts as 50 of them.
        max_gap: Share of the bound by which the grouping may be below it; 0 for the optimum.

    Raises:
        PlanningError: No grouping uses every unit and gives each group enough memory.
    """
    _check(counts, powers, memories_bytes, num_microbatches, max_stages)
    used = [index for index, count in enumerate(counts) if count]
    kept = np.array([counts[i] for i in used], dtype=np.int64)
    compositions = enumerate_compositions(kept.tolist(), max_stages)
    memory = compositions @ np.array([float(memories_bytes[i]) for i in used])
    compositions = compositions[memory >= min_memory_bytes]
    units = compositions.sum(axis=1)
    power = compositions @ np.array([float(powers[i]) for i in used])
    power = power * num_microbatches / (num_microbatches + units - 1)
    # Equal powers that differ in their last bits are one candidate for z.
    order = np.lexsort((*compositions.T, -_rounded(power)))
    search = _IntervalSearch(compositions[order], _rounded(power)[order], kept, max_programs)
    search.least_gain += max_gap
    # A group's effective power is at most its power, so the sum of all powers bounds Eq. 3a.
    search.bound = float(sum(n * power for n, power in zip(counts, powers, strict=True)))
    search.run()
    if search.solution is None:
        raise PlanningError(_infeasible(counts, memories_bytes, min_memory_bytes, max_stages))
    groups = [_widen(row, used, len(counts)) for row in search.solution]
    groups.sort(key=lambda group: (-effective_power(group, powers, num_microbatches), group))
    objective = len(groups) * effective_power(groups[-1], powers, num_microbatches)
    bound = max(search.bound, objective)
    optimal = search.finished and not max_gap
    return Grouping(
        groups=tuple(groups),
        objective=objective,
        optimal=optimal,
        gap=0.0 if optimal else (bound - objective) / bound,
    )


class _IntervalSearch:
    """Best-first search over intervals of z, candidates in falling order."""

    def __init__(
        self, compositions: IntArray, power: FloatArray, counts: IntArray, max_programs: int
    ) -> None:
        self.compositions = compositions
        self.counts = counts
        # Candidate i allows the first `ends[i]` compositions: those of power ≥ candidates[i].
        last = np.flatnonzero(np.diff(power, append=-np.inf) < 0)
        self.candidates = power[last]
        self.ends = last + 1
        self.programs_left = max_programs
        self.least_gain = _LEAST_GAIN
        self.bounds: dict[int, CoverBound] = {}
        # Prices of one candidate bound all others: by what the cheapest composition then costs.
        self.priced_groups = np.full(len(self.candidates), np.inf)
        self.pool: set[int] = set()
        self.resolved: set[int] = set()
        self.objective = 0.0
        self.solution: list[tuple[int, ...]] | None = None
        self.bound = 0.0
        self.finished = False

    def run(self) -> None:
        """Fill `solution`, `bound` and `finished`."""
        if not len(self.candidates):
            self.finished = True
            return
        try:
            self._start_from_deal()
            self._search_intervals()
            self.finished = True
        except OutOfProgramsError:
            pass

    def _start_from_deal(self) -> None:
        """Start from the best round-robin deal, so that weak intervals are never opened."""
        counts, total = self.counts.tolist(), int(self.counts.sum())
        every = range(1, total + 1)
        spread = np.unique(np.geomspace(1, total, _MOST_DEALS).astype(int)).tolist()
        numbers = every if total <= _MOST_DEALS else spread
        deals = [deal_evenly(counts, num_groups) for num_groups in numbers]
        firsts = np.cumsum([0, *map(len, deals[:-1])])
        powers = self._powers(np.array([row for dealt in deals for row, _ in dealt]))
        objectives = np.array(numbers) * np.minimum.reduceat(powers, firsts)
        best = len(deals) - 1 - int(np.argmax(objectives[::-1]))
        self.objective = float(objectives[best])
        if self.objective:
            self.solution = [row for row, repeats in deals[best] for _ in range(repeats)]

    def _powers(self, rows: IntArray) -> FloatArray:
        """Return the powers of some compositions; 0 of those that aren't allowed."""
        weights = np.cumprod([1, *(self.counts[:-1] + 1)])
        codes, wanted = self.compositions @ weights, rows @ weights
        order = np.argsort(codes)
        found = order[np.searchsorted(codes, wanted, sorter=order) % len(codes)]
        position = np.searchsorted(self.ends, found, side="right")
        powers: FloatArray = np.where(codes[found] == wanted, self.candidates[position], 0.0)
        return powers

    def _search_intervals(self) -> None:
        heap: list[tuple[float, int, int]] = []
        self._relax(len(self.candidates) - 1)
        self._push(heap, 0, len(self.candidates) - 1)
        while heap:
            negative_bound, low, high = heapq.heappop(heap)
            self.bound = -negative_bound
            if not self._improves(-negative_bound):
                break
            if self._interval_bound(low, high) < -negative_bound:
                self._push(heap, low, high)
            elif low < high:
                middle = (low + high) // 2
                self._push(heap, low, middle)
                self._push(heap, middle + 1, high)
            else:
                self._resolve(self._most_groups(low), low)
                self._push(heap, low, high)
        # The last interval's bound, or less than that can be gained beyond the objective.
        self.bound = max(self.objective, min(self.bound, self.objective * (1 + self.least_gain)))

    def _push(self, heap: list[tuple[float, int, int]], low: int, high: int) -> None:
        """Push an interval by what is known of it, without another programme."""
        if high in self.bounds:
            bound = self._interval_bound(low, high)
        else:
            bound = float(np.floor(self.priced_groups[high] + 1e-6) * self.candidates[low])
        if self._improves(bound):
            heapq.heappush(heap, (-bound, low, high))

    def _interval_bound(self, low: int, high: int) -> float:
        return self._most_groups(high) * float(self.candidates[low])

    def _improves(self, objective: float) -> bool:
        return objective > self.objective * (1 + self.least_gain)

    def _most_groups(self, candidate: int) -> int:
        """Return the most groups under a candidate that aren't settled yet."""
        num_groups = self._relax(candidate).num_groups
        while num_groups in self.resolved:
            num_groups -= 1
        return num_groups

    def _relax(self, candidate: int) -> CoverBound:
        if candidate not in self.bounds:
            self._spend(1)
            allowed = self.compositions[: self.ends[candidate]]
            found = self.bounds[candidate] = cover_bound(allowed, self.counts, self.pool)
            cheapest = np.minimum.accumulate(self.compositions @ found.prices)[self.ends - 1]
            price = float(self.counts @ found.prices)
            priced = np.where(cheapest > 0, price / np.maximum(cheapest, 1e-12), np.inf)
            self.priced_groups = np.minimum(self.priced_groups, priced)
        return self.bounds[candidate]

    def _resolve(self, num_groups: int, first: int) -> None:
        """Find the largest z with which `num_groups` groups cover all units, by bisection.

        Covers exist from some candidate on, because a smaller z only allows more compositions.
        Candidates before `first` are known to have none.
        """
        worth = np.flatnonzero(
            num_groups * self.candidates > self.objective * (1 + self.least_gain)
        )
        low, high = first, int(worth[-1]) if len(worth) else -1
        step, found = 1, -1
        probe = first
        while low <= high:
            rows = self._cover(probe, num_groups)
            if rows is None:
                low = probe + 1
                probe = (low + high) // 2 if found >= 0 else min(probe + step, high)
                step *= 4
            else:
                found = probe
                self.objective = len(rows) * float(self.candidates[probe])
                self.solution = rows
                high = probe - 1
                probe = (low + high) // 2
        self.resolved.add(num_groups)

    def _cover(self, candidate: int, num_groups: int) -> list[tuple[int, ...]] | None:
        relaxed = self._relax(candidate)
        if relaxed.num_groups < num_groups:
            return None
        allowed = self.compositions[: self.ends[candidate]]
        # Σ x_p = counts·π - Σ (p·π - 1)·x_p, so a larger excess can't be in a cover of this size.
        excess = allowed @ relaxed.prices - 1.0
        keep = np.flatnonzero(excess <= relaxed.value - num_groups + 1e-6)
        self._spend(_COVER_PROGRAMS)
        times = solve_cover(
            allowed[keep], self.counts, num_groups=num_groups, max_nodes=_COVER_NODES
        )
        if times is None:
            return None
        chosen = np.flatnonzero(times)
        return [tuple(allowed[keep[i]].tolist()) for i in chosen for _ in range(int(times[i]))]

    def _spend(self, num_programs: int) -> None:
        self.programs_left -= num_programs
        if self.programs_left < 0:
            raise OutOfProgramsError


def _rounded(power: FloatArray) -> FloatArray:
    scale = float(power.max()) if len(power) else 1.0
    return np.round(power / scale, 11) * scale


def _widen(row: Sequence[int], used: Sequence[int], num_types: int) -> tuple[int, ...]:
    wide = [0] * num_types
    for index, count in zip(used, row, strict=True):
        wide[index] = int(count)
    return tuple(wide)


def _check(
    counts: Sequence[int],
    powers: Sequence[float],
    memories_bytes: Sequence[int],
    num_microbatches: int,
    max_stages: int,
) -> None:
    if not len(counts) == len(powers) == len(memories_bytes):
        raise PlanningError(
            f"{len(counts)} counts, {len(powers)} powers and {len(memories_bytes)} memories: give "
            "one of each per device type."
        )
    if sum(counts) < 1 or min(counts) < 0:
        raise PlanningError(f"counts are {list(counts)}: there are no devices to group. Add some.")
    used = [power for power, count in zip(powers, counts, strict=True) if count]
    if num_microbatches < 1 or max_stages < 1 or min(used) <= 0:
        raise PlanningError(
            f"num_microbatches {num_microbatches}, max_stages {max_stages} and powers "
            f"{list(powers)} must all be above 0."
        )


def _infeasible(
    counts: Sequence[int], memories_bytes: Sequence[int], min_memory_bytes: int, max_stages: int
) -> str:
    total = sum(count * memory for count, memory in zip(counts, memories_bytes, strict=True))
    return (
        f"No grouping of {list(counts)} units gives every group {min_memory_bytes / 2**30:.1f} GiB "
        f"with at most {max_stages} stages; all units together have {total / 2**30:.1f} GiB. Add "
        "devices, leave some idle, or lower the memory per group (larger TP degree, shorter "
        "sequences)."
    )
