"""Plans as dictionaries, in few words; and the table of those that many tests run.

All of these have three layers.
"""

from typing import Any

from lightning_hetero import ParallelPlan

Plan = dict[str, Any]


def stage(ranks: int | list[int], first: int, last: int) -> Plan:
    ranks = [ranks] if isinstance(ranks, int) else ranks
    return {"ranks": ranks, "layers": [first, last]}


def pipeline(*stages: Plan, num_microbatches: int | None = None, **sizes: int) -> Plan:
    count = {} if num_microbatches is None else {"num_microbatches": num_microbatches}
    return {"stages": list(stages), **count, **sizes}


def plan_of(*pipelines: Plan) -> Plan:
    return {"pipelines": list(pipelines)}


def size_of(plan: Plan) -> int:
    """Return how many ranks a plan is for."""
    return max(ParallelPlan.from_dict(plan).ranks) + 1


ALONE = plan_of(pipeline(stage(0, 0, 3)))
STAGES = plan_of(pipeline(stage(0, 0, 1), stage(1, 1, 3)))
THREE = plan_of(pipeline(stage(1, 0, 1), stage(0, 1, 2), stage(2, 2, 3)))
COPIES = plan_of(pipeline(stage(0, 0, 3)), pipeline(stage(1, 0, 3)))
UNEQUAL = plan_of(pipeline(stage(0, 0, 3)), pipeline(stage(1, 0, 1), stage(2, 1, 3)))
SHARDED = plan_of(pipeline(stage([0, 1], 0, 3)))
TURNED = plan_of(pipeline(stage(1, 0, 2), stage(0, 2, 3)))
CHAIN = plan_of(pipeline(stage(0, 0, 1), stage(1, 1, 2), stage(2, 2, 3)))
TRIPLE = plan_of(*(pipeline(stage(rank, 0, 3)) for rank in range(3)))
CUT_LATE = plan_of(pipeline(stage(0, 0, 3)), pipeline(stage(1, 0, 2), stage(2, 2, 3)))
