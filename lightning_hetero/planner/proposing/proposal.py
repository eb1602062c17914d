"""Propose a few plans that together suit the data (Hydraulis §7).

A plan here is a number of pipelines of each scheme. Proposals start from fractional plans
(`relaxation`) for several longest lengths, since iterations with and without long sequences need
different plans. Every whole plan near a fractional one joins the pool, with unused devices filled
up. The pool is tried on iterations drawn from the data (`quick_estimates`). Plans are chosen one by
one, each the one that most shortens the mean, over iterations, of the best plan's time. Rounds of
exchanging pipelines of one scheme for others refine the chosen plans.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from lightning_hetero.assign.pipeline_cost import (
    CostTable,
    PipelineCost,
    as_lengths,
    typical_length,
)
from lightning_hetero.core.arrays import BoolArray, FloatArray, IntArray
from lightning_hetero.core.errors import PlanningError
from lightning_hetero.planner.proposing.quick_estimates import estimate_plans
from lightning_hetero.planner.proposing.relaxation import AverageWork, fractional_plan

__all__ = ["Scheme", "choose_together", "draw_iteration", "propose"]

_WORTH_HAVING = 1e-4
"""Least share of the mean that one more plan has to save."""
_LENGTH_STEP = 128
"""Tokens of an interval in which lengths count as equal."""
_NUM_LONGEST = 6
"""Longest lengths for which fractional plans are made."""
_NUM_ITERATIONS = 24
"""Iterations drawn from the data on which plans are tried."""
_NUM_ROUNDS = 3
"""Rounds of exchanges around the chosen plans."""
_MAX_CELL_STEPS = 2e8
"""Most sequences × plans × iterations × pipelines estimated a round."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """One way to run a pipeline: its cost and the devices it takes."""

    cost: PipelineCost
    """Latency coefficients and limits."""
    devices: tuple[tuple[str, int], ...]
    """Device types and how many of each; the stages of one pipeline may use several types."""


def draw_iteration(
    lengths: IntArray, tokens_per_iteration: int, generator: np.random.Generator
) -> IntArray:
    """Return lengths drawn from the data until the next would exceed the budget; at least one."""
    mean = float(lengths.mean())
    drawn = generator.choice(lengths, int(2 * tokens_per_iteration / mean) + 16)
    count = int(np.searchsorted(np.cumsum(drawn), tokens_per_iteration, side="right"))
    return drawn[: max(1, count)]


def choose_together(latencies_s: FloatArray, may_be_first: BoolArray, most: int) -> list[int]:
    """Return plans, chosen greedily to minimise the mean of the best plan's time per iteration.

    Args:
        latencies_s: [plans, iterations] seconds.
        may_be_first: [plans] whether a plan holds all sequences.
        most: Most plans to choose, 1 or more.
    """
    chosen = [int(np.where(may_be_first, latencies_s.mean(axis=1), np.inf).argmin())]
    current_s = latencies_s[chosen[0]]
    while len(chosen) < most:
        means_s = np.minimum(latencies_s, current_s).mean(axis=1)
        best = int(means_s.argmin())
        if means_s[best] >= current_s.mean() * (1 - _WORTH_HAVING):
            break
        chosen.append(best)
        current_s = np.minimum(current_s, latencies_s[best])
    return chosen


def propose(
    lengths: ArrayLike,
    schemes: Sequence[Scheme],
    num_devices: Mapping[str, int],
    *,
    tokens_per_iteration: int,
    most: int,
    seed: int = 0,
) -> list[tuple[int, ...]]:
    """Return pipelines of each scheme for candidates, the one that serves every iteration first.

    Args:
        lengths: Tokens of the data's sequences or a fair sample of them, cut to the context length.
        schemes: Schemes that a pipeline may have.
        num_devices: How many devices of each type there are.
        tokens_per_iteration: Tokens that all pipelines together take an iteration.
        most: Most candidates, 1 or more.
        seed: Seed of the iterations drawn.

    Raises:
        PlanningError: No scheme holds the longest sequence on the devices there are.
    """
    return _ProposalSearch(
        lengths=as_lengths(lengths),
        schemes=schemes,
        num_devices=num_devices,
        tokens_per_iteration=tokens_per_iteration,
        most=most,
        seed=seed,
    ).run()


class _ProposalSearch:
    """The pool of plans and what is known about them."""

    def __init__(
        self,
        *,
        lengths: IntArray,
        schemes: Sequence[Scheme],
        num_devices: Mapping[str, int],
        tokens_per_iteration: int,
        most: int,
        seed: int,
    ) -> None:
        self.lengths, self.most = lengths, most
        self.tokens = tokens_per_iteration
        self.costs = [scheme.cost for scheme in schemes]
        types = sorted(num_devices)
        self.devices = np.array([[dict(s.devices).get(t, 0) for t in types] for s in schemes])
        self.available = np.array([num_devices[t] for t in types])
        known = np.array([all(t in num_devices for t, _ in s.devices) for s in schemes])
        self.usable: BoolArray = (self.devices <= self.available).all(axis=1) & known
        self.longest = int(lengths.max())
        self.table = CostTable.of(self.costs)
        if not (self.usable & (self.table.max_len >= self.longest)).any():
            limit = int(np.where(self.usable, self.table.max_len, 0).max())
            raise PlanningError(
                f"The longest sequence has {self.longest} tokens but the roomiest scheme on "
                f"{dict(num_devices)} takes {limit}. Cut sequences at {limit}, or give schemes "
                "with more tensor parallelism or stages."
            )
        mean_s = self.table.times_s(np.array([int(lengths.mean())]))[0]
        self.efficiency = 1.0 / (mean_s * (self.table.num_bubbles + 1))
        generator = np.random.default_rng(seed)
        self.iterations = [
            draw_iteration(lengths, self.tokens, generator) for _ in range(_NUM_ITERATIONS)
        ]
        self.estimates: dict[tuple[int, ...], FloatArray] = {}

    def run(self) -> list[tuple[int, ...]]:
        """Fill the pool, then choose and refine."""
        pool = {plan for longest in self._longest_lengths() for plan in self._near(longest)}
        self._set_num_iterations(len(pool))
        self._estimate(pool)
        chosen = self._choose()
        for round_index in range(_NUM_ROUNDS):
            if self._is_unbeatable(chosen):
                break
            self._estimate(self._neighbours(chosen, round_index))
            before, chosen = chosen, self._choose()
            if chosen == before:
                break
        return chosen

    def _is_unbeatable(self, chosen: list[tuple[int, ...]]) -> bool:
        """Return whether every iteration takes as long as its longest sequence alone."""
        longest = np.array([int(item.max()) for item in self.iterations])
        alone_s = self.table.alone_s(longest)
        fits = (longest[:, None] <= self.table.max_len) & self.usable
        least_s = np.where(fits, alone_s, np.inf).min(axis=1)
        best_s = np.min([self.estimates[plan] for plan in chosen], axis=0)
        return bool((best_s <= least_s * (1 + 1e-3)).all())

    def _longest_lengths(self) -> list[int]:
        """Return the context length and quantiles of the iterations' longest sequences."""
        longest = [int(item.max()) for item in self.iterations]
        shares = np.linspace(0, 1, _NUM_LONGEST)
        quantiles = np.quantile(longest, shares, method="nearest").astype(int).tolist()
        return sorted({*quantiles, self.longest}, reverse=True)

    def _near(self, longest: int) -> set[tuple[int, ...]]:
        """Return the whole plans near the fractional plans for data up to `longest`."""
        found = self._uniform(longest)
        work = self._average_work(longest)
        for with_bubbles in (False, True):
            plan = fractional_plan(work, with_bubbles=with_bubbles)
            if plan is not None:
                found |= self._rounded(plan.counts, longest)
        return found

    def _uniform(self, longest: int) -> set[tuple[int, ...]]:
        """Return plans all of whose pipelines hold `longest`, with one scheme per device type.

        Once with the schemes that take least device time, once with those that end first.
        """
        alone_s = self.table.alone_s(np.array(longest))
        roomy = self.usable & (self.table.max_len >= longest)
        found = set()
        for merit in (self.efficiency / self.devices.sum(axis=1), 1.0 / alone_s):
            plan, left = np.zeros(len(self.costs), dtype=np.int64), self.available
            for k in np.argsort(-merit, kind="stable").tolist():
                needs = self.devices[k] > 0
                if roomy[k]:
                    plan[k] = int((left[needs] // self.devices[k][needs]).min())
                    left = left - plan[k] * self.devices[k]
            if plan.any():
                found.add(self._filled(plan))
        return found

    def _average_work(self, longest: int) -> AverageWork:
        """Return the work of an average iteration whose sequences are at most `longest`."""
        kept = self.lengths[self.lengths <= longest]
        interval = (kept - 1) // _LENGTH_STEP
        occupied, place = np.unique(interval, return_inverse=True)
        times_s = self.table.times_s(kept)
        scale = self.tokens / kept.sum()
        work_s = np.stack(
            [np.bincount(place, weights=column) * scale for column in times_s.T], axis=1
        )
        tops = np.zeros(len(occupied), dtype=np.int64)
        np.maximum.at(tops, place, kept)
        return AverageWork(
            work_s=work_s,
            alone_s=self.table.alone_s(tops),
            fits=(tops[:, None] <= self.table.max_len) & self.usable,
            lost_s=self.table.lost_s(np.array(typical_length(kept))),
            devices=self.devices.astype(float),
            available=self.available.astype(float),
        )

    def _rounded(self, counts: FloatArray, longest: int) -> set[tuple[int, ...]]:
        """Return every rounding of a fractional plan that the devices allow, filled up."""
        whole = np.floor(counts + 1e-6).astype(np.int64)
        partial = np.flatnonzero(counts - whole > 1e-6)
        # The largest fractions first: beyond six there are too many combinations to keep.
        partial = partial[np.argsort(-(counts - whole)[partial], kind="stable")][:6]
        roomy = self.table.max_len >= longest
        found = set()
        for ups in itertools.product((0, 1), repeat=len(partial)):
            plan = whole.copy()
            plan[partial] += np.array(ups, dtype=np.int64)
            used = plan @ self.devices
            if (used <= self.available).all() and plan[roomy].sum() > 0:
                found.add(self._filled(plan))
        return found

    def _filled(self, plan: IntArray) -> tuple[int, ...]:
        """Return the plan with unused devices given to the most efficient schemes that fit."""
        plan = plan.copy()
        order = np.argsort(-self.efficiency / self.devices.sum(axis=1), kind="stable").tolist()
        left = self.available - plan @ self.devices
        for k in order:
            if self.usable[k]:
                needs = self.devices[k] > 0
                extra = int((left[needs] // self.devices[k][needs]).min())
                plan[k] += extra
                left = left - extra * self.devices[k]
        return tuple(plan.tolist())

    def _neighbours(
        self, plans: Iterable[tuple[int, ...]], round_index: int
    ) -> set[tuple[int, ...]]:
        """Return plans with pipelines of one scheme exchanged for another, fewer each round."""
        found = set()
        for plan in plans:
            counts = np.array(plan)
            for source in np.flatnonzero(counts):
                removed = max(1, int(counts[source]) >> (2 * round_index + 2))
                for target in np.flatnonzero(self.usable):
                    if target == source:
                        continue
                    fewer = counts.copy()
                    needed = self.devices[target] - (self.available - fewer @ self.devices)
                    gives = self.devices[source]
                    useful = gives > 0
                    least = (
                        int(np.ceil(needed[useful] / gives[useful]).max()) if useful.any() else 1
                    )
                    fewer[source] -= min(int(counts[source]), max(removed, least))
                    left = self.available - fewer @ self.devices
                    needs = self.devices[target] > 0
                    extra = int((left[needs] // self.devices[target][needs]).min())
                    if extra > 0:
                        fewer[target] += extra
                        found.add(self._filled(fewer))
        return found - self.estimates.keys()

    def _set_num_iterations(self, num_plans: int) -> None:
        """Keep as many iterations as the work allows, the hardest and easiest among them."""
        width = int(self.available.sum()) / 4
        steps = max(len(item) for item in self.iterations)
        most = int(_MAX_CELL_STEPS / (steps * width * max(num_plans, 100)))
        count = min(len(self.iterations), max(3, most))
        order = np.argsort([int(item.max()) for item in self.iterations], kind="stable")
        kept = order[np.linspace(0, len(order) - 1, count).round().astype(int)]
        self.iterations = [self.iterations[i] for i in kept.tolist()]

    def _estimate(self, plans: Iterable[tuple[int, ...]]) -> None:
        fresh = sorted(plan for plan in plans if plan not in self.estimates)
        if fresh:
            values = estimate_plans(self.iterations, np.array(fresh), self.costs)
            self.estimates.update(zip(fresh, values, strict=True))

    def _choose(self) -> list[tuple[int, ...]]:
        plans = sorted(self.estimates)
        values = np.array([self.estimates[plan] for plan in plans])
        roomy = np.array(
            [max(k.max_len for k, n in zip(self.costs, p, strict=True) if n) for p in plans]
        )
        chosen = choose_together(values, roomy >= self.longest, self.most)
        return [plans[index] for index in chosen]
