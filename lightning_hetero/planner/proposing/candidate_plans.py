"""Propose candidate plans for data of varying lengths (Hydraulis §7 on AutoHet's clusters).

1. A scheme is one way to run a pipeline. Schemes are the columns that the planner's masters choose
   for samples of a typical length, and pipelines of one TP degree on one or two types of devices.
   AutoHet's Eq. 4 balances their layers.
2. `propose` says how many pipelines of each scheme each candidate has.
3. Each candidate is placed on nodes and ranks. This decides the costs of its pipelines.
4. Candidates, and any given plans, are tried on iterations drawn from the data. The plan that is
   best if all iterations must run it comes first. Each further one shortens the mean most if every
   iteration runs the best of those chosen.

If no plan can hold the longest sample beside all states, hosts keep these (`planner.hosts`).
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import ArrayLike

from lightning_hetero.assign.iteration import assign_iteration
from lightning_hetero.assign.pipeline_cost import PipelineCost, as_lengths, typical_length
from lightning_hetero.core.arrays import IntArray
from lightning_hetero.core.errors import AssignmentError, PlanningError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.planner.columns import ColumnTimes
from lightning_hetero.planner.hosts import check_hosts, cost_on_hosts
from lightning_hetero.planner.master import Master
from lightning_hetero.planner.placement import MappingOrder, Option, place, to_plan
from lightning_hetero.planner.proposing.pipeline_costs import PipelineRoom, plan_costs, with_budgets
from lightning_hetero.planner.proposing.proposal import choose_together, draw_iteration, propose
from lightning_hetero.planner.proposing.schemes import Scheme, work_lower_bound_s
from lightning_hetero.planner.stages import Ownership, Stages
from lightning_hetero.planner.workload import Workload
from lightning_hetero.simulator import CostModel, devices_line, host_bytes

_Group = tuple[Option, ...]
"""The stages of one pipeline, whose nodes are still open."""
_Costs = tuple[PipelineCost, ...]
"""The costs of a plan's pipelines."""
_TOGETHER = MappingOrder.STAGES_TOGETHER
_NUM_SPARE = 8
"""More plans that are proposed than chosen, because estimates may be 5 % off."""
_MAX_STAGES = 16
_MIXED_COUNTS = (1, 2, 4)
"""Stages on each of a mixed pipeline's two device types."""


@dataclass(frozen=True, kw_only=True)
class CandidateOptions:
    """The candidates that are considered, and how they are tried."""

    num_candidate_plans: int = 8
    """Most candidates, 1 or more."""
    tp_degrees: tuple[int, ...] = (1,)
    """Tensor-parallel degrees to consider."""
    num_iterations: int = 6
    """Iterations drawn from the data on which candidates are tried."""
    seed: int = 0
    """Seed of the iterations."""


@dataclass(frozen=True, kw_only=True)
class CandidatePlans:
    """Candidate plans; the one that is best for all iterations comes first."""

    plans: tuple[ParallelPlan, ...]
    """The plans; their pipelines' numbers of micro-batches are left to the assignment."""
    costs: tuple[tuple[PipelineCost, ...], ...]
    """[plan][pipeline] costs."""
    static_s: float
    """Mean seconds of propagation under the first plan alone, on the iterations tried."""
    dynamic_s: float
    """The same if each iteration runs the best of all plans."""
    bound_s: float
    """Mean seconds that no mix of the pipelines considered can beat."""
    tokens_per_step: int
    """Tokens of an iteration."""

    def longest_microbatches(self, plan: ParallelPlan) -> list[tuple[int, ...]] | None:
        """Return the longest micro-batch of each pipeline of a plan; None if it is no candidate."""
        if plan not in self.plans:
            return None
        costs = self.costs[self.plans.index(plan)]
        return [(min(cost.max_len, self.tokens_per_step),) for cost in costs]


def propose_plans(
    lengths: ArrayLike,
    cost: CostModel,
    *,
    tokens_per_step: int,
    options: CandidateOptions | None = None,
    given: Sequence[ParallelPlan] = (),
) -> CandidatePlans:
    """Return candidate plans for the data on a cluster.

    Args:
        lengths: Tokens of the data's samples, or of a representative part of them.
        cost: Times and bytes on the cluster.
        tokens_per_step: Tokens of an iteration on all pipelines together.
        options: How to search.
        given: Other plans to try.

    Raises:
        PlanningError: No plan holds the longest sample, with states on devices or on hosts.
    """

    def search(cost: CostModel) -> CandidatePlans:
        return _CandidateSearch(as_lengths(lengths), cost, tokens_per_step, options).run(given)

    try:
        return search(cost)
    except PlanningError:
        relaxed = cost_on_hosts(cost)
        if relaxed is None:
            raise
    return _with_host_owners(search(relaxed), cost)


def _with_host_owners(found: CandidatePlans, cost: CostModel) -> CandidatePlans:
    """Keep states on hosts for ranks that couldn't hold MaxLen tokens of their pipeline otherwise.

    Raises:
        PlanningError: A host has too little memory.
    """
    owners = {
        rank
        for plan, costs in zip(found.plans, found.costs, strict=True)
        for pipeline, item in zip(plan.pipelines, costs, strict=True)
        for rank in PipelineRoom(pipeline, cost, plan.num_pipelines).ranks_without(item.max_len)
    }
    plans = tuple(replace(plan, host_owners=tuple(sorted(owners))) for plan in found.plans)
    for plan in plans:
        check_hosts(host_bytes(plan, cost), cost)
    return replace(found, plans=plans)


class _CandidateSearch:
    def __init__(
        self,
        lengths: IntArray,
        cost: CostModel,
        tokens_per_step: int,
        options: CandidateOptions | None,
    ) -> None:
        self.lengths = lengths
        self.longest = int(lengths.max())
        self.cost = cost
        self.tokens = tokens_per_step
        self.options = options or CandidateOptions()
        self.num_devices = cost.cluster.num_devices

    def _balance_for(self, length: int) -> None:
        """Balance layers for micro-batches of one sample of `length` tokens."""
        batch = max(_MAX_STAGES, self.tokens // length)
        work = Workload(sequence_length=length, global_batch_size=batch)
        self.stages = Stages(self.cost, work, self.options.tp_degrees)
        self.times_of = cache(lambda number: ColumnTimes(self.stages, Ownership(number), _TOGETHER))

    def run(self, given: Sequence[ParallelPlan]) -> CandidatePlans:
        found = {plan: costs for plan in given if (costs := self._costs(plan)) is not None}
        schemes: dict[_Group, Scheme] = {}
        # Layers balanced for the longest sample are slower for most, but leave more room.
        for length in (typical_length(self.lengths), self.longest):
            self._balance_for(length)
            groups = dict.fromkeys([*self._enumerated(), *self._priced()])
            own = {g: scheme for g in groups if (scheme := self._scheme(g)) is not None}
            found |= self._proposed(own)
            schemes |= own
            if any(map(self._holds_longest, found.values())):
                return self._choose(found, tuple(schemes.values()))
        most = max((scheme.cost.max_len for scheme in schemes.values()), default=0)
        raise PlanningError(
            f"No plan on {devices_line(self.cost.cluster)} holds the longest sample of "
            f"{self.longest:,} tokens; pipelines hold {most:,} at most beside the states of "
            f"{self.cost.model.name}. Cut samples shorter (context_length), allow more tensor "
            "parallelism, or say how much host_memory_bytes every node has for states."
        )

    def _proposed(self, schemes: Mapping[_Group, Scheme]) -> dict[ParallelPlan, _Costs]:
        """Return the plans proposed for some schemes, and their costs."""
        if not any(scheme.cost.max_len >= self.longest for scheme in schemes.values()):
            return {}
        proposals = propose(
            self.lengths,
            tuple(schemes.values()),
            self.num_devices,
            tokens_per_iteration=self.tokens,
            most=self.options.num_candidate_plans + _NUM_SPARE,
            seed=self.options.seed,
        )
        found = {}
        for counts in proposals:
            groups = [group for group, n in zip(schemes, counts, strict=True) for _ in range(n)]
            if (costed := self._costed(groups)) is not None:
                found[costed[0]] = costed[1]
        return found

    # -- schemes and plans ----------------------------------------------------------------------

    def _priced(self) -> Iterator[_Group]:
        """Yield the columns that masters use, for one, two, four, ... pipelines."""
        if not self.stages.options:
            return
        most = sum(self.stages.devices.values())
        for number in (1 << i for i in range(most.bit_length())):
            master = Master([self.times_of(number)])
            master.solve()
            yield from (column.options for column, _ in master.best_columns())

    def _enumerated(self) -> Iterator[_Group]:
        most = min(self.cost.model.num_layers, _MAX_STAGES)
        for degree in self.options.tp_degrees:
            units = {kind: self._num_units(kind, degree) for kind in self.stages.devices}
            for kind, count in units.items():
                for num_stages in range(1, min(most, count) + 1):
                    # All small depths; of the deep ones only those that use every device.
                    if num_stages <= 4 or count % num_stages == 0:
                        yield (Option(kind, degree),) * num_stages
            usable = [kind for kind, count in units.items() if count]
            layer_s = {
                kind: self.stages.times_s(Option(kind, degree), False, False)[:, 1].sum()
                for kind in usable
            }
            by_speed = sorted(usable, key=layer_s.__getitem__)
            for fast, slow in itertools.combinations(by_speed, 2):
                for first, second in itertools.product(_MIXED_COUNTS, repeat=2):
                    fits = first <= units[slow] and second <= units[fast]
                    if fits and first + second <= most:
                        own = Option(slow, degree), Option(fast, degree)
                        yield (own[0],) * first + (own[1],) * second

    def _num_units(self, kind: int, tp_degree: int) -> int:
        return sum(count // tp_degree for count in self.stages.counts_of_class[kind])

    def _scheme(self, group: _Group) -> Scheme | None:
        """Return a group's scheme, costed in a plan of as many such pipelines as fit; else None."""
        needed = Counter(group)
        copies = min(self._num_units(kind, degree) // n for (kind, degree), n in needed.items())
        costed = self._costed([group] * copies) if copies else None
        if costed is None:
            return None
        taken: Counter[str] = Counter()
        for (kind, degree), number in needed.items():
            node = self.stages.node_of_class[kind]
            taken[self.cost.cluster.nodes[node].device] += number * degree
        return Scheme(cost=costed[1][0], devices=tuple(taken.items()))

    def _costed(self, groups: Sequence[_Group]) -> tuple[ParallelPlan, _Costs] | None:
        """Return the plan of groups on ranks, and its costs; None if layers or nodes don't fit.

        Stages recompute if their pipeline couldn't hold the longest sample otherwise.
        """
        pipelines = place(groups, self.stages.class_of_node, self.stages.counts, _TOGETHER)
        rows = [self.times_of(len(groups)).balance(group) for group in groups]
        layers = [row for row in rows if row is not None]
        if pipelines is None or len(layers) < len(rows):
            return None
        plan = to_plan(pipelines, layers, [None] * len(groups), self.cost.cluster)
        plan = with_budgets(plan, self.cost, self.longest)
        costs = self._costs(plan)
        return None if costs is None else (plan, costs)

    def _costs(self, plan: ParallelPlan) -> _Costs | None:
        try:
            return plan_costs(plan, self.cost, context_length=self.longest)
        except AssignmentError:
            return None  # A stage has no memory for tokens.

    # -- choice ---------------------------------------------------------------------------------

    def _holds_longest(self, costs: Sequence[PipelineCost]) -> bool:
        return max(cost.max_len for cost in costs) >= self.longest

    def _choose(
        self,
        found: Mapping[ParallelPlan, _Costs],
        schemes: Sequence[Scheme],
    ) -> CandidatePlans:
        """Choose plans: the best alone, then one by one those that shorten the mean most."""
        plans = list(found)
        generator = np.random.default_rng(self.options.seed)
        iterations = [
            draw_iteration(self.lengths, self.tokens, generator)
            for _ in range(self.options.num_iterations)
        ]
        values = np.array([[self._seconds(found[plan], i) for i in iterations] for plan in plans])
        # The first plan must hold the longest sample, even if no drawn iteration has it.
        roomy = np.array([self._holds_longest(found[plan]) for plan in plans])
        order = choose_together(values, roomy, self.options.num_candidate_plans)
        dynamic_s = values[order].min(axis=0)
        bounds_s = [work_lower_bound_s(i, schemes, self.num_devices) for i in iterations]
        return CandidatePlans(
            plans=tuple(plans[i] for i in order),
            costs=tuple(found[plans[i]] for i in order),
            static_s=float(values[order[0]].mean()),
            dynamic_s=float(dynamic_s.mean()),
            bound_s=float(np.minimum(bounds_s, dynamic_s).mean()),
            tokens_per_step=self.tokens,
        )

    def _seconds(self, costs: _Costs, lengths: IntArray) -> float:
        if lengths.max() > max(cost.max_len for cost in costs):
            return np.inf
        return assign_iteration(lengths, [costs]).latency_s
