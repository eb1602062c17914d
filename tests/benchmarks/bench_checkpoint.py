"""Recovery of layer-wise checkpoints (AutoHet §V-C); `bench_layerwise` has a save's stall.

Real bytes go through stores that are throttled to AutoHet's 3500 MB/s for each node's
disk, 1200 MB/s for the one remote store that all nodes share and 50 GB/s for what a rank sends,
each divided by `SLOWDOWN`; the peer is the same recovery with nothing but the remote store. With a
state of S bytes the peer's floor is S/1200. Ours in A and C: two disks of S/2 each, S/7000, so
5.83 times at most; in B half of S from one disk beside half from the remote, 2 times at most.
"""

import functools
from collections.abc import Sequence

from lightning_hetero.checkpoint import (
    CheckpointWriter,
    Peers,
    Recovered,
    SliceNeed,
    Store,
    Tier,
    TierKind,
    assembly,
    encoding,
)
from lightning_hetero.core.plan import ParallelPlan, PipelinePlan, StagePlan
from lightning_hetero.exchange.slices import OuterRole, ParameterSpec
from tests.benchmarks.harness import Row, median_times_s
from tests.checkpoint.stand_ins import MemoryStore, Throttle, ThrottledStore
from tests.checkpoint.states import contents, needs_of, recover, run_ranks

SLOWDOWN = 240
DISK_BYTES_PER_S = 3500e6 / SLOWDOWN
REMOTE_BYTES_PER_S = 1200e6 / SLOWDOWN
LINK_BYTES_PER_S = 50e9 / SLOWDOWN
BLOCK_BYTES = 8 << 10
CHUNK_BYTES = 256 << 10
NUM_LAYERS, HIDDEN, VOCAB = 8, 256, 3142
"""GPT-3 6.7B with width and vocabulary divided by 16 and four layers in one: all ranks share one
interpreter here, so what is done once for each tensor weighs far more than beside real layers."""


def gpt(num_layers: int = NUM_LAYERS) -> list[ParameterSpec]:
    """Return the parameters of a GPT."""
    first, last = frozenset({OuterRole.FIRST}), frozenset({OuterRole.LAST})
    items = [
        ParameterSpec(name="wte", shape=(VOCAB, HIDDEN), roles=first | last),
        ParameterSpec(name="ln_f", shape=(HIDDEN,), roles=last),
    ]
    for i in range(num_layers):
        for name, shape, dim in (
            ("q", (HIDDEN, HIDDEN), 0),
            ("k", (HIDDEN, HIDDEN), 0),
            ("v", (HIDDEN, HIDDEN), 0),
            ("o", (HIDDEN, HIDDEN), 1),
            ("up", (4 * HIDDEN, HIDDEN), 0),
            ("down", (HIDDEN, 4 * HIDDEN), 1),
            ("ln", (2 * HIDDEN,), None),
        ):
            items.append(ParameterSpec(name=f"{i}.{name}", shape=shape, layer=i, tp_dim=dim))
    return items


def two_stages(*pairs: tuple[Sequence[int], Sequence[int]]) -> ParallelPlan:
    """Return pipelines of two stages of 16 layers, given the ranks of both."""
    half = NUM_LAYERS // 2
    return ParallelPlan(
        pipelines=tuple(
            PipelinePlan(
                stages=(
                    StagePlan(ranks=tuple(a), layers=range(half)),
                    StagePlan(ranks=tuple(b), layers=range(half, NUM_LAYERS)),
                )
            )
            for a, b in pairs
        )
    )


BEFORE = two_stages(*(((2 * i, 2 * i + 1), (8 + 2 * i, 9 + 2 * i)) for i in range(4)))
NODES_BEFORE = ["n0"] * 8 + ["n1"] * 8


def scenarios() -> dict[str, tuple[ParallelPlan, list[str], float]]:
    """Return for A, B and C the plan afterwards, the nodes of its ranks and the target."""
    a = two_stages(((0, 1), (4, 5)), ((2, 3), (6, 7)))
    b = ParallelPlan.even(world_size=8, num_layers=NUM_LAYERS, tp_degree=4)
    old = [((2 * i, 2 * i + 1), (8 + 2 * i, 9 + 2 * i)) for i in range(4)]
    c = two_stages(*old, ((16, 17), (18, 19)))
    return {
        "A: two of four groups lost": (a, ["n0"] * 4 + ["n1"] * 4, 4.38),
        "B: one of two nodes lost, TP 2 to 4": (b, ["n1"] * 8, 1.49),
        "C: two nodes join": (c, [*NODES_BEFORE, "n2", "n2", "n3", "n3"], 3.59),
    }


def run() -> list[Row]:
    """Measure the three scenarios."""
    items = gpt()
    disks: dict[str, Store] = {name: MemoryStore(name) for name in ("n0", "n1", "n2", "n3")}
    remote = MemoryStore("remote")
    parts = contents(1, BEFORE, 16, items=items)

    def save(rank: int, peers: Peers) -> None:
        tiers = [
            Tier(kind=TierKind.DISK, store=disks[NODES_BEFORE[rank]]),
            Tier(kind=TierKind.REMOTE, store=remote),
        ]
        writer = CheckpointWriter(tiers, node_of_rank=NODES_BEFORE, peers=peers)
        writer.save(parts[rank]).wait_until_uploaded()
        writer.close()

    encoding.BLOCK_BYTES = BLOCK_BYTES
    run_ranks(16, save, timeout_s=120)
    size = sum(len(data) for data in remote.files.values())
    rows = []
    for name, (plan, nodes, target) in scenarios().items():
        needs = [needs_of(rank, plan, len(nodes), items=items) for rank in range(len(nodes))]
        times = median_times_s(
            functools.partial(_recover, nodes, needs, disks, remote),
            functools.partial(_recover, nodes, needs, None, remote),
            repeats=2,
        )
        rows.append(
            Row(
                name=f"recovery {name}, {size / 1e6:.0f} MB",
                ours=times[0],
                peer=times[1],
                target=target,
                better="higher",
                note="peer: all from the remote; disks 3500, remote 1200 MB/s in all, both "
                f"divided by {SLOWDOWN}",
            )
        )
    return rows


def _recover(
    nodes: Sequence[str],
    needs: Sequence[Sequence[SliceNeed]],
    disks: dict[str, Store] | None,
    remote: Store,
) -> None:
    """Recover once on threads, disks and remote throttled."""
    size = len(nodes)
    slow_remote = ThrottledStore(remote, Throttle(REMOTE_BYTES_PER_S))
    own = {
        node: ThrottledStore(disks[node], Throttle(DISK_BYTES_PER_S))
        for node in (set(nodes) if disks is not None else ())
        if disks is not None
    }

    def action(rank: int, peers: Peers) -> Recovered | None:
        tiers = [Tier(kind=TierKind.REMOTE, store=slow_remote)]
        if own:
            tiers.insert(0, Tier(kind=TierKind.DISK, store=own[nodes[rank]]))
        return recover(needs[rank], tiers, node=nodes[rank], peers=peers)

    assembly.CHUNK_BYTES = CHUNK_BYTES
    results = run_ranks(size, action, bytes_per_s=LINK_BYTES_PER_S, timeout_s=120)
    for result, wanted in zip(results, needs, strict=True):
        # The tests compare the values bit for bit.
        assert result is not None
        assert len(result.slices) == len(wanted)
