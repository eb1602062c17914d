"""Orders of a pipeline's passes, solved for unequal stages, slow links and the room there is.

`ScheduleProblem` says what takes how long, `solve` returns an order and a lower bound, and
`solve_actions` turns it into the lists of actions that the runtime executes.
"""

from lightning_hetero.schedules.actions import StageTimes, solve_actions
from lightning_hetero.schedules.bound import lower_bound_s
from lightning_hetero.schedules.problem import Edge, ScheduleProblem
from lightning_hetero.schedules.solve import Solution, solve

__all__ = [
    "Edge",
    "ScheduleProblem",
    "Solution",
    "StageTimes",
    "lower_bound_s",
    "solve",
    "solve_actions",
]
