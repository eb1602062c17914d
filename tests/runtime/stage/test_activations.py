"""Laws of the messages between stages: their sizes are known, and they are let go."""

import pytest

from tests.processes import ProcessPool
from tests.runtime.link_runs import exchange, train_and_count_sends
from tests.runtime.runs import pipeline, plan_of, stage

pytestmark = pytest.mark.dist

THREE = plan_of(pipeline(stage(0, 0, 1), stage(1, 1, 2), stage(2, 2, 3)))


@pytest.mark.parametrize(("first", "second"), [([0], [1]), ([2], [3, 0, 1]), ([3, 0], [2, 1])])
def test_each_message_may_have_other_sizes_and_dtypes(
    pool: ProcessPool, first: list[int], second: list[int]
) -> None:
    # Each group is the smaller one for its own messages, and the larger one for the others'.
    pool.run(exchange, len(first + second), first, second)


def test_a_rank_keeps_no_more_messages_than_may_be_on_their_way(pool: ProcessPool) -> None:
    found = pool.run(train_and_count_sends, 3, THREE, 64)
    # A check with three hidden states comes before the training step, a validation pass behind
    # it; on a new link hidden states that were expected before the first had come, one by the check
    # and two by the validation, are sent in two parts.
    assert [sent for sent, _, _ in found] == [3 + 65 + 66, 3 + 64 + 65 + 66, 64]
    # As many hidden states as the stage holds, and gradients as the one before holds; first two
    # hidden states of the validation in two parts each.
    assert all(most <= limit for (_, most, _), limit in zip(found, [4, 2 + 3, 2], strict=True))
