"""Hydraulis' figure 10, simulated from its published coefficients (LLaMA-13B, A800).

Scenarios of figure 10 for 13B: 16 and 32 GPUs, F1 = 16K context and 100k tokens an iteration, F2 =
32K and 100k, F3 = 32K and 200k. The baseline is what Megatron-LM does: fixed-length packing and
bins dealt evenly, on the homogeneous plan that is best for the scenario.
"""

from tests.benchmarks.assignment_cases import LENGTH_SETS, Scenario, best_fit_decreasing, bins_of
from tests.benchmarks.harness import Row

FIGURES = {"F1": (16_384, 100_000), "F2": (32_768, 100_000), "F3": (32_768, 200_000)}


def run() -> list[Row]:
    """Dynamic heterogeneous plans against the best static homogeneous one."""
    return [
        Scenario(
            speeds={"A800": 1.0},
            num_gpus=num_gpus,
            context_length=context,
            tokens=tokens,
            num_iterations=30,
            length_set=length_set,
        ).against(
            {"fixed-length packing": bins_of(best_fit_decreasing, context)},
            f"Fig. 10: {num_gpus} GPUs {figure} {context // 1024}K/{tokens // 1000}k, {length_set}",
            target=1.32,
        )
        for num_gpus in (16, 32)
        for figure, (context, tokens) in FIGURES.items()
        for length_set in LENGTH_SETS
    ]
