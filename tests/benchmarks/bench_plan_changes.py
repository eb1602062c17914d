"""Resident memory over 1,000 changes among 8 plans, 0.8 MB of weights each; the worst rank's."""

from tests.benchmarks.harness import Row
from tests.processes import ProcessPool
from tests.runtime.plan_changes import change_often

NUM_CHANGES = 1000
NUM_WARMING = 700
"""Changes after which the allocator has what it needs."""


def run() -> list[Row]:
    pool = ProcessPool()
    pool.run(change_often, 2, NUM_WARMING, 0)
    grown = max(left.grown_mb for left in pool.run(change_often, 2, NUM_CHANGES, 0))
    pool.close()
    return [
        Row(
            name="resident memory over 1,000 changes of plan",
            ours=grown,
            peer=None,
            unit="MB",
            target=1.0,
            better="lower",
            kind="measured",
            value=grown,
            note="growth on 2 ranks among 8 plans, 0.8 MB of weights",
        )
    ]
