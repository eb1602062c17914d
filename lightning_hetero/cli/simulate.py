"""Predict a plan's iteration: `lightning-hetero simulate plan.json --cluster ... --model ...`."""

import argparse
import datetime
from collections.abc import Sequence
from typing import Any

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
    MicroBatchShape,
    ProfileCost,
    RooflineCost,
    Simulation,
    plot_timeline,
    save_trace,
    simulate,
    split_batch,
)

__all__ = [
    "add_parser",
    "add_workload_arguments",
    "cost_of",
    "plan_table",
    "run_simulate",
    "stage_labels",
    "summary_lines",
]

_GIB = 2**30


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what planning and simulating both need: cluster, model, batch and profile."""
    parser.add_argument("--cluster", required=True, help="YAML file of nodes, devices and links")
    parser.add_argument(
        "--model",
        required=True,
        help=f"a known name ({', '.join(sorted(KNOWN_MODELS))}), a YAML file of sizes or a "
        "Hugging Face config folder",
    )
    parser.add_argument(
        "--sequence-length", type=int, required=True, help="tokens of a sample, 1 or more"
    )
    parser.add_argument(
        "--global-batch-size", type=int, required=True, help="samples of an iteration, 1 or more"
    )
    parser.add_argument(
        "--micro-batch-size", type=int, default=1, help="samples of a micro-batch (default: 1)"
    )
    parser.add_argument("--profile", help="JSON file that `lightning-hetero profile` wrote")
    parser.add_argument(
        "--max-profile-age-days",
        type=float,
        default=90.0,
        help="refuse an older profile (default: 90)",
    )


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's arguments."""
    parser = subparsers.add_parser(
        "simulate",
        help="predict the iteration time of a plan and draw its timeline",
        description="Predict what one iteration of a plan takes, and what limits it.",
    )
    parser.add_argument("plan", help="JSON file of the plan")
    add_workload_arguments(parser)
    parser.add_argument("--trace", help="write a Perfetto/Chrome trace to this JSON file")
    parser.add_argument("--plot", help="draw the timeline into this .svg, .png or .pdf file")


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
    console = Console()
    console.print(plan_table(plan, cost, microbatches, simulation))
    for line in summary_lines(plan, cost, microbatches, simulation):
        console.print(line, highlight=False)
    if arguments.trace:
        save_trace(arguments.trace, plan, simulation)
    if arguments.plot:
        plot_timeline(arguments.plot, plan, simulation, stage_labels=stage_labels(plan, cost))
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


def plan_table(
    plan: ParallelPlan,
    cost: CostModel,
    microbatches: Sequence[Sequence[MicroBatchShape]],
    simulation: Simulation,
) -> Table:
    """Return one line per stage: who runs what, how full and how busy it is."""
    title = f"{cost.model.name} on {cost.cluster.num_ranks} devices"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("pipe\nline", "stage", "device", "ranks", "TP", "layers"):
        table.add_column(column, no_wrap=True)
    for column in ("micro-\nbatches", "memory\nGiB", "busy"):
        table.add_column(column, justify="right", no_wrap=True)
    for pipeline_index, stage_index, stage in plan.iter_stages():
        shape = cost.shape_of(stage)
        used = simulation.stage_memory_bytes[pipeline_index][stage_index]
        available = cost.usable_bytes(shape.device)
        memory = f"{used / _GIB:.1f}/{available / _GIB:.1f}"
        layers = f"{stage.layers.start}-{stage.layers.stop - 1} ({len(stage.layers)})"
        table.add_row(
            str(pipeline_index),
            str(stage_index),
            shape.device,
            _ranges(stage.ranks),
            str(stage.tp_degree),
            layers,
            str(len(microbatches[pipeline_index])),
            memory if used <= available else f"[bold red]{memory}[/]",
            f"{simulation.stage_busy[pipeline_index][stage_index]:.0%}",
            end_section=stage_index == plan.pipelines[pipeline_index].num_stages - 1,
        )
    return table


def summary_lines(
    plan: ParallelPlan,
    cost: CostModel,
    microbatches: Sequence[Sequence[MicroBatchShape]],
    simulation: Simulation,
) -> list[str]:
    """Return iteration time, throughput, money, bottleneck and stages that don't fit."""
    tokens = sum(sum(batch) for batches in microbatches for batch in batches)
    tokens_per_s = simulation.tokens_per_s(tokens)
    exposed = simulation.exchange_s / simulation.iteration_time_s
    lines = [
        f"iteration time  {simulation.iteration_time_s:.4g} s "
        f"({exposed:.1%} of it exposed exchange and optimizer step)",
        f"throughput      {tokens_per_s:,.0f} tokens/s ({tokens:,} tokens an iteration)",
    ]
    price = cost.cluster.price_per_hour
    if price is not None:
        lines.append(f"price           {price / 3600 / tokens_per_s * 1e9:,.2f} per 10⁹ tokens")
    lines.append(f"limited by      {simulation.bottleneck}")
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


def stage_labels(plan: ParallelPlan, cost: CostModel) -> list[list[str]]:
    """Return a short label per stage for pictures."""
    return [
        [
            f"pipeline {index}, stage {s}: {stage.tp_degree} × {cost.shape_of(stage).device}, "
            f"layers {stage.layers.start}-{stage.layers.stop - 1}"
            for s, stage in enumerate(pipeline.stages)
        ]
        for index, pipeline in enumerate(plan.pipelines)
    ]


def _ranges(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))
