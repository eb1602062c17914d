from itertools import islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.errors import CheckpointError, ConfigurationError
from lightning_hetero.data.order import Cursor, EpochOrder, Progress
from tests.data.rows import samples_of


@st.composite
def orders(draw: st.DrawFn) -> EpochOrder:
    lengths = draw(st.lists(st.integers(1, 100), min_size=1, max_size=60))
    budget = draw(st.integers(max(lengths), 5 * max(lengths)))
    seed = draw(st.integers(0, 5))
    return EpochOrder(lengths, tokens_per_step=budget, seed=seed)


@settings(deadline=None, max_examples=200)
@given(orders(), st.integers(0, 3))
def test_an_epoch_takes_every_sample_once_in_a_fixed_number_of_iterations(order, epoch) -> None:
    drawn = list(islice(order.draw(Cursor(epoch=epoch)), len(order)))
    assert sorted(samples_of(drawn)) == list(range(order.num_samples))
    assert [item.is_last for item in drawn] == [False] * (len(order) - 1) + [True]
    assert all(item.lengths.tolist() == order.lengths[item.samples].tolist() for item in drawn)
    assert drawn[-1].after.num_samples == order.num_samples
    for before, item in pairwise(drawn):
        assert item.before == before.after


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(1, 5), st.integers(0, 9))
def test_iterations_take_the_budget_on_average_and_differ_by_the_longest_sample(
    lengths, factor, seed
) -> None:
    budget = factor * max(lengths)
    order = EpochOrder(lengths, tokens_per_step=budget, seed=seed)
    even = sum(lengths) / len(order)
    assert even <= budget
    for item in islice(order.draw(Cursor()), len(order)):
        assert abs(int(item.lengths.sum()) - even) <= max(lengths)


@settings(deadline=None, max_examples=200)
@given(orders(), st.data())
def test_from_any_cursor_what_remains_is_what_was_not_consumed(order, data) -> None:
    cursor = Cursor(
        epoch=1,
        num_samples=data.draw(st.integers(0, order.num_samples)),
        num_iterations=data.draw(st.integers(0, len(order) + 1)),
    )
    rest = []
    for item in order.draw(cursor):
        if item.before.epoch != 1:
            break
        rest.append(item)
    assert samples_of(rest) == order.order(1)[cursor.num_samples :].tolist()


@settings(deadline=None, max_examples=100)
@given(orders(), st.data())
def test_going_on_from_a_cut_draws_what_would_have_followed(order, data) -> None:
    drawn = list(islice(order.draw(Cursor()), 2 * len(order)))
    index = data.draw(st.integers(0, len(order)))
    again = list(islice(order.draw(drawn[index].before), 2 * len(order) - index))
    assert [item.samples for item in again] == [item.samples for item in drawn[index:]]
    assert [item.before for item in again] == [item.before for item in drawn[index:]]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    lengths = list(range(1, 100))
    order = EpochOrder(lengths, tokens_per_step=200, seed=1)
    other = EpochOrder(lengths, tokens_per_step=200, seed=2)
    found = {tuple(item.tolist()) for item in (order.order(0), order.order(1), other.order(0))}
    assert len(found) == 3
    plain = EpochOrder(lengths, tokens_per_step=200, shuffle=False)
    assert plain.order(4).tolist() == list(range(99))


def test_impossible_budgets_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="longest sample has 10 tokens"):
        EpochOrder([10, 3, 4], tokens_per_step=9)
    with pytest.raises(ConfigurationError, match="0 samples"):
        EpochOrder([], tokens_per_step=9)


def test_a_state_of_another_order_is_refused() -> None:
    progress = Progress(seed=1, num_samples=10)
    progress.cursor = Cursor(epoch=2, num_samples=4, num_iterations=1)
    state = progress.state_dict()
    with pytest.raises(CheckpointError, match="seed"):
        Progress(seed=2, num_samples=10).load_state_dict(state)
    with pytest.raises(CheckpointError, match="not a cursor"):
        progress.load_state_dict({**state, "cursor": {"epoch": 1}})
    again = Progress(seed=1, num_samples=10)
    again.load_state_dict(state)
    assert again.cursor == progress.cursor
