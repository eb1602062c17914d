"""Propose a few plans that together suit the data (Hydraulis §7).

A plan here is a number of pipelines of each scheme. Iterations with long sequences need other plans
than those without.

1. Some iterations are drawn from the data, and all devices get pipelines of one scheme, as far as
   they go: the most efficient one that holds the longest sequence, or the quickest.
2. `estimate_plans` gives the seconds of each plan on each iteration. Let an iteration run the
   chosen plan that is best for it: then plans are chosen one after another, each the one that
   shortens the mean iteration most.
3. Plans near the chosen ones, with some pipelines of one scheme replaced by those of another, are
   tried as well, and 2 is repeated until nothing changes.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from lightning_hetero.assign.pipeline_cost import CostTable, PipelineCost, as_lengths
from lightning_hetero.core.arrays import BoolArray, FloatArray, IntArray
from lightning_hetero.core.errors import PlanningError
from lightning_hetero.planner.proposing.schemes import Scheme, SchemeTable

_WORTH_HAVING = 1e-4
"""One more plan must shorten the mean iteration by this share."""
_NUM_ITERATIONS, _FEWEST_ITERATIONS = 24, 3
"""Iterations drawn from the data on which plans are tried."""
_NUM_ROUNDS = 5
"""Most rounds of estimates."""
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
    generator, mean = np.random.default_rng(seed), float(sizes.mean())
    # As many iterations as the work allows: sequences × pipelines of each of about 100 plans.
    cell_steps = tokens_per_iteration / mean * float(table.available.sum()) / 4 * 100
    number = max(_FEWEST_ITERATIONS, min(_NUM_ITERATIONS, int(_MAX_CELL_STEPS / cell_steps)))
    iterations = [draw_iteration(sizes, tokens_per_iteration, generator) for _ in range(number)]
    plans, known = _WholePlans(table, mean), dict[_Counts, FloatArray]()
    new, chosen = plans.all_of_one_size(longest), list[_Counts]()
    for round_index in range(_NUM_ROUNDS):
        fresh = sorted(new - known.keys())
        if fresh:
            values = estimate_plans(iterations, np.array(fresh), table.costs)
            known.update(zip(fresh, values, strict=True))
        every = sorted(known)
        roomy: BoolArray = np.array(every)[:, table.table.max_len >= longest].sum(axis=1) > 0
        order = choose_together(np.array([known[plan] for plan in every]), roomy, most)
        before, chosen = chosen, [every[index] for index in order]
        if chosen == before:
            break
        new = plans.neighbours(chosen, round_index)
    alone = sorted(known, key=lambda plan: (known[plan].mean(), plan))
    return list(dict.fromkeys([*chosen, *alone]))[:most]


class _WholePlans:
    """Makes whole plans of schemes, in which no device is unused that a pipeline could use."""

    def __init__(self, schemes: SchemeTable, mean_length: float) -> None:
        self._schemes, self._devices = schemes, schemes.devices
        mean_s = schemes.table.times_s(np.array([mean_length]))[0]
        device_s = mean_s * (schemes.table.num_bubbles + 1) * self._devices.sum(axis=1)
        self._by_efficiency: IntArray = np.argsort(device_s, kind="stable")
        """Schemes in the order of device time that a sequence of mean length takes."""

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


def estimate_plans(
    iterations: Sequence[IntArray], counts: IntArray, costs: Sequence[PipelineCost]
) -> FloatArray:
    """Return estimated seconds [plans, iterations], infinite where a sequence doesn't fit.

    In the arrays here, a row is one iteration on one plan. Its sequences are assigned one after
    another, the longest first: each goes to the scheme whose pipelines then end soonest.

    Suppose that the n pipelines of a scheme have N sequences, of t_1 ≥ t_2 ≥ … ≥ t_N seconds. The
    mean pipeline works for Σt / n seconds. Of the first q sequences, some pipeline has ⌈q / n⌉ or
    more, each of which takes t_q or more. So the last one works for at least ::

        max(Σt / n, max_q t_q·⌈q / n⌉)

    seconds. A pipeline of S stages waits for S - 1 more micro-batches. The estimate assumes V equal
    ones, which must be as long as the longest sequence: it tries the largest V for which they are,
    and the next one.

    Args:
        iterations: Lengths of each iteration's sequences.
        counts: [plans, K] pipelines of each scheme.
        costs: The K schemes.
    """
    used = np.flatnonzero(counts.any(axis=0))
    table = CostTable.of([costs[k] for k in used.tolist()])
    lengths = np.zeros((len(iterations), max(map(len, iterations))))
    for row, item in enumerate(iterations):
        lengths[row, : len(item)] = np.sort(item)[::-1]
    exists = np.repeat(counts[:, used] > 0, len(iterations), axis=0)
    pipelines = np.maximum(np.repeat(counts[:, used], len(iterations), axis=0), 1)
    columns = np.tile(lengths, (len(counts), 1)).T
    rows, bubbles = np.arange(len(pipelines)), table.num_bubbles
    work_s, least_s, longest_s, given, tokens = np.zeros((5, *pipelines.shape))
    is_unfit = np.zeros(len(rows), dtype=bool)
    for length in np.ascontiguousarray(columns):
        time_s, more = table.times_s(length), tokens + length[:, None]
        each_s = np.maximum(
            (work_s + time_s) / pipelines,
            np.maximum(least_s, time_s * np.ceil((given + 1) / pipelines)),
        )
        end_s = each_s + bubbles * np.maximum(longest_s, time_s)
        end_s += table.c * (bubbles + np.maximum(more / (pipelines * table.max_len), 1.0))
        end_s[~exists | (length[:, None] > table.max_len)] = np.inf
        scheme = end_s.argmin(axis=1)
        is_unfit |= np.isinf(end_s[rows, scheme])
        # Rows without a sequence left keep what they have.
        at = rows[length > 0], scheme[length > 0]
        least_s[at] = np.maximum(least_s[at], time_s[at] * np.ceil((given[at] + 1) / pipelines[at]))
        longest_s[at] = np.maximum(longest_s[at], time_s[at])
        work_s[at] += time_s[at]
        given[at] += 1
        tokens[at] = more[at]
    each_s = np.maximum(work_s / pipelines, least_s)
    fewest = np.maximum(np.ceil(tokens / (pipelines * table.max_len)), 1.0)
    ratio = each_s / np.where(given > 0, longest_s, 1.0)
    ends_s = [
        each_s + bubbles * np.maximum(longest_s, each_s / number) + table.c * (bubbles + number)
        for number in (np.maximum(np.floor(ratio), fewest), np.maximum(np.ceil(ratio), fewest))
    ]
    found_s = np.where(given > 0, np.minimum(*ends_s), 0.0).max(axis=1)
    return np.where(is_unfit, np.inf, found_s).reshape(len(counts), len(iterations))
