"""Propagation over a graph of operations: the same times as a pipeline's own propagation."""

import numpy as np
import pytest

from lightning_hetero.core.actions import ActionKind, schedule_1f1b
from lightning_hetero.simulator.operations import OperationGraph, propagate_operations
from lightning_hetero.simulator.propagate import EqualTimes, propagate


@pytest.mark.parametrize("seed", range(5))
def test_a_pipeline_takes_as_long_as_by_its_schedule(seed):
    rng = np.random.default_rng(seed)
    num_stages, num_microbatches = int(rng.integers(1, 6)), int(rng.integers(1, 9))
    forward, backward = rng.random((2, num_stages, num_microbatches))
    # Messages shorter than any action never queue, so links need no order of their own.
    there, back = 1e-3 * rng.random((2, max(num_stages - 1, 0), num_microbatches))
    times = [
        EqualTimes(*(tuple(row[:, m]) for row in (forward, backward + 0.01, there, back)), 1)
        for m in range(num_microbatches)
    ]
    expected = propagate(times, [0.0] * num_stages)
    lists = [
        schedule_1f1b(stage_index=s, num_stages=num_stages, num_microbatches=num_microbatches)
        for s in range(num_stages)
    ]
    keys = [(a.stage_index, a.kind, a.microbatch_index) for actions in lists for a in actions]
    index = {key: 2 * i for i, key in enumerate(keys)}  # Each action's message follows it.
    last = {key[0]: index[key] for key in keys}
    own, waits = [], []
    for i, (stage, kind, number) in enumerate(keys):
        is_forward = kind is ActionKind.FORWARD
        source, target = (stage - 1, stage + 1) if is_forward else (stage + 1, stage - 1)
        sender = index.get((source, kind, number), -2) + 1
        before = 2 * i - 2 if i and keys[i - 1][0] == stage else -1
        own.append((forward if is_forward else backward + 0.01)[stage][number])
        waits.append([sender, before])
        sends = 0 <= target < num_stages
        row = there[stage] if is_forward and sends else back[stage - 1] if sends else None
        own.append(0.0 if row is None else row[number])
        waits.append([2 * i, -1])
    graph = OperationGraph.build(np.array(waits), np.arange(len(own)))
    ends = propagate_operations(graph, np.array(own), np.zeros(len(own)))
    for stage in range(num_stages):
        assert ends[last[stage]] == pytest.approx(expected.end_s[stage])


def test_members_of_a_group_end_with_the_last_and_a_cycle_is_refused():
    waits = np.array([[-1], [-1], [0], [1]])
    graph = OperationGraph.build(waits, np.array([0, 1, 2, 2]))
    ends = propagate_operations(graph, np.array([1.0, 5.0, 0.5, 0.25]), np.zeros(4))
    assert ends.tolist() == [1.0, 5.0, 5.5, 5.25]
    with pytest.raises(ValueError, match="cycle"):
        OperationGraph.build(np.array([[1], [0]]), np.arange(2))
