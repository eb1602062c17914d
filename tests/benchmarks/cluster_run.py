"""Simulate Greyhound's large run: 256 GPUs, (8 TP, 16 DP, 2 PP), faults coming and going.

The simulator times every iteration of whatever plan runs under the faults of the moment; jitter is
added; the real detector, localisation, balancing, swap search and ski-rental policy see only those
times, and every mitigation costs its time. Nothing in the loop knows the schedule of faults.

What mitigations cost: any change of plan stretches the next iteration by at most `CHANGE_SHARE`,
which `python -m tests.benchmarks exchange` measures. S3 also moves bytes: ranks that trade places
pull all weights of their new stage and take over its slices, with master weights and both moments.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from lightning_hetero.core.cluster import Cluster, Link, Node
from lightning_hetero.core.devices import find_device
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.plan import ParallelPlan, StagePlan
from lightning_hetero.simulator import RooflineCost, StateLayout, simulate
from lightning_hetero.straggler import (
    BocdDetector,
    DecisionKind,
    Mitigation,
    PolicyConfig,
    PossibleMitigation,
)
from lightning_hetero.straggler.locate import find_suspects
from lightning_hetero.straggler.mitigation import propose_swap, swap_ranks
from lightning_hetero.straggler.policy import MitigationPolicy
from lightning_hetero.straggler.prediction import balance_microbatches

NUM_NODES, TP, NUM_PIPELINES, NUM_STAGES = 32, 8, 16, 2
NUM_MICROBATCHES = 16 * NUM_PIPELINES
SEQUENCE_LENGTH = 2048
MODEL = ModelSpec(
    name="GPT2-40B",
    num_layers=48,
    hidden_size=8192,
    num_heads=64,
    num_kv_heads=64,
    intermediate_size=4 * 8192,
    vocab_size=50304,
    gated_mlp=False,
    tied_embeddings=True,
    biases=True,
    max_positions=2048,
)
JITTER = 0.01
CHANGE_SHARE = 0.2
"""Time that a change of plan may add to the next iteration, as a share of it."""
STATE_BYTES = 12
"""Master weight and two Adam moments in fp32, bytes per owned parameter."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What is slow at a moment."""

    devices: tuple[tuple[int, float], ...] = ()
    """(node, slowdown) of nodes with a slow device: it slows its tensor-parallel group."""
    links: tuple[tuple[int, int, float], ...] = ()
    """(node, node, slowdown) of congested links."""


@dataclass(frozen=True, kw_only=True)
class Episode:
    """Faults that hold for iterations [start, stop)."""

    start: int
    stop: int
    faults: Faults


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Iterations per minute over the time in which there are faults, and what was done."""

    iterations_per_min: float
    actions: tuple[tuple[int, str], ...]


def paper_schedule(seed: int = 0) -> tuple[Episode, ...]:
    """Return 2 congested links and 8 slow devices of varying severity, overlapping."""
    rng = np.random.default_rng(seed)
    nodes = rng.permutation(NUM_NODES)
    slow = [(int(node), float(rng.uniform(1.3, 2.6))) for node in nodes[:8]]
    # The congested links join holders of the same layers: stages 0 (or 1) of two pipelines.
    links = ((int(nodes[8]) // 2 * 2, int(nodes[9]) // 2 * 2, 25.0), (1, 21, 18.0))
    phases = [
        Faults(devices=tuple(slow[:2])),
        Faults(devices=tuple(slow[:2]), links=links[:1]),
        Faults(devices=tuple(slow[2:5]), links=links[:1]),
        Faults(devices=tuple(slow[5:8]), links=links),
        Faults(devices=tuple(slow[6:8]), links=links[1:]),
    ]
    length = 300
    return tuple(
        Episode(start=100 + i * length, stop=100 + (i + 1) * length, faults=faults)
        for i, faults in enumerate(phases)
    )


class SimulatedCluster:
    """Answers what an iteration of a plan takes under given faults."""

    def __init__(self) -> None:
        self._time_s = cache(self._simulate)
        self._stage_s = cache(self._measure_stages)

    def iteration_s(self, plan: ParallelPlan, counts: Sequence[int], faults: Faults) -> float:
        """Return the iteration time."""
        return self._time_s(plan, tuple(counts), faults)

    def pipeline_s(self, plan: ParallelPlan, faults: Faults) -> tuple[float, ...]:
        """Return the seconds per micro-batch of each pipeline's slowest stage."""
        stage_s = self._stage_s(plan, faults)
        return tuple(max(row) for row in stage_s)

    def node_s(self, plan: ParallelPlan, faults: Faults) -> dict[int, float]:
        """Return the computing seconds per micro-batch of every node (one stage each)."""
        stage_s = self._stage_s(plan, faults)
        return {stage.ranks[0] // TP: stage_s[p][s] for p, s, stage in plan.iter_stages()}

    def link_s(
        self, faults: Faults, pairs: Sequence[tuple[int, int]]
    ) -> dict[tuple[int, int], float]:
        """Return what a point-to-point probe of 64 MiB between nodes takes."""
        cost = self._cost(faults)
        return {pair: cost.transfer_s(pair[0] * TP, pair[1] * TP, 2**26) for pair in pairs}

    def matmul_s(self, faults: Faults) -> dict[int, float]:
        """Return what a matmul probe of the slowest device of every node takes."""
        cost = self._cost(faults)
        nodes = enumerate(cost.cluster.nodes)
        return {n: 2.0 * 8192**3 / cost.device(node.device).peak_flops_per_s for n, node in nodes}

    def moved_bytes(self, stage: StagePlan) -> tuple[float, float]:
        """Return the bytes of weights that a rank new to a stage pulls, and of slices it takes."""
        cost = self._cost(Faults())
        held = cost.num_stage_params(cost.shape_of(stage))
        return held * cost.layout.weight_bytes, held / NUM_PIPELINES * STATE_BYTES

    def swap_s(self, before: ParallelPlan, after: ParallelPlan, faults: Faults) -> float:
        """Return the seconds in which the last rank has pulled what its new place needs."""
        cost = self._cost(faults)
        seconds = [0.0]
        for pipeline_index, stage_index, stage in after.iter_stages():
            rank, owners = stage.ranks[0], [p.stages[stage_index] for p in before.pipelines]
            if any(rank in owner.ranks for owner in owners):
                continue
            weights, slices = self.moved_bytes(stage)
            shares = [cost.transfer_s(o.ranks[0], rank, weights / len(owners)) for o in owners]
            previous = owners[pipeline_index].ranks[0]
            seconds.append(sum(shares) + cost.transfer_s(previous, rank, slices))
        return max(seconds)

    @staticmethod
    @cache
    def _cost(faults: Faults) -> RooflineCost:
        device = find_device("H800-80GB", ())
        slow = dict(faults.devices)
        variants = tuple(
            replace(
                device,
                name=f"H800-slow-{node}",
                peak_flops_per_s=device.peak_flops_per_s / ratio,
                memory_bytes_per_s=device.memory_bytes_per_s / ratio,
            )
            for node, ratio in slow.items()
        )
        cluster = Cluster(
            nodes=tuple(
                Node(device=f"H800-slow-{n}" if n in slow else "H800-80GB", count=TP)
                for n in range(NUM_NODES)
            ),
            links=tuple(Link(nodes=(a, b), bytes_per_s=50e9 / r) for a, b, r in faults.links),
            devices=variants,
        )
        return RooflineCost(cluster, MODEL, layout=StateLayout())

    def _simulate(self, plan: ParallelPlan, counts: tuple[int, ...], faults: Faults) -> float:
        microbatches = [[(SEQUENCE_LENGTH,)] * count for count in counts]
        return simulate(plan, self._cost(faults), microbatches).iteration_time_s

    def _measure_stages(self, plan: ParallelPlan, faults: Faults) -> tuple[tuple[float, ...], ...]:
        cost = self._cost(faults)
        return tuple(
            tuple(sum(cost.compute_s(cost.shape_of(s), (SEQUENCE_LENGTH,))) for s in p.stages)
            for p in plan.pipelines
        )


def run(episodes: Sequence[Episode], *, mitigate: bool, seed: int = 1) -> RunResult:
    """Run all iterations; return the throughput while the episodes last."""
    trainer = _Trainer(mitigate=mitigate, seed=seed)
    start, stop = episodes[0].start, episodes[-1].stop
    elapsed_s = 0.0
    for step in range(stop):
        faults = next((e.faults for e in episodes if e.start <= step < e.stop), Faults())
        seconds = trainer.iterate(step, faults)
        if step >= start:
            elapsed_s += seconds
    return RunResult(
        iterations_per_min=60.0 * (stop - start) / elapsed_s, actions=tuple(trainer.actions)
    )


class _Trainer:
    """One run: the plan in force, the detector, the policy."""

    def __init__(self, *, mitigate: bool, seed: int) -> None:
        self.cluster = SimulatedCluster()
        self.base = ParallelPlan.even(
            world_size=NUM_NODES * TP, num_layers=48, num_stages=NUM_STAGES, tp_degree=TP
        )
        self.even = (NUM_MICROBATCHES // NUM_PIPELINES,) * NUM_PIPELINES
        self.plan, self.counts = self.base, self.even
        self.healthy_s = self.cluster.iteration_s(self.base, self.even, Faults())
        self.known = Faults()
        self.detector = BocdDetector()
        self.policy = MitigationPolicy(
            PolicyConfig(
                rebalance_cost_s=self._change_s(self.base),
                swap_cost_s=self.first_swap_s(),
                allowed=(Mitigation.IGNORE, Mitigation.REBALANCE, Mitigation.SWAP),
            )
        )
        self.num_news = 0
        self.rng = np.random.default_rng(seed)
        self.mitigate = mitigate
        self.actions: list[tuple[int, str]] = []

    def iterate(self, step: int, faults: Faults) -> float:
        """Run an iteration; return its seconds with those of probes and changes before the next."""
        seconds = self.cluster.iteration_s(self.plan, self.counts, faults)
        seconds *= float(np.exp(self.rng.normal(0.0, JITTER)))
        if not self.mitigate:
            return seconds
        # What the plan should take, given what is known: a change is news, whatever plan runs.
        predicted_s = self.cluster.iteration_s(self.plan, self.counts, self.known)
        change = self.detector.update(seconds / predicted_s)
        # Computing times per rank are measured anyway: news there needs no change of the whole.
        if change is not None or self._device_news(faults):
            seconds += self._locate(step, faults)
        if self.known != Faults():
            seconds += self._mitigate(step)
        return seconds

    def _device_news(self, faults: Faults) -> bool:
        """Tell whether other nodes than known have been slow for four iterations on end."""
        is_news = self._slow_nodes(faults) != {node for node, _ in self.known.devices}
        self.num_news = self.num_news + 1 if is_news else 0
        return self.num_news >= 4

    def _slow_nodes(self, faults: Faults) -> set[int]:
        """Return slow nodes by what their stages compute, against the plan's prediction."""
        healthy_s = self.cluster.node_s(self.plan, Faults())
        suspects = find_suspects(self.cluster.node_s(self.plan, faults), expected_s=healthy_s)
        return set(suspects)

    def _locate(self, step: int, faults: Faults) -> float:
        """Find slow nodes from their computing times and slow links by probes; return seconds."""
        suspects = self._slow_nodes(faults)
        probes_s = self.cluster.matmul_s(faults)
        devices = {n: round(r, 2) for n, r in find_suspects(probes_s).items() if n in suspects}
        pairs = [(a, b) for a in range(NUM_NODES) for b in range(a + 1, NUM_NODES)]
        probed = self.cluster.link_s(faults, pairs)
        links = find_suspects(probed, least_ratio=1.5)
        self.known = Faults(
            devices=tuple(sorted(devices.items())),
            links=tuple((a, b, ratio) for (a, b), ratio in sorted(links.items())),
        )
        self.detector.reset()
        self.actions.append((step, f"found {len(devices)} devices, {len(links)} links"))
        self.policy.end()
        # 31 rounds of disjoint pairs cover all links; a probe goes there and back four times.
        seconds = 31 * 8 * max(probed.values())
        if self.known != Faults():
            self.policy.begin(healthy_s=self.healthy_s)
        elif (self.plan, self.counts) != (self.base, self.even):
            seconds += self._change_s(self.base)
            self.plan, self.counts = self.base, self.even
            self.actions.append((step, "undone"))
        return seconds

    def _mitigate(self, step: int) -> float:
        """Ask the policy; return the seconds of what it had done."""
        counts, swapped = self._options()
        balanced_s = self.cluster.iteration_s(self.plan, counts, self.known)
        predicted_s = {Mitigation.REBALANCE: balanced_s}
        if swapped is not None:
            predicted_s[Mitigation.SWAP] = self.cluster.iteration_s(*swapped, self.known)
        decision = self.policy.decide(
            unmitigated_s=self.cluster.iteration_s(self.base, self.even, self.known),
            possible=[
                PossibleMitigation(mitigation=step, iteration_s=seconds)
                for step, seconds in predicted_s.items()
            ],
        )
        if decision.kind is not DecisionKind.APPLY:
            return 0.0
        self.actions.append((step, f"{decision.mitigation.value}: {decision.reason}"))
        if decision.mitigation is Mitigation.SWAP and swapped is not None:
            cost_s = self._change_s(swapped[0])
            self.plan, self.counts = swapped
        else:
            cost_s, self.counts = self._change_s(self.plan), counts
        self.policy.record_cost(decision.mitigation, cost_s)
        return cost_s

    def _change_s(self, plan: ParallelPlan) -> float:
        """Return what it costs to go on under another plan."""
        moving_s = self.cluster.swap_s(self.plan, plan, self.known)
        return CHANGE_SHARE * self.healthy_s + moving_s

    def first_swap_s(self) -> float:
        """Return what S3 is thought to cost at first: two nodes trade places, all links healthy."""
        first, last = self.base.pipelines[0].stages
        return self._change_s(swap_ranks(self.base, first.ranks, last.ranks))

    def _options(self) -> tuple[tuple[int, ...], tuple[ParallelPlan, tuple[int, ...]] | None]:
        return self._balanced(self.plan), _propose(self, self.plan, self.known)

    def _balanced(self, plan: ParallelPlan) -> tuple[int, ...]:
        times_s = self.cluster.pipeline_s(plan, self.known)
        fixed_s = [(NUM_STAGES - 1) * time_s for time_s in times_s]
        return balance_microbatches(times_s, NUM_MICROBATCHES, fixed_s=fixed_s)

    def search(
        self, plan: ParallelPlan, known: Faults
    ) -> tuple[ParallelPlan, tuple[int, ...]] | None:
        """Return the plan that S3 would run, with balanced micro-batches."""

        def predict_s(candidate: ParallelPlan) -> float:
            return self.cluster.iteration_s(candidate, self._balanced(candidate), known)

        proposal = propose_swap(
            plan,
            slow_ranks={node * TP: ratio for node, ratio in known.devices},
            slow_links=[(a * TP, b * TP) for a, b, _ in known.links],
            predict_s=predict_s,
        )
        return None if proposal is None else (proposal[0], self._balanced(proposal[0]))


@cache
def _propose(
    trainer: _Trainer, plan: ParallelPlan, known: Faults
) -> tuple[ParallelPlan, tuple[int, ...]] | None:
    return trainer.search(plan, known)


def healthy_iterations_per_min() -> float:
    """Return the throughput without faults."""
    trainer = _Trainer(mitigate=False, seed=0)
    return 60.0 / trainer.healthy_s


def swap_figures() -> str:
    """Return what S3 is charged and why."""
    trainer = _Trainer(mitigate=False, seed=0)
    stage = trainer.base.pipelines[0].stages[0]
    weights, slices = trainer.cluster.moved_bytes(stage)
    return (
        f"S3 is charged {trainer.first_swap_s():.2f} s or more: {CHANGE_SHARE:g} of an iteration, "
        f"{weights / 1e9:.1f} GB of weights and {slices / 1e9:.1f} GB of slices a rank"
    )
