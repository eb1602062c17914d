"""Predict one iteration of a plan by a discrete-event simulation.

An iteration is pull → the schedule of every pipeline (1F1B, or given lists of actions) → push →
optimizer step, in the order in which the runtime runs it. Pulls overlap with the warm-up bubble,
pushes with the last backward and the cool-down bubble.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hetero.core.errors import PlanError
from lightning_hetero.core.places import stages_by_worker
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.simulator.cost import CostModel
from lightning_hetero.simulator.exchange import exchange_of
from lightning_hetero.simulator.memory import MicroBatchShape, StageFacts
from lightning_hetero.simulator.propagate import Orders, Timeline, propagate
from lightning_hetero.simulator.work import PipelineWork


@dataclass(frozen=True, slots=True)
class Event:
    """A computation, a message or an exchange of one stage."""

    pipeline_index: int
    stage_index: int
    kind: str
    """Computation: "F", "B" (or "I" and "W" if backwards are split) or "step". A message to the
    next stage is "SF", one to the previous stage "SB". Exchange that nothing hides: "pull",
    "push"."""
    microbatch_index: int
    """The micro-batch; -1 for exchange and step, which belong to none."""
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Times, memory and bottleneck of one iteration of a plan.

    ::

        batches = split_batch(plan, global_batch_size=64, sequence_length=4096)
        found = simulate(plan, RooflineCost(cluster, model), batches)
        print(found.iteration_time_s, found.bottleneck, found.fits)
    """

    iteration_time_s: float
    """Seconds from the first pull to the end of the last optimizer step."""
    stages: tuple[tuple[StageFacts, ...], ...]
    """[pipeline][stage] device, peak of memory of each rank, load and recomputation."""
    memory_bytes: tuple[float, ...]
    """Peak bytes per global rank; for idle ranks, what they own by the plan's owner shares."""
    host_bytes: tuple[float, ...]
    """Bytes of owned states on the host per global rank."""
    exchange_s: float
    """Exposed seconds of pull, push and optimizer step: those not hidden behind a forward or
    backward."""
    step_s: float
    """Seconds of the longest optimizer step of a stage. May be more than `exchange_s`: if that
    stage has ended before others, their backward hides part of its step."""
    bottleneck: str
    """The stage, or the exchange, that takes longest, in words."""
    events: tuple[Event, ...] = ()
    """All events; empty unless recorded."""

    @property
    def recompute_s(self) -> float:
        """The most seconds in which any stage recomputes activations."""
        return max(known.recompute_s for row in self.stages for known in row)

    @property
    def fits(self) -> bool:
        """Whether every stage has the memory it needs."""
        return not self.lacking_bytes

    @property
    def lacking_bytes(self) -> dict[tuple[int, int], float]:
        """For each (pipeline, stage) that lacks memory, how many bytes; empty if the plan fits.

        Planner, command line and reports use this to decide whether a plan fits.
        """
        # Pipelines that run alike share a row.
        rows = {id(row): [known.lacking_bytes for known in row] for row in self.stages}
        return {
            (p, s): lacking
            for p, row in enumerate(self.stages)
            for s, lacking in enumerate(rows[id(row)])
            if lacking > 0
        }

    @property
    def stage_memory_bytes(self) -> tuple[tuple[float, ...], ...]:
        """[pipeline][stage] peak bytes of each of the stage's ranks."""
        return tuple(tuple(known.used_bytes or 0.0 for known in row) for row in self.stages)

    def tokens_per_s(self, num_tokens: int) -> float:
        """Return the throughput, given the tokens of the iteration."""
        return num_tokens / self.iteration_time_s


def split_batch(
    plan: ParallelPlan, *, global_batch_size: int, sequence_length: int, microbatch_size: int = 1
) -> list[list[MicroBatchShape]]:
    """Return each pipeline's micro-batches: as many as the plan says, else nearly equal numbers.

    Raises:
        PlanError: The plan's numbers of micro-batches don't add up to the global batch, or the
            batch isn't a multiple of the micro-batch.
    """
    total, rest = divmod(global_batch_size, microbatch_size)
    if global_batch_size < 1 or microbatch_size < 1 or sequence_length < 1 or rest:
        raise PlanError(
            f"A global batch of {global_batch_size} sequences of {sequence_length} tokens can't be "
            f"cut into micro-batches of {microbatch_size}. Choose a multiple, all 1 or more."
        )
    sizes = [pipeline.microbatch_size or 1 for pipeline in plan.pipelines]
    counts = [pipeline.num_microbatches or 0 for pipeline in plan.pipelines]
    named = sum(count * size for count, size in zip(counts, sizes, strict=True))
    is_open = [pipeline.num_microbatches is None for pipeline in plan.pipelines]
    room = sum(itertools.compress(sizes, is_open))
    rounds, left = divmod(total - named, room) if room else (0, total - named)
    if rounds < 0 or (left and set(sizes) != {1}) or (left and not room):
        raise PlanError(
            f"The plan's pipelines run {sum(counts)} micro-batches of {microbatch_size} but the "
            f"global batch is {global_batch_size}, which makes {total}. Pass "
            f"--global-batch-size {named * microbatch_size} or change the plan."
        )
    for index in itertools.compress(range(len(counts)), is_open):
        counts[index] = rounds + (left > 0)
        left -= left > 0
    return [
        [(sequence_length,) * (microbatch_size * size)] * count
        for size, count in zip(sizes, counts, strict=True)
    ]


def simulate(
    plan: ParallelPlan,
    cost: CostModel,
    microbatches: Sequence[Sequence[MicroBatchShape]],
    *,
    orders: Sequence[Orders | None] | None = None,
    record_events: bool = False,
) -> Simulation:
    """Simulate one iteration.

    Args:
        plan: The plan; its own `num_microbatches` are ignored.
        cost: Times and bytes. It caches results: use one object for many plans.
        microbatches: For each pipeline its micro-batches; a pipeline may have none.
        orders: For each pipeline the actions of its workers, such as `schedules.solve_actions`
            returns, with whole or split backward passes; None is 1F1B.
        record_events: Whether to record all events, for traces and pictures; slower.

    Raises:
        PlanError: Plan, model, cluster, micro-batches and actions don't match.
    """
    every = orders or [None] * plan.num_pipelines
    _check(plan, cost, microbatches, every)
    kinds, kind_of = _alike(plan, cost, microbatches, every)
    works = [PipelineWork(plan, m[0], cost, microbatches[m[0]], every[m[0]]) for m in kinds]
    exchange = exchange_of(plan, kinds, cost)
    pulled = exchange.pull_start_s([work.first_forward_s for work in works])
    timelines = _propagate(
        works, pulled, blocking=cost.layout.blocking_messages, record=record_events
    )
    computed = [timeline.end_s for timeline in timelines]
    has_work = [bool(work.microbatches) for work in works]
    pushed = exchange.push_end_s(computed, [line.last_s for line in timelines], has_work)
    steps = [work.steps_s for work in works]
    stepped = [
        [end + step for end, step in zip(*rows, strict=True)]
        for rows in zip(pushed, steps, strict=True)
    ]
    iteration_s = max(map(max, stepped))
    first_s = min(row[0] for row in itertools.compress(pulled, has_work))
    last_s = max(map(max, itertools.compress(computed, has_work)))
    exchange_s = iteration_s - last_s + first_s
    facts = [
        work.facts([seconds / iteration_s for seconds in line.busy_s])
        for work, line in zip(works, timelines, strict=True)
    ]
    stages = tuple([facts[kind] for kind in kind_of])
    return Simulation(
        iteration_time_s=iteration_s,
        stages=stages,
        memory_bytes=_rank_memory(plan, cost, stages),
        host_bytes=host_bytes(plan, cost),
        exchange_s=exchange_s,
        step_s=max(map(max, steps)),
        bottleneck=_bottleneck(plan, stages, exchange_s / iteration_s),
        events=_events(kind_of, timelines, pulled, pushed, stepped) if record_events else (),
    )


def _propagate(
    works: Sequence[PipelineWork], starts: Sequence[Sequence[float]], **options: bool
) -> list[Timeline]:
    """Return the timeline of every pipeline; equal ones are run only once."""
    known: dict[object, Timeline] = {}
    timelines = []
    for work, start in zip(works, starts, strict=True):
        orders = work.orders and tuple(map(tuple, work.orders))
        key = tuple(work.times), tuple(start), orders, work.workers
        if key not in known:
            known[key] = propagate(
                work.times, start, orders=work.orders, workers=work.workers, **options
            )
        timelines.append(known[key])
    return timelines


def _alike(
    plan: ParallelPlan,
    cost: CostModel,
    microbatches: Sequence[Sequence[MicroBatchShape]],
    orders: Sequence[Orders | None],
) -> tuple[list[list[int]], list[int]]:
    """Return groups of pipelines that run alike on the same nodes, and each pipeline's group."""
    # Each pipeline is a group of its own in two cases. A ring follows the plan's order of ranks, so
    # under unequal links pipelines on the same nodes may take different times. And with owner
    # shares each rank may own another share.
    is_ordered = bool(cost.special_links) and not cost.layout.sharded
    is_ordered |= plan.owner_shares is not None
    kinds: dict[object, list[int]] = {}
    kind_of: list[object] = []
    for index, (pipeline, batches) in enumerate(zip(plan.pipelines, microbatches, strict=True)):
        shapes = tuple(
            [(cost.shape_in(plan, s), s.activation_budget_bytes) for s in pipeline.stages]
        )
        nodes = tuple([cost.node_of_rank[rank] for s in pipeline.stages for rank in s.ranks])
        order = orders[index] and tuple(map(tuple, orders[index] or ()))
        alike = shapes, nodes, pipeline.workers, _summary(batches), order
        key = index if is_ordered else alike
        members = kinds.setdefault(key, [])
        members.append(index)
        kind_of.append(key)
    numbers = {key: number for number, key in enumerate(kinds)}
    return list(kinds.values()), [numbers[key] for key in kind_of]


def _summary(microbatches: Sequence[MicroBatchShape]) -> tuple[object, ...]:
    """Return a key of some micro-batches, short if they are equal."""
    if len(set(microbatches)) == 1:
        return len(microbatches), microbatches[0]
    return tuple(microbatches)


def _check(
    plan: ParallelPlan,
    cost: CostModel,
    microbatches: Sequence[Sequence[MicroBatchShape]],
    orders: Sequence[Orders | None],
) -> None:
    for what, given in ("Micro-batches", microbatches), ("Orders", orders):
        if len(given) != plan.num_pipelines:
            raise PlanError(
                f"{what} are given for {len(given)} pipelines but the plan has "
                f"{plan.num_pipelines}. Give one list for each pipeline, empty if it has no work."
            )
    if not any(microbatches):
        raise PlanError("No pipeline has a micro-batch. Give at least one pipeline some work.")
    plan.check_num_layers(cost.model.num_layers)
    for index, (batches, order) in enumerate(zip(microbatches, orders, strict=True)):
        if order is None:
            continue
        pipeline = plan.pipelines[index]
        passes = [{(a.stage_index, a.microbatch_index) for a in actions} for actions in order]
        expected = [
            {(stage, m) for stage in own for m in range(len(batches))}
            for own in stages_by_worker(pipeline.workers)
        ]
        if passes != expected:
            raise PlanError(
                f"The orders of pipeline {index} aren't those of {len(batches)} micro-batches on "
                f"each of {pipeline.num_stages} stages. Solve them for this plan."
            )


def host_bytes(plan: ParallelPlan, cost: CostModel) -> tuple[float, ...]:
    """Return each global rank's bytes of masters, states and summed gradients on its host."""
    found = [0.0] * len(cost.node_of_rank)
    for _, _, stage in plan.iter_stages():
        for rank in stage.ranks:
            if cost.layout.host_owned or rank in plan.host_owners:
                own = cost.owned_params(plan, stage) * cost.layout.kept_bytes
                found[rank] = own if plan.owner_shares is not None else found[rank] + own
    return tuple(found)


def _rank_memory(
    plan: ParallelPlan, cost: CostModel, stages: Sequence[Sequence[StageFacts]]
) -> tuple[float, ...]:
    per_rank = [
        cost.idle_bytes(plan, rank) if plan.owner_shares and not plan.place(rank) else 0.0
        for rank in range(len(cost.node_of_rank))
    ]
    totals = {id(row): [known.used_bytes or 0.0 for known in row] for row in stages}
    for pipeline, row in zip(plan.pipelines, stages, strict=True):
        for stage, total in zip(pipeline.stages, totals[id(row)], strict=True):
            for rank in stage.ranks:
                per_rank[rank] = total
    return tuple(per_rank)


def _bottleneck(
    plan: ParallelPlan, stages: Sequence[Sequence[StageFacts]], exchange_share: float
) -> str:
    # Rounded, so that the first of equally busy stages is named.
    share, pipeline, stage = max(
        (round(known.busy or 0.0, 9), -p, -s)
        for p, row in enumerate(stages)
        for s, known in enumerate(row)
    )
    if exchange_share > share:
        return f"weight and gradient exchange ({exchange_share:.0%} of the iteration)"
    tp_degree = plan.pipelines[-pipeline].stages[-stage].tp_degree
    devices = f"{tp_degree} × {stages[-pipeline][-stage].device}"
    return f"pipeline {-pipeline} stage {-stage} ({devices}, busy {share:.0%})"


def _events(
    kind_of: Sequence[int],
    timelines: Sequence[Timeline],
    pulled_s: Sequence[Sequence[float]],
    pushed_s: Sequence[Sequence[float]],
    stepped_s: Sequence[Sequence[float]],
) -> tuple[Event, ...]:
    """Return all events; times are those of each kind of pipelines, as [kind][stage]."""
    events = []
    for p, kind in enumerate(kind_of):
        computed = timelines[kind].end_s
        for s, end_s in enumerate(pulled_s[kind]):
            if end_s:
                events.append(Event(p, s, "pull", -1, 0.0, end_s))
        events += [Event(p, s, what, m, a, b) for what, s, m, a, b in timelines[kind].events]
        for s, (start_s, pushed, stepped) in enumerate(
            zip(computed, pushed_s[kind], stepped_s[kind], strict=True)
        ):
            if pushed > start_s:
                events.append(Event(p, s, "push", -1, start_s, pushed))
            events.append(Event(p, s, "step", -1, pushed, stepped))
    return tuple(events)
