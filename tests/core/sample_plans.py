"""Random plans and a small model's parameters, shared by the tests of plain data."""

from itertools import pairwise
from random import Random

from lightning_hetero.core.plan import ParallelPlan, PipelinePlan, StagePlan
from lightning_hetero.exchange.slices import OuterRole, ParameterSpec


def random_plan(
    rng: Random,
    *,
    max_ranks: int = 9,
    max_layers: int = 5,
    degrees: tuple[int, ...] = (1, 2, 4),
    has_chunks: bool = False,
) -> tuple[ParallelPlan, int]:
    """Return a plan of any shape and a world size that may leave ranks idle.

    With chunks some ranks run several stages.
    """
    num_layers, world_size = rng.randint(1, max_layers), rng.randint(1, max_ranks)
    free = list(range(world_size))
    rng.shuffle(free)
    pipelines: list[PipelinePlan] = []
    while free and (not pipelines or rng.random() < 0.85):
        num_stages = rng.randint(1, min(num_layers, len(free)))
        cuts = [0, *sorted(rng.sample(range(1, num_layers), num_stages - 1)), num_layers]
        stages = []
        one = rng.choice([d for d in degrees if d * num_stages <= len(free)])
        is_mixed = rng.random() < 0.5
        for left, (start, stop) in zip(range(num_stages - 1, -1, -1), pairwise(cuts), strict=True):
            able = [d for d in degrees if d <= len(free) - left]
            degree = rng.choice(able) if is_mixed else one
            ranks, free = free[:degree], free[degree:]
            group = tuple(ranks)
            if has_chunks and stages and rng.random() < 0.5:
                free, group = ranks + free, rng.choice(stages).ranks
            stages.append(_stage(rng, group, range(start, stop)))
        pipelines.append(PipelinePlan(stages=tuple(stages)))
    shares = [rng.randint(0, 3) for _ in range(world_size)]
    shares[rng.randrange(world_size)] += 1
    plan = ParallelPlan(
        pipelines=tuple(pipelines),
        owner_shares=tuple(map(float, shares)),
        host_owners=tuple(rank for rank in range(world_size) if rng.random() < 0.2),
    )
    return plan, world_size


def _stage(rng: Random, ranks: tuple[int, ...], layers: range) -> StagePlan:
    """Return a stage that leaves recomputation open or says how many layers it recomputes."""
    recomputed = rng.randint(0, len(layers)) if rng.random() < 0.3 else None
    left = len(layers) - (recomputed or 0)
    selective = rng.randint(0, left) if rng.random() < 0.3 else None
    return StagePlan(
        ranks=ranks, layers=layers, recomputed_layers=recomputed, selective_layers=selective
    )


def small_model(num_layers: int, *, tied: bool) -> list[ParameterSpec]:
    """Return parameters of every kind: fused, row- and column-parallel, whole, scalar, frozen."""
    first, last = OuterRole.FIRST, OuterRole.LAST
    roles = frozenset({first, last} if tied else {first})
    specs = [ParameterSpec(name="embedding", shape=(20, 3), roles=roles, tp_dim=0)]
    for layer in range(num_layers):
        specs += [
            ParameterSpec(name=f"{layer}.qkv", shape=(24, 2), layer=layer, tp_dim=0, tp_blocks=3),
            ParameterSpec(name=f"{layer}.out", shape=(2, 12), layer=layer, tp_dim=1),
            ParameterSpec(name=f"{layer}.norm", shape=(7,), layer=layer),
            ParameterSpec(name=f"{layer}.scale", shape=(), layer=layer),
            ParameterSpec(name=f"{layer}.old", shape=(5, 2), layer=layer, requires_grad=False),
        ]
    specs.append(ParameterSpec(name="norm", shape=(9,), roles=frozenset({last})))
    if not tied:
        head = ParameterSpec(name="head", shape=(20, 3), roles=frozenset({last}), tp_dim=0)
        specs.append(head)
    return specs
