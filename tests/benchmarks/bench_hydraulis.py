"""Hydraulis' figure 10, simulated from its published coefficients (LLaMA-13B, A800).

Scenarios of figure 10 for 13B: 16 and 32 GPUs, F1 = 16K context and 100k tokens an iteration, F2 =
32K and 100k, F3 = 32K and 200k. The baseline is what Megatron-LM does: fixed-length packing and
bins dealt evenly, on the homogeneous plan that is best for the scenario after trying all that hold
the context. Only propagation is simulated; both sides synchronise the same gradients. A scenario
below the target says which ratio no plan and assignment can exceed.
"""

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_hetero.assign import PipelineCost, assign_iteration
from lightning_hetero.planner.proposing.proposal import propose
from lightning_hetero.planner.proposing.relaxation import Scheme
from tests.benchmarks.assignment_cases import (
    LENGTH_SETS,
    Assign,
    MicroBatches,
    Parallelism,
    best_fit_decreasing,
    bins_of,
    check_work,
    draw_iterations,
    homogeneous_plans,
    load_lengths,
    most_possible,
    pipeline_times_s,
    schemes_on,
)
from tests.benchmarks.harness import Row

SCENARIOS = {"F1": (16_384, 100_000), "F2": (32_768, 100_000), "F3": (32_768, 200_000)}
NUM_ITERATIONS = 30
TARGET = 1.32
Plan = list[PipelineCost]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Iterations, and the plans to run them on."""

    context_length: int
    iterations: list[NDArray[np.int64]]
    candidates: list[Plan]
    homogeneous: dict[str, Plan]
    schemes: dict[Parallelism, Scheme]
    devices: dict[str, int]


@functools.cache
def scenario(num_gpus: int, figure: str, length_set: str, count: int = NUM_ITERATIONS) -> Scenario:
    """Draw a scenario's iterations and propose plans for it."""
    context_length, tokens = SCENARIOS[figure]
    lengths = load_lengths(length_set, context_length)
    schemes = schemes_on(num_gpus, {"A800": 1.0})
    devices = {"A800": num_gpus}
    every = list(schemes.values())
    proposals = propose(lengths, every, devices, tokens_per_iteration=tokens, most=8)
    return Scenario(
        context_length=context_length,
        iterations=draw_iterations(lengths, tokens, count),
        candidates=[
            [scheme.cost for scheme, n in zip(every, counts, strict=True) for _ in range(n)]
            for counts in proposals
        ],
        homogeneous=homogeneous_plans(schemes, devices, context_length),
        schemes=schemes,
        devices=devices,
    )


def run_ours(iterations: list[NDArray[np.int64]], candidates: list[Plan]) -> list[float]:
    """Assign every iteration under its best candidate; return the simulated seconds."""
    times_s = []
    for lengths in iterations:
        chosen = assign_iteration(lengths, candidates)
        plan = candidates[chosen.plan_index]
        times_s.append(max(_ends_s(lengths, plan, list(chosen.microbatches))))
    return times_s


def run_fixed(iterations: list[NDArray[np.int64]], plan: Plan, assign: Assign) -> list[float]:
    """Assign every iteration to one plan by a given rule; return the simulated seconds."""
    return [max(_ends_s(lengths, plan, assign(lengths, plan))) for lengths in iterations]


def _ends_s(lengths: NDArray[np.int64], plan: Plan, work: list[MicroBatches]) -> list[float]:
    check_work(lengths, plan, work)
    return pipeline_times_s(lengths, plan, work)


def best_static(case: Scenario, assign: Assign) -> tuple[str, float]:
    """Return the homogeneous plan that is best under an assignment, and its mean seconds."""
    means_s = {
        name: float(np.mean(run_fixed(case.iterations, plan, assign)))
        for name, plan in case.homogeneous.items()
    }
    name = min(means_s, key=lambda key: means_s[key])
    return name, means_s[name]


def run() -> list[Row]:
    """Dynamic heterogeneous plans against the best static homogeneous one."""
    rows = []
    for num_gpus in (16, 32):
        for figure, (context_length, tokens) in SCENARIOS.items():
            for length_set in LENGTH_SETS:
                case = scenario(num_gpus, figure, length_set)
                ours = run_ours(case.iterations, case.candidates)
                packed = bins_of(best_fit_decreasing, context_length)
                name, peer_s = best_static(case, packed)
                ours_s = float(np.mean(ours))
                title = f"{num_gpus} GPUs {figure} {context_length // 1024}K/{tokens // 1000}k"
                note = f"peer: best static homogeneous plan, {name}, fixed-length packing"
                ratio = peer_s / ours_s
                if ratio < TARGET:
                    limit = most_possible(peer_s, case.iterations, case.schemes, case.devices)
                    note += f"; {limit}"
                rows.append(
                    Row(
                        name=f"Fig. 10: {title}, {length_set}",
                        ours=ours_s,
                        peer=peer_s,
                        unit="s/iteration",
                        target=TARGET,
                        better="higher",
                        kind="simulated",
                        value=ratio,
                        note=note,
                    )
                )
    return rows
