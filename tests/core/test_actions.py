from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.core.actions import (
    Action,
    ActionKind,
    schedule_1f1b,
)

SHAPES = {"num_stages": st.integers(1, 9), "num_microbatches": st.integers(0, 20)}


def schedules(num_stages: int, num_microbatches: int) -> list[tuple[Action, ...]]:
    return [
        schedule_1f1b(stage_index=s, num_stages=num_stages, num_microbatches=num_microbatches)
        for s in range(num_stages)
    ]


@given(**SHAPES)
def test_1f1b_never_holds_more_than_num_stages_activations(num_stages, num_microbatches):
    for stage_index, actions in enumerate(schedules(num_stages, num_microbatches)):
        held, most = 0, 0
        for action in actions:
            held += 1 if action.kind is ActionKind.FORWARD else -1
            most = max(most, held)
        assert held == 0
        assert most == min(num_stages - stage_index, num_microbatches)


@given(**SHAPES)
def test_1f1b_runs_every_microbatch_forward_once_and_then_backward_once(
    num_stages, num_microbatches
):
    for stage_index, actions in enumerate(schedules(num_stages, num_microbatches)):
        position = {action: index for index, action in enumerate(actions)}
        assert len(position) == len(actions) == 2 * num_microbatches
        for m in range(num_microbatches):
            forward = Action(ActionKind.FORWARD, stage_index, m)
            assert position[forward] < position[Action(ActionKind.BACKWARD, stage_index, m)]
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
            order = [action.microbatch_index for action in actions if action.kind is kind]
            assert order == list(range(num_microbatches))


@given(**SHAPES)
def test_1f1b_takes_as_many_slots_as_the_closed_form_says(num_stages, num_microbatches):
    """With equal times a slot long, an iteration takes 2·(M + P - 1) slots."""
    ends: dict[tuple[ActionKind, int, int], int] = {}
    todo = [list(actions) for actions in schedules(num_stages, num_microbatches)]
    clocks = [0] * num_stages
    while any(todo):
        progressed = False
        for s, actions in enumerate(todo):
            if not actions:
                continue
            action = actions[0]
            forward = action.kind is ActionKind.FORWARD
            neighbour = s - 1 if forward else s + 1
            needed = (action.kind, neighbour, action.microbatch_index)
            if 0 <= neighbour < num_stages and needed not in ends:
                continue
            clocks[s] = max(clocks[s], ends.get(needed, 0)) + 1
            ends[action.kind, s, action.microbatch_index] = clocks[s]
            actions.pop(0)
            progressed = True
        assert progressed, "the schedule waits for itself"
    expected = 2 * (num_microbatches + num_stages - 1) if num_microbatches else 0
    assert max(clocks) == expected
