"""Predict a plan's iteration: `lightning-hetero simulate plan.json --cluster ... --model ...`."""

import argparse
from collections.abc import Mapping
from typing import Any

from lightning_hetero.cli.arguments import (
    add_plot_argument,
    add_workload_arguments,
    check_picture,
    cost_of,
    predict,
)
from lightning_hetero.cli.output import facts_of, price_line, print_json, print_plan
from lightning_hetero.cli.run_page.plan_page import draw_plan
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.simulator import (
    CostModel,
    Simulation,
    fitting_lines,
    prediction_lines,
)

_GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    parser.description = "Predict the time of one iteration of a plan, and what limits it."
    parser.add_argument(
        "plan",
        metavar="PLAN",
        help="JSON file of the plan, as `lightning-hetero plan --output` writes",
    )
    add_workload_arguments(parser, size="derived from the plan and the global batch size")
    add_plot_argument(parser, "the timeline")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")


def run_simulate(arguments: argparse.Namespace) -> int:
    """Simulate the plan, print the table, draw the picture."""
    check_picture(arguments.plot)
    plan = ParallelPlan.load(arguments.plan)
    cost = cost_of(arguments)
    simulation, batches, num_tokens, scheduled = predict(
        plan, cost, arguments, record_events=bool(arguments.plot)
    )
    facts = facts_of(plan, cost, simulation, num_tokens)
    if arguments.json:
        print_json({"model": cost.model.name, "precision": arguments.precision, **facts})
    else:
        counts = [len(items) for items in batches]
        lines = [*_summary(plan, cost, simulation, facts), f"schedule        {scheduled}"]
        print_plan(
            plan, cost, simulation, counts=counts, lines=lines, precision=arguments.precision
        )
    if arguments.plot:
        draw_plan(arguments.plot, plan, cost, simulation)
    return 0


def _summary(
    plan: ParallelPlan, cost: CostModel, simulation: Simulation, facts: Mapping[str, Any]
) -> list[str]:
    """Return lines on iteration time, throughput, price, bottleneck and stages that don't fit."""
    lines = prediction_lines(simulation, facts["tokens_per_iteration"])
    lines += fitting_lines(plan, simulation)
    lines.append(f"limited by      {simulation.bottleneck}")
    if (price := facts["price_per_billion_tokens"]) is not None:
        lines.append(price_line(price))
    for (pipeline_index, stage_index), lacking in simulation.lacking_bytes.items():
        stage = plan.pipelines[pipeline_index].stages[stage_index]
        lines.append(
            f"does not fit    pipeline {pipeline_index} stage {stage_index} needs "
            f"{lacking / _GIB:.1f} GiB more than {cost.shape_of(stage).device} has"
        )
    return lines
