"""Proposed plans and assignment on real lengths at 64 and 1,024 GPUs.

Peers know neither pipelines nor unequal devices: verl's Karmarkar-Karp over tokens, best-fit and
first-fit decreasing into bins of the context length, dealt evenly. Each gets the homogeneous plan
that is best for it of all that hold the context. Clusters: half of the GPUs at half the speed, as
this package is for; and all equal. There one 32K sequence alone takes at least 2.94 s of any plan,
and the peer's best plan is made for it, so that little can be gained where many iterations have
one: each row says which ratio no plan and assignment can exceed, by a bound over all of them.
"""

import numpy as np

from lightning_hetero.assign import assign_iteration
from lightning_hetero.planner.proposing.proposal import propose
from tests.benchmarks.assignment_cases import (
    LENGTH_SETS,
    assign_by_karmarkar_karp,
    best_fit_decreasing,
    bins_of,
    check_work,
    draw_iterations,
    first_fit_decreasing,
    homogeneous_plans,
    load_lengths,
    most_possible,
    pipeline_times_s,
    schemes_on,
)
from tests.benchmarks.harness import Row

CONTEXT = 32_768
SIZES = {64: (200_000, 30), 1024: (3_200_000, 4)}
CLUSTERS = {"mixed": {"A800": 1.0, "half-speed": 0.5}, "equal": {"A800": 1.0}}
PEERS = {
    "verl Karmarkar-Karp": assign_by_karmarkar_karp,
    "TRL best-fit decreasing": bins_of(best_fit_decreasing, CONTEXT),
    "first-fit decreasing": bins_of(first_fit_decreasing, CONTEXT),
}


class Case:
    """One cluster, length set and size, with its iterations and proposed plans."""

    def __init__(self, num_gpus: int, cluster: str, length_set: str) -> None:
        self.num_gpus = num_gpus
        self.title = f"{num_gpus} GPUs {cluster}, {length_set}"
        tokens, count = SIZES[num_gpus]
        speeds = CLUSTERS[cluster]
        self.devices = {device: num_gpus // len(speeds) for device in speeds}
        lengths = load_lengths(length_set, CONTEXT)
        self.schemes = schemes_on(num_gpus, speeds)
        schemes = list(self.schemes.values())
        proposals = propose(lengths, schemes, self.devices, tokens_per_iteration=tokens, most=8)
        self.candidates = [
            [scheme.cost for scheme, n in zip(schemes, counts, strict=True) for _ in range(n)]
            for counts in proposals
        ]
        self.iterations = draw_iterations(lengths, tokens, count)
        self.chosen = [assign_iteration(item, self.candidates) for item in self.iterations]
        self.plans = [self.candidates[item.plan_index] for item in self.chosen]

    def against_peers(self) -> Row:
        """Return our simulated iteration time against the best peer's."""
        ours_s = []
        for lengths, plan, chosen in zip(self.iterations, self.plans, self.chosen, strict=True):
            check_work(lengths, plan, chosen.microbatches)
            ours_s.append(max(pipeline_times_s(lengths, plan, chosen.microbatches)))
        times_s: dict[str, float] = {}
        for plan_name, plan in homogeneous_plans(self.schemes, self.devices, CONTEXT).items():
            for peer, assign in PEERS.items():
                ends_s = []
                for lengths in self.iterations:
                    work = assign(lengths, plan)
                    check_work(lengths, plan, work)
                    ends_s.append(max(pipeline_times_s(lengths, plan, work)))
                times_s[f"{peer} on {plan_name}"] = float(np.mean(ends_s))
        best = min(times_s, key=times_s.__getitem__)
        mean_s = float(np.mean(ours_s))
        limit = most_possible(times_s[best], self.iterations, self.schemes, self.devices)
        return Row(
            name=f"assignment against the best peer: {self.title}",
            ours=mean_s,
            peer=times_s[best],
            unit="s/iteration",
            target=1.15,
            better="higher",
            kind="simulated",
            note=f"peer: {best}; {limit}",
        )


def run() -> list[Row]:
    """Return the ratio of every case."""
    return [
        Case(num_gpus, cluster, length_set).against_peers()
        for cluster in CLUSTERS
        for num_gpus in SIZES
        for length_set in LENGTH_SETS
    ]
