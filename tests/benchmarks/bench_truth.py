"""Predicted against measured times, and how long a prediction takes.

Sailor's plans on GH200 and mixed RTX nodes: profiles of single layers and the networks' measured
curves go in, no iteration time does; the notes say which choices were made with these runs in
sight. The roofline, which knows nothing but data sheets, against the
stages of LLaMA 13B that Hydraulis measured on A800. The peer of these rows is the measurement.

Floor of one simulation: 4 pipelines · 4 stages · 16 micro-batches · 2 = 512 actions, each a dozen
list look-ups and additions, about 0.5 µs in CPython: 0.25 ms. Equal pipelines are run once.
"""

import dataclasses
import json
import statistics

from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.plan import ParallelPlan, PipelinePlan, StagePlan
from lightning_hetero.simulator import RooflineCost, StageShape, simulate, split_batch
from tests.benchmarks.harness import Row, median_times_s
from tests.simulator.sailor import ROOT, SailorCost, load_profile, load_run

# What was chosen with the measurements in sight: these rows are no blind predictions.
_TIMES = "no number fitted; mit's link rule chosen after seeing these runs"
_MEMORY = "two constants chosen to agree with these peaks"
_ROOFLINE = "attention efficiency revised after seeing these stages"


def run() -> list[Row]:
    """Return the rows of measured plans, of the roofline and of the simulator's own speed."""
    return [*measured_plans(), *roofline(), _speed()]


def measured_plans() -> list[Row]:
    """Return the rows of Sailor's runs; none without its data beside the repository."""
    rows, time_errors, memory_errors = [], [], []
    for path in sorted((ROOT / "measured").glob("*.json")):
        measured = load_run(path)
        devices = {node.device for node in measured.cluster.nodes}
        profile = load_profile(measured.model_name, devices)
        cost = SailorCost(measured.cluster, measured.model_name, profile)
        predicted = simulate(measured.plan, cost, measured.microbatches)
        error = abs(predicted.iteration_time_s / measured.iteration_time_s - 1)
        time_errors.append(error)
        memory_errors.append(abs(max(predicted.memory_bytes) / measured.peak_bytes - 1))
        rows.append(
            Row(
                name=f"predicted iteration, {path.stem}",
                ours=predicted.iteration_time_s,
                peer=measured.iteration_time_s,
                target=0.20,
                kind="simulated",
                value=error,
                note=f"peer: measured; memory off by {memory_errors[-1]:.1%}",
            )
        )
    if not rows:
        return []
    return [
        *rows,
        Row.of_share("mean error of iteration time", statistics.mean(time_errors), 0.08, _TIMES),
        Row.of_share("worst error of iteration time", max(time_errors), 0.20, _TIMES),
        Row.of_share("worst error of peak memory", max(memory_errors), 0.05, _MEMORY),
    ]


def roofline() -> list[Row]:
    """Return the rows of Hydraulis's stages; none without its data beside the repository."""
    path = ROOT.parent / "hydraulis/llama13b-a800.json"
    if not path.exists():
        return []
    data = json.loads(path.read_text())
    model = dataclasses.replace(ModelSpec.load("llama-13b"), vocab_size=data["model"]["vocab_size"])
    cost = RooflineCost(Cluster(nodes=(Node(device="A800-80GB", count=8),)), model)
    errors = []
    for scheme in data["schemes"]:
        whole, layers = scheme["pp"] == 1, model.num_layers // scheme["pp"]
        shape = StageShape("A800-80GB", scheme["tp"], layers, whole, whole)
        for length in (2048, 8192, 32768):
            measured_s = (scheme["a"] * length**2 + scheme["b"] * length + scheme["c"]) / 1e3
            errors.append(abs(sum(cost.compute_s(shape, (length,))) / measured_s - 1))
    return [
        Row.of_share(f"roofline, {what} error of A800 stages", value, target, _ROOFLINE)
        for what, value, target in (
            ("mean", statistics.mean(errors), 0.20),
            ("worst", max(errors), 0.30),
        )
    ]


def _speed() -> Row:
    """Time unequal pipelines, so that none is found again."""
    model = ModelSpec.load("llama-7b")
    cluster = Cluster(nodes=(Node(device="A100-80GB", count=8), Node(device="H800-80GB", count=8)))
    cost = RooflineCost(cluster, model)
    pipelines = []
    for index in range(4):
        edges = (0, 7 + index, 16 - index, 25, 32)
        stages = tuple(
            StagePlan(ranks=(4 * index + s,), layers=range(edges[s], edges[s + 1]))
            for s in range(4)
        )
        pipelines.append(PipelinePlan(stages=stages))
    plan = ParallelPlan(pipelines=tuple(pipelines))
    batches = split_batch(plan, global_batch_size=64, sequence_length=4096)
    (seconds,) = median_times_s(lambda: simulate(plan, cost, batches), repeats=101)
    return Row(
        name="simulate 4 pipelines of 4 stages, 16 micro-batches each",
        ours=seconds * 1e3,
        unit="ms",
        target=1.0,
    )
