"""Plan for a cluster: `lightning-hetero plan --cluster cluster.yaml --model llama-7b ...`."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lightning_hetero.cli.arguments import (
    add_format_arguments,
    add_plot_argument,
    add_workload_arguments,
    check_folder_of,
    check_picture,
    cost_of,
)
from lightning_hetero.cli.baselines import Baseline, find_baselines
from lightning_hetero.cli.output import (
    as_rich,
    assumptions_line,
    facts_of,
    output_console,
    price_line,
    print_csv,
    print_json,
    print_plan,
    print_table,
    stage_rows,
    write_json,
)
from lightning_hetero.cli.run_page.plan_page import draw_plan
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.planner import (
    Objective,
    PlannedCandidate,
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
    memory_tables,
    plan_table,
    prediction_lines,
    simulated_facts,
)

__all__ = ["add_arguments", "run_plan"]

_CANDIDATES_PER_LINE = 8
"""Plans to request per line to print, since several may differ only in what a line leaves out."""
_MOST_LISTED = 1000


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
    parser.add_argument(
        "--equal-microbatches",
        action="store_true",
        help="give every pipeline the same number of micro-batches, as AutoHet does",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="search 7 to 512 devices no longer than a run does when it starts",
    )
    parser.add_argument(
        "--top", type=int, default=5, metavar="NUMBER", help="kinds of plans to list (default: 5)"
    )
    parser.add_argument("--output", metavar="FILE", help="write the best plan to this JSON file")
    parser.add_argument(
        "--save-top",
        nargs=2,
        metavar=("NUMBER", "FOLDER"),
        help="write the best kinds of plans as plan-1.json, plan-2.json, ... into a folder",
    )
    parser.add_argument(
        "--memory", action="store_true", help="print what fills each stage's devices, too"
    )
    add_plot_argument(parser, "its timeline and memory", may_be_page=True)
    add_format_arguments(parser, json_file=True)


def run_plan(arguments: argparse.Namespace) -> int:
    """Plan, print the best plan and the runners-up, write plans and picture."""
    num_saved, folder = _save_top(arguments)
    most = max(arguments.top, num_saved)
    cost = cost_of(arguments)
    degrees = arguments.tp_degrees
    options = PlanningOptions(
        objective=Objective(arguments.objective),
        equal_microbatches=arguments.equal_microbatches,
        tp_degrees=None if degrees is None else tuple(degrees),
        num_candidates=_CANDIDATES_PER_LINE * most,
        thorough=not arguments.quick,
    )
    result, scheduled = rank_scheduled(
        _plan(arguments, cost, options), cost, Schedule(arguments.schedule)
    )
    workload = result.workload
    kinds = _kinds(result, cost)
    baselines = find_baselines(cost, workload, valid_tp_degrees(cost, workload, options))
    if arguments.json is True:
        print_json(_as_json(result, cost, baselines, arguments))
    elif arguments.csv:
        print_csv(
            [
                {"place": place, **row}
                for place, candidate in enumerate(list(kinds.values())[: arguments.top], start=1)
                for row in stage_rows(candidate.plan, cost, candidate.simulation)
            ]
        )
    else:
        _print_tables(result, scheduled, cost, baselines, arguments)
    if isinstance(arguments.json, str):
        write_json(_as_json(result, cost, baselines, arguments), arguments.json)
    _write(arguments, result, cost)
    for place, candidate in enumerate(list(kinds.values())[:num_saved], start=1):
        _save(candidate.plan, folder / f"plan-{place}.json")
    return 0


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


def _save_top(arguments: argparse.Namespace) -> tuple[int, Path]:
    """Check `--save-top` before planning; return the number of plans and their folder."""
    if not 1 <= arguments.top <= _MOST_LISTED:
        raise ConfigurationError(
            f"--top is {arguments.top}; it must be 1 or more, and at most {_MOST_LISTED}."
        )
    check_picture(arguments.plot, may_be_page=True)
    check_folder_of(arguments.output, "--output")
    check_folder_of(arguments.json if isinstance(arguments.json, str) else None, "--json")
    if arguments.save_top is None:
        return 0, Path()
    number, folder = arguments.save_top
    if not (number.isascii() and number.isdigit() and 1 <= int(number[:9]) <= _MOST_LISTED):
        raise ConfigurationError(
            f"--save-top is {number[:20]}; it must be a whole number, 1 to {_MOST_LISTED}."
        )
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"Can't make the folder {folder} of --save-top: {error.strerror}."
        ) from error
    return int(number), Path(folder)


def _print_tables(
    result: PlanningResult,
    scheduled: Scheduled,
    cost: CostModel,
    baselines: Sequence[Baseline],
    arguments: argparse.Namespace,
) -> None:
    console = output_console()
    best = result.best
    counts = [pipeline.num_microbatches for pipeline in best.plan.pipelines]
    known = simulated_facts(best.plan, cost, best.simulation)
    table = plan_table(best.plan, known, counts)
    lines = [*_summary(result, cost, baselines), f"schedule        {scheduled}"]
    lines.append(assumptions_line(cost, arguments.precision))
    print_plan(console, cost, table, lines)
    if arguments.memory:
        for memory in memory_tables(best.plan, known, counts):
            console.print()
            print_table(console, "What fills a device", memory)
    if arguments.top > 1:
        console.print()
        console.print(_candidates_table(result, cost, arguments.top))


def _as_json(
    result: PlanningResult,
    cost: CostModel,
    baselines: Sequence[Baseline],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    num_tokens = result.workload.num_tokens
    candidates = list(_kinds(result, cost).items())[: arguments.top]
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
        "baselines": [asdict(baseline) for baseline in baselines],
        "candidates": [
            {
                "pipelines": kind,
                "iteration_time_s": candidate.simulation.iteration_time_s,
                "tokens_per_s": candidate.simulation.tokens_per_s(num_tokens),
                "plan": candidate.plan.to_dict(),
            }
            for kind, candidate in candidates
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


def _summary(result: PlanningResult, cost: CostModel, baselines: Sequence[Baseline]) -> list[str]:
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


def _compared_line(time_s: float, baselines: Sequence[Baseline]) -> str:
    """Return the line with the baselines' times, and this plan's speed-up over the best of them."""
    others = [b.iteration_time_s for b in baselines if b.iteration_time_s is not None]
    ratio = f", {min(others) / time_s:.2f}×" if others else ""
    texts = [*map(str, baselines), f"this plan: {time_s:.4g} s{ratio}"]
    return "compared with   " + "; ".join(texts)


def _bound_line(result: PlanningResult) -> str:
    if result.objective is Objective.COST and result.lower_bound_price is not None:
        price = result.lower_bound_price / result.workload.num_tokens * 1e9
        least = f"cheaper than {price:,.2f} per 10⁹ tokens"
    else:
        least = f"faster than {result.lower_bound_s:.4g} s"
    return bound_line(least, result.gap)


def _candidates_table(result: PlanningResult, cost: CostModel, most: int) -> Table:
    """Return a table with a line per kind of plan: its pipelines and its best iteration time."""
    header = ("place", "pipelines", "devices", "seconds", "tokens/s", "per 10⁹ tokens")
    table = as_rich("Best plans", header)
    num_tokens = result.workload.num_tokens
    for place, (kind, candidate) in enumerate(islice(_kinds(result, cost).items(), most), start=1):
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


def _kinds(result: PlanningResult, cost: CostModel) -> dict[str, PlannedCandidate]:
    """Return the best plan of each kind, by its description, the best first.

    Plans with the same pipelines and stages in a different order are of one kind.
    """
    kinds: dict[str, PlannedCandidate] = {}
    seen = set()
    for candidate in result.candidates:
        words = _describe(candidate.plan, cost)
        kind = tuple(sorted(_stages_of(candidate.plan, cost)))
        if kind not in seen:
            seen.add(kind)
            kinds[words] = candidate
    return kinds


def _stages_of(found: ParallelPlan, cost: CostModel) -> Iterator[tuple[tuple[str, int], ...]]:
    """Yield each pipeline's stages, (device, TP degree), in a fixed order."""
    for pipeline in found.pipelines:
        yield tuple(
            sorted((cost.shape_of(stage).device, stage.tp_degree) for stage in pipeline.stages)
        )


def _describe(found: ParallelPlan, cost: CostModel) -> str:
    """Return the pipelines in a few words, such as `2 × (2·A100-80GB + H800-80GB)`.

    The order is fixed, because it means nothing: the most frequent pipeline first.
    """
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
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} × ({text})" for text, count in ordered)


def _write(arguments: argparse.Namespace, result: PlanningResult, cost: CostModel) -> None:
    found = result.best.plan
    if arguments.output:
        _save(found, Path(arguments.output))
    if arguments.plot:
        microbatch = result.workload.microbatch
        batches = own_microbatches(found, microbatch)
        scheduled = simulate_scheduled(
            found, cost, batches, Schedule(arguments.schedule), record_events=True
        )
        draw_plan(arguments.plot, found, cost, scheduled.simulation)


def _save(found: ParallelPlan, path: Path) -> None:
    try:
        found.save(path)
    except OSError as error:
        raise ConfigurationError(
            f"Can't write the plan to {path}: {error.strerror}. Name another file."
        ) from error
