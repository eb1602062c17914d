"""Plan for a cluster: `lightning-hetero plan --cluster cluster.yaml --model llama-7b ...`."""

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_hetero.cli.arguments import (
    add_plot_argument,
    add_workload_arguments,
    check_folder_of,
    check_picture,
    cost_of,
    replicated_cost,
)
from lightning_hetero.cli.output import facts_of, price_line, print_json, print_plan
from lightning_hetero.cli.run_page.plan_page import draw_plan
from lightning_hetero.core.errors import ConfigurationError, PlanError, PlanningError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.planner import (
    Objective,
    PlanningOptions,
    PlanningResult,
    Workload,
    plan,
    plan_best_size,
)
from lightning_hetero.planner.memory import own_microbatches
from lightning_hetero.planner.result import ProgressCallback
from lightning_hetero.planner.scheduled import Scheduled, rank_scheduled, simulate_scheduled
from lightning_hetero.planner.search import sizes_of
from lightning_hetero.planner.workload import valid_tp_degrees
from lightning_hetero.schedules import Schedule
from lightning_hetero.simulator import (
    CostModel,
    bound_line,
    fitting_lines,
    precision_notes,
    prediction_lines,
    simulate,
    split_batch,
)

_NUM_CANDIDATES = 16
"""Plans of which the best one under the schedule is taken."""
_OTHER_FORMAT = {
    "bf16-mixed": "16-mixed",
    "bf16-true": "16-true",
    "16-mixed": "bf16-mixed",
    "16-true": "bf16-true",
}
"""For each precision of 16 bits, the one with the other format."""
_MOST_ACTIONS = 1_000_000
"""Most forward and backward passes of a plan that is simulated for comparison."""
_Baselines = Mapping[str, float | None]
"""Predicted iteration of usual plans, by their kinds in words; None if they don't fit."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    parser.description = "Find the best pipelines for unequal devices, and say how good they are."
    add_workload_arguments(parser, size="the best one")
    parser.add_argument(
        "--objective",
        choices=[str(objective) for objective in Objective],
        default=str(Objective.THROUGHPUT),
        help="maximise tokens per second, or per unit of currency (default: throughput)",
    )
    parser.add_argument(
        "--tp-degrees",
        type=int,
        nargs="+",
        metavar="DEGREE",
        help="tensor-parallel degrees to consider (default: all that nodes and heads allow)",
    )
    parser.add_argument("--output", metavar="FILE", help="write the best plan to this JSON file")
    add_plot_argument(parser, "its timeline and memory")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")


def run_plan(arguments: argparse.Namespace) -> int:
    """Plan, print the best plan, write plan and picture."""
    check_picture(arguments.plot)
    check_folder_of(arguments.output, "--output")
    cost = cost_of(arguments)
    result, scheduled = _find(arguments, cost)
    workload = result.workload
    degrees = valid_tp_degrees(cost, workload, _options(arguments))
    baselines = _find_baselines(cost, workload, degrees)
    if arguments.json:
        print_json(_as_json(result, cost, baselines, arguments))
    else:
        best = result.best
        counts = [pipeline.num_microbatches for pipeline in best.plan.pipelines]
        lines = [*_summary(result, cost, baselines), f"schedule        {scheduled}"]
        lines += _other_format_lines(cost, arguments)
        print_plan(
            best.plan,
            cost,
            best.simulation,
            counts=counts,
            lines=lines,
            precision=arguments.precision,
        )
    _write(arguments, result, cost)
    return 0


def _options(arguments: argparse.Namespace) -> PlanningOptions:
    degrees = arguments.tp_degrees
    return PlanningOptions(
        objective=Objective(arguments.objective),
        tp_degrees=None if degrees is None else tuple(degrees),
        num_candidates=_NUM_CANDIDATES,
    )


def _find(arguments: argparse.Namespace, cost: CostModel) -> tuple[PlanningResult, Scheduled]:
    """Plan, and return the candidates, the best under the schedule first, and its orders."""
    result = _plan(arguments, cost, _options(arguments))
    return rank_scheduled(result, cost, Schedule(arguments.schedule))


def _plan(
    arguments: argparse.Namespace, cost: CostModel, options: PlanningOptions
) -> PlanningResult:
    """Plan with the given micro-batch size, or with the best one."""
    workload = Workload(
        sequence_length=arguments.sequence_length, global_batch_size=arguments.global_batch_size
    )
    with _progress() as progress:
        if arguments.micro_batch_size == "auto":
            return plan_best_size(cost, workload, options, progress=progress)
        sized = replace(workload, sequences_per_microbatch=arguments.micro_batch_size)
        return plan(cost.cluster, cost.model, sized, options, cost=cost, progress=progress)


def _as_json(
    result: PlanningResult,
    cost: CostModel,
    baselines: _Baselines,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    num_tokens = result.workload.num_tokens
    return {
        "model": cost.model.name,
        "cluster": cost.cluster.num_devices,
        "precision": arguments.precision,
        "objective": str(result.objective),
        "micro_batch_size": result.workload.sequences_per_microbatch,
        **facts_of(result.best.plan, cost, result.best.simulation, num_tokens),
        "lower_bound_s": result.lower_bound_s,
        "gap": result.gap,
        "num_layouts": result.num_estimated,
        "num_simulated": result.num_simulated,
        "baselines": [
            {"name": name, "iteration_time_s": time_s} for name, time_s in baselines.items()
        ],
    }


@contextmanager
def _progress() -> Iterator[ProgressCallback]:
    """Show a bar on a terminal's stderr; it disappears when done."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task("Planning", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)


def _summary(result: PlanningResult, cost: CostModel, baselines: _Baselines) -> list[str]:
    best = result.best
    lines = [
        *prediction_lines(best.simulation, result.workload.num_tokens),
        *fitting_lines(best.plan, best.simulation),
        _compared_line(best.simulation.iteration_time_s, baselines),
        _bound_line(result),
        f"limited by      {result.limit}",
    ]
    money = best.money_per_token(result.workload.num_tokens)
    if money is not None:
        lines.append(price_line(money * 1e9))
    idle = cost.cluster.num_ranks - len(best.plan.ranks)
    if idle:
        lines.append(f"idle            {idle} of {cost.cluster.num_ranks} devices")
    if (sizes := sizes_of(result)) != "1":
        lines.append(f"micro-batches   of {sizes} samples")
    lines.append(
        f"searched        {result.num_estimated:,} layouts, {result.num_simulated:,} simulated"
    )
    return lines


def _other_format_lines(cost: CostModel, arguments: argparse.Namespace) -> list[str]:
    """Return what a plan in the other 16-bit format takes, if a device lacks the given one."""
    if arguments.profile is not None or not precision_notes(cost):
        return []
    asked = {**vars(arguments), "precision": _OTHER_FORMAT[arguments.precision]}
    other = argparse.Namespace(**asked)
    try:
        result, _ = _find(other, cost_of(other))
    except PlanningError:
        return []
    time_s = result.best.simulation.iteration_time_s
    return [f"precision       {time_s:.4g} s with the best plan for --precision {other.precision}"]


def _compared_line(time_s: float, baselines: _Baselines) -> str:
    """Return the line with the baselines' times, and this plan's speed-up over the best of them."""
    others = {name: seconds for name, seconds in baselines.items() if seconds is not None}
    texts = [
        f"{name}: {f'{others[name]:.4g} s' if name in others else 'does not fit'}"
        for name in baselines
    ]
    ratio = f", {min(others.values()) / time_s:.2f}×" if others else ""
    return "compared with   " + "; ".join([*texts, f"this plan: {time_s:.4g} s{ratio}"])


def _bound_line(result: PlanningResult) -> str:
    if result.objective is Objective.COST and result.lower_bound_price is not None:
        price = result.lower_bound_price / result.workload.num_tokens * 1e9
        least = f"cheaper than {price:,.2f} per 10⁹ tokens"
    else:
        least = f"faster than {result.lower_bound_s:.4g} s"
    return bound_line(least, result.gap)


def _write(arguments: argparse.Namespace, result: PlanningResult, cost: CostModel) -> None:
    found = result.best.plan
    if arguments.output:
        try:
            found.save(arguments.output)
        except OSError as error:
            raise ConfigurationError(
                f"Can't write the plan to {arguments.output}: {error.strerror}. Name another file."
            ) from error
    if arguments.plot:
        microbatch = result.workload.microbatch
        batches = own_microbatches(found, microbatch)
        scheduled = simulate_scheduled(
            found, cost, batches, Schedule(arguments.schedule), record_events=True
        )
        draw_plan(arguments.plot, found, cost, scheduled.simulation)


def _find_baselines(cost: CostModel, workload: Workload, tp_degrees: tuple[int, ...]) -> _Baselines:
    """Return plain data parallelism and the best equal pipelines, as far as they can be predicted.

    Plain data parallelism keeps the whole model and its optimizer states on every device. Equal
    pipelines have the same stages, TP degree and layers, and equal numbers of micro-batches.
    """
    plain = _best([_even(cost, 1, 1)], replicated_cost(cost), workload)
    num_ranks = cost.cluster.num_ranks
    equal = [
        _even(cost, num_stages, degree)
        for degree in tp_degrees
        for num_stages in range(1, cost.model.num_layers + 1)
        if num_ranks % (num_stages * degree) == 0
    ]
    return {"plain data parallel": plain, "equal pipelines": _best(equal, cost, workload)}


def _even(cost: CostModel, num_stages: int, tp_degree: int) -> ParallelPlan | None:
    """Return equal pipelines whose TP groups stay inside nodes; None if there are none."""
    try:
        found = ParallelPlan.even(
            world_size=cost.cluster.num_ranks,
            num_layers=cost.model.num_layers,
            num_stages=num_stages,
            tp_degree=tp_degree,
        )
    except PlanError:
        return None
    crosses = any(
        len({cost.node_of_rank[rank] for rank in stage.ranks}) > 1
        for _, _, stage in found.iter_stages()
    )
    return None if crosses else found


def _best(plans: list[ParallelPlan | None], cost: CostModel, workload: Workload) -> float | None:
    """Return the shortest iteration of those that fit."""
    times = []
    for found in plans:
        if found is None or 2 * workload.num_microbatches * found.max_stages > _MOST_ACTIONS:
            continue
        batches = split_batch(
            found,
            global_batch_size=workload.global_batch_size,
            sequence_length=workload.sequence_length,
            microbatch_size=workload.sequences_per_microbatch,
        )
        simulation = simulate(found, cost, batches)
        if simulation.fits:
            times.append(simulation.iteration_time_s)
    return min(times, default=None)
