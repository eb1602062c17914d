"""Every plan there is for a tiny cluster, written without the planner: what it is judged by."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.devices import DeviceSpec
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.plan import ParallelPlan, PipelinePlan, StagePlan
from lightning_hetero.simulator import CostModel, simulate


def tiny_model(num_layers: int, *, vocab_size: int = 4096) -> ModelSpec:
    return ModelSpec(
        name="tiny",
        num_layers=num_layers,
        hidden_size=2048,
        num_heads=16,
        num_kv_heads=16,
        intermediate_size=8192,
        vocab_size=vocab_size,
        gated_mlp=False,
        tied_embeddings=False,
    )


def tiny_cluster(
    *nodes: tuple[float, int, float], bytes_per_s: float = 50e9, price: float | None = None
) -> Cluster:
    """Return a cluster of nodes given as (TFLOP/s, devices, GiB)."""
    kinds = {(speed, memory): f"D{speed:g}-{memory:g}" for speed, _, memory in nodes}
    devices = tuple(
        DeviceSpec(
            name=name,
            peak_flops_per_s=speed * 1e12,
            memory_bytes=int(memory * 2**30),
            memory_bytes_per_s=speed * 7e9,
            intra_node_bytes_per_s=200e9,
        )
        for (speed, memory), name in kinds.items()
    )
    return Cluster(
        nodes=tuple(
            Node(
                device=kinds[speed, memory],
                count=count,
                price_per_hour=None if price is None else price * count * speed**0.5,
            )
            for speed, count, memory in nodes
        ),
        inter_node_bytes_per_s=bytes_per_s,
        devices=devices,
    )


Stages = tuple[tuple[int, int], ...]
"""A pipeline as (node, TP degree) of every stage."""


def every_pipeline(counts: list[int], num_heads: int, most_stages: int) -> list[Stages]:
    """Return every pipeline; each stage may have its own degree."""
    degrees = [degree for degree in range(1, max(counts) + 1) if num_heads % degree == 0]
    pipelines: list[Stages] = []
    longer: list[Stages] = [()]
    for _ in range(most_stages):
        longer = [
            (*stages, (node, degree))
            for stages in longer
            for node, count in enumerate(counts)
            for degree in degrees
            if sum(size for other, size in stages if other == node) + degree <= count
        ]
        pipelines += longer
    return pipelines


def every_layout(
    cluster: Cluster, num_heads: int, most_stages: int, most_pipelines: int
) -> Iterator[tuple[Stages, ...]]:
    """Yield every set of pipelines, one of those that renaming equal nodes makes the same."""
    counts = [node.count for node in cluster.nodes]
    pipelines = every_pipeline(counts, num_heads, most_stages)
    kinds = [(node.device, node.count) for node in cluster.nodes]
    renamings = [
        names
        for names in itertools.permutations(range(len(counts)))
        if all(kinds[a] == kinds[b] for a, b in enumerate(names))
    ]
    seen = set()

    def extend(chosen, start, free):
        if chosen:
            same = (
                tuple(sorted(tuple((names[n], tp) for n, tp in stages) for stages in chosen))
                for names in renamings
            )
            if (name := min(same)) in seen:
                return
            seen.add(name)
            yield chosen
        for index in range(start, len(pipelines) if len(chosen) < most_pipelines else 0):
            left = list(free)
            for node, tp_degree in pipelines[index]:
                left[node] -= tp_degree
            if min(left) >= 0:
                yield from extend((*chosen, pipelines[index]), index, left)

    yield from extend((), 0, counts)


def splits(total: int, parts: int) -> list[tuple[int, ...]]:
    """Return every way to write `total` as `parts` positive whole numbers."""
    return [
        tuple(b - a for a, b in itertools.pairwise((0, *cuts, total)))
        for cuts in itertools.combinations(range(1, total), parts - 1)
    ]


def every_plan(cluster: Cluster, model: ModelSpec, num_microbatches: int) -> Iterator[ParallelPlan]:
    """Yield every plan: layouts, times layer splits, times numbers of micro-batches."""
    for layout in every_layout(cluster, model.num_heads, model.num_layers, num_microbatches):
        free = [cluster.ranks_of(node)[0] for node in range(len(cluster.nodes))]
        ranks = []
        for pipeline in layout:
            row = []
            for node, tp_degree in pipeline:
                row.append(tuple(range(free[node], free[node] + tp_degree)))
                free[node] += tp_degree
            ranks.append(row)
        per_pipeline = [splits(model.num_layers, len(row)) for row in ranks]
        for layers in itertools.product(*per_pipeline):
            stages = [
                tuple(
                    StagePlan(ranks=own, layers=range(stop - count, stop))
                    for own, count, stop in zip(
                        row, split, itertools.accumulate(split), strict=True
                    )
                )
                for row, split in zip(ranks, layers, strict=True)
            ]
            for counts in splits(num_microbatches, len(layout)):
                yield ParallelPlan(
                    pipelines=tuple(
                        PipelinePlan(stages=parts, num_microbatches=count)
                        for parts, count in zip(stages, counts, strict=True)
                    )
                )


def time_of(plan: ParallelPlan, cost: CostModel, microbatch: tuple[int, ...]) -> float:
    """Return the simulated seconds of a plan, infinite if its memory doesn't suffice."""
    batches = [[microbatch] * (p.num_microbatches or 0) for p in plan.pipelines]
    simulation = simulate(plan, cost, batches)
    for rank, needed in enumerate(simulation.memory_bytes):
        if needed > cost.usable_bytes(cost.cluster.device_of(rank).name):
            return float("inf")
    return simulation.iteration_time_s


def best_time(
    plans: Iterable[ParallelPlan],
    cost: CostModel,
    microbatch: tuple[int, ...],
    *,
    selectively: bool = False,
    below: float = float("inf"),
) -> float:
    """Return the least seconds of plans under every recomputation, and every ownership if need be.

    It is `below` if none takes less. A plan that fits as it is gains nothing by either. Others are
    tried with every number of layers that each stage recomputes as a whole, the others selectively,
    and with nothing recomputed; with `selectively` also with every number of selective ones. Plans
    whose work alone takes as long as the best are left out.
    """

    def by_work(some: Iterable[ParallelPlan]) -> list[tuple[float, int, ParallelPlan]]:
        return sorted((least_s(plan, cost, microbatch), i, plan) for i, plan in enumerate(some))

    best, full = below, []
    for least, _, plan in by_work(plans):
        if least >= best:
            break
        seconds = time_of(plan, cost, microbatch)
        best = min(best, seconds)
        if seconds == float("inf"):
            full.append(plan)

    for least, _, plan in by_work(full):
        if least >= best:
            break
        for again_least, _, again in by_work(
            _recomputed(plan, cost, microbatch, selectively=selectively)
        ):
            if again_least >= best:
                break
            seconds = time_of(again, cost, microbatch)
            if seconds == float("inf"):
                owned = _owned_by_room(again, cost, microbatch)
                seconds = min((time_of(o, cost, microbatch) for o in owned), default=seconds)
            best = min(best, seconds)
    return best


def least_s(plan: ParallelPlan, cost: CostModel, microbatch: tuple[int, ...]) -> float:
    """Return seconds that the plan takes at least, by its stages' work.

    A stage waits for the first micro-batch's forward through the stages before it and, at the end,
    for the last one's backward through them.
    """
    least = 0.0
    for pipeline in plan.pipelines:
        before = 0.0
        for stage in pipeline.stages:
            seconds = sum(cost.compute_s(cost.shape_of(stage), microbatch))
            least = max(least, (pipeline.num_microbatches or 0) * seconds + before)
            before += seconds
    return least


def _recomputed(
    plan: ParallelPlan, cost: CostModel, microbatch: tuple[int, ...], *, selectively: bool
) -> Iterator[ParallelPlan]:
    """Yield the plan with every number of layers that stages recompute, see `best_time`.

    None as a whole while one is kept as it is: two selectively free as many bytes in less time.
    What doesn't fit even if others own everything is left out.
    """
    tokens = sum(microbatch)

    def holds(pipeline: PipelinePlan, index: int, stage: StagePlan) -> bool:
        shape = cost.shape_of(stage)
        held = tokens * min(pipeline.num_stages - index, pipeline.num_microbatches or 0)
        used = cost.memory_of_tokens(shape, plan.num_pipelines, held, tokens, owned_params=0.0)
        return used.total <= cost.usable_bytes(shape.device)

    choices = []
    for pipeline_index, index, stage in plan.iter_stages():
        count = len(stage.layers)
        kept = {(0, n) for n in (range(count) if selectively else (0,))}
        some = [
            replace(stage, recomputed_layers=whole, selective_layers=selective)
            for whole, selective in sorted(kept | {(n, count - n) for n in range(count + 1)})
        ]
        pipeline = plan.pipelines[pipeline_index]
        choices.append([item for item in some if holds(pipeline, index, item)])
    for stages in itertools.product(*choices):
        rest = iter(stages)
        yield ParallelPlan(
            pipelines=tuple(
                replace(pipeline, stages=tuple(itertools.islice(rest, pipeline.num_stages)))
                for pipeline in plan.pipelines
            )
        )


def _owned_by_room(
    plan: ParallelPlan, cost: CostModel, microbatch: tuple[int, ...]
) -> list[ParallelPlan]:
    """Return the plan with ownership by room: in proportion to it, and holders' claims first."""
    total, tokens = float(cost.model.num_params), sum(microbatch)
    room: dict[int, float] = {}
    claim: dict[int, float] = {}
    for pipeline in plan.pipelines:
        for index, stage in enumerate(pipeline.stages):
            shape = cost.shape_of(stage)
            held = tokens * min(pipeline.num_stages - index, pipeline.num_microbatches or 0)
            count = plan.num_pipelines

            def used(owned, shape=shape, held=held, count=count):
                return cost.memory_of_tokens(shape, count, held, tokens, owned_params=owned).total

            most = _largest(lambda owned: used(owned) <= cost.usable_bytes(shape.device), total)  # noqa: B023
            for rank in stage.ranks:
                room[rank] = most
                claim[rank] = min(most, cost.num_owned_params(shape, count))
    for rank in set(range(cost.cluster.num_ranks)) - set(room):
        layout, device = cost.layout, cost.cluster.device_of(rank).name
        each = layout.owned_bytes + plan.num_pipelines * layout.gradient_bytes
        room[rank], claim[rank] = cost.usable_bytes(device) / each, 0.0
    if min(room.values()) < 0 or sum(room.values()) < total:
        return []
    spare, left = sum(room.values()) - sum(claim.values()), total - sum(claim.values())
    first = {rank: claim[rank] + left / spare * (room[rank] - claim[rank]) for rank in room}
    ranks = range(cost.cluster.num_ranks)
    rows = ([room[rank] for rank in ranks], [first[rank] for rank in ranks])
    return [replace(plan, owner_shares=tuple(row)) for row in rows]


def _largest(fits: Callable[[float], bool], most: float) -> float:
    """Return the largest number up to `most` that fits, -1 if not even 0 does."""
    if not fits(0.0):
        return -1.0
    low, high = 0.0, most
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
