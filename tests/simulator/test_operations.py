"""Propagation over a graph of operations: the same times as a pipeline's own propagation."""

import numpy as np
import pytest

from lightning_hetero.simulator.operations import OperationGraph, propagate_operations
from lightning_hetero.simulator.propagate import PipelineTimes, dependency_order, propagate


@pytest.mark.parametrize("seed", range(10))
def test_a_pipeline_takes_as_long_as_by_its_schedule(seed):
    rng = np.random.default_rng(seed)
    num_stages, num_microbatches = int(rng.integers(1, 6)), int(rng.integers(1, 9))
    forward, backward = rng.random((2, num_stages, num_microbatches))
    # Messages shorter than any action never queue, so links need no order of their own.
    there, back = 1e-3 * rng.random((2, max(num_stages - 1, 0), num_microbatches))
    times = PipelineTimes(
        forward_s=forward.tolist(),
        backward_s=(backward + 0.01).tolist(),
        forward_message_s=there.tolist(),
        backward_message_s=back.tolist(),
    )
    expected = propagate(times, [0.0] * num_stages)
    ops: dict[tuple[int, bool, int], int] = {}
    last: dict[int, int] = {}
    own, waits = [], []
    for stage, is_backward, number in dependency_order(num_stages, num_microbatches):
        source = stage + 1 if is_backward else stage - 1
        message = -1
        if 0 <= source < num_stages:
            row = back[stage] if is_backward else there[source]
            own.append(row[number])
            waits.append([ops[source, is_backward, number], -1])
            message = len(own) - 1
        own.append(times.backward_s[stage][number] if is_backward else forward[stage][number])
        waits.append([message, last.get(stage, -1)])
        ops[stage, is_backward, number] = last[stage] = len(own) - 1
    graph = OperationGraph.build(np.array(waits), np.arange(len(own)))
    ends = propagate_operations(graph, np.array(own), np.zeros(len(own)))
    for stage in range(num_stages):
        assert ends[last[stage]] == pytest.approx(expected.end_s[stage])


def test_members_of_a_group_end_with_the_last():
    waits = np.array([[-1], [-1], [0], [1]])
    graph = OperationGraph.build(waits, np.array([0, 1, 2, 2]))
    ends = propagate_operations(graph, np.array([1.0, 5.0, 0.5, 0.25]), np.zeros(4))
    assert ends.tolist() == [1.0, 5.0, 5.5, 5.25]


def test_a_circle_is_refused():
    with pytest.raises(ValueError, match="circle"):
        OperationGraph.build(np.array([[1], [0]]), np.arange(2))
