"""Proposed plans and assignment on real lengths at 64 and 1,024 GPUs.

Peers know neither pipelines nor unequal devices: verl's Karmarkar-Karp over tokens, best-fit and
first-fit decreasing into bins of the context length, dealt evenly. Clusters: half of the GPUs at
half the speed, as this package is for; and all equal. There one 32K sequence alone takes at least
2.94 s of any plan, and the peer's best plan is made for it, so that little can be gained where many
iterations have one.
"""

from tests.benchmarks.assignment_cases import (
    LENGTH_SETS,
    Scenario,
    assign_by_karmarkar_karp,
    best_fit_decreasing,
    bins_of,
    first_fit_decreasing,
)
from tests.benchmarks.harness import Row

CONTEXT = 32_768
SIZES = {64: (200_000, 30), 1024: (3_200_000, 4)}
"""Tokens of an iteration and number of iterations, by GPUs."""
CLUSTERS = {"mixed": {"A800": 1.0, "half-speed": 0.5}, "equal": {"A800": 1.0}}
PEERS = {
    "verl Karmarkar-Karp": assign_by_karmarkar_karp,
    "TRL best-fit decreasing": bins_of(best_fit_decreasing, CONTEXT),
    "first-fit decreasing": bins_of(first_fit_decreasing, CONTEXT),
}


def run() -> list[Row]:
    """Return the ratio of every case."""
    return [
        Scenario(
            speeds=speeds,
            num_gpus=num_gpus,
            context_length=CONTEXT,
            tokens=tokens,
            num_iterations=count,
            length_set=length_set,
        ).against(
            PEERS,
            f"assignment against the best peer: {num_gpus} GPUs {cluster}, {length_set}",
            target=1.15,
        )
        for cluster, speeds in CLUSTERS.items()
        for num_gpus, (tokens, count) in SIZES.items()
        for length_set in LENGTH_SETS
    ]
