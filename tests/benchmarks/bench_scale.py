"""What one rank does itself in runs of 8 to 4,096 ranks: flat or logarithmic where it can be.

The engine's figures are those of `lone_rank`: the peer of a figure at 1,024 ranks is the same at
64, and the note has all sizes.

`--only "TP 8"` takes the plans whose name holds that, `--only control` what has no plan, `--only
fits` what a whole `Trainer.fit` adds to the engine (`lone_fit`).
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from tests.benchmarks.harness import Row
from tests.benchmarks.lone_fit import measure_fit
from tests.benchmarks.lone_rank import Case, measure
from tests.processes import fork_server
from tests.runtime.generation.virtual_time import form_next

SIZES = (8, 64, 1024, 4096)
LIMIT_S = 300
"""For each size of a plan, which takes 5 to 10 s of CPU; one that takes longer is left out."""
PLANS: dict[str, dict[str, Any]] = {
    "one-stage plan": {"num_stages": 1},
    "8 stages": {"num_stages": 8},
    "2 stages, TP 4": {"num_stages": 2, "tp_degree": 4},
    "one stage, TP 8": {"num_stages": 1, "tp_degree": 8},
}
FITS: dict[str, dict[str, Any]] = {
    "one-stage plan": {"num_stages": 1},
    "8 stages": {"num_stages": 8},
    "one stage, redundancy=1": {"num_stages": 1, "redundancy": 1},
}


def run(only: str = "") -> list[Row]:
    rows = _forming() if only in "control traffic" else []
    rows += _fits() if only in "whole fits" else []
    for name in [name for name in PLANS if only in name]:
        cases = [Case(world_size=size, **PLANS[name]) for size in SIZES]
        found = _measure([case for case in cases if case.has_other_plan], measure)
        rows += [
            _row(f"set-up, {name}", found["set_up_s"], 1.0),
            _row(f"change to a known plan, {name}", found["change_s"], 0.2),
            _row(f"iteration, {name}", found["iteration_s"], 1.2, is_ratio=True),
        ]
    return rows


def _fits() -> list[Row]:
    """The start of a whole `Trainer.fit`, and a step of it."""
    rows = []
    for name, options in FITS.items():
        found = _measure([Case(world_size=n, **options) for n in SIZES[1:]], measure_fit)
        rows += [
            _row(f"start of a fit, {name}", found["start_s"], 1.0),
            _row(f"step of a fit, {name}", found["step_s"], 1.2, is_ratio=True),
        ]
    return rows


def _measure(cases: list[Case], work: Callable[[Case], Any]) -> dict[str, dict[int, float]]:
    """Return figures by name and world size, each case measured in a process of its own.

    Groups and memory of one case don't show in another; one that takes too long is left out.
    """
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for case in cases:
        context = fork_server()
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_send_figures, args=(theirs, case, work), daemon=True)
        process.start()
        theirs.close()
        try:
            figures = vars(ours.recv()) if ours.poll(LIMIT_S) else {}
        finally:
            process.kill()
            process.join()
        for name, value in figures.items():
            found[name][case.world_size] = value
    return found


def _send_figures(connection: Connection, case: Case, work: Callable[[Case], Any]) -> None:
    connection.send(work(case))


def _forming() -> list[Row]:
    """Virtual seconds until the ranks agree on the next generation after a loss, and calls."""
    sizes = [size for size in SIZES if size <= 1024]
    whole = {size: form_next(size) for size in sizes}
    frozen = {size: form_next(size, num_frozen=4, silence_s=2.0) for size in sizes}
    seconds = {size: item.seconds for size, item in whole.items()}
    late = {size: item.seconds - 2.0 for size, item in frozen.items()}
    return [
        replace(_row(name, found, target), unit="s", kind="simulated")
        for name, found, target in (
            ("agreeing on the next generation, virtual time", seconds, 1.0),
            ("the same after the limit of 2 s, four ranks frozen", late, 2.0),
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
