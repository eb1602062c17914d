"""Grouping equals brute force on small clusters and keeps Eq. 3's constraints on large ones."""

import ast
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero import assign, planner, simulator
from lightning_hetero.core.errors import PlanningError
from tests.planner.cover import cover_bound, solve_cover
from tests.planner.grouping import effective_power, group_devices
from tests.planner.patterns import enumerate_compositions

GIB = 2**30


def best_by_brute_force(counts, powers, memories, minimum, num_microbatches, max_stages):
    """Return the largest (groups x least power) over all partitions of the units."""
    compositions = [
        row
        for row in itertools.product(*(range(count + 1) for count in counts))
        if 0 < sum(row) <= max_stages
        and sum(c * m for c, m in zip(row, memories, strict=True)) >= minimum
    ]
    best = 0.0

    def extend(left, start, num_groups, weakest):
        nonlocal best
        if not any(left):
            best = max(best, num_groups * weakest)
            return
        for index in range(start, len(compositions)):
            row = compositions[index]
            if all(c <= have for c, have in zip(row, left, strict=True)):
                rest = tuple(have - c for c, have in zip(row, left, strict=True))
                power = effective_power(row, powers, num_microbatches)
                extend(rest, index, num_groups + 1, min(weakest, power))

    extend(tuple(counts), 0, 0, float("inf"))
    return best


@st.composite
def problems(draw):
    num_types = draw(st.integers(1, 3))
    counts = draw(
        st.lists(st.integers(0, 8), min_size=num_types, max_size=num_types).filter(
            lambda values: 0 < sum(values) <= 8
        )
    )
    powers = draw(
        st.lists(st.floats(0.2, 5.0), min_size=num_types, max_size=num_types)
        | st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=num_types, max_size=num_types)
    )
    memories = [draw(st.sampled_from([16, 24, 40, 80])) * GIB for _ in range(num_types)]
    minimum = draw(st.sampled_from([0, 20, 50, 100, 200])) * GIB
    return (
        counts,
        powers,
        memories,
        minimum,
        draw(st.sampled_from([1, 2, 8, 64])),
        draw(st.integers(1, 8)),
    )


@settings(max_examples=100, deadline=None)
@given(problems())
def test_grouping_equals_brute_force_up_to_8_units_of_3_types(problem):
    expected = best_by_brute_force(*problem)
    if expected == 0.0:
        with pytest.raises(PlanningError, match="No grouping"):
            group_devices(*problem)
        return
    grouping = group_devices(*problem)
    assert grouping.optimal
    assert grouping.gap == 0.0
    assert grouping.objective == pytest.approx(expected, rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(problems())
def test_groups_keep_every_constraint_of_eq_3(problem):
    counts, powers, memories, minimum, num_microbatches, max_stages = problem
    try:
        grouping = group_devices(*problem)
    except PlanningError:
        return
    groups = grouping.groups
    assert [sum(column) for column in zip(*groups, strict=True)] == list(counts)
    assert all(1 <= sum(group) <= max_stages for group in groups)
    assert all(
        sum(c * m for c, m in zip(group, memories, strict=True)) >= minimum for group in groups
    )
    weakest = min(effective_power(group, powers, num_microbatches) for group in groups)
    assert grouping.objective == pytest.approx(len(groups) * weakest)
    near = group_devices(*problem, max_gap=0.1)
    assert not near.optimal
    assert near.gap <= 0.1
    assert near.objective * 1.1 >= grouping.objective


@pytest.mark.parametrize("counts", [(32, 16, 16), (341, 342, 341), (1024,), (5000, 3000, 2000)])
def test_large_clusters_are_grouped_optimally_and_use_every_unit(counts):
    powers, memories = (1.0, 3.17, 0.47)[: len(counts)], (80, 80, 96)[: len(counts)]
    grouping = group_devices(counts, powers, memories, 170, 32, 32)
    assert grouping.optimal
    assert [sum(column) for column in zip(*grouping.groups, strict=True)] == list(counts)


@settings(max_examples=30, deadline=None)
@given(problems())
def test_the_relaxation_bounds_every_integer_cover(problem):
    counts, _, _, _, _, max_stages = problem
    counts = np.array([count for count in counts if count])
    compositions = enumerate_compositions(counts.tolist(), max_stages)
    bound = cover_bound(compositions, counts, set())
    more = bound.num_groups + 1
    assert solve_cover(compositions, counts, num_groups=more, max_nodes=100_000) is None


def test_a_work_limit_returns_the_best_so_far_with_its_gap():
    grouping = group_devices(
        (97, 89, 83), (1.0, 3.17, 0.47), (80, 80, 96), 170, 32, 32, max_programs=0
    )
    assert not grouping.optimal
    assert 0.0 < grouping.gap < 1.0
    assert [sum(column) for column in zip(*grouping.groups, strict=True)] == [97, 89, 83]


def test_zero_devices_and_unfit_memory_say_what_to_do():
    with pytest.raises(PlanningError, match="no devices"):
        group_devices((0,), (1.0,), (80,), 0, 8, 8)
    with pytest.raises(PlanningError, match="Add devices"):
        group_devices((2,), (1.0,), (10 * GIB,), 30 * GIB, 8, 8)


def test_nothing_that_plans_looks_at_a_clock():
    for room in (planner, assign, simulator):
        for path in Path(room.__file__).parent.rglob("*.py"):
            imports = [
                n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Import)
            ]
            assert not {alias.name for n in imports for alias in n.names} & {"time"}, path
