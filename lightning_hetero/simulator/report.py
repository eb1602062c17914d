"""Describe a plan and its prediction as text: a table and lines.

The command line prints them, and so does `HeteroStrategy` when it starts. Pipelines that differ
only in ranks share their lines.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hetero.core.cluster import Cluster
from lightning_hetero.core.devices import Arithmetic
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.plan import ParallelPlan, PipelinePlan, StagePlan
from lightning_hetero.core.recomputation import describe_recomputation
from lightning_hetero.simulator.cost import CostModel
from lightning_hetero.simulator.device_costs import ProfileCost
from lightning_hetero.simulator.memory import MemoryTerms, StageFacts
from lightning_hetero.simulator.simulate import Simulation

_GIB, _MIB = 2**30, 2**20

TERM_NAMES = {
    "weights": "weights",
    "frozen": "frozen weights",
    "gradients": "gradients",
    "owned": "owned states",
    "activations": "activations",
    "recomputed": "recomputed layer",
    "head": "logits and loss",
    "messages": "messages of stages",
    "exchange": "pull and push",
    "reserved": "context and slack",
}
"""Terms of a device's memory and their names in tables and pictures."""


@dataclass(frozen=True, kw_only=True)
class PlanTable:
    """Cells of the table of a plan; empty columns are left out."""

    header: tuple[str, ...]
    sections: tuple[tuple[tuple[str, ...], ...], ...]
    """Rows of each group of identical pipelines."""

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """All rows, one for each stage of each group."""
        return [row for section in self.sections for row in section]


def plan_table(
    plan: ParallelPlan, facts: Sequence[Sequence[StageFacts]], counts: Sequence[int | None]
) -> PlanTable:
    """Return the table of a plan.

    Args:
        plan: The plan.
        facts: [pipeline][stage] facts.
        counts: Micro-batches of each pipeline.
    """
    unit, unit_bytes = memory_unit(facts)
    places = ("pipeline", "stage", "device", "ranks", "TP", "layers", "recomputed")
    header = (*places, "micro-batches", f"memory {unit}", "busy")
    sections = []
    for members in alike_pipelines(plan, facts, counts):
        section = []
        for index, stage in enumerate(plan.pipelines[members[0]].stages):
            known = facts[members[0]][index]
            ranks = sorted(r for m in members for r in plan.pipelines[m].stages[index].ranks)
            busy = [facts[m][index].busy for m in members]
            section.append(
                (
                    list_indices(members) if index == 0 else "",
                    str(index),
                    known.device,
                    _ranges(ranks),
                    str(stage.tp_degree),
                    f"{stage.layers.start}-{stage.layers.stop - 1} ({len(stage.layers)})",
                    _recomputed(stage),
                    _work(counts[members[0]], plan.pipelines[members[0]]) if index == 0 else "",
                    _memory(known, unit_bytes),
                    "" if None in busy else f"{max(b for b in busy if b is not None):.0%}",
                )
            )
        sections.append(section)
    shown = [c for c in range(len(header)) if any(row[c] for rows in sections for row in rows)]
    return PlanTable(
        header=tuple(header[c] for c in shown),
        sections=tuple(
            tuple(tuple(row[c] for c in shown) for row in section) for section in sections
        ),
    )


def _recomputed(stage: StagePlan) -> str:
    """Return the recomputation of a stage in words; "" if there is none, or none is named."""
    return describe_recomputation(
        stage.recomputed_layers or None, stage.selective_layers, stage.activation_budget_bytes
    )


def _work(count: int | None, pipeline: PipelinePlan) -> str:
    """Return a pipeline's micro-batches, times the samples of each if it names them."""
    size = pipeline.microbatch_size
    return str(count or "") + ("" if size is None else f" × {size}")


def memory_terms(known: StageFacts) -> dict[str, float]:
    """Return the bytes of each term of a stage's memory, and those that no plan may fill."""
    terms = (known.memory or MemoryTerms())._asdict()
    terms["reserved"] = known.reserved_bytes or 0.0
    return {name: terms[name] for name in TERM_NAMES}


def memory_unit(facts: Sequence[Sequence[StageFacts]]) -> tuple[str, int]:
    """Return the unit in which memory reads well, and its bytes."""
    most = max(stage.used_bytes or 0.0 for row in facts for stage in row)
    return ("GiB", _GIB) if most >= 0.1 * _GIB else ("MiB", _MIB)


def prediction_lines(simulation: Simulation, num_tokens: int) -> list[str]:
    """Return the time of an iteration of `num_tokens` tokens, and the throughput."""
    time_s = simulation.iteration_time_s
    return [
        f"iteration time  {time_s:.4g} s "
        f"({simulation.exchange_s / time_s:.1%} of it exposed exchange and optimizer step)",
        f"throughput      {simulation.tokens_per_s(num_tokens):,.0f} tokens/s "
        f"({num_tokens:,} tokens an iteration)",
    ]


def fitting_lines(plan: ParallelPlan, simulation: Simulation) -> list[str]:
    """Return lines on what makes a plan fit: recomputation, states on hosts; [] if nothing."""
    return [*_recomputation_lines(plan, simulation), *host_lines(simulation.host_bytes)]


def host_lines(host_bytes: Sequence[float]) -> list[str]:
    """Return a line on the ranks that keep bytes on hosts, given those of each; [] if none does."""
    ranks = [rank for rank, num_bytes in enumerate(host_bytes) if num_bytes]
    if not ranks:
        return []
    total = sum(host_bytes) / _GIB
    return [
        f"host memory     ranks {_ranges(ranks)} keep {total:,.1f} GiB of masters and optimizer "
        "states on their hosts, and step there"
    ]


def _recomputation_lines(plan: ParallelPlan, simulation: Simulation) -> list[str]:
    if not simulation.recompute_s:
        return []
    stages: dict[tuple[int, ...], list[int]] = {}
    for pipeline, row in enumerate(simulation.stages):
        again = tuple(stage for stage, known in enumerate(row) if known.recompute_s)
        if again:
            stages.setdefault(again, []).append(pipeline)
    places = []
    for again, pipelines in stages.items():
        where = f"stage{'s' if len(again) > 1 else ''} {_ranges(again)}"
        if plan.num_pipelines > 1:
            where += f" of pipeline{'s' if len(pipelines) > 1 else ''} {_ranges(pipelines)}"
        places.append(where)
    return [
        f"recomputation   {simulation.recompute_s:.4g} s of {simulation.iteration_time_s:.4g} s "
        f"computes activations again on {', '.join(places)}"
    ]


def precision_notes(cost: CostModel) -> list[str]:
    """Return a note on each device type without units for the precision that is computed in."""
    asked, notes = cost.layout.computes_in, []
    for name in cost.cluster.num_devices:
        device = cost.device(name)
        if not device.is_native(asked):
            native = [item for item in Arithmetic if device.is_native(item)]
            rates = " and ".join(f"{device.flops_per_s(i) / 1e12:.4g} in {i}" for i in native)
            notes.append(
                f"{name} has no {asked} units and runs it at the rate of fp32 (TFLOP/s: {rates})"
            )
    return notes


def tuning_notes(model: ModelSpec) -> list[str]:
    """Return a note on what trains of a model; none if all of it does."""
    if model.tuning is None:
        return []
    count = f"{model.num_params:,} of {model.num_params + model.num_frozen_params:,} parameters"
    return [f"{model.tuning.method}: {count} train, the others are held and never sent"]


def model_lines(cost: CostModel) -> list[str]:
    """Return lines on what trains, and on a precision that devices lack, unless it was measured."""
    notes = () if isinstance(cost, ProfileCost) else precision_notes(cost)
    trains = [f"trains          {note}" for note in tuning_notes(cost.model)]
    return trains + [f"precision       {note}" for note in notes]


def bound_line(least: str, gap: float, *, plans: str = "plan") -> str:
    """Return a line on how near a plan is to a bound.

    Args:
        least: What no plan can be, such as "faster than 3 s".
        gap: How much worse the plan is, as a share.
        plans: The word for the plans that the bound holds for.
    """
    return f"bound           no {plans} can be {least}: this one is within {gap:.1%}"


def devices_line(cluster: Cluster) -> str:
    """Return the devices and their numbers, `4 × A100-80GB, 2 × H800-80GB`."""
    return ", ".join(f"{count} × {device}" for device, count in cluster.num_devices.items())


def alike_pipelines(
    plan: ParallelPlan, facts: Sequence[Sequence[StageFacts]], counts: Sequence[int | None]
) -> list[list[int]]:
    """Return the indices of pipelines in groups that differ only in ranks."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, pipeline in enumerate(plan.pipelines):
        # Slices of equal pipelines may differ by a few bytes, which doesn't matter to a reader.
        stages = tuple(
            (
                (stage.tp_degree, stage.layers, _recomputed(stage)),
                (known.device, f"{known.used_bytes or 0:.2e}"),
            )
            for stage, known in zip(pipeline.stages, facts[index], strict=True)
        )
        groups.setdefault((stages, counts[index], pipeline.microbatch_size), []).append(index)
    return list(groups.values())


def _memory(known: StageFacts, unit_bytes: int) -> str:
    if known.used_bytes is None:
        return ""
    used = f"{known.used_bytes / unit_bytes:,.1f}"
    if known.usable_bytes is None:
        return used
    return f"{used} of {known.usable_bytes / unit_bytes:,.1f}"


def list_indices(indices: Sequence[int]) -> str:
    """Return `0-3 (4 ×)` for four indices, `7` for one."""
    return _ranges(indices) + (f" ({len(indices)} ×)" if len(indices) > 1 else "")


def _ranges(numbers: Sequence[int]) -> str:
    """Return `0-3,7` for [0, 1, 2, 3, 7]; only the first three runs are named."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs[:3]) + (",…" if len(runs) > 3 else "")
