"""Print plans: tables for people, JSON for programs."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.simulator import (
    CostModel,
    MemoryTerms,
    ProfileCost,
    Simulation,
    devices_line,
    plan_table,
    precision_notes,
    tuning_notes,
)

_TEXT_COLUMNS = ("pipeline", "stage", "device", "ranks", "pipelines", "what")


def output_console() -> Console:
    """Return the console for tables; in files and pipes tables are as wide as they need to be."""
    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120)


def print_plan(
    plan: ParallelPlan,
    cost: CostModel,
    simulation: Simulation,
    *,
    counts: Sequence[int | None],
    lines: Sequence[str],
    precision: str,
) -> None:
    """Print a simulated plan's table and the lines about it, problems in red.

    Args:
        plan: The plan.
        cost: The cost model of the simulation.
        simulation: Its simulation.
        counts: Micro-batches of each pipeline.
        lines: What to print below the table; a line with the assumptions follows.
        precision: The Trainer's precision.
    """
    console = output_console()
    table = plan_table(plan, simulation.stages, counts)
    found = as_rich(f"{cost.model.name} on {devices_line(cost.cluster)}", table.header)
    for section in table.sections:  # A line between groups of equal pipelines.
        for index, row in enumerate(section):
            found.add_row(*row, end_section=index == len(section) - 1)
    console.print(found)
    for line in (*lines, assumptions_line(cost, precision)):
        style = "bold red" if line.startswith("does not fit") else None
        console.print(line, style=style, highlight=False)


def as_rich(title: str, header: Sequence[str]) -> Table:
    """Return an empty table with numbers to the right; text that doesn't fit is wrapped."""
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in header:
        table.add_column(
            column.replace("micro-", "micro-\n"),
            justify="left" if column.split(" (")[0] in _TEXT_COLUMNS else "right",
            overflow="fold",
        )
    return table


def price_line(price_per_billion_tokens: float) -> str:
    """Return the line on the price of tokens."""
    return (
        f"price           {price_per_billion_tokens:,.2f} per billion tokens (in the currency of "
        "price_per_hour)"
    )


def assumptions_line(cost: CostModel, precision: str) -> str:
    """Return the line on the assumptions of memory and times."""
    layout = cost.layout
    twice = " with standbys" if layout.redundancy else ""
    times = "measured times" if isinstance(cost, ProfileCost) else "data sheets"
    notes = [*tuning_notes(cost.model), *precision_notes(cost)]
    return (
        f"assumes         {precision}, Adam ({layout.weight_bytes} + {layout.summed_bytes} bytes a "
        f"parameter held, {layout.kept_bytes} owned{twice}), {times}, 1 GiB + 4% of memory left "
        "free" + "".join([f"; {note}" for note in notes])
    )


def facts_of(
    plan: ParallelPlan, cost: CostModel, simulation: Simulation, num_tokens: int
) -> dict[str, Any]:
    """Return a plan and its simulation as values for JSON."""
    price = cost.cluster.price_of(sorted({cost.node_of_rank[rank] for rank in plan.ranks}))
    per_token = None if price is None else price / 3600 * simulation.iteration_time_s / num_tokens
    return {
        "iteration_time_s": simulation.iteration_time_s,
        "exposed_exchange_s": simulation.exchange_s,
        "optimizer_step_s": simulation.step_s,
        "recompute_s": simulation.recompute_s,
        "tokens_per_iteration": num_tokens,
        "tokens_per_s": simulation.tokens_per_s(num_tokens),
        "price_per_billion_tokens": None if per_token is None else per_token * 1e9,
        "limited_by": simulation.bottleneck,
        "stages": _stage_rows(plan, simulation),
        "plan": plan.to_dict(),
    }


def _stage_rows(plan: ParallelPlan, simulation: Simulation) -> list[dict[str, Any]]:
    """Return one row of plain values for each stage."""
    rows = []
    for pipeline, index, stage in plan.iter_stages():
        known = simulation.stages[pipeline][index]
        memory = known.memory or MemoryTerms()
        rows.append(
            {
                "pipeline": pipeline,
                "stage": index,
                "device": known.device,
                "ranks": list(stage.ranks),
                "tp_degree": stage.tp_degree,
                "first_layer": stage.layers.start,
                "end_layer": stage.layers.stop,
                "num_microbatches": plan.pipelines[pipeline].num_microbatches,
                "microbatch_size": plan.pipelines[pipeline].microbatch_size,
                **stage.recomputation,
                "recompute_s": known.recompute_s,
                "memory_bytes": round(memory.total),
                **{f"{term}_bytes": round(value) for term, value in memory._asdict().items()},
                "host_bytes": round(max(simulation.host_bytes[rank] for rank in stage.ranks)),
                "usable_bytes": round(known.usable_bytes or 0.0),
                "busy": known.busy,
            }
        )
    return rows


def print_json(facts: Mapping[str, Any]) -> None:
    """Print one JSON object."""
    print(json.dumps(facts, indent=1))
