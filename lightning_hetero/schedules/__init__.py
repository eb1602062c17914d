"""Solve the order of a pipeline's passes, for unequal stages, slow links and limited memory.

`ScheduleProblem` has the seconds of all passes and links and the memory of workers, `solve` returns
an order, and `solve_actions` turns it into the lists of actions that the runtime executes.
"""

from lightning_hetero.schedules.problem import Edge, ScheduleProblem, end_s
from lightning_hetero.schedules.solve import (
    Schedule,
    Solution,
    StageTimes,
    as_actions,
    order_1f1b,
    solve,
    solve_actions,
    solve_in_rooms,
    usual_actions,
)

__all__ = [
    "Edge",
    "Schedule",
    "ScheduleProblem",
    "Solution",
    "StageTimes",
    "as_actions",
    "end_s",
    "order_1f1b",
    "solve",
    "solve_actions",
    "solve_in_rooms",
    "usual_actions",
]
