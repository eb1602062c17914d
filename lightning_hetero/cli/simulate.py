"""Predict a plan's iteration: `lightning-hetero simulate plan.json --cluster ... --model ...`."""

import argparse
import datetime
import os
import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_hetero.core.cluster import Cluster
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.model_spec import KNOWN_MODELS, ModelSpec
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.profile import Profile
from lightning_hetero.simulator import (
    CostModel,
    PlanTable,
    ProfileCost,
    RooflineCost,
    Simulation,
    devices_line,
    plan_table,
    plot_timeline,
    prediction_lines,
    save_trace,
    simulate,
    simulated_facts,
    split_batch,
)

__all__ = [
    "add_arguments",
    "add_model_argument",
    "add_workload_arguments",
    "as_rich",
    "cost_of",
    "output_console",
    "print_plan",
    "run_simulate",
]

_GIB = 2**30
_TEXT_COLUMNS = ("pipeline", "stage", "device", "ranks", "pipelines")


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Add what `ModelSpec.load` takes."""
    parser.add_argument(
        "--model",
        metavar="NAME",
        required=True,
        help=f"a known name ({', '.join(sorted(KNOWN_MODELS))}), a YAML file of sizes or a "
        "Hugging Face config folder",
    )


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what planning and simulating both need: cluster, model, batch and profile."""
    parser.add_argument(
        "--cluster", metavar="FILE", required=True, help="YAML file of nodes, devices and links"
    )
    add_model_argument(parser)
    for name, default, what in (
        ("--sequence-length", None, "tokens of a sample, 1 or more"),
        ("--global-batch-size", None, "samples of an iteration, 1 or more"),
        ("--micro-batch-size", 1, "samples of a micro-batch (default: 1)"),
    ):
        parser.add_argument(
            name,
            metavar="NUMBER",
            type=int,
            default=default,
            required=default is None,
            help=what,
        )
    parser.add_argument(
        "--profile",
        metavar="FILE",
        help="JSON file that `lightning-hetero profile` wrote (default: data sheets)",
    )
    parser.add_argument(
        "--max-profile-age-days",
        metavar="DAYS",
        type=float,
        default=90.0,
        help="refuse an older profile (default: 90)",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    parser.description = "Predict what one iteration of a plan takes, and what limits it."
    parser.add_argument(
        "plan",
        metavar="PLAN",
        help="JSON file of the plan, as `lightning-hetero plan --output` writes",
    )
    add_workload_arguments(parser)
    parser.add_argument(
        "--trace", metavar="FILE", help="write a Perfetto/Chrome trace to this JSON file"
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="draw the timeline into this .svg, .png or .pdf file"
    )


def run_simulate(arguments: argparse.Namespace) -> int:
    """Simulate the plan, print the table, write trace and picture."""
    plan = ParallelPlan.load(arguments.plan)
    cost = cost_of(arguments)
    microbatches = split_batch(
        plan,
        global_batch_size=arguments.global_batch_size,
        sequence_length=arguments.sequence_length,
        microbatch_size=arguments.micro_batch_size,
    )
    simulation = simulate(
        plan, cost, microbatches, record_events=bool(arguments.trace or arguments.plot)
    )
    counts = [len(batches) for batches in microbatches]
    num_tokens = sum(sum(batch) for batches in microbatches for batch in batches)
    table = plan_table(plan, simulated_facts(plan, cost, simulation), counts)
    print_plan(output_console(), cost, table, _summary(plan, cost, simulation, num_tokens))
    if arguments.trace:
        save_trace(arguments.trace, plan, simulation)
    if arguments.plot:
        plot_timeline(arguments.plot, plan, cost, simulation)
    return 0


def cost_of(arguments: argparse.Namespace) -> CostModel:
    """Read cluster, model and profile; without a profile the roofline of known devices serves."""
    for name in ("sequence_length", "global_batch_size", "micro_batch_size"):
        if getattr(arguments, name) < 1:
            option = "--" + name.replace("_", "-")
            raise ConfigurationError(
                f"{option} is {getattr(arguments, name)}; it must be 1 or more."
            )
    cluster = Cluster.load(arguments.cluster)
    model = ModelSpec.load(arguments.model)
    if arguments.profile is None:
        return RooflineCost(cluster, model)
    profile = Profile.load(arguments.profile)
    profile.check(model=model, max_age=datetime.timedelta(days=arguments.max_profile_age_days))
    return ProfileCost(cluster, model, profile)


def output_console() -> Console:
    """Return where tables go: in files and pipes they are as wide as they need."""
    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120)


def print_plan(
    console: Console,
    cost: CostModel,
    table: PlanTable,
    lines: Sequence[str],
) -> None:
    """Print a plan's table and what is said of it, what is wrong in red."""
    found = as_rich(f"{cost.model.name} on {devices_line(cost.cluster)}", table.header)
    for section in table.sections:
        for index, row in enumerate(section):
            found.add_row(*row, end_section=index == len(section) - 1)
    console.print(found)
    for line in lines:
        style = "bold red" if line.startswith("does not fit") else None
        console.print(line, style=style, highlight=False)


def as_rich(title: str, header: Sequence[str]) -> Table:
    """Return an empty table, numbers to the right; what doesn't fit is wrapped, never cut."""
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in header:
        table.add_column(
            column.replace("micro-", "micro-\n"),
            justify="left" if column in _TEXT_COLUMNS else "right",
            overflow="fold",
        )
    return table


def _summary(
    plan: ParallelPlan, cost: CostModel, simulation: Simulation, num_tokens: int
) -> list[str]:
    """Return iteration time, throughput, money, bottleneck and stages that don't fit."""
    lines = prediction_lines(simulation, num_tokens)
    lines.append(f"limited by      {simulation.bottleneck}")
    price = cost.cluster.price_per_hour
    if price is not None:
        tokens_per_s = simulation.tokens_per_s(num_tokens)
        lines.append(f"price           {price / 3600 / tokens_per_s * 1e9:,.2f} per 10⁹ tokens")
    for pipeline_index, stage_index, stage in plan.iter_stages():
        device = cost.shape_of(stage).device
        over = simulation.stage_memory_bytes[pipeline_index][stage_index] - cost.usable_bytes(
            device
        )
        if over > 0:
            lines.append(
                f"does not fit    pipeline {pipeline_index} stage {stage_index} needs "
                f"{over / _GIB:.1f} GiB more than {device} has"
            )
    return lines
