"""Show how two plans differ: `lightning-hetero compare A.json B.json --cluster ...`."""

import argparse
from collections.abc import Sequence
from typing import Any

from lightning_hetero.cli.arguments import add_workload_arguments, cost_of, predict
from lightning_hetero.cli.output import (
    as_rich,
    assumptions_line,
    facts_of,
    output_console,
    print_json,
)
from lightning_hetero.core.errors import PlanError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.simulator import CostModel, devices_line
from lightning_hetero.simulator.exchange import moved_params

_GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    parser.description = "Compare the predicted times and memory of two plans."
    parser.add_argument("plans", metavar="PLAN", nargs=2, help="JSON files of two plans")
    add_workload_arguments(parser, size="derived from the plans and the global batch size")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")


def run_compare(arguments: argparse.Namespace) -> int:
    """Simulate both plans and print what differs."""
    plans = [ParallelPlan.load(path) for path in arguments.plans]
    cost = cost_of(arguments)
    for plan, path in zip(plans, arguments.plans, strict=True):
        try:
            plan.check_num_layers(cost.model.num_layers)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None
    facts = [_facts(plan, cost, arguments) for plan in plans]
    if arguments.json:
        print_json({"plans": dict(zip("AB", facts, strict=True))})
        return 0
    console = output_console()
    for letter, path in zip("AB", arguments.plans, strict=True):
        console.print(f"{letter}  {path}", highlight=False)
    title = f"{cost.model.name} on {devices_line(cost.cluster)}"
    table = as_rich(title, ("what", "A", "B", "B - A"))
    for total in _rows(facts[0], facts[1]):
        table.add_row(*total)
    console.print(table)
    ranks = _rank_rows(cost, facts[0], facts[1])
    if ranks:
        table = as_rich(
            "Ranks that differ",
            ("ranks", "device", "A: layers", "GiB", "busy", "B: layers", "GiB", "busy"),
        )
        for row in ranks:
            table.add_row(*row)
        console.print(table)
    else:
        console.print("Every rank does the same under both plans.", highlight=False)
    console.print(assumptions_line(cost, arguments.precision), highlight=False)
    return 0


def _facts(plan: ParallelPlan, cost: CostModel, arguments: argparse.Namespace) -> dict[str, Any]:
    simulation, batches, num_tokens, _ = predict(plan, cost, arguments)
    hidden = sum(
        2 * (pipeline.num_stages - 1) * sum(map(sum, batches[index]))
        for index, pipeline in enumerate(plan.pipelines)
    )
    return {
        **facts_of(plan, cost, simulation, num_tokens),
        "largest_memory_bytes": max(simulation.memory_bytes),
        "exchanged_bytes": _exchanged_bytes(plan, cost),
        "hidden_state_bytes": cost.model.hidden_bytes(hidden, cost.layout.weight_bytes),
    }


def _exchanged_bytes(plan: ParallelPlan, cost: CostModel) -> float:
    """Return the bytes of weights and gradients that an iteration moves between ranks."""
    layout = cost.layout
    ways = layout.pushed_bytes + (layout.weight_bytes if layout.sharded else 0)
    return moved_params(plan, cost) * ways


def _rows(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return the totals of both plans and their differences."""
    rows = []
    for key, name, unit, form in (
        ("iteration_time_s", "iteration (s)", 1.0, ".4g"),
        ("exposed_exchange_s", "of it exposed exchange and optimizer step (s)", 1.0, ".4g"),
        ("optimizer_step_s", "longest optimizer step, exposed or not (s)", 1.0, ".4g"),
        ("tokens_per_s", "tokens/s", 1.0, ",.0f"),
        ("largest_memory_bytes", "largest memory of a rank (GiB)", _GIB, ",.2f"),
        ("exchanged_bytes", "weights and gradients between pipelines (GiB)", _GIB, ",.2f"),
        ("hidden_state_bytes", "hidden states and gradients in pipelines (GiB)", _GIB, ",.2f"),
        ("price_per_billion_tokens", "price of a billion tokens", 1.0, ",.2f"),
    ):
        if a[key] is None or b[key] is None:
            continue
        first, second = a[key] / unit, b[key] / unit
        change = f"{second - first:+{form}}"
        if first:
            change += f" ({second / first - 1:+.1%})"
        rows.append((name, f"{first:{form}}", f"{second:{form}}", change))
    rows.append(("limited by", a["limited_by"], b["limited_by"], ""))
    return rows


def _rank_rows(cost: CostModel, a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a row for each run of ranks with the same change: their stages in both plans."""
    sides = [_by_rank(facts["stages"]) for facts in (a, b)]
    groups: list[tuple[int, int, tuple[str, ...]]] = []
    for rank in range(cost.cluster.num_ranks):
        idle = ("idle", "", "")
        cells = (sides[0].get(rank, idle), sides[1].get(rank, idle))
        if cells[0] == cells[1]:
            continue
        device = cost.cluster.nodes[cost.node_of_rank[rank]].device
        row = (device, *cells[0], *cells[1])
        if groups and groups[-1][1] == rank - 1 and groups[-1][2] == row:
            groups[-1] = (groups[-1][0], rank, row)
        else:
            groups.append((rank, rank, row))
    return [
        (str(first) if first == last else f"{first}-{last}", *row) for first, last, row in groups
    ]


def _by_rank(stages: Sequence[dict[str, Any]]) -> dict[int, tuple[str, str, str]]:
    return {
        rank: (
            f"{stage['first_layer']}-{stage['end_layer'] - 1}"
            + (f" TP{stage['tp_degree']}" if stage["tp_degree"] > 1 else ""),
            f"{stage['memory_bytes'] / _GIB:.1f}",
            f"{stage['busy']:.0%}",
        )
        for stage in stages
        for rank in stage["ranks"]
    }
