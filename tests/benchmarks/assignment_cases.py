"""What the assignment benchmarks share: real lengths, published coefficients, peers, exact 1F1B.

Coefficients are of LLaMA-13B on A800 GPUs, 12 schemes of (TP, PP). Iterations are drawn from real
lengths, cut to the context length. Everything is simulated: an iteration takes as long as its last
pipeline, a pipeline as long as its 1F1B schedule with a third of a micro-batch's time in forward
and two in backward. Both sides synchronise the same gradients, which aren't simulated.
"""

import bisect
import functools
import heapq
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_hetero.assign import PipelineCost, assign_iteration
from lightning_hetero.assign.pipeline_cost import microbatch_times_s
from lightning_hetero.core.actions import ActionKind, schedule_1f1b
from lightning_hetero.planner.proposing.proposal import draw_iteration, propose
from lightning_hetero.planner.proposing.schemes import Scheme, work_lower_bound_s
from tests.benchmarks.harness import Row

DATA = Path(__file__).resolve().parents[2].parent / "shared/data"
LENGTH_SETS = ("web-documents", "python-files")
MicroBatches = tuple[tuple[int, ...], ...]
"""The micro-batches of one pipeline, each the indices of its samples."""
Assign = Callable[[NDArray[np.int64], Sequence[PipelineCost]], list[MicroBatches]]
"""Gives each pipeline of a plan its micro-batches."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Iterations of real lengths, and devices to run them on."""

    speeds: dict[str, float]
    """Of device types, which have equal shares of the GPUs."""
    num_gpus: int
    context_length: int
    tokens: int
    """Of an iteration."""
    num_iterations: int
    length_set: str

    def against(self, peers: dict[str, Assign], name: str, target: float) -> Row:
        """Return our simulated iterations' mean against that of the best peer.

        Ours take, for each iteration, the best of the plans that are proposed. A peer assigns to
        the homogeneous plan that is best for it of all that hold the context. A row below its
        target says which ratio no plan and assignment can exceed.
        """
        devices = {device: self.num_gpus // len(self.speeds) for device in self.speeds}
        lengths = load_lengths(self.length_set, self.context_length)
        iterations = draw_iterations(lengths, self.tokens, self.num_iterations)
        schemes = schemes_on(self.num_gpus, self.speeds)
        every = list(schemes.values())
        proposals = propose(lengths, every, devices, tokens_per_iteration=self.tokens, most=8)
        candidates = [
            [scheme.cost for scheme, n in zip(every, counts, strict=True) for _ in range(n)]
            for counts in proposals
        ]
        ours_s = []
        for item in iterations:
            chosen = assign_iteration(item, candidates)
            plan, work = candidates[chosen.plan_index], chosen.microbatches
            ours_s.append(iteration_time_s(item, plan, work))
        plans = homogeneous_plans(schemes, devices, self.context_length)
        peers_s = {
            f"{peer} on {plan_name}": float(
                np.mean([iteration_time_s(item, plan, assign(item, plan)) for item in iterations])
            )
            for plan_name, plan in plans.items()
            for peer, assign in peers.items()
        }
        best = min(peers_s, key=peers_s.__getitem__)
        mean_s, note = float(np.mean(ours_s)), f"peer: {best}"
        if peers_s[best] / mean_s < target:
            note += f"; {most_possible(peers_s[best], iterations, schemes, devices)}"
        return Row(
            name=name,
            ours=mean_s,
            peer=peers_s[best],
            unit="s/iteration",
            target=target,
            better="higher",
            kind="simulated",
            note=note,
        )


def load_lengths(name: str, context_length: int) -> NDArray[np.int64]:
    """Return real lengths, cut to the context length."""
    lengths: NDArray[np.int64] = np.load(DATA / f"lengths/{name}.npy").astype(np.int64)
    return np.minimum(lengths, context_length)


def draw_iterations(
    lengths: NDArray[np.int64], tokens: int, count: int, seed: int = 1
) -> list[NDArray[np.int64]]:
    """Return the lengths of the samples of some iterations."""
    generator = np.random.default_rng(seed)
    return [draw_iteration(lengths, tokens, generator) for _ in range(count)]


@functools.cache
def published() -> dict:
    """Return the published coefficients."""
    return json.loads((DATA / "hydraulis/llama13b-a800.json").read_text())


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """TP and PP of a scheme, and on which devices it runs."""

    tp: int
    pp: int
    device: str

    def __str__(self) -> str:
        return f"{self.device}:tp{self.tp}pp{self.pp}"


def schemes_on(num_gpus: int, speeds: dict[str, float]) -> dict[Parallelism, Scheme]:
    """Return the 12 schemes on each device type; a device of speed 0.5 takes twice the time."""
    data = published()
    found = {}
    for device, speed in speeds.items():
        for entry in data["schemes"]:
            tp, pp = entry["tp"], entry["pp"]
            cost = PipelineCost(
                a=entry["a"] / 1e3 / speed,
                b=entry["b"] / 1e3 / speed,
                c=entry["c"] / 1e3 / speed,
                max_len=max_len(num_gpus, tp, pp),
                util_len=data["util_len_by_tp"][str(tp)],
                num_stages=pp,
            )
            place = Parallelism(tp=tp, pp=pp, device=device)
            found[place] = Scheme(cost=cost, devices=((device, tp * pp),))
    return found


def max_len(num_gpus: int, tp: int, pp: int) -> int:
    """Return the most tokens that the first stage can hold, a multiple of 128; 0 if none.

    By Hydraulis's Appendix B.1, on N devices, with activations of `A·H/TP` bytes a layer and token
    and PP micro-batches of them at once: layers `L·H²·B·(α/N + (1-α)/(PP·TP))`, embedding
    `16·H·V·(α/N + (1-α)/TP)`.
    """
    data = published()
    model, memory, cluster = data["model"], data["memory"], data["cluster"]
    hidden, num_layers = model["hidden_size"], model["num_layers"]
    sharded, kept = memory["alpha"] / num_gpus, (1 - memory["alpha"]) / tp
    layers = num_layers * hidden**2 * memory["B"] * (sharded + kept / pp)
    embedding = 16 * hidden * model["vocab_size"] * (sharded + kept)
    room = cluster["gpu_memory_bytes"] - cluster["memory_gap_bytes"] - layers - embedding
    per_token = hidden / tp * memory["A_by_tp"][str(tp)] * num_layers
    return max(0, int(room / per_token) // 128 * 128)


def homogeneous_plans(
    schemes: dict[Parallelism, Scheme], num_devices: dict[str, int], context_length: int
) -> dict[str, list[PipelineCost]]:
    """Return the plans with one (TP, PP) on all devices whose pipelines hold the context length."""
    plans = {}
    for tp, pp in sorted({(place.tp, place.pp) for place in schemes}):
        pipelines = [
            schemes[Parallelism(tp=tp, pp=pp, device=device)].cost
            for device, count in num_devices.items()
            for _ in range(count // (tp * pp))
        ]
        if pipelines and min(p.max_len for p in pipelines) >= context_length:
            plans[f"tp{tp}pp{pp}x{len(pipelines)}"] = pipelines
    return plans


def time_1f1b_s(times_s: Sequence[float], num_stages: int) -> float:
    """Return when the last backward of a 1F1B schedule ends; times are of one stage."""
    if num_stages == 1 or not len(times_s):
        return float(sum(times_s))
    lists = [
        schedule_1f1b(stage_index=s, num_stages=num_stages, num_microbatches=len(times_s))
        for s in range(num_stages)
    ]
    ends: dict[tuple[ActionKind, int, int], float] = {}
    position, clock = [0] * num_stages, [0.0] * num_stages
    while any(position[s] < len(lists[s]) for s in range(num_stages)):
        for s in range(num_stages):
            while position[s] < len(lists[s]):
                action = lists[s][position[s]]
                is_forward = action.kind is ActionKind.FORWARD
                before = s - 1 if is_forward else s + 1
                key = (action.kind, before, action.microbatch_index)
                if 0 <= before < num_stages and key not in ends:
                    break
                ready_s = ends.get(key, 0.0)
                share = 1 / 3 if is_forward else 2 / 3
                clock[s] = max(clock[s], ready_s) + share * times_s[action.microbatch_index]
                ends[action.kind, s, action.microbatch_index] = clock[s]
                position[s] += 1
    return max(clock)


def iteration_time_s(
    lengths: NDArray[np.int64], plan: Sequence[PipelineCost], work: Sequence[MicroBatches]
) -> float:
    """Return when the last pipeline of the plan ends, once it is clear that it does all work."""
    check_work(lengths, plan, work)
    times_s = (
        time_1f1b_s(microbatch_times_s(lengths, batches, cost).tolist(), cost.num_stages)
        for cost, batches in zip(plan, work, strict=True)
    )
    return max(times_s)


def most_possible(
    peer_s: float,
    iterations: Sequence[NDArray[np.int64]],
    schemes: dict[Parallelism, Scheme],
    num_devices: dict[str, int],
) -> str:
    """Return the ratio to a peer that no plan can exceed, by the work that devices have to do.

    Each iteration may have its own plan, of any numbers of pipelines of these schemes, and any
    assignment.
    """
    bounds_s = [
        work_lower_bound_s(lengths, list(schemes.values()), num_devices) for lengths in iterations
    ]
    return f"no plan can exceed {peer_s / float(np.mean(bounds_s)):.3f}x"


def check_work(
    lengths: NDArray[np.int64], plan: Sequence[PipelineCost], work: Sequence[MicroBatches]
) -> None:
    """Fail unless every sample stands in one micro-batch and none is above its limit."""
    samples = sorted(i for batches in work for batch in batches for i in batch)
    assert samples == list(range(len(lengths)))
    for cost, batches in zip(plan, work, strict=True):
        assert all(int(lengths[list(batch)].sum()) <= cost.max_len for batch in batches)


def karmarkar_karp(values: Sequence[int], num_parts: int) -> list[list[int]]:
    """Return parts of nearly equal sums by largest differencing, as verl balances tokens.

    The two states with the largest spread are merged, the heaviest part of one with the lightest of
    the other, until one state is left.
    """
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for order, value in enumerate(values):
        state = [(int(value), [order])] + [(0, []) for _ in range(num_parts - 1)]
        heap.append((-int(value), order, state))
    heapq.heapify(heap)
    serial = itertools.count(len(values))
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], next(serial), merged))
    return [items for _, items in heap[0][2]]


def assign_by_karmarkar_karp(
    lengths: NDArray[np.int64], plan: Sequence[PipelineCost]
) -> list[MicroBatches]:
    """Balance tokens over pipelines, then over the fewest micro-batches that hold them (verl)."""
    work = []
    for part, cost in zip(karmarkar_karp(lengths.tolist(), len(plan)), plan, strict=True):
        sizes = lengths[part]
        count = -(-int(sizes.sum()) // cost.max_len)
        groups = karmarkar_karp(sizes.tolist(), count) if part else []
        while any(int(sizes[group].sum()) > cost.max_len for group in groups):
            count += 1
            groups = karmarkar_karp(sizes.tolist(), count)
        work.append(tuple(tuple(part[i] for i in group) for group in groups if group))
    return work


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return bins, longest first, each sample into the fullest bin with room (TRL's packing)."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect.bisect_left(rooms, (lengths[index], -1))
        room, chosen = rooms.pop(place) if place < len(rooms) else (capacity, len(bins))
        if chosen == len(bins):
            bins.append([])
        bins[chosen].append(index)
        bisect.insort(rooms, (room - lengths[index], chosen))
    return bins


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return bins, longest first, each sample into the first bin with room."""
    bins: list[list[int]] = []
    rooms: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        chosen = next((b for b, room in enumerate(rooms) if room >= lengths[index]), len(bins))
        if chosen == len(bins):
            bins.append([])
            rooms.append(capacity)
        bins[chosen].append(index)
        rooms[chosen] -= lengths[index]
    return bins


def _dealt(bins: list[list[int]], num_pipelines: int) -> list[MicroBatches]:
    """Deal bins evenly, one after the other, as a distributed sampler does."""
    return [
        tuple(tuple(items) for items in bins[start::num_pipelines])
        for start in range(num_pipelines)
    ]


def bins_of(pack_bins: Callable[[Sequence[int], int], list[list[int]]], context: int) -> Assign:
    """Return an assignment that packs to the context length and deals the bins evenly."""

    def assign(lengths: NDArray[np.int64], plan: Sequence[PipelineCost]) -> list[MicroBatches]:
        return _dealt(pack_bins(lengths.tolist(), context), len(plan))

    return assign
