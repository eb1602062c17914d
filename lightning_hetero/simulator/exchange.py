"""Compute when an iteration's weights have arrived, and when its gradients have.

Layers are exchanged one after another in one fixed order, gradients from the last layer to the
first, each as soon as its backward has ended on all holders. Within a segment, arrivals and sends
are evenly spaced. So the queue ends at the later of two times, each linear in the number of layers,
and no loop over layers is needed. `unit_times` computes how long one layer takes.
"""

from collections.abc import Sequence

from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.exchange.owner_shares import OwnedUnit, spread_ownership
from lightning_hetero.simulator.cost import CostModel
from lightning_hetero.simulator.unit_times import (
    Holders,
    OwnedTimes,
    Segment,
    UnitTimes,
    cut_segments,
)


def exchange_of(
    plan: ParallelPlan, kinds: Sequence[Sequence[int]], cost: CostModel
) -> "ExchangeTable":
    """Return the table of a plan's pulls and pushes.

    Args:
        plan: The plan.
        kinds: Groups of pipelines that run alike; groups of one pipeline each if the plan has owner
            shares.
        cost: Times and bytes.
    """
    every = [[plan.pipelines[index] for index in members] for members in kinds]
    return ExchangeTable([Holders.of(pipelines) for pipelines in every], cost, plan)


def moved_params(plan: ParallelPlan, cost: CostModel) -> float:
    """Return the parameters that travel between holders and owners in a push of the whole plan."""
    layers = [[len(stage.layers) for stage in pipeline.stages] for pipeline in plan.pipelines]
    segments = cut_segments(layers, cost.model)
    if plan.owner_shares is None:
        return sum(s.num_units * s.params_per_unit for s in segments) * (plan.num_pipelines - 1)
    units = _units(plan, segments)
    return sum(
        unit.size * (1.0 - sum(owned.get(rank, 0.0) for rank in ranks))
        for unit, owned in zip(units, spread_ownership(units, plan.owner_shares), strict=True)
        for ranks in unit.holders
    )


def _units(plan: ParallelPlan, segments: Sequence[Segment]) -> list[OwnedUnit]:
    return [
        OwnedUnit(
            size=max(1.0, float(segment.num_units * segment.params_per_unit)),
            holders=tuple(
                pipeline.stages[stage].ranks
                for pipeline, stage in zip(plan.pipelines, segment.stages, strict=True)
            ),
        )
        for segment in segments
    ]


class ExchangeTable:
    """Seconds that every pipeline needs to pull and push one unit of every segment.

    Args:
        holders: The pipelines; those that `Holders` put together count as one.
        cost: Times and bytes.
        plan: The plan, whose owner shares count; None if holders own equal parts.
    """

    def __init__(
        self, holders: Sequence[Holders], cost: CostModel, plan: ParallelPlan | None = None
    ) -> None:
        self.segments = cut_segments([entry.layers for entry in holders], cost.model)
        nothing = [[(0.0, 0.0)] * len(holders)] * len(self.segments)
        self._left = _left_over(holders, self.segments) if cost.layout.overlap else nothing
        equal = UnitTimes(holders, self.segments, cost)
        times: UnitTimes | OwnedTimes = equal
        self._foreign_s: tuple[list[list[float]], float] | None = None
        """Seconds of stages and of idle ranks for what they own but don't hold."""
        if plan is not None and plan.owner_shares is not None and cost.layout.sharded:
            owned = spread_ownership(_units(plan, self.segments), plan.owner_shares)
            times = OwnedTimes(plan, equal, owned)
            self._foreign_s = times.foreign_s()
        pull_s, push_s = times.pull_and_push_s()
        self.pull_s: list[list[float]] = pull_s.T.tolist()
        """[segment][pipeline] seconds to pull one unit; zeros if nothing is sharded."""
        self.push_s: list[list[float]] = push_s.T.tolist()
        """[segment][pipeline] seconds to push one unit."""

    def pull_start_s(self, first_forward_s: Sequence[Sequence[float]]) -> list[list[float]]:
        """Return when each stage may start, so that no layer runs before its weights are there.

        Args:
            first_forward_s: Seconds of the first forward, as [pipeline][stage].
        """
        starts = []
        for index, forward in enumerate(first_forward_s):
            total, first = [0.0] * len(forward), [0.0] * len(forward)
            units = [0] * len(forward)
            # Pulls run from the first layer to the last.
            for segment, pull in zip(reversed(self.segments), reversed(self.pull_s), strict=True):
                stage = segment.stages[index]
                if units[stage] == 0:
                    first[stage] = pull[index]
                units[stage] += segment.num_units
                total[stage] += segment.num_units * pull[index]
            every = zip(first, total, forward, units, strict=True)
            starts.append([max(one, all_s - own * (1 - 1 / n)) for one, all_s, own, n in every])
        return starts

    def push_end_s(
        self,
        end_s: Sequence[Sequence[float]],
        last_s: Sequence[Sequence[float]],
        has_work: Sequence[bool],
    ) -> list[list[float]]:
        """Return when each stage has sent and received all gradients, as [pipeline][stage].

        All stages wait until ranks without layers have received what they own.

        Args:
            end_s: End of each stage's last action.
            last_s: Seconds of that action, during which layers finish one by one.
            has_work: Whether each pipeline ran any micro-batch; one without only receives.
        """
        sent = [[0.0] * len(ends) for ends in end_s]
        received = [[0.0] * len(ends) for ends in end_s]
        workers = [index for index, work in enumerate(has_work) if work]
        # Searches spend much of their time here, so the larger of two is taken without a call.
        every = zip(self.segments, self.push_s, self._left, strict=True)
        for segment, push, left in every:
            units, first_ready, last_ready, last_sent = segment.num_units, 0.0, 0.0, 0.0
            for index in workers:
                stage, seconds = segment.stages[index], push[index]
                end, span = end_s[index][stage], last_s[index][stage]
                first, last = end - span * left[index][0], end - span * left[index][1]
                busy, after = sent[index][stage], last + seconds
                queue = (busy if busy > first else first) + units * seconds
                sent[index][stage] = end = queue if queue > after else after
                first_ready = first if first > first_ready else first_ready
                last_ready = last if last > last_ready else last_ready
                last_sent = end if end > last_sent else last_sent
            for row, stage, seconds in zip(received, segment.stages, push, strict=True):
                busy = row[stage]
                queue = (busy if busy > first_ready else first_ready) + units * seconds
                row[stage] = max(queue, last_ready + seconds, last_sent)
        ends = [
            [max(ends) for ends in zip(*columns, strict=True)]
            for columns in zip(sent, received, end_s, strict=True)
        ]
        if self._foreign_s is None:
            return ends
        foreign, idle = self._foreign_s
        last = max(map(max, end_s)) + idle
        return [
            [max(end + more, last) for end, more in zip(*rows, strict=True)]
            for rows in zip(ends, foreign, strict=True)
        ]


def _left_over(
    holders: Sequence[Holders], segments: Sequence[Segment]
) -> list[list[tuple[float, float]]]:
    """Return when units become ready to push: layers one by one in the last action of a stage.

    As [segment][pipeline] shares of that action that are left then, for a segment's first unit and
    its last. The last layer is first; the head is ready before any layer, the embedding after all.
    """
    left, found = [list(entry.layers) for entry in holders], []
    for segment in segments:
        row = []
        for entry, counts, stage in zip(holders, left, segment.stages, strict=True):
            first = last = counts[stage]
            if segment.is_layers:
                first, last = last - 1, last - segment.num_units
                counts[stage] = last
            row.append((first / entry.layers[stage], last / entry.layers[stage]))
        found.append(row)
    return found
