from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.errors import PlanError
from lightning_hetero.core.owners import assign_owners
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.slices import Ownership
from lightning_hetero.core.transfers import TransferTable
from lightning_hetero.schedules import usual_actions
from tests.core.sample_plans import random_plan, small_model
from tests.rendezvous.checker import RendezvousError, check_rendezvous
from tests.rendezvous.operations import (
    EXCHANGE,
    STAGES,
    Iteration,
    Operation,
    OperationKind,
    Transfer,
    iteration_operations,
    random_orders,
)
from tests.rendezvous.stepwise import runs_through

RULES = st.sampled_from([Ownership.HOLDERS, Ownership.EVEN, Ownership.PARAMETER])
random = st.randoms(use_true_random=False)
Lists = dict[int, tuple[Operation, ...]]


def operations_of(
    plan: ParallelPlan, rule: Ownership, iteration: Iteration, *, tied: bool
) -> Lists:
    specs = small_model(plan.num_layers, tied=tied)
    slices = assign_owners(specs, plan, world_size=iteration.world_size, ownership=rule)
    return iteration_operations(plan, TransferTable(specs, slices, plan), iteration)


def random_operations(
    rng: Random, rule: Ownership, *, max_ranks: int, max_layers: int, max_microbatches: int
) -> Lists:
    plan, world_size = random_plan(
        rng, max_ranks=max_ranks, max_layers=max_layers, has_chunks=rng.random() < 0.5
    )
    iteration = Iteration(
        world_size=world_size,
        num_microbatches=tuple(rng.randint(0, max_microbatches) for _ in plan.pipelines),
        activation_bytes=rng.randint(1, 9),
        orders_of=rng.choice([usual_actions, random_orders(rng)]),
        collective_of=rng.choice([lambda _: "", lambda members: f"{EXCHANGE} {members}"]),
    )
    return operations_of(plan, rule, iteration, tied=rng.random() < 0.5)


@given(rng=random, rule=RULES)
def test_no_small_plan_blocks(rng, rule):
    check_rendezvous(random_operations(rng, rule, max_ranks=16, max_layers=6, max_microbatches=6))


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), rule=RULES)
def test_no_plan_of_up_to_64_ranks_blocks(seed, rule):
    check_rendezvous(
        random_operations(Random(seed), rule, max_ranks=64, max_layers=24, max_microbatches=12)
    )


@pytest.mark.parametrize("rule", [Ownership.HOLDERS, Ownership.EVEN])
@pytest.mark.parametrize(("num_stages", "tp_degree"), [(1, 1), (8, 1), (64, 1), (4, 4)])
def test_no_even_plan_of_64_ranks_blocks(num_stages, tp_degree, rule):
    num_layers = max(8, num_stages)
    plan = ParallelPlan.even(
        world_size=64, num_layers=num_layers, num_stages=num_stages, tp_degree=tp_degree
    )
    for collective_of in (lambda _: "", lambda members: f"{EXCHANGE} {members}"):
        iteration = Iteration(
            world_size=64,
            num_microbatches=(16,) * plan.num_pipelines,
            activation_bytes=8,
            collective_of=collective_of,
        )
        check_rendezvous(operations_of(plan, rule, iteration, tied=True))


def swapped(items: tuple[Operation, ...], first: int, second: int) -> tuple[Operation, ...]:
    """Return the list with two operations swapped; waits that would point ahead are dropped."""
    order = list(range(len(items)))
    order[first], order[second] = order[second], order[first]
    place = {old: new for new, old in enumerate(order)}
    return tuple(
        replace(
            items[old],
            waits_for=tuple(
                place[needed] for needed in items[old].waits_for if place[needed] < new
            ),
        )
        for new, old in enumerate(order)
    )


@settings(max_examples=150)
@given(rng=random, rule=RULES, num_faults=st.integers(0, 2))
def test_the_checker_agrees_with_ranks_that_run_step_by_step(rng, rule, num_faults):
    lists = random_operations(rng, rule, max_ranks=4, max_layers=3, max_microbatches=3)
    for _ in range(num_faults):
        rank = rng.choice(list(lists))
        items = lists[rank]
        fault = rng.choice(["swap", "drop", "resize"])
        index = rng.randrange(len(items))
        if fault == "swap":
            lists[rank] = swapped(items, index, rng.randrange(len(items)))
        elif fault == "drop" and items[index].transfers:
            smaller = replace(items[index], transfers=items[index].transfers[1:])
            lists[rank] = (*items[:index], smaller, *items[index + 1 :])
        elif fault == "resize" and items[index].transfers:
            first = items[index].transfers[0]
            larger = replace(first, num_bytes=first.num_bytes + 1)
            changed = replace(items[index], transfers=(larger, *items[index].transfers[1:]))
            lists[rank] = (*items[:index], changed, *items[index + 1 :])
    assert_checker_is_right(lists)


def move(*transfers: tuple[int, int], tag: str = "x", num_bytes: int = 4) -> Operation:
    """Return a transfer of the given (source, destination) pairs on the exchange communicator."""
    members = tuple(Transfer(a, b, num_bytes, tag) for a, b in transfers)
    label = f"move {tag}"
    return Operation(
        kind=OperationKind.TRANSFER, label=label, communicator=EXCHANGE, transfers=members
    )


@settings(max_examples=200)
@given(rng=random, num_ranks=st.integers(2, 4), num_messages=st.integers(1, 8))
def test_the_checker_agrees_on_messages_in_any_order(rng, num_ranks, num_messages):
    """Like messages match whatever their order, so that only deadlocks are left to find."""
    lists: dict[int, list[Operation]] = {rank: [] for rank in range(num_ranks)}
    for _ in range(num_messages):
        pair = rng.sample(range(num_ranks), 2)
        queue = rng.choice(["forward", "backward"])
        for rank in pair:
            lists[rank].append(replace(move((pair[0], pair[1])), communicator=queue))
    for rank, items in lists.items():
        if rng.random() < 0.5:
            first, second = rng.randrange(len(items) + 1), rng.randrange(len(items) + 1)
            items[min(first, second) : max(first, second)] = reversed(
                items[min(first, second) : max(first, second)]
            )
        if len(items) > 1 and rng.random() < 0.3 and items[0].communicator == items[1].communicator:
            both = items[0].transfers + items[1].transfers
            lists[rank] = items = [replace(items[0], transfers=both), *items[2:]]
        if items and rng.random() < 0.3:
            position = rng.randrange(len(items))
            wait = Operation(kind=OperationKind.COMPUTE, label="F0", waits_for=(position,))
            items.insert(position + 1, wait)
    assert_checker_is_right({rank: tuple(items) for rank, items in lists.items()})


def assert_checker_is_right(lists: Lists) -> None:
    try:
        check_rendezvous(lists)
    except RendezvousError:
        assert not runs_through(lists)
    else:
        assert runs_through(lists)


def assert_found(lists: Lists, *said: str) -> None:
    with pytest.raises(RendezvousError) as caught:
        check_rendezvous(lists)
    assert isinstance(caught.value, PlanError)
    for part in said:
        assert part in str(caught.value)
    assert not runs_through(lists)


def test_two_peers_that_both_receive_first_deadlock_unless_grouped():
    there, back = move((0, 1), tag="there"), move((1, 0), tag="back")
    assert_found(
        {0: (back, there), 1: (there, back)},
        "Deadlock: ranks [0, 1]",
        "rank 0 operation 0 (move back on 'exchange')",
        "rank 1 operation 0 (move there on 'exchange')",
        "group the sends and receives",
    )
    check_rendezvous({0: (there, back), 1: (there, back)})
    both = replace(there, transfers=there.transfers + back.transfers)
    check_rendezvous({0: (both,), 1: (both,)})


def test_two_peers_that_both_send_first_deadlock_too():
    there, back = move((0, 1), tag="there"), move((1, 0), tag="back")
    assert_found({0: (there, back), 1: (back, there)}, "Deadlock", "'exchange'")


def test_a_ring_of_three_deadlocks_and_all_three_are_named():
    a, b, c = (move(pair, tag=str(pair)) for pair in [(0, 1), (1, 2), (2, 0)])
    assert_found({0: (c, a), 1: (a, b), 2: (b, c)}, "Deadlock: ranks [0, 1, 2]")


def test_queues_of_their_own_part_what_one_queue_would_block():
    there, back = move((0, 1), tag="there"), move((1, 0), tag="back")
    apart = replace(back, communicator="backward")
    check_rendezvous({0: (apart, there), 1: (there, apart)})
    # Waiting for the receive before sending blocks again, whatever the communicators.
    compute = Operation(kind=OperationKind.COMPUTE, label="F0", waits_for=(0,))
    assert_found({0: (apart, compute, there), 1: (there, compute, apart)}, "(F0)", "'backward'")


def test_a_missing_receive_or_send_is_named_with_both_ranks():
    there, tail = move((0, 1), tag="there", num_bytes=24), move((0, 1), tag="tail")
    assert_found(
        {0: (there, tail), 1: (there,)},
        "rank 0 operation 1 (move tail on 'exchange') sends 'tail' of 4 bytes to rank 1",
        "no receive",
    )
    assert_found(
        {0: (), 1: (there,)},
        "rank 1 operation 0 (move there on 'exchange') receives 'there' of 24 bytes from rank 0",
        "never sends",
    )
    assert_found({0: (there,)}, "rank 1", "no receive")


def test_a_message_of_another_size_is_named_with_both_sizes():
    assert_found(
        {0: (move((0, 1), num_bytes=24),), 1: (move((0, 1), num_bytes=28),)},
        "rank 0 operation 0",
        "24 bytes",
        "rank 1 operation 0",
        "28 bytes",
        "same order and size",
    )


def test_a_collective_that_a_rank_lacks_or_sees_otherwise_is_found():
    both = Operation(
        kind=OperationKind.COLLECTIVE, label="end", communicator="control", ranks=(0, 1)
    )
    check_rendezvous({0: (both,), 1: (both,)})
    assert_found({0: (both,), 1: ()}, "'control'", "ranks [0, 1]", "ranks [0] issue it")
    assert_found({0: (both,), 1: (replace(both, num_bytes=8),)}, "0 bytes", "8 bytes")
    alone = replace(both, ranks=(1,))
    assert_found({0: (both,), 1: (alone,)}, "ranks [0, 1]", "ranks [1]")


def test_collectives_in_opposite_order_on_two_communicators_deadlock():
    a = Operation(kind=OperationKind.COLLECTIVE, label="a", communicator="a", ranks=(0, 1))
    b = replace(a, label="b", communicator="b")
    assert_found({0: (a, b), 1: (b, a)}, "Deadlock: ranks [0, 1]", "(a on 'a')", "(b on 'b')")


def test_a_message_between_other_ranks_or_to_oneself_is_refused():
    with pytest.raises(RendezvousError, match="from rank 1 to rank 2; exactly one end must be"):
        check_rendezvous({0: (move((1, 2)),), 1: (), 2: ()})
    with pytest.raises(RendezvousError, match="from rank 0 to rank 0"):
        check_rendezvous({0: (move((0, 0)),)})


@pytest.mark.parametrize("position", [0, 1, -1])
def test_waiting_for_what_is_not_issued_yet_is_refused(position):
    item = Operation(kind=OperationKind.COMPUTE, label="F0", waits_for=(position,))
    with pytest.raises(RendezvousError, match=rf"\(F0\) waits for operation {position}"):
        check_rendezvous({0: (item,)})


def two_by_two(*, headers_apart: bool = True) -> Lists:
    plan = ParallelPlan.even(world_size=4, num_layers=4, num_stages=2)
    iteration = Iteration(
        world_size=4,
        num_microbatches=(4, 4),
        activation_bytes=64,
        headers_apart=headers_apart,
    )
    return operations_of(plan, Ownership.HOLDERS, iteration, tied=False)


def test_two_units_pulled_in_another_order_on_one_rank_are_found():
    lists = two_by_two()
    first, second = [index for index, item in enumerate(lists[2]) if item.label.startswith("pull")][
        :2
    ]
    lists[2] = swapped(lists[2], first, second)
    assert_found(lists, "rank 2", "rank 0", "'pull -1'", "'pull 0'", "'exchange'")


def test_a_push_that_one_rank_issues_before_its_pull_is_found():
    lists = two_by_two()
    labels = [item.label for item in lists[0]]
    lists[0] = swapped(lists[0], labels.index("pull of unit 1"), labels.index("push of unit 1"))
    assert_found(lists, "'push 1'", "'pull 1'")


def test_one_queue_for_both_directions_of_a_pipeline_is_found():
    """Why each sender and receiver have a communicator of their own.

    A stage posts receives ahead of what it sends; on one communicator its sends would wait for what
    the other stage sends only after it has received them.
    """
    check_rendezvous(two_by_two(headers_apart=False))
    lists = {
        rank: tuple(
            replace(item, communicator="both") if item.communicator.startswith(STAGES) else item
            for item in items
        )
        for rank, items in two_by_two(headers_apart=False).items()
    }
    assert_found(lists, "Deadlock", "'both'")
