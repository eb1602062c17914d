"""In the memory of orders that were published, and on stages that these are made for, ours isn't
slower: interleaved 1F1B (Narayanan et al. 2021), ZB-V (Qi et al. 2024), DualPipeV (DeepSeek 2025).
"""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
from torch import nn
from torch.distributed.pipelining import schedules as published

from lightning_hetero.schedules import ScheduleProblem, end_s, solve
from lightning_hetero.schedules.problem import FORWARD, INPUT, WEIGHT, Orders, Pass

KINDS = {
    "FORWARD": (FORWARD,),
    "FULL_BACKWARD": (INPUT, WEIGHT),
    "BACKWARD_INPUT": (INPUT,),
    "BACKWARD_WEIGHT": (WEIGHT,),
}


def orders_of(name: str, num_ranks: int, count: int) -> Orders:
    """Return the orders of a schedule of torch's, with two stages on each rank."""
    stages = [
        SimpleNamespace(
            group_size=num_ranks,
            group_rank=0,
            num_stages=2 * num_ranks,
            stage_index=index * num_ranks,
            is_first=not index,
            is_last=False,
            has_backward=True,
            submod=None,
        )
        for index in range(2)
    ]
    runtime = published._PipelineScheduleRuntime
    with mock.patch.object(runtime, "_prepare_schedule_with_comms"):
        schedule = getattr(published, name)(stages, count, loss_fn=nn.functional.mse_loss)

    def passes(action: object) -> list[Pass]:
        parts = getattr(action, "sub_actions", None) or [action]
        return [
            (kind, part.stage_index, part.microbatch_index)
            for part in parts
            for kind in KINDS[part.computation_type.name]
        ]

    return tuple(
        tuple(item for action in actions if action is not None for item in passes(action))
        for _, actions in sorted(schedule.pipeline_order.items())
    )


def peak(problem: ScheduleProblem, order: tuple[Pass, ...]) -> float:
    used = most = 0.0
    for kind, stage, m in order:
        held, waiting = problem.held_bytes[stage][m], problem.waiting_bytes[stage][m]
        used += (held, waiting - held, -waiting)[kind]
        most = max(most, used)
    return most


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("per_rank", [2, 3, 4])
@pytest.mark.parametrize(
    "name",
    [
        "ScheduleInterleaved1F1B",
        "ScheduleInterleavedZeroBubble",
        "ScheduleZBVZeroBubble",
        "ScheduleDualPipeV",
    ],
)
def test_ours_are_never_slower_in_the_same_memory(name: str, per_rank: int, num_ranks: int) -> None:
    count, ranks = per_rank * num_ranks, [*range(num_ranks)]
    is_v = not name.startswith("ScheduleInterleaved")
    workers = ranks + (ranks[::-1] if is_v else ranks)
    problem = ScheduleProblem.equal(
        forward_s=[1.0] * len(workers),
        input_s=[1.0] * len(workers),
        weight_s=[1.0] * len(workers),
        num_microbatches=count,
        workers=workers,
    )
    theirs = orders_of(name, num_ranks, count)
    room = tuple(peak(problem, order) for order in theirs)
    ours = solve(replace(problem, room_bytes=room))
    assert ours.end_s <= end_s(problem, theirs) + 1e-9
