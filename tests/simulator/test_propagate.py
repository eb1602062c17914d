"""Pipelines end when a slow walk over the runtime's own action lists says, in few rounds."""

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.actions import Action, ActionKind, schedule_1f1b
from lightning_hetero.core.errors import PlanError
from lightning_hetero.schedules import Edge, ScheduleProblem, as_actions, solve
from lightning_hetero.simulator.propagate import EqualTimes, Orders, propagate

seconds = st.one_of(st.sampled_from([0.5, 1.0, 2.0]), st.floats(1e-3, 10.0))


def row_of(draw, count: int) -> tuple[float, ...]:
    return tuple(draw(seconds) for _ in range(count))


def times_of(draw, num_stages: int, kinds: Sequence[int]) -> list[EqualTimes]:
    """Draw times for micro-batches of some kinds, one after another."""
    known = {kind: equal_of(draw, num_stages, 1) for kind in sorted(set(kinds))}
    return [known[kind] for kind in kinds]


def equal_of(draw, num_stages: int, count: int) -> EqualTimes:
    rows = [row_of(draw, num_stages - back // 2) for back in range(4)]
    return EqualTimes(*rows, count)


def lists_1f1b(num_stages: int, count: int) -> Orders:
    return [
        schedule_1f1b(stage_index=s, num_stages=num_stages, num_microbatches=count)
        for s in range(num_stages)
    ]


def walk(times: Sequence[EqualTimes], start_s: Sequence[float], lists: Orders, *, blocking: bool):
    """Run each stage's action list; repeatedly take any stage whose next action may run."""
    num_stages = len(start_s)
    position, free = [0] * num_stages, list(start_s)
    sent_at: dict[tuple[str, int, int], tuple[float, float]] = {}
    ended: set[tuple[str, int, int]] = set()
    link_free: dict[tuple[int, int], float] = {}
    while any(done < len(actions) for done, actions in zip(position, lists, strict=True)):
        for stage, actions in enumerate(lists):
            if position[stage] == len(actions):
                continue
            kind, number = actions[position[stage]].kind, actions[position[stage]].microbatch_index
            run, step = times[number], 1 if kind == "F" else 0 if kind == "W" else -1
            start, source, target = free[stage], stage - step, stage + step
            if step and 0 <= source < num_stages:
                if (source, step, number) not in sent_at:
                    continue
                left, message_s = sent_at[source, step, number]
                start = max(start, left) + message_s if blocking else max(start, left + message_s)
            weight_s = run.weight_s[stage] if kind in "IW" else 0.0
            backward_s = run.backward_s[stage] - weight_s
            seconds_of = {"F": run.forward_s[stage], "W": weight_s}
            free[stage] = end = start + seconds_of.get(kind, backward_s)
            if step and 0 <= target < num_stages:
                row = run.forward_message_s if step == 1 else run.backward_message_s
                message_s = row[min(stage, target)]
                left = max(end, link_free.get((stage, target), 0.0))
                sent_at[stage, step, number] = left, message_s
                link_free[stage, target] = left + message_s
                free[stage] = left + message_s if blocking else end
            ended.add((kind.value, stage, number))
            position[stage] += 1
    return free, ended


@settings(max_examples=150)
@given(
    st.data(),
    st.integers(1, 7),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 25)), max_size=4),
    st.booleans(),
)
def test_ends_are_those_of_a_walk_over_the_action_lists(data, num_stages, runs, blocking):
    kinds = [kind for kind, count in runs for _ in range(count)]
    times, start = times_of(data.draw, num_stages, kinds), row_of(data.draw, num_stages)
    lists = lists_1f1b(num_stages, len(kinds))
    free, ended = walk(times, start, lists, blocking=blocking)
    found = propagate(times, start, blocking=blocking)
    recorded = propagate(times, start, blocking=blocking, record=True)
    listed = propagate(times, start, orders=lists, blocking=blocking, record=True)
    assert found.end_s == pytest.approx(free, rel=1e-7)
    assert recorded.end_s == pytest.approx(free, rel=1e-12)
    assert found.busy_s == recorded.busy_s
    assert {event[:3] for event in recorded.events if event[0] in "FB"} == ended
    assert sorted(listed.events) == sorted(recorded.events)
    assert replace(listed, events=()) == replace(recorded, events=())
    for stage in range(num_stages):
        own = [event for event in recorded.events if event[1] == stage and event[0] in "FB"]
        assert found.busy_s[stage] == pytest.approx(sum(end - start for *_, start, end in own))


@settings(max_examples=60)
@given(st.data(), st.integers(1, 6), st.integers(1, 40), st.booleans())
def test_a_run_of_equal_micro_batches_is_a_short_form(data, num_stages, count, blocking):
    run, start = equal_of(data.draw, num_stages, count), row_of(data.draw, num_stages)
    singles = [replace(run, num_microbatches=1)] * count
    short, long = (propagate(t, start, blocking=blocking) for t in (run, singles))
    assert short.end_s == pytest.approx(long.end_s, rel=1e-7)
    assert short.busy_s == pytest.approx(long.busy_s)


def test_the_work_does_not_grow_with_equal_micro_batches():
    def seconds_of(count: int) -> float:
        hops = (0.1,) * 7
        times, tries = EqualTimes((1.0,) * 8, (2.0,) * 7 + (2.5,), hops, hops, count), []
        for _ in range(5):
            begin = time.process_time()
            propagate(times, [0.0] * 8)
            tries.append(time.process_time() - begin)
        return min(tries)

    assert seconds_of(1_000_000) < 4 * seconds_of(100)


@settings(max_examples=20)
@given(st.data(), st.integers(1, 5), st.integers(1, 8), st.floats(1.0, 2.0), st.booleans())
def test_solved_orders_end_when_the_solver_says(data, num_stages, count, depth, is_split):
    run = equal_of(data.draw, num_stages, count)
    free = (0.0,) * (num_stages - 1)
    weight_s = tuple(0.4 * is_split * seconds for seconds in run.backward_s)
    run = replace(run, forward_message_s=free, backward_message_s=free, weight_s=weight_s)
    problem = ScheduleProblem.equal(
        forward_s=run.forward_s,
        input_s=[a - b for a, b in zip(run.backward_s, weight_s, strict=True)],
        weight_s=weight_s,
        num_microbatches=count,
        most_held=[depth * num_stages] * num_stages,
    )
    solution = solve(problem)
    orders = [
        [Action(ActionKind("FIW"[kind]), stage, m) for kind, stage, m in order]
        for order in solution.orders
    ]
    start = [0.0] * num_stages
    found = propagate(run, start, orders=orders)
    assert max(found.end_s) == pytest.approx(solution.end_s)
    singles = [replace(run, num_microbatches=1)] * count
    assert found.end_s == pytest.approx(walk(singles, start, orders, blocking=False)[0])


def test_orders_that_wait_for_each_other_are_refused():
    forward, backward = (Action(kind, 0, 0) for kind in (ActionKind.FORWARD, ActionKind.BACKWARD))
    orders = [[backward, forward], lists_1f1b(2, 1)[1]]
    with pytest.raises(PlanError, match="wait for each other"):
        propagate(EqualTimes((1.0, 1.0), (1.0, 1.0), (0.0,), (0.0,), 1), [0.0, 0.0], orders=orders)


@given(st.data(), st.integers(1, 8))
def test_workers_with_several_stages_end_when_the_solver_says(data, count):
    row = data.draw(st.lists(st.integers(0, 2), min_size=2, max_size=6))
    workers = [[*dict.fromkeys(row)].index(worker) for worker in row]
    forward, backward, share = row_of(data.draw, len(row)), row_of(data.draw, len(row)), 0.5
    message = data.draw(seconds)
    hops = tuple(message * (a != b) for a, b in pairwise(workers))
    problem = ScheduleProblem.equal(
        forward_s=forward,
        input_s=[value * (1 - share) for value in backward],
        weight_s=[value * share for value in backward],
        num_microbatches=count,
        edges=[Edge(transfer_s=hop) for hop in hops],
        workers=workers,
    )
    weights = tuple(value * share for value in backward)
    times = EqualTimes(forward, backward, hops, hops, count, weights)
    found = solve(problem)
    begin = [0.0] * len(row)
    line = propagate(times, begin, orders=as_actions(found.orders), workers=workers, record=True)
    assert max(line.end_s) == pytest.approx(found.end_s)
    busy = [sum(count * (forward[s] + backward[s]) for s in stages_of(workers, w)) for w in workers]
    assert line.busy_s == pytest.approx(busy)
    for stage, end in enumerate(line.end_s):
        kinds = {(kind, stage) for kind in "FIW"}
        assert end == max(event[4] for event in line.events if event[:2] in kinds)
    assert max(propagate(times, begin, workers=workers).end_s) > 0


def stages_of(workers: Sequence[int], worker: int) -> list[int]:
    return [stage for stage, other in enumerate(workers) if other == worker]
