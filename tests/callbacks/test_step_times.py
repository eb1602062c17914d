import pytest
import torch

from lightning_hetero.callbacks.watching.step_times import StepTimes
from lightning_hetero.core.actions import ActionKind
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.models import pack_samples
from lightning_hetero.models.batches import AssignedBatch, EmptyBatch, work_of
from lightning_hetero.runtime.clock import ActionTime, IterationTimes, MessageTime

PLAN = ParallelPlan.even(world_size=1, num_layers=1, num_stages=1)
FORWARD, BACKWARD = ActionKind.FORWARD, ActionKind.BACKWARD


def test_work_follows_the_tokens_and_in_packed_batches_their_lengths():
    rows = {"ids": torch.zeros(4, 8), "weights": torch.zeros(4)}
    assert work_of(rows) == work_of(torch.zeros(32)) == 32
    short, long = (
        pack_samples([torch.arange(length + 1) for length in lengths])
        for lengths in ([100] * 40, [4000])
    )
    assert work_of(long) > 1.2 * work_of(short)
    parts = AssignedBatch(plan=PLAN, microbatches=(short, long), first_index=0)
    assert work_of(parts) == pytest.approx(work_of(short) + work_of(long))
    assert work_of(EmptyBatch()) == 0.0
    assert work_of("text") == 1.0


def iteration(scale: float) -> IterationTimes:
    actions = [ActionTime(FORWARD, 0, 1.0 * scale, 0.0), ActionTime(FORWARD, 1, 3.0 * scale, 0.0)]
    actions += [ActionTime(BACKWARD, m, 4.0 * scale, 0.0) for m in range(2)]
    messages = (MessageTime(1, 64, 0.5 * scale, False), MessageTime(2, 999, 0.25 * scale, True))
    return IterationTimes(actions=tuple(actions), wait_s=1.0, messages=messages)


def test_a_step_is_all_its_batches():
    times = StepTimes(7)
    for scale in (1.0, 3.0):
        times.begin_batch(torch.zeros(6))
        times.end_batch(iteration(scale), share=0.25)
    seen, seconds = times.finish(8)
    assert seconds > 0.0
    assert times.index == seen.step == 8
    assert (seen.forward_s, seen.backward_s) == (4.0, 8.0)
    assert (seen.work, seen.num_microbatches) == (3.0, 4)
    assert seen.pace == (4.0 + 8.0) / 3.0 / 0.25, "that of the whole model"
    assert seen.waits_s == {1: 2.0, 2: 1.0}
    assert seen.hidden_bytes == 64


def test_late_times_count_with_the_work_of_their_own_batch():
    times = StepTimes(0)
    for index, tokens in enumerate((10, 30, 50)):
        times.begin_batch(torch.zeros(tokens))
        times.end_batch(iteration(float(index)) if index else None, share=0.5, is_late=True)
        observation, iteration_s = times.finish(index + 1)
        assert (iteration_s > 0.0) == (observation.num_microbatches > 0) == (index > 0)
        if index:
            assert observation.work == (0, 10, 30)[index] / 2  # Two micro-batches.
            assert observation.forward_s == 2.0 * index
            assert observation.share == 0.5
