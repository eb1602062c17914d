"""What one rank does itself in runs of 8 to 4,096 ranks, see `lone_rank`: flat where it can be.

The peer of a figure at 1,024 ranks is the same at 64; the note has all sizes.
"""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

from tests.benchmarks.harness import Row
from tests.benchmarks.lone_rank import Case, Figures, measure
from tests.processes import fork_server

SIZES = (8, 64, 1024, 4096)
PLANS = {
    "one-stage plan": {"num_stages": 1},
    "8 stages": {"num_stages": 8},
    "2 stages, TP 4": {"num_stages": 2, "tp_degree": 4},
}


def run() -> list[Row]:
    rows = []
    # A process for each case: groups and memory of one don't show in another.
    with ProcessPoolExecutor(1, fork_server(), max_tasks_per_child=1) as processes:
        for name, plan in PLANS.items():
            cases = [Case(world_size=size, **plan) for size in SIZES]
            figures = dict(zip(SIZES, processes.map(measure, cases), strict=True))
            rows += _rows_of(name, figures)
    return rows


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
            better="lower",
            kind="measured",
            value=found[1024] / max(found[64], 1e-9) if is_ratio else found[1024],
            note="; ".join(f"{size:,}: {value:.4g}" for size, value in found.items()),
        )

    return [
        row("set-up", "CPU s", lambda f: f.set_up_s, 1.0, is_ratio=False),
        row("change to a known plan", "CPU s", lambda f: f.change_s, 0.2, is_ratio=False),
        row("iteration", "CPU s", lambda f: f.iteration_s, 1.2, is_ratio=True),
        row("calls an iteration", "", lambda f: f.num_calls, 1.0, is_ratio=True),
        row("messages an iteration", "", lambda f: f.num_messages, 1.0, is_ratio=True),
        row("groups made", "", lambda f: f.num_groups, 1.2, is_ratio=True),
        row("groups in later iterations", "", lambda f: f.num_late_groups, 0.0, is_ratio=False),
        row("live memory", "MB", lambda f: f.live_bytes / 1e6, 1.5, is_ratio=True),
    ]
