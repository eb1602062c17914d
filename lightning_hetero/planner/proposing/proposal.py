"""Propose a few plans that together suit the data (Hydraulis §7).

A plan here is a number of pipelines of each scheme. Iterations with long sequences need other plans
than those without.

1. Some iterations are drawn from the data. For each, `relaxation` finds the best fractional plan,
   and all ways to round its numbers up or down join the pool. Devices that are left get pipelines.
2. `quick_estimates` gives the seconds of each plan of the pool on each iteration. Let an iteration
   run the chosen plan that is best for it: then plans are chosen one after another, each the one
   that shortens the mean iteration most.
3. Plans near the chosen ones, with some pipelines of one scheme replaced by those of another, join
   the pool, and 2 is repeated.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from lightning_hetero.assign.pipeline_cost import as_lengths
from lightning_hetero.core.arrays import BoolArray, FloatArray, IntArray
from lightning_hetero.core.errors import PlanningError
from lightning_hetero.planner.proposing.quick_estimates import estimate_plans
from lightning_hetero.planner.proposing.relaxation import FractionalPlan, Scheme, SchemeTable

_WORTH_HAVING = 1e-4
"""One more plan must shorten the mean iteration by this share."""
_NUM_ITERATIONS = 24
"""Iterations drawn from the data on which plans are tried."""
_NUM_ROUNDS = 3
"""How often plans near the chosen ones are tried."""
_MOST_ROUNDED = 5
"""So many numbers of a fractional plan are rounded both ways; others are rounded down."""
_MAX_CELL_STEPS = 2e8
"""Limit of sequences × plans × iterations × pipelines that one round estimates."""

_Counts = tuple[int, ...]
"""Pipelines of each scheme."""


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
) -> list[_Counts]:
    """Return pipelines of each scheme for candidates, the one that serves every iteration first.

    Args:
        lengths: Tokens of the data's sequences or a fair sample of them, cut to the context length.
        schemes: Schemes that a pipeline may have.
        num_devices: How many devices of each type there are.
        tokens_per_iteration: Tokens that all pipelines together take an iteration.
        most: Most candidates, 1 or more. Where fewer are best together, the best alone follow:
            estimates may be wrong.
        seed: Seed of the iterations drawn.

    Raises:
        PlanningError: No scheme holds the longest sequence on the devices there are.
    """
    sizes, table = as_lengths(lengths), SchemeTable(schemes, num_devices)
    longest = int(sizes.max())
    limit = int(np.where(table.usable, table.table.max_len, 0).max())
    if limit < longest:
        raise PlanningError(
            f"The longest sequence has {longest} tokens but the roomiest scheme on "
            f"{dict(num_devices)} takes {limit}. Cut sequences at {limit}, or give schemes "
            "with more tensor parallelism or stages."
        )
    generator = np.random.default_rng(seed)
    iterations = [
        draw_iteration(sizes, tokens_per_iteration, generator) for _ in range(_NUM_ITERATIONS)
    ]
    plans = _WholePlans(table, float(sizes.mean()))
    pool = plans.all_of_one_size(longest).union(*map(plans.near, iterations))
    tried = _Estimates(table, iterations, most, len(pool))
    tried.add(pool)
    chosen = tried.best(longest)
    for round_index in range(_NUM_ROUNDS):
        if tried.is_unbeatable(chosen):
            break
        tried.add(plans.neighbours(chosen, round_index))
        before, chosen = chosen, tried.best(longest)
        if chosen == before:
            break
    return list(dict.fromkeys([*chosen, *tried.best_alone()]))[:most]


class _WholePlans:
    """Makes whole plans of schemes, in which no device is unused that a pipeline could use."""

    def __init__(self, schemes: SchemeTable, mean_length: float) -> None:
        self._schemes, self._devices = schemes, schemes.devices
        mean_s = schemes.table.times_s(np.array([mean_length]))[0]
        device_s = mean_s * (schemes.table.num_bubbles + 1) * self._devices.sum(axis=1)
        self._by_efficiency: IntArray = np.argsort(device_s, kind="stable")
        """Schemes in the order of device time that a sequence of mean length takes."""

    def near(self, lengths: IntArray) -> set[_Counts]:
        """Return plans near the best fractional one for some sequences, which all of them hold."""
        longest, fractional = int(lengths.max()), FractionalPlan.of(lengths, self._schemes)
        found = self.all_of_one_size(longest)
        if fractional is None:
            return found
        whole = np.floor(fractional.counts + 1e-6).astype(np.int64)
        rest = fractional.counts - whole
        # The largest fractions first: of more there are too many combinations to keep.
        order = np.argsort(-rest, kind="stable")
        partial = order[rest[order] > 1e-6][:_MOST_ROUNDED]
        roomy = self._schemes.table.max_len >= longest
        for ups in itertools.product((0, 1), repeat=len(partial)):
            plan = whole.copy()
            plan[partial] += np.array(ups, dtype=np.int64)
            if (self._left(plan) >= 0).all() and plan[roomy].any():
                found.add(self._filled(plan))
        return found

    def all_of_one_size(self, longest: int) -> set[_Counts]:
        """Return two plans of pipelines that hold `longest` tokens: most efficient, quickest."""
        table, nothing = self._schemes.table, np.zeros(len(self._devices), dtype=np.int64)
        roomy = table.max_len >= longest
        by_end = np.argsort(table.alone_s(np.array(longest)), kind="stable")
        return {
            self._filled(self._fill(nothing, order[roomy[order]]))
            for order in (self._by_efficiency, by_end)
        }

    def neighbours(self, plans: Iterable[_Counts], round_index: int) -> set[_Counts]:
        """Return plans with pipelines of one scheme replaced by another's, fewer each round."""
        found = set()
        for plan in map(np.array, plans):
            for source in np.flatnonzero(plan):
                gives = self._devices[source]
                removed = max(1, int(plan[source]) >> (2 * round_index + 2))
                for target in np.flatnonzero(self._schemes.usable):
                    # At least as many as one pipeline of the target lacks devices.
                    lacking = (self._devices[target] - self._left(plan))[gives > 0]
                    least = int(np.ceil(lacking / gives[gives > 0]).max())
                    fewer = plan.copy()
                    fewer[source] -= min(int(plan[source]), max(removed, least))
                    more = self._fill(fewer, np.array([target]))
                    if target != source and more[target] > fewer[target]:
                        found.add(self._filled(more))
        return found

    def _left(self, plan: IntArray) -> IntArray:
        """Return the unused devices of each type."""
        left: IntArray = self._schemes.available - plan @ self._devices
        return left

    def _fill(self, plan: IntArray, order: IntArray) -> IntArray:
        """Return the plan with unused devices given to schemes in this order."""
        plan = plan.copy()
        for k in order[self._schemes.usable[order]].tolist():
            needs = self._devices[k] > 0
            plan[k] += int((self._left(plan)[needs] // self._devices[k][needs]).min())
        return plan

    def _filled(self, plan: IntArray) -> _Counts:
        """Return the plan with unused devices given to the most efficient schemes that fit."""
        return tuple(self._fill(plan, self._by_efficiency).tolist())


class _Estimates:
    """The seconds of each plan of the pool on each iteration."""

    def __init__(
        self, schemes: SchemeTable, iterations: Sequence[IntArray], most: int, num_plans: int
    ) -> None:
        self._schemes, self._most = schemes, most
        self._known: dict[_Counts, FloatArray] = {}
        # As many iterations as the work allows, the hardest and the easiest among them.
        steps, width = max(map(len, iterations)), int(schemes.available.sum()) / 4
        affordable = int(_MAX_CELL_STEPS / (steps * width * max(num_plans, 100)))
        kept = np.linspace(0, len(iterations) - 1, min(len(iterations), max(3, affordable)))
        ordered = sorted(iterations, key=lambda item: int(item.max()))
        self._iterations = [ordered[index] for index in kept.round().astype(int)]

    def add(self, plans: Iterable[_Counts]) -> None:
        """Estimate plans."""
        fresh = sorted(set(plans) - self._known.keys())
        if fresh:
            values = estimate_plans(self._iterations, np.array(fresh), self._schemes.costs)
            self._known.update(zip(fresh, values, strict=True))

    def best(self, longest: int) -> list[_Counts]:
        """Return the plans that are best together, the first of which holds `longest` tokens."""
        plans = sorted(self._known)
        values = np.array([self._known[plan] for plan in plans])
        roomy = np.array(plans)[:, self._schemes.table.max_len >= longest].sum(axis=1) > 0
        return [plans[index] for index in choose_together(values, roomy, self._most)]

    def best_alone(self) -> list[_Counts]:
        """Return all plans, the one of the least mean first."""
        return sorted(self._known, key=lambda plan: (self._known[plan].mean(), plan))

    def is_unbeatable(self, chosen: Sequence[_Counts]) -> bool:
        """Return whether every iteration takes as long as its longest sequence alone."""
        least_s = self._schemes.alone_s(np.array([item.max() for item in self._iterations]))
        best_s = np.min([self._known[plan] for plan in chosen], axis=0)
        return bool((best_s <= least_s * (1 + 1e-3)).all())
