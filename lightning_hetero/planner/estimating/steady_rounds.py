"""The pace of a pipeline with many equal micro-batches."""

from functools import lru_cache

import numpy as np

from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.simulator.propagate import EqualTimes

__all__ = ["circle_s", "steady_round_s"]


def steady_round_s(times: EqualTimes, *, blocking: bool = False) -> float:
    """Return by how many seconds each further one of many micro-batches delays the pipeline's end.

    In 1F1B stages u to t wait for each other in a circle: forwards from u to t, backwards from t to
    u, and then the forward on u of the micro-batch that comes t - u + 1 later. The slowest circle
    sets the pace, or a link that is busy for longer.
    """
    work_s = np.add(times.forward_s, times.backward_s)
    hops_s = np.add(times.forward_message_s, times.backward_message_s)
    links_s = (0.0, *times.forward_message_s, *times.backward_message_s)
    return max(float(circle_s(work_s, hops_s, blocking=blocking)), *links_s)


def circle_s(work_s: FloatArray, hops_s: FloatArray, *, blocking: bool = False) -> FloatArray:
    """Return the seconds of a micro-batch in the slowest circle of stages.

    Args:
        work_s: Forward and backward of each stage, [..., stages].
        hops_s: Messages between each two stages, there and back.
        blocking: Whether a message keeps both its ends from computing.
    """
    done = np.zeros((*work_s.shape[:-1], work_s.shape[-1] + 1))
    np.cumsum(work_s, axis=-1, out=done[..., 1:])
    passed = np.cumsum([0.0, 0.0, *hops_s, 0.0])
    first, last = _circles(work_s.shape[-1])
    # A blocking message also keeps the circle's outer stages from computing.
    outer = int(blocking)
    messages_s = passed[last + 1 + outer] - passed[first + 1 - outer]
    circles_s = done[..., last + 1] - done[..., first] + messages_s
    slowest: FloatArray = (circles_s / (last - first + 1)).max(axis=-1)
    return slowest


@lru_cache
def _circles(num_stages: int) -> tuple[IntArray, IntArray]:
    """Return the first and the last stage of every circle."""
    return np.triu_indices(num_stages)
