"""Plan for a cluster: `lightning-hetero plan --cluster cluster.yaml --model llama-7b ...`."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lightning_hetero.cli.simulate import (
    add_workload_arguments,
    as_rich,
    cost_of,
    output_console,
    print_plan,
)
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.planner import (
    Objective,
    PlannedCandidate,
    PlanningOptions,
    PlanningResult,
    Workload,
    plan,
)
from lightning_hetero.planner.search import ProgressCallback
from lightning_hetero.simulator import (
    CostModel,
    bound_line,
    plan_table,
    plot_timeline,
    prediction_lines,
    simulate,
    simulated_facts,
)

__all__ = ["add_arguments", "run_plan"]

_CANDIDATES_PER_LINE = 8
"""Plans to ask for, since several may differ only in what their line doesn't say."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    parser.description = "Find the best pipelines for unequal devices, and say how good they are."
    add_workload_arguments(parser)
    parser.add_argument(
        "--objective",
        choices=[str(objective) for objective in Objective],
        default=str(Objective.THROUGHPUT),
        help="what to maximise, or tokens per money (default: throughput)",
    )
    parser.add_argument(
        "--tp-degrees",
        type=int,
        nargs="+",
        metavar="DEGREE",
        help="tensor-parallel degrees to consider (default: all that nodes and heads allow)",
    )
    parser.add_argument(
        "--equal-microbatches",
        action="store_true",
        help="give every pipeline the same number of micro-batches, as AutoHet does",
    )
    parser.add_argument(
        "--top", type=int, default=5, metavar="NUMBER", help="kinds of plans to list (default: 5)"
    )
    parser.add_argument("--output", metavar="FILE", help="write the best plan to this JSON file")
    parser.add_argument(
        "--plot", metavar="FILE", help="draw its timeline into this .svg, .png or .pdf file"
    )


def run_plan(arguments: argparse.Namespace) -> int:
    """Plan, print the best plan and the runners-up, write plan and picture."""
    if arguments.top < 1:
        raise ConfigurationError(f"--top is {arguments.top}; it must be 1 or more.")
    cost = cost_of(arguments)
    workload = Workload(
        sequence_length=arguments.sequence_length,
        global_batch_size=arguments.global_batch_size,
        sequences_per_microbatch=arguments.micro_batch_size,
    )
    degrees = arguments.tp_degrees
    options = PlanningOptions(
        objective=Objective(arguments.objective),
        equal_microbatches=arguments.equal_microbatches,
        tp_degrees=None if degrees is None else tuple(degrees),
        num_candidates=_CANDIDATES_PER_LINE * arguments.top,
    )
    with _progress() as progress:
        result = plan(cost.cluster, cost.model, workload, options, cost=cost, progress=progress)
    console = output_console()
    best = result.best
    counts = [pipeline.num_microbatches for pipeline in best.plan.pipelines]
    table = plan_table(best.plan, simulated_facts(best.plan, cost, best.simulation), counts)
    print_plan(console, cost, table, _summary(result, cost))
    if arguments.top > 1:
        console.print()
        console.print(_candidates_table(result, cost, arguments.top))
    _write(arguments, result, cost)
    return 0


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


def _summary(result: PlanningResult, cost: CostModel) -> list[str]:
    best = result.best
    lines = [
        *prediction_lines(best.simulation, result.workload.num_tokens),
        _bound_line(result),
        f"limited by      {result.limit}",
    ]
    money = best.money_per_token(result.workload.num_tokens)
    if money is not None:
        lines.append(f"price           {money * 1e9:,.2f} per 10⁹ tokens")
    idle = cost.cluster.num_ranks - len(best.plan.ranks)
    if idle:
        lines.append(f"idle            {idle} of {cost.cluster.num_ranks} devices")
    lines.append(
        f"searched        {result.num_estimated:,} layouts, {result.num_simulated:,} simulated"
    )
    return lines


def _bound_line(result: PlanningResult) -> str:
    if result.objective is Objective.COST and result.lower_bound_price is not None:
        price = result.lower_bound_price / result.workload.num_tokens * 1e9
        least = f"cheaper than {price:,.2f} per 10⁹ tokens"
    else:
        least = f"faster than {result.lower_bound_s:.4g} s"
    return bound_line(least, result.gap)


def _candidates_table(result: PlanningResult, cost: CostModel, most: int) -> Table:
    """Return one line per kind of plan: how its pipelines are made and what the best takes."""
    kinds: dict[str, PlannedCandidate] = {}
    for candidate in result.candidates:
        kinds.setdefault(_describe(candidate.plan, cost), candidate)
    header = ("place", "pipelines", "devices", "seconds", "tokens/s", "per 10⁹ tokens")
    table = as_rich("Best plans", header)
    num_tokens = result.workload.num_tokens
    for place, (kind, candidate) in enumerate(islice(kinds.items(), most), start=1):
        money = candidate.money_per_token(num_tokens)
        table.add_row(
            str(place),
            kind,
            str(len(candidate.plan.ranks)),
            f"{candidate.simulation.iteration_time_s:.4g}",
            f"{candidate.simulation.tokens_per_s(num_tokens):,.0f}",
            "-" if money is None else f"{money * 1e9:,.2f}",
        )
    return table


def _describe(found: ParallelPlan, cost: CostModel) -> str:
    """Return the pipelines in a few words, such as `2 × (2·A100-80GB + H800-80GB)`."""
    counts: dict[str, int] = {}
    for pipeline in found.pipelines:
        stages: dict[str, int] = {}
        for stage in pipeline.stages:
            device = cost.shape_of(stage).device
            name = f"{device} TP{stage.tp_degree}" if stage.tp_degree > 1 else device
            stages[name] = stages.get(name, 0) + 1
        parts = [name if count == 1 else f"{count}·{name}" for name, count in stages.items()]
        text = " + ".join(parts)
        counts[text] = counts.get(text, 0) + 1
    return ", ".join(f"{count} × ({text})" for text, count in counts.items())


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
        batches = [[microbatch] * (p.num_microbatches or 0) for p in found.pipelines]
        simulation = simulate(found, cost, batches, record_events=True)
        plot_timeline(Path(arguments.plot), found, cost, simulation)
