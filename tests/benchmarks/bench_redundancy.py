"""What a normal step costs with `redundancy=1`, over the same step without, on two gloo processes.

Counted, for P parameters in fp32 and two ranks, bytes out of each rank and parameters it updates:

* two equal pipelines: without, a push of 2P and a pull of 2P bytes, and P/2 updated; with it a push
  of 4P, no pull, as each rank keeps all that it holds, and P updated. The same bytes, twice the
  optimizer's step.
* one pipeline of two stages of P/2: without, nothing moves; with it a push of 2P bytes, which the
  other rank keeps again, and P updated instead of P/2. The worst case there is.

Steps run in Lightning's loop, alternating runs of both; the figure is the median of steps.
"""

from typing import Any

from lightning_hetero import HeteroStrategy
from tests.benchmarks.bench_runtime import ROWS, lightning_steps, medians, slowest
from tests.benchmarks.harness import Row
from tests.benchmarks.steps import Seconds, processes

REPEATS = 5
TARGET = 1.10
CASES: dict[str, dict[str, Any]] = {
    "two equal pipelines": {"num_microbatches": 1},
    "one pipeline of two stages": {"num_stages": 2, "num_microbatches": 8},
}


def with_and_without(rank: int, options: dict[str, Any]) -> tuple[Seconds, Seconds]:
    """Return median step times on this rank, (with redundancy, without)."""
    both: tuple[list[Seconds], list[Seconds]] = [], []
    for _ in range(REPEATS):
        for redundancy, steps in zip((1, 0), both, strict=True):
            steps += lightning_steps(HeteroStrategy(redundancy=redundancy, **options), ROWS)
    return medians(both[0]), medians(both[1])


def run() -> list[Row]:
    rows = []
    for name, options in CASES.items():
        with processes() as pool:
            figures = pool.run(with_and_without, 2, options, timeout_s=500)
        ours_wall, ours = slowest([item[0] for item in figures])
        peer_wall, peer = slowest([item[1] for item in figures])
        note = f"redundancy=0; CPU time of the main thread {ours / peer:.3f}"
        name = f"step with redundancy=1, {name}"
        rows.append(Row(name=name, ours=ours_wall, peer=peer_wall, target=TARGET, note=note))
    return rows
