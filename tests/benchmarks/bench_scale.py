"""What one rank does itself in runs of 8 to 4,096 ranks: flat or logarithmic where it can be.

The engine's figures are those of `lone_rank`: the peer of a figure at 1,024 ranks is the same at
64, and the note has all sizes. Rank 0 watches for stragglers by made-up times.

Where a unit has no shard groups a rank's table grows with the ranks; it is computed here by itself.

`--only "TP 8"` takes the plans whose name holds that, `--only control` what has no plan, `--only
tables` those tables, `--only fits` what a whole `Trainer.fit` adds to the engine (`lone_fit`).
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from multiprocessing.connection import Connection
from typing import Any, Literal, TypeVar

import numpy as np

from lightning_hetero.core.plan import ParallelPlan, PipelinePlan, StagePlan
from lightning_hetero.exchange.owners import assign_owners
from lightning_hetero.exchange.slices import Ownership, ParameterSpec
from lightning_hetero.exchange.transfers import TransferTable
from lightning_hetero.straggler.locate import probe_rounds, suspect
from lightning_hetero.straggler.paces import Observation, RankHistory, RankNote
from lightning_hetero.straggler.watch import RunWatch, WatchConfig
from tests.benchmarks.harness import Row
from tests.benchmarks.lone_fit import measure_fit
from tests.benchmarks.lone_rank import (
    NUM_LAYERS,
    NUM_ROWS,
    WEIGHTS,
    WIDTH,
    Case,
    Figures,
    measure,
)
from tests.processes import fork_server
from tests.runtime.generation.virtual_time import form_next

SIZES = (8, 64, 1024, 4096)
NUM_WATCHED = 50
"""Iterations."""
REPEATS = 3
LIMIT_S = 300
"""For each size of a plan, which takes 5 to 10 s of CPU; one that takes longer is left out."""
PLANS: dict[str, dict[str, Any]] = {
    "one-stage plan": {"num_stages": 1},
    "8 stages": {"num_stages": 8},
    "2 stages, TP 4": {"num_stages": 2, "tp_degree": 4},
    "one stage, TP 8": {"num_stages": 1, "tp_degree": 8},
    "8 stages, all ranks own alike": {"num_stages": 8, "ownership": Ownership.EVEN},
}
FITS: dict[str, dict[str, Any]] = {
    "one-stage plan": {"num_stages": 1},
    "8 stages": {"num_stages": 8},
    "one stage, redundancy=1": {"num_stages": 1, "redundancy": 1},
}
_Found = TypeVar("_Found")


def run(only: str = "") -> list[Row]:
    rows = _forming() if only in "control traffic" else []
    rows += _watching() if only in "control traffic" else []
    rows += _tables() if only in "tables" else []
    rows += _fits() if only in "whole fits" else []
    for name in [name for name in PLANS if only in name]:
        cases = [Case(world_size=size, **PLANS[name]) for size in SIZES]
        figures = ((case.world_size, _measure(case)) for case in cases if case.has_other_plan)
        rows += _rows_of(name, {size: item for size, item in figures if item is not None})
    return rows


def _fits() -> list[Row]:
    """The start of a whole `Trainer.fit`, and a step of it."""
    rows = []
    for name, options in FITS.items():
        cases = [Case(world_size=size, **options) for size in SIZES[1:]]
        figures = {case.world_size: _measure(case, measure_fit) for case in cases}
        starts = {size: item.start_s for size, item in figures.items() if item is not None}
        steps = {size: item.step_s for size, item in figures.items() if item is not None}
        rows += [
            _row_of_sizes(f"start of a fit, {name}", "CPU s", starts, 1.0),
            _row_of_sizes(f"step of a fit, {name}", "CPU s", steps, 1.2 * steps[64]),
        ]
    return rows


def _measure(case: Case, work: Callable[[Case], _Found] = measure) -> _Found | None:
    """Measure in a process of its own; None if that takes too long.

    Groups and memory of one case don't show in another.
    """
    context = fork_server()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send_figures, args=(theirs, case, work), daemon=True)
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(LIMIT_S) else None
    finally:
        process.kill()
        process.join()


def _send_figures(connection: Connection, case: Case, work: Callable[[Case], Any]) -> None:
    connection.send(work(case))


def _rows_of(plan: str, figures: dict[int, Figures]) -> list[Row]:
    def row(
        what: str, unit: str, of: Callable[[Figures], float], target: float, *, is_ratio: bool
    ) -> Row:
        found = {size: of(item) for size, item in figures.items()}
        return Row(
            name=f"{what}, {plan}, 1,024 ranks",
            ours=found[1024],
            peer=found[64],
            unit=unit,
            target=target,
            value=found[1024] / max(found[64], 1e-9) if is_ratio else found[1024],
            note="; ".join(f"{size:,}: {value:.4g}" for size, value in found.items()),
        )

    return [
        row("set-up", "CPU s", lambda f: f.set_up_s, 1.0, is_ratio=False),
        row("change to a known plan", "CPU s", lambda f: f.change_s, 0.2, is_ratio=False),
        row("iteration", "CPU s", lambda f: f.iteration_s, 1.2, is_ratio=True),
        row("Python calls an iteration", "", lambda f: f.num_python_calls, 1.05, is_ratio=True),
        row("calls an iteration", "", lambda f: f.num_calls, 1.0, is_ratio=True),
        row("messages an iteration", "", lambda f: f.num_messages, 1.0, is_ratio=True),
        row("groups made", "", lambda f: f.num_groups, 1.2, is_ratio=True),
        row("groups in later iterations", "", lambda f: f.num_late_groups, 0.0, is_ratio=False),
        row("live memory", "MB", lambda f: f.live_bytes / 1e6, 1.5, is_ratio=True),
    ]


def _tables() -> list[Row]:
    """Seconds for what one rank sends, gets and keeps, where ranks are no shard groups."""
    cases: dict[str, tuple[Callable[[int], ParallelPlan], Ownership, int]] = {
        "all ranks own alike": (partial(_equal, tp_degree=1), Ownership.EVEN, 1),
        "TP degrees 8 and 4": (_mixed, Ownership.HOLDERS, 1),
        "TP 8, three blocks": (partial(_equal, tp_degree=8), Ownership.HOLDERS, 3),
    }
    rows = []
    for name, (plan_of, ownership, blocks) in cases.items():
        found = {}
        for size in SIZES[1:]:
            work = partial(_make_table, plan_of(size), _specs(blocks), size, ownership)
            found[size] = statistics.median(_cpu_s(work) for _ in range(REPEATS))
        rows.append(_row_of_sizes(f"table without shard groups, {name}", "CPU s", found, 0.2))
    return rows


def _make_table(
    plan: ParallelPlan, specs: Sequence[ParameterSpec], size: int, ownership: Ownership
) -> None:
    slices = assign_owners(specs, plan, world_size=size, ownership=ownership)
    table = TransferTable(specs, slices, plan)
    for kind in {unit.kind for unit in table.units if 0 in unit.kind.members}:
        for push in (False, True):
            assert kind.shard_groups(push=push) is None
            assert kind.moves(0, push=push)


def _cpu_s(work: Callable[[], None]) -> float:
    start_s = time.process_time()
    work()
    return time.process_time() - start_s


def _specs(blocks: int) -> list[ParameterSpec]:
    """As many weights as `lone_rank` has; the first one of a layer has blocks."""
    shapes = [(blocks * NUM_ROWS, WIDTH)] + [(NUM_ROWS, WIDTH)] * (len(WEIGHTS) - 1)
    return [
        ParameterSpec(
            name=f"{layer}.{index}",
            shape=shape,
            layer=layer,
            tp_dim=0,
            tp_blocks=1 if index else blocks,
        )
        for layer in range(NUM_LAYERS)
        for index, shape in enumerate(shapes)
    ]


def _equal(world_size: int, tp_degree: int) -> ParallelPlan:
    num_stages = 8 if tp_degree == 1 else 1
    return ParallelPlan.even(
        world_size=world_size, num_layers=NUM_LAYERS, num_stages=num_stages, tp_degree=tp_degree
    )


def _mixed(world_size: int) -> ParallelPlan:
    """Return one pipeline of degree 8 for each two of degree 4."""
    degrees = (8, 4, 4) * (world_size // 16)
    firsts = accumulate(degrees, initial=0)
    stages = [
        StagePlan(ranks=tuple(range(first, first + degree)), layers=range(NUM_LAYERS))
        for first, degree in zip(firsts, degrees, strict=False)
    ]
    return ParallelPlan(pipelines=tuple(PipelinePlan(stages=(stage,)) for stage in stages))


def _forming() -> list[Row]:
    """Virtual seconds until the ranks agree on the next generation after a loss, and calls."""
    sizes = [size for size in SIZES if size <= 1024]
    whole = {size: form_next(size) for size in sizes}
    frozen = {size: form_next(size, num_frozen=4, silence_s=2.0) for size in sizes}
    calls = {size: item.num_calls / size for size, item in whole.items()}
    seconds = {size: item.seconds for size, item in whole.items()}
    late = {size: item.seconds - 2.0 for size, item in frozen.items()}
    return [
        _row_of_sizes(
            "calls of the store for each rank and next generation", "", calls, 20.0, "simulated"
        ),
        _row_of_sizes(
            "agreeing on the next generation, virtual time", "s", seconds, 1.0, "simulated"
        ),
        _row_of_sizes(
            "the same after the limit of 2 s, four ranks frozen", "s", late, 2.0, "simulated"
        ),
    ]


def _row_of_sizes(
    name: str,
    unit: str,
    found: dict[int, float],
    target: float,
    kind: Literal["measured", "simulated"] = "measured",
) -> Row:
    return Row(
        name=f"{name}, 1,024 ranks",
        ours=found[1024],
        peer=found.get(64),
        unit=unit,
        target=target,
        kind=kind,
        value=found[1024],
        note="; ".join(f"{size:,}: {value:.4g}" for size, value in sorted(found.items())),
    )


def _watching() -> list[Row]:
    """What rank 0 computes for an iteration, and for a look; the messages are those of a tree."""
    watching, looking = {}, {}
    for size in (*SIZES, 10_000):
        times_s = np.random.default_rng(0).normal(1.0, 0.02, (NUM_WATCHED, size))
        notes = np.zeros((NUM_WATCHED, size, len(RankNote._fields)))
        notes[:, :, 0], notes[:, :, 1] = times_s.max(1, keepdims=True), times_s
        watch = RunWatch(WatchConfig(), report=lambda _: None, say=lambda _: None)
        seconds = []
        for step, rows in enumerate(notes):
            start_s = time.process_time()
            watch.see(step, rows)
            seconds.append(time.process_time() - start_s)
        watching[size] = statistics.median(seconds) * 1e3
        histories = [RankHistory(rank) for rank in range(size)]
        for rank, history in enumerate(histories):
            history.observe(
                Observation(step=0, forward_s=1.0 + (rank == 3), waits_s={rank ^ 1: 0.1})
            )
            history.settle(1)
        reports = [history.report(0) for history in histories]
        start_s = time.process_time()
        suspicion = suspect(reports, iteration_s=1.0)
        probe_rounds(suspicion, size)
        looking[size] = (time.process_time() - start_s) * 1e3
    return [
        _row_of_sizes("rank 0 watches an iteration", "CPU ms", watching, 1.0),
        _row_of_sizes("rank 0 looks who is slow", "CPU ms", looking, 100.0),
    ]
