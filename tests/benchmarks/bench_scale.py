"""What one rank does itself in runs of 64 to 4,096 ranks: flat or logarithmic where it can be.

A `Trainer.fit` of one rank (`lone_rank`), watched by `StragglerMonitor` and `RunMetrics`: the peer
of a figure at 1,024 ranks is the same at 64, and the note has all sizes. `--only "TP 8"` takes the
plans whose name holds that, `--only control` what has no plan.
"""

from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from tests.benchmarks.harness import Row
from tests.benchmarks.lone_rank import Case, measure
from tests.processes import fork_server
from tests.runtime.generation.virtual_time import form_next

SIZES = (64, 1024, 4096)
LIMIT_S = 300
"""For each size of a plan, which takes 5 to 10 s of CPU; one that takes longer is left out."""
PLANS: dict[str, dict[str, Any]] = {
    "one-stage plan": {"num_stages": 1},
    "8 stages": {"num_stages": 8},
    "2 stages, TP 4": {"num_stages": 2, "tp_degree": 4},
    "one stage, TP 8": {"num_stages": 1, "tp_degree": 8},
    "one stage, redundancy=1": {"num_stages": 1, "redundancy": 1},
}


def run(only: str = "") -> list[Row]:
    rows = _forming() if only in "control traffic" else []
    for name in [name for name in PLANS if only in name]:
        sized = {size: _measure(Case(world_size=size, **PLANS[name])) for size in SIZES}
        found = {size: figures for size, figures in sized.items() if figures}
        starts, changes, steps = (
            {size: figures[key] for size, figures in found.items()}
            for key in ("start_s", "change_s", "step_s")
        )
        rows += [
            _row(f"start of a fit, {name}", starts, 1.0),
            _row(f"change to a known plan, {name}", changes, 0.2),
            _row(f"step of a fit, {name}", steps, 1.2, is_ratio=True),
        ]
    return rows


def _measure(case: Case) -> dict[str, float]:
    """Return a case's figures, measured in a process of its own; none if it takes too long."""
    context = fork_server()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send_figures, args=(theirs, case), daemon=True)
    process.start()
    theirs.close()
    try:
        return vars(ours.recv()) if ours.poll(LIMIT_S) else {}
    finally:
        process.kill()
        process.join()


def _send_figures(connection: Connection, case: Case) -> None:
    connection.send(measure(case))


def _forming() -> list[Row]:
    """Virtual seconds until the ranks agree on the next generation after a loss, and calls."""
    sizes = (8, 64, 1024)
    whole = {size: form_next(size).seconds for size in sizes}
    frozen = {size: form_next(size, num_frozen=4, silence_s=2.0).seconds - 2.0 for size in sizes}
    return [
        replace(_row(name, found, target), unit="s", kind="simulated")
        for name, found, target in (
            ("agreeing on the next generation, virtual time", whole, 1.0),
            ("the same after the limit of 2 s, four ranks frozen", frozen, 2.0),
        )
    ]


def _row(name: str, found: dict[int, float], target: float, *, is_ratio: bool = False) -> Row:
    return Row(
        name=f"{name}, 1,024 ranks",
        ours=found[1024],
        peer=found.get(64),
        unit="CPU s",
        target=target,
        value=found[1024] / found[64] if is_ratio else found[1024],
        note="; ".join(f"{size:,}: {value:.4g}" for size, value in sorted(found.items())),
    )
