"""Read Sailor's measured plans and profiles as this package's plans, clusters and costs.

What is modelled is how those runs were made; no number is fitted to their times. They trained
in fp32 with states on every replica. Messages between stages block both ends: every TP rank
sends the whole hidden state forward and its share of the gradient back, which the receiving
node gathers. Gradients are all-reduced around a ring after the last backward; nothing overlaps.

Two choices were made with the measurements in sight, so what rests on them is no blind
prediction.

- `mit` nodes share one NIC between all their GPUs, and RTX-3090 nodes were measured at 1 Gb/s.
  Rings go at their slowest member's rate, which agrees with the measured reductions. But messages
  between stages go at the best rate measured in that cluster: at the 3090's own rate the two mit
  runs here would be predicted 2.0 to 2.1 times as long as they took. Why they were faster isn't
  known.
- `PROCESS_BYTES` and `ALLOCATOR_SLACK` are round numbers that agree with the measured peaks;
  without them predicted memory is 18 % (clariden) to 44 % (mit) too low.
"""

import datetime
import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.devices import DeviceSpec
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.plan import ParallelPlan, PipelinePlan, StagePlan
from lightning_hetero.core.profile import BlockTimes, DeviceProfile, LayerMemory, Profile
from lightning_hetero.simulator import MicroBatchShape, ProfileCost, StageShape, StateLayout

ROOT = Path(__file__).resolve().parents[2].parent / "shared/data/sailor"
SEQUENCE_LENGTH = 2048
# GPU types of one cluster, whose nodes are joined by one network.
CLUSTERS = (("GH-96",), ("RTX-3090", "RTX-2080", "Titan-RTX"))
# Name in the data: (peak FLOP/s, memory GiB, memory bytes/s) from data sheets.
SPECS = {
    "GH-96": (989e12, 96, 4000e9),
    "RTX-3090": (71e12, 24, 936e9),
    "RTX-2080": (81e12, 8, 448e9),
    "Titan-RTX": (130e12, 24, 672e9),
    "A100-40": (312e12, 40, 1555e9),
    "A100-80": (312e12, 80, 2039e9),
    "V100-16": (125e12, 16, 900e9),
}
MODELS = {"OPT-350": "opt-350m", "GPT-Neo-2.7": "gpt-neo-2.7b"}
# Not in the package's table of models.
OPT_30B = ModelSpec(
    name="opt-30b",
    num_layers=48,
    hidden_size=7168,
    intermediate_size=28672,
    num_heads=56,
    num_kv_heads=56,
    vocab_size=50272,
    gated_mlp=False,
    tied_embeddings=True,
    biases=True,
    max_positions=2048,
)
# fp32 weights and gradients; two Adam moments and the flat copies that DeepSpeed makes of weights
# and gradients.
LAYOUT = StateLayout(
    weight_bytes=4,
    gradient_bytes=4,
    owned_bytes=16,
    sharded=False,
    overlap=False,
    blocking_messages=True,
)
# CUDA context, compiled kernels and NCCL's buffers of a process, bytes, and what the caching
# allocator holds beyond what is live.
PROCESS_BYTES = 2.5e9
ALLOCATOR_SLACK = 1.1


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A plan that was run, and what was measured."""

    name: str
    plan: ParallelPlan
    cluster: Cluster
    model_name: str
    microbatches: list[list[MicroBatchShape]]
    iteration_time_s: float
    reduction_s: float
    peak_bytes: float


class SailorCost(ProfileCost):
    """Costs of Sailor's runtime: the profile's times and the networks' measured curves."""

    def __init__(self, cluster: Cluster, model_name: str, profile: Profile) -> None:
        super().__init__(cluster, profile.model, profile, layout=LAYOUT)
        self._curves = _load("network_coeffs.json")["inter"]
        self._intra = _load("intra_node_bandwidths.json")
        self._layer_memory = _load("layer_memory.json")[model_name]
        self._update_s = {
            node.device: _update_times_s(model_name, node.device) for node in cluster.nodes
        }

    def activation_s(self, sender: StagePlan, receiver: StagePlan, num_tokens: int) -> float:
        num_bytes = self.model.hidden_bytes(num_tokens, bytes_per_value=4)
        if sender.layers.start < receiver.layers.start:
            return self.message_s(sender, receiver, num_bytes)
        share = num_bytes / sender.tp_degree
        return self.message_s(sender, receiver, share) + self.gather_s(receiver, num_bytes)

    def message_s(self, sender: StagePlan, receiver: StagePlan, num_bytes: float) -> float:
        """Return the seconds in which every TP rank sends so many bytes to its counterpart."""
        device = self._device_of(sender.ranks[0])
        count = sender.tp_degree
        if self.node_of_rank[sender.ranks[0]] == self.node_of_rank[receiver.ranks[0]]:
            return num_bytes / self._intra_rate(device, 2)
        peers = next((types for types in CLUSTERS if device in types), (device,))
        rate = max(self._inter_rate(peer, count, num_bytes) for peer in peers)
        return count * num_bytes / rate

    def gather_s(self, stage: StagePlan, num_bytes: float) -> float:
        """Return the seconds in which a node's TP ranks gather a tensor cut among them."""
        count = stage.tp_degree
        if count == 1:
            return 0.0
        rate = self._intra_rate(self._device_of(stage.ranks[0]), count)
        return (count - 1) / count * num_bytes / rate

    def all_reduce_s(self, ranks: Any, num_bytes: float) -> float:
        """Return the seconds of the rings of all TP ranks at once, at the slowest member's rate."""
        count = len(ranks)
        if count < 2:
            return 0.0
        nodes = [self.cluster.nodes[self.node_of_rank[rank]] for rank in ranks]
        message = num_bytes / count
        if len({self.node_of_rank[rank] for rank in ranks}) == 1:
            return 2 * (count - 1) * message / self._intra_rate(nodes[0].device, count)
        slowest = max(
            node.count * message / self._inter_rate(node.device, node.count, message)
            for node in nodes
        )
        return 2 * (count - 1) * slowest

    def num_stage_params(self, shape: StageShape) -> float:
        memory = self._layer_memory[str(shape.tp_degree)]
        layers = self._entries(shape)
        return float(sum(memory[str(layer)]["params_bytes"] for layer in layers)) / 4

    def activation_bytes(self, shape: StageShape, num_tokens: int) -> float:
        return ALLOCATOR_SLACK * super().activation_bytes(shape, num_tokens)

    def transient_bytes(self, shape: StageShape, num_tokens: int) -> float:
        """Return the head's activations, the scores' gradients in a backward, and the process's."""
        memory = self._layer_memory[str(shape.tp_degree)]
        head = memory[str(self.model.num_layers + 1)]["act_mem_bytes"] / SEQUENCE_LENGTH
        per_token = head * shape.has_head
        scores = 4 * self.model.num_heads / shape.tp_degree * SEQUENCE_LENGTH
        return PROCESS_BYTES + ALLOCATOR_SLACK * (per_token + 3 * scores) * num_tokens

    def step_s(self, shape: StageShape, num_owned: float) -> float:
        return self._update_s[shape.device][shape.tp_degree] * len(self._entries(shape))

    def _entries(self, shape: StageShape) -> list[int]:
        """Return profile entries that cost what the stage's do: blocks are all alike."""
        blocks = list(range(1, shape.num_layers + 1))
        return [0] * shape.has_embedding + blocks + [self.model.num_layers + 1] * shape.has_head

    def _device_of(self, rank: int) -> str:
        return self.cluster.nodes[self.node_of_rank[rank]].device

    def _inter_rate(self, device: str, count: int, num_bytes: float) -> float:
        return _rate(self._curves[device], count, num_bytes)

    def _intra_rate(self, device: str, count: int) -> float:
        return float(_nearest(self._intra[device], count)[1])


def load_run(path: Path) -> MeasuredRun:
    """Read one measured plan."""
    data = json.loads(path.read_text())
    builder = _PlanBuilder(data.get("N"))
    pipelines = [
        builder.add_pipeline(entry, replica)
        for entry in data["pipeline_list"]
        for replica in range(entry["dp"][0])
    ]
    plan = ParallelPlan(pipelines=tuple(builder.finish(stages) for stages in pipelines))
    count = round(data["gbs"] / data["mbs"] / plan.num_pipelines)
    microbatch = (SEQUENCE_LENGTH,) * data["mbs"]
    return MeasuredRun(
        name=path.stem,
        plan=plan,
        cluster=builder.cluster(),
        model_name=data.get("model", "OPT-350"),
        microbatches=[[microbatch] * count for _ in plan.pipelines],
        iteration_time_s=data["real"],
        reduction_s=data["red_grads"],
        peak_bytes=data["max_mem"],
    )


def load_profile(model_name: str, devices: set[str]) -> Profile:
    """Read the measured times of a model on some device types."""
    model = OPT_30B if model_name == "OPT-30" else ModelSpec.load(MODELS[model_name])
    memory = _load("layer_memory.json")[model_name]
    return Profile(
        model=model,
        versions={},
        date=datetime.datetime(2025, 1, 1, tzinfo=datetime.UTC),
        devices=tuple(
            DeviceProfile(
                device=device,
                times=_block_times(model_name, device, model.num_layers),
                memory=tuple(
                    LayerMemory(
                        tp_degree=int(tp),
                        layer_bytes_per_token=layers["1"]["act_mem_bytes"] / SEQUENCE_LENGTH,
                        embedding_bytes_per_token=layers["0"]["act_mem_bytes"] / SEQUENCE_LENGTH,
                    )
                    for tp, layers in memory.items()
                ),
            )
            for device in sorted(devices)
        ),
    )


def sailor_cluster(counts: dict[str, int], *, devices_per_node: int) -> Cluster:
    """Return so many devices of each type in equal nodes; links are the cost's business."""
    per_node = devices_per_node
    return cluster_of(
        [(name, per_node) for name, count in counts.items() for _ in range(count // per_node)]
    )


def cluster_of(nodes: Sequence[tuple[str, int]]) -> Cluster:
    """Return the cluster of nodes given as (device, count); links are the cost's business."""
    builder = _PlanBuilder(None)
    for device, count in nodes:
        builder.add_node(device, count)
    return builder.cluster()


class _PlanBuilder:
    """Numbers ranks node by node as a plan's stages and replicas name them."""

    def __init__(self, num_nodes: int | None) -> None:
        self._nodes: list[tuple[str, int]] = []
        self._free: list[int] = []
        self._num_nodes = num_nodes

    def add_pipeline(
        self, entry: dict[str, Any], replica: int
    ) -> list[tuple[int, int, int, range]]:
        """Return (node, first device, TP degree, blocks) of every stage of one replica."""
        stages = []
        num_entries = 1 + max(layer for layers in entry["layers_per_stage"] for layer in layers)
        for layers, groups in zip(entry["layers_per_stage"], entry["tmp_per_stage"], strict=True):
            (machine, *_), tp_degree = groups[replica]
            device, count, _ = machine
            node, first = self._take(device, count, tp_degree)
            blocks = [layer - 1 for layer in layers if 0 < layer < num_entries - 1]
            stages.append((node, first, tp_degree, range(blocks[0], blocks[-1] + 1)))
        return stages

    def finish(self, stages: list[tuple[int, int, int, range]]) -> PipelinePlan:
        """Return the pipeline with global ranks, once all nodes are known."""
        starts = [sum(count for _, count in self._nodes[:n]) for n in range(len(self._nodes))]
        return PipelinePlan(
            stages=tuple(
                StagePlan(
                    ranks=tuple(range(starts[node] + first, starts[node] + first + tp_degree)),
                    layers=blocks,
                )
                for node, first, tp_degree, blocks in stages
            )
        )

    def cluster(self) -> Cluster:
        """Return the nodes as a cluster; links are the cost's business."""
        names = {device for device, _ in self._nodes}
        return Cluster(
            nodes=tuple(Node(device=device, count=count) for device, count in self._nodes),
            devices=tuple(
                DeviceSpec(
                    name=name,
                    peak_flops_per_s=SPECS[name][0],
                    memory_bytes=SPECS[name][1] * 2**30,
                    memory_bytes_per_s=SPECS[name][2],
                    intra_node_bytes_per_s=_nearest(_load("intra_node_bandwidths.json")[name], 2)[
                        1
                    ],
                )
                for name in sorted(names)
            ),
        )

    def add_node(self, device: str, count: int) -> None:
        """Add a node with all devices free."""
        self._nodes.append((device, count))
        self._free.append(count)

    def _take(self, device: str, count: int, tp_degree: int) -> tuple[int, int]:
        for node, (name, size) in enumerate(self._nodes):
            if name == device and self._free[node] >= tp_degree:
                first = size - self._free[node]
                self._free[node] -= tp_degree
                return node, first
        self.add_node(device, count)
        self._free[-1] -= tp_degree
        return len(self._nodes) - 1, 0


@functools.cache
def _load(name: str) -> Any:
    return json.loads((ROOT / name).read_text())


def _block_times(model_name: str, device: str, num_layers: int) -> tuple[BlockTimes, ...]:
    data = _load(f"profiles/{model_name}/{device}.json")
    blocks = [str(layer) for layer in range(1, num_layers + 1)]
    result = []
    for size, degrees in data.items():
        for tp, layers in degrees.items():
            forward, backward = (
                sum(layers[block][index] for block in blocks) / num_layers for index in range(2)
            )
            result.append(
                BlockTimes(
                    tp_degree=int(tp),
                    lengths=(SEQUENCE_LENGTH,) * int(size),
                    blocks={1: (forward, backward)},
                    embedding=tuple(layers["0"][:2]),
                    head=tuple(layers[str(num_layers + 1)][:2]),
                )
            )
    return tuple(result)


def _update_times_s(model_name: str, device: str) -> dict[int, float]:
    """Return the optimizer's seconds per layer at each TP degree; micro-batches don't matter."""
    data = _load(f"profiles/{model_name}/{device}.json")
    times: dict[int, list[float]] = {}
    for degrees in data.values():
        for tp, layers in degrees.items():
            times.setdefault(int(tp), []).append(layers["1"][2])
    return {tp: sorted(values)[len(values) // 2] for tp, values in times.items()}


def _nearest(curves: dict[str, Any], count: int) -> Any:
    """Return the entry of the largest measured number of GPUs up to `count`."""
    fitting = [int(key) for key in curves if int(key) <= count] or [min(map(int, curves))]
    return curves[str(max(fitting))]


def _rate(curves: dict[str, Any], count: int, num_bytes: float) -> float:
    """Return the bytes/s that `count` GPUs together reach with messages of this size."""
    (c2, c1, c0), best = _nearest(curves, count)
    x = math.log2(max(num_bytes / 1e6, 1e-3))
    return min(max(c2 * x * x + c1 * x + c0, 1e-3) * 1e9, best)
