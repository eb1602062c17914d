"""Pipelines end when a slow walk over the runtime's own action lists says, in few rounds."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.actions import ActionKind, schedule_1f1b
from lightning_hetero.simulator import propagate as module
from lightning_hetero.simulator.propagate import (
    NOTHING,
    NOWHERE,
    EqualTimes,
    PipelineTimes,
    Step,
    propagate,
    run_rounds,
)

seconds = st.one_of(st.sampled_from([0.5, 1.0, 2.0]), st.floats(1e-3, 10.0))


def row_of(draw, count: int) -> tuple[float, ...]:
    return tuple(draw(seconds) for _ in range(count))


def times_of(draw, num_stages: int, kinds: Sequence[int]) -> PipelineTimes:
    """Draw times for micro-batches of some kinds."""

    def rows(count: int) -> list[list[float]]:
        known = [row_of(draw, max(kinds, default=0) + 1) for _ in range(count)]
        return [[row[kind] for kind in kinds] for row in known]

    return PipelineTimes(
        forward_s=rows(num_stages),
        backward_s=rows(num_stages),
        forward_message_s=rows(num_stages - 1),
        backward_message_s=rows(num_stages - 1),
    )


def walk(times: PipelineTimes, start_s: Sequence[float], *, blocking: bool):
    """Run each stage's action list; repeatedly take any stage whose next action may run."""
    num_stages, count = len(start_s), len(times.forward_s[0])
    lists = [
        schedule_1f1b(stage_index=s, num_stages=num_stages, num_microbatches=count)
        for s in range(num_stages)
    ]
    position, free = [0] * num_stages, list(start_s)
    sent_at: dict[tuple[str, int, int], tuple[float, float]] = {}
    ended: set[tuple[str, int, int]] = set()
    link_free: dict[tuple[int, int], float] = {}
    while any(done < len(actions) for done, actions in zip(position, lists, strict=True)):
        for stage, actions in enumerate(lists):
            if position[stage] == len(actions):
                continue
            action = actions[position[stage]]
            is_forward = action.kind is ActionKind.FORWARD
            source = stage - 1 if is_forward else stage + 1
            kind, number = "F" if is_forward else "B", action.microbatch_index
            start = free[stage]
            if 0 <= source < num_stages:
                if (kind, source, number) not in sent_at:
                    continue
                left, message_s = sent_at[kind, source, number]
                start = max(start, left) + message_s if blocking else max(start, left + message_s)
            rows = times.forward_s if is_forward else times.backward_s
            free[stage] = end = start + rows[stage][number]
            target = stage + 1 if is_forward else stage - 1
            if 0 <= target < num_stages:
                message_s = (
                    times.forward_message_s[stage]
                    if is_forward
                    else times.backward_message_s[target]
                )[number]
                left = max(end, link_free.get((stage, target), 0.0))
                sent_at[kind, stage, number] = left, message_s
                link_free[stage, target] = left + message_s
                free[stage] = left + message_s if blocking else end
            ended.add((kind, stage, number))
            position[stage] += 1
    return free, ended


@settings(max_examples=150, deadline=None)
@given(
    st.data(),
    st.integers(1, 7),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 25)), max_size=4),
    st.booleans(),
)
def test_ends_are_those_of_a_walk_over_the_action_lists(data, num_stages, runs, blocking):
    kinds = [kind for kind, count in runs for _ in range(count)]
    times, start = times_of(data.draw, num_stages, kinds), row_of(data.draw, num_stages)
    free, ended = walk(times, start, blocking=blocking)
    found = propagate(times, start, blocking=blocking)
    recorded = propagate(times, start, blocking=blocking, record=True)
    assert found.end_s == pytest.approx(free, rel=1e-7)
    assert recorded.end_s == pytest.approx(free, rel=1e-12)
    assert found.busy_s == recorded.busy_s
    assert {event[:3] for event in recorded.events if event[0] in "FB"} == ended
    for stage in range(num_stages):
        own = [event for event in recorded.events if event[1] == stage and event[0] in "FB"]
        assert found.busy_s[stage] == pytest.approx(sum(end - start for *_, start, end in own))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 6), st.integers(1, 40), st.booleans())
def test_equal_times_are_a_short_form(data, num_stages, count, blocking):
    rows = [row_of(data.draw, num_stages - back // 2) for back in range(4)]
    equal = EqualTimes(*rows, count)
    start = row_of(data.draw, num_stages)
    results = [propagate(t, start, blocking=blocking) for t in (equal, equal.one_by_one())]
    assert results[0] == results[1]


@pytest.mark.parametrize("num_microbatches", [100, 16_384])
def test_rounds_do_not_grow_with_micro_batches(monkeypatch, num_microbatches):
    ran = []
    run = module._State.run
    monkeypatch.setattr(
        module._State,
        "run",
        lambda self, steps, **options: (ran.append(1), run(self, steps, **options)),
    )
    hops = (0.1,) * 7
    times = EqualTimes((1.0,) * 8, (2.0,) * 7 + (2.5,), hops, hops, num_microbatches)
    propagate(times, [0.0] * 8)
    assert len(ran) < 40


def test_other_schedules_are_lists_of_steps():
    """A weight gradient fills the time in which the input gradient is under way."""

    def run(*, split: bool) -> list[float]:
        last, first = [], []
        for _ in range(3):
            last.append(Step(1, 0, 1.0 if split else 2.0, 1, 0.5, 1, ("I", 1, 0)))
            first.append(Step(0, 1, 2.0, NOWHERE, 0.0, NOWHERE, ("B", 0, 0)))
            if split:
                last.append(Step(1, NOTHING, 1.0, NOWHERE, 0.0, NOWHERE, ("W", 1, 0)))
        # One round: each message is read before the next one arrives in its slot.
        pairs = itertools.chain.from_iterable(
            [*last[index * (1 + split) : (index + 1) * (1 + split)], first[index]]
            for index in range(3)
        )
        return run_rounds([(list(pairs), 1)], [0.0, 0.0], num_messages=2)

    assert run(split=False) == [8.5, 6.0]
    assert run(split=True) == [7.5, 6.0]
