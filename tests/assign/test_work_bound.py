import functools
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.assign import PipelineCost
from lightning_hetero.planner.proposing.schemes import Scheme, work_lower_bound_s
from tests.assign.cases import costs
from tests.benchmarks.assignment_cases import time_1f1b_s

NUM_DEVICES = {"new": 3, "old": 2}


@functools.cache
def partitions(num_items: int) -> list[np.ndarray]:
    """Return all partitions as the group of each item, numbered in order of their first item."""
    groups: list[tuple[int, ...]] = [()]
    for _ in range(num_items):
        groups = [(*g, new) for g in groups for new in range(max(g, default=-1) + 2)]
    return [np.array(group) for group in groups]


@functools.cache
def fastest_s(cost: PipelineCost, lengths: tuple[int, ...]) -> float:
    """Return the least 1F1B time of all packings and orders of a pipeline's sequences."""
    if not lengths:
        return 0.0
    ends_s = [np.inf]
    for groups in partitions(len(lengths)):
        batches = [np.array(lengths)[groups == index] for index in range(groups.max() + 1)]
        if max(int(batch.sum()) for batch in batches) <= cost.max_len:
            times_s = [sum(cost.a * n * n + cost.b * n for n in b) + cost.c for b in batches]
            for order in itertools.permutations(times_s):
                ends_s.append(time_1f1b_s(order, cost.num_stages))
    return min(ends_s)


def optimum_s(lengths: list[int], schemes: list[Scheme]) -> float:
    """Return the least time of all plans, dispatches, packings and orders."""
    best_s = np.inf
    # A pipeline without sequences takes devices for nothing, so each has one, longest first.
    for pipeline_of in partitions(len(lengths)):
        members = [
            tuple(np.array(lengths)[pipeline_of == index]) for index in range(pipeline_of.max() + 1)
        ]
        for chosen in itertools.product(schemes, repeat=len(members)):
            used = dict.fromkeys(NUM_DEVICES, 0)
            for scheme in chosen:
                for device, count in scheme.devices:
                    used[device] += count
            if all(used[device] <= NUM_DEVICES[device] for device in used):
                ends_s = map(fastest_s, (scheme.cost for scheme in chosen), members)
                best_s = min(best_s, max(ends_s))
    return best_s


PLACES = ((("new", 1),), (("new", 2),), (("old", 1),), (("new", 1), ("old", 1)))


@st.composite
def plan_cases(draw: st.DrawFn) -> tuple[list[int], list[Scheme]]:
    """Draw sequences and schemes on one or two device types."""
    scheme = st.builds(Scheme, cost=costs(), devices=st.sampled_from(PLACES))
    schemes = draw(st.lists(scheme, min_size=1, max_size=3))
    longest = max(scheme.cost.max_len for scheme in schemes)
    return draw(st.lists(st.integers(1, longest), min_size=1, max_size=4)), schemes


@settings(max_examples=30)
@given(plan_cases())
def test_no_plan_or_assignment_ends_before_the_bound(case) -> None:
    lengths, schemes = case
    best_s = optimum_s(lengths, schemes)
    bound_s = work_lower_bound_s(lengths, schemes, NUM_DEVICES)
    assert bound_s <= best_s * (1 + 1e-5)
    if len(lengths) == 1:
        assert bound_s >= best_s * 0.99


def test_work_alone_says_when_devices_of_two_speeds_can_be_done() -> None:
    times = {"max_len": 100, "util_len": 1, "num_stages": 1, "a": 0.0, "c": 0.0}
    schemes = [
        Scheme(cost=PipelineCost(b=1.0, **times), devices=(("new", 1),)),
        Scheme(cost=PipelineCost(b=2.0, **times), devices=(("old", 1),)),
    ]
    # 600 tokens at 2 + 3/2 tokens a second, or 100 where a sequence is quickest.
    assert work_lower_bound_s([100] * 6, schemes, {"new": 2, "old": 3}) == pytest.approx(600 / 3.5)
    assert work_lower_bound_s([100], schemes, {"new": 2, "old": 3}) == pytest.approx(100)
    assert work_lower_bound_s([100], schemes, {"new": 0, "old": 0}) == math.inf
