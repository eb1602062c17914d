"""How good the search's plans are: against every layout, against parts of itself.

Two questions, each answered by the worst case of many: how far the best plan is from the best of
every layout (`every_layout`, clusters of 8 to 64 devices), and whether what the search may do more
ever makes it slower (`search_laws`: a node, TP degrees, recomputation, unequal shares, sizes of
micro-batches). Tests hold the laws on very small clusters. Devices are from data sheets; with
Sailor's profiles beside the repository, also as measured there.

Clusters take up to a few minutes, so few are tried, unless variables say otherwise:
`LIGHTNING_HETERO_MOST_LAYOUTS` (20,000 layouts of a cluster), `LIGHTNING_HETERO_LAW_CLUSTERS` (6)
and `LIGHTNING_HETERO_LAW_DEVICES` (about 8).
"""

import itertools
import os
from collections.abc import Iterator, Sequence

from lightning_hetero.planner import PlanningOptions, Workload, plan
from tests.benchmarks.every_layout import compare, small_tasks
from tests.benchmarks.harness import Row
from tests.benchmarks.search_laws import LAWS, TOLERANCE, Task, draw, slower_by
from tests.simulator.sailor import ROOT, SailorCost, load_profile, sailor_cluster

MOST_LAYOUTS = int(os.environ.get("LIGHTNING_HETERO_MOST_LAYOUTS", "20000"))
NUM_CLUSTERS = 30
NUM_LAWS = int(os.environ.get("LIGHTNING_HETERO_LAW_CLUSTERS", "6"))
MOST_DEVICES_OF_LAWS = int(os.environ.get("LIGHTNING_HETERO_LAW_DEVICES", "8"))


def run() -> list[Row]:
    """Return the rows of all questions."""
    rows = _against_every_layout()
    tasks = [draw(seed, MOST_DEVICES_OF_LAWS) for seed in range(NUM_LAWS)]
    rows += [_law(law, tasks) for law in LAWS]
    if ROOT.exists():
        rows += [*_sailor_shares(), _sailor_nodes()]
    return rows


def _against_every_layout() -> list[Row]:
    compared = (compare(task, MOST_LAYOUTS) for task in small_tasks())
    found = list(itertools.islice(filter(None, compared), NUM_CLUSTERS))
    above = max(item.above for item in found)
    missed = sum(item.missed for item in found) / len(found)
    note = f"{len(found)} clusters of 8 to 64 devices with at most {MOST_LAYOUTS} layouts"
    return [
        Row.of_share("best plan above the best of every layout", above, 0.01, note),
        Row.of_share("clusters where another layout is better", missed, 0.2, note),
    ]


def _law(law: str, tasks: Sequence[Task]) -> Row:
    """Return by how much the best plan gets slower at worst."""
    slower = [share for task in tasks if (share := slower_by(task, law)) is not None]
    sizes = [task.num_devices for task in tasks]
    note = f"worst of {len(slower)} random clusters of {min(sizes)} to {max(sizes)} devices"
    return Row.of_share(f"slower by {law}", max(slower), TOLERANCE, note)


def _sailor_shares() -> Iterator[Row]:
    for fast, slow in ((32, 96), (80, 240), (128, 384)):
        slower = []
        for size in range(1, 9):
            if 1024 % size:
                continue
            workload = Workload(
                sequence_length=2048, global_batch_size=1024, sequences_per_microbatch=size
            )
            equal, free = (
                _sailor_s("OPT-350", fast, slow, workload, equal_microbatches=only_equal)
                for only_equal in (True, False)
            )
            slower.append(free / equal - 1)
        yield Row.of_share(
            f"slower by unequal shares, {fast} A100 + {slow} V100",
            max(slower),
            0.0,
            "OPT-350, batch 1,024, micro-batches of 1, 2, 4, 8, Sailor's profiles and costs",
        )


def _sailor_nodes() -> Row:
    workload = Workload(sequence_length=2048, global_batch_size=512)
    times = [_sailor_s("OPT-30", 64, slow, workload) for slow in (0, 4, 16, 64)]
    slower = max(after / before - 1 for before, after in itertools.pairwise(times))
    note = "64 A100 + 0, 4, 16, 64 V100: " + ", ".join(f"{seconds:.1f} s" for seconds in times)
    return Row.of_share("slower by more nodes, OPT-30, batch 512", slower, 0.0, note)


def _sailor_s(model_name: str, fast: int, slow: int, workload: Workload, **options: bool) -> float:
    cluster = sailor_cluster({"A100-40": fast, "V100-16": slow}, devices_per_node=4)
    profile = load_profile(model_name, {node.device for node in cluster.nodes})
    cost = SailorCost(cluster, model_name, profile)
    found = plan(cluster, profile.model, workload, PlanningOptions(**options), cost=cost)
    return found.best.simulation.iteration_time_s
