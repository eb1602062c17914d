"""What a rank keeps of what it sent to other stages, under 64 micro-batches and under 4."""

from tests.benchmarks.harness import Row
from tests.processes import ProcessPool
from tests.runtime.link_runs import train_and_count_sends
from tests.runtime.runs import pipeline, plan_of, stage

PLAN = plan_of(pipeline(stage(0, 0, 1), stage(1, 1, 2), stage(2, 2, 3)))


def run() -> list[Row]:
    pool = ProcessPool()
    many, few = (
        max(num_bytes for _, _, num_bytes in pool.run(train_and_count_sends, 3, PLAN, count))
        for count in (64, 4)
    )
    pool.close()
    return [
        Row(
            name="memory of sends under 64 micro-batches",
            ours=many,
            peer=few,
            unit="bytes",
            target=1.0,
            better="lower",
            kind="measured",
            value=many / few,
            note="the same under 4 micro-batches; worst rank of 3 stages, headers included",
        )
    ]
