"""The gate of the planner: its plans beside those of a recorded search, on 208 clusters.

::

    python -m tests.benchmarks.search_gate                # all that is recorded
    python -m tests.benchmarks.search_gate --most 32 --first 40
    python -m tests.benchmarks.search_gate --record       # append what this tree's search finds

Cases are the planner's benchmarks and 200 random clusters of 2 to 128 devices of 1 to 3 types,
links of 1 to 400 Gbit/s, all known models; each follows from its number. `--record` writes
`gate_record.jsonl`, a line a case: the seconds of the best plan's iteration, infinite if nothing
fits, and the search's processor time. The record beside this file is of the search that came before
pipelines were columns, with other processes beside it, so its processor times are rough. Memory was
counted without gradients that are kept until they have arrived. Plans of the record that don't fit
since they are counted have `"fits": false`; those cases are timed only.
"""

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.devices import KNOWN_DEVICES
from lightning_hetero.core.errors import PlanningError
from lightning_hetero.core.model_spec import KNOWN_MODELS, ModelSpec
from lightning_hetero.planner import PlanningOptions, Workload, plan
from lightning_hetero.simulator import RooflineCost

RECORD = Path(__file__).with_name("gate_record.jsonl")
NUM_RANDOM = 200
TYPES = ("A100-80GB", "H800-80GB", "H20-96GB")


@dataclass(frozen=True, kw_only=True)
class GateCase:
    """A cluster and what to plan for it."""

    name: str
    cluster: Cluster
    model: str
    workload: Workload

    def search(self) -> tuple[float, float]:
        """Return seconds of the best plan's iteration, infinite if none fits; processor time."""
        start = time.process_time()
        model = ModelSpec.load(self.model)
        cost = RooflineCost(self.cluster, model)
        try:
            found = plan(self.cluster, model, self.workload, PlanningOptions(), cost=cost)
            seconds = found.best.simulation.iteration_time_s
        except PlanningError:
            seconds = math.inf
        return seconds, time.process_time() - start


def fixed_cases() -> list[GateCase]:
    """Return the clusters of the planner's benchmarks, smallest first."""
    sizes = (
        ((8,), (4,), (4,), "llama-7b", 256),
        ((8,), (8,), (8,), "llama-7b", 256),
        ((8, 8), (8,), (8,), "llama-7b", 256),
        ((8,) * 3, (8,) * 3, (8,) * 2, "llama-7b", 256),
        ((8,) * 22, (8,) * 21, (8,) * 21, "llama-70b", 2048),
        ((8,) * 43, (8,) * 43, (8,) * 42, "llama-70b", 4096),
        ((8,) * 417, (8,) * 417, (8,) * 416, "llama-70b", 16384),
    )
    cases = []
    for *counts, model, batch in sizes:
        nodes = tuple(
            Node(device=device, count=count)
            for device, row in zip(TYPES, counts, strict=True)
            for count in row
        )
        cluster = Cluster(nodes=nodes)
        workload = Workload(sequence_length=4096, global_batch_size=batch)
        name = f"benchmark-{cluster.num_ranks}"
        cases.append(GateCase(name=name, cluster=cluster, model=model, workload=workload))
    example = (Node(device="A100-80GB", count=4), Node(device="H800-80GB", count=2))
    mixed = (Node(device="A100-80GB", count=8), *[Node(device="H800-80GB", count=4)] * 2)
    large = (*mixed, Node(device="H20-96GB", count=8), Node(device="A100-80GB", count=4))
    for nodes, model, batch in (
        (example, "llama-7b", 64),
        (large, "llama-70b", 256),
    ):
        cluster = Cluster(nodes=nodes)
        workload = Workload(sequence_length=4096, global_batch_size=batch)
        name = f"example-{cluster.num_ranks}"
        cases.append(GateCase(name=name, cluster=cluster, model=model, workload=workload))
    return sorted(cases, key=lambda case: case.cluster.num_ranks)


def draw(number: int) -> GateCase:
    """Return the random case of a number: sizes are even on a logarithmic scale."""
    choose = random.Random(f"gate {number}")
    target = round(2 ** choose.uniform(1, 7))
    names = choose.sample(sorted(KNOWN_DEVICES), choose.randint(1, 3))
    nodes: list[Node] = []
    for index, name in enumerate(names):
        count = choose.choice([1, 2, 4, 8])
        share = max(1, target // len(names) - (index == 0))
        count = min(count, share)
        nodes += [Node(device=name, count=count)] * max(1, round(share / count))
    cluster = Cluster(
        nodes=tuple(nodes),
        inter_node_bytes_per_s=1.25e8 * 2 ** choose.uniform(0, math.log2(400)),
    )
    size = choose.choice([1, 1, 2, 4])
    workload = Workload(
        sequence_length=choose.choice([512, 1024, 2048, 4096, 8192]),
        global_batch_size=size * choose.choice([4, 8, 16, 32, 64, 128, 256]),
        sequences_per_microbatch=size,
    )
    model = choose.choice(sorted(KNOWN_MODELS))
    return GateCase(name=f"random-{number}", cluster=cluster, model=model, workload=workload)


def gate_cases(most: int = 10_000) -> Iterator[GateCase]:
    """Yield all cases of up to `most` devices: the small ones first, in strides over their sizes.

    So the first of them are a sample of all.
    """
    cases = [*fixed_cases(), *map(draw, range(NUM_RANDOM))]
    cases = [case for case in cases if case.cluster.num_ranks <= most]
    bands = [[c for c in cases if low < c.cluster.num_ranks <= low * 4] for low in (1, 4, 16, 64)]
    bands.append([c for c in cases if c.cluster.num_ranks > 256])
    while any(bands):
        for band, times in zip(bands, (3, 3, 2, 1, 1), strict=True):
            for _ in range(min(times, len(band))):
                yield band.pop(0)


def recorded() -> dict[str, tuple[float, float]]:
    """Return (seconds of an iteration, processor seconds) of each case that was recorded.

    Seconds are infinite where nothing fits, and NaN where the recorded plan doesn't fit any more.
    """
    lines = RECORD.read_text(encoding="utf-8").splitlines() if RECORD.exists() else []
    rows = [json.loads(line) for line in lines]
    return {
        row["case"]: (
            float(row["iteration_s"]) if row.get("fits", True) else math.nan,
            row["processor_s"],
        )
        for row in rows
    }


def main() -> int:
    """Compare searches, or record this one."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.search_gate")
    parser.add_argument("--record", action="store_true", help="append to the record instead")
    parser.add_argument("--most", type=int, default=10_000, help="most devices of a cluster")
    parser.add_argument("--first", type=int, default=10_000, help="so many cases")
    parser.add_argument("--case", help="this case alone")
    arguments = parser.parse_args()
    known = recorded()
    if arguments.record:
        for case in gate_cases(arguments.most):
            if case.name not in known:
                seconds, processor_s = case.search()
                row = {"case": case.name, "iteration_s": seconds, "processor_s": processor_s}
                row["iteration_s"] = str(seconds) if math.isinf(seconds) else seconds
                with RECORD.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
        return 0
    ratios, times = [], []
    for case in list(gate_cases(arguments.most))[: arguments.first]:
        if case.name not in known or (arguments.case and case.name != arguments.case):
            continue
        before, before_s = known[case.name]
        seconds, processor_s = case.search()
        times.append(processor_s)
        ratio = 1.0 if before == seconds else seconds / before
        if math.isfinite(before):
            ratios.append(ratio)
        mark = " ABOVE" if ratio > 1.01 else ""
        print(
            f"{case.name}, {case.cluster.num_ranks} devices, {case.model}: {seconds:.4g} s against "
            f"{before:.4g} s, {ratio:.4f}{mark}; {processor_s:.1f} s against {before_s:.1f} s",
            flush=True,
        )
    if not ratios:
        print("Nothing is recorded for these cases.")
        return 1
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    above = sum(ratio > 1.01 for ratio in ratios)
    print(
        f"{len(ratios)} cases: geometric mean {mean:.4f}, worst {max(ratios):.4f}, {above} above "
        f"1.01; processor time: median {statistics.median(times):.1f} s, most {max(times):.1f} s"
    )
    return int(mean > 1.0 or above > 0)


if __name__ == "__main__":
    raise SystemExit(main())
