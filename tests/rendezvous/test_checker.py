import re
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.actions import most_held
from lightning_hetero.core.errors import PlanError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.exchange.owners import assign_owners
from lightning_hetero.exchange.slices import Ownership
from lightning_hetero.exchange.transfers import TransferTable
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


@given(rng=random, rule=RULES)
def test_steps_wait_for_what_they_receive_sends_for_what_they_send_and_receives_come_first(
    rng, rule
):
    """Else the checker would judge lists that block less than what runs."""
    plan, world_size = random_plan(rng)
    counts = tuple(rng.randint(0, 5) for _ in plan.pipelines)
    iteration = Iteration(
        world_size=world_size,
        num_microbatches=counts,
        activation_bytes=100,
        orders_of=rng.choice([usual_actions, random_orders(rng)]),
    )
    for rank, items in operations_of(plan, rule, iteration, tied=True).items():
        at = {item.label: index for index, item in enumerate(items)}
        pulls = {index for label, index in at.items() if label.startswith("pull")}
        for item in items:
            verb, _, step = item.label.rpartition(" ")
            if verb == "send":
                assert item.waits_for == (at.get(f"reduce {step}", at[step]),)
            elif re.fullmatch(r"[FBIW]\d+", item.label):
                received = at.get(f"receive {step}")
                gathered = at.get(f"gather {step}", received)
                assert gathered == received or items[gathered].waits_for == (received,)
                needs = {gathered} - {None} | (pulls if step[0] == "F" else set())
                assert set(item.waits_for) == needs
        place = plan.place(rank)
        if place is None or not place.stage_index:
            continue
        pipeline, count = plan.pipelines[place.pipeline_index], counts[place.pipeline_index]
        before = iteration.orders_of(pipeline.workers, count)[place.stage_index - 1]
        ahead = most_held(before).get(place.stage_index - 1, 0)
        # Activations as far ahead as the stage before may hold, gradients behind activations.
        posted = [at[f"receive header of F{n}"] for n in range(count)]
        steps = [at[f"F{n}"] for n in range(count)]
        assert all(a < b for a, b in zip(steps, posted[ahead:], strict=False))
        assert all(a < b for a, b in zip(posted[ahead:], steps[1:], strict=False))
        gradients = [label for label in at if re.match(r"receive [BI]\d", label)]
        assert all(at[label] > at[f"F{label[9:]}"] for label in gradients)


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


def collective(label: str, ranks: tuple[int, ...] = (0, 1), **more: Any) -> Operation:
    return Operation(
        kind=OperationKind.COLLECTIVE, label=label, communicator=label, ranks=ranks, **more
    )


THERE, BACK = move((0, 1), tag="there", num_bytes=24), move((1, 0), tag="back")
APART = replace(BACK, communicator="backward")
BOTH = replace(THERE, transfers=THERE.transfers + BACK.transfers)
A, B, C = (move(pair, tag=str(pair)) for pair in [(0, 1), (1, 2), (2, 0)])
END = collective("end")
WAIT = Operation(kind=OperationKind.COMPUTE, label="F0", waits_for=(0,))


@pytest.mark.parametrize(
    ("lists", "said"),
    [
        pytest.param(
            {0: (BACK, THERE), 1: (THERE, BACK)},
            ["Deadlock: ranks [0, 1]", "rank 0 operation 0 (move back on 'exchange')", "group the"],
            id="both receive first",
        ),
        pytest.param({0: (THERE, BACK), 1: (BACK, THERE)}, ["Deadlock"], id="both send first"),
        pytest.param({0: (C, A), 1: (A, B), 2: (B, C)}, ["ranks [0, 1, 2]"], id="a ring"),
        pytest.param(
            {0: (APART, WAIT, THERE), 1: (THERE, WAIT, APART)},
            ["(F0)", "'backward'"],
            id="waits for a receive before it sends",
        ),
        pytest.param(
            {0: (THERE, A), 1: (THERE,)},
            ["rank 0 operation 1", "of 4 bytes to rank 1", "no receive"],
            id="no receive",
        ),
        pytest.param(
            {0: (), 1: (THERE,)},
            ["rank 1 operation 0", "of 24 bytes from rank 0", "never sends"],
            id="no send",
        ),
        pytest.param(
            {0: (THERE,), 1: (move((0, 1), tag="there"),)},
            ["24 bytes", "4 bytes", "same order and size"],
            id="another size",
        ),
        pytest.param({0: (THERE,)}, ["rank 1", "no receive"], id="no rank"),
        pytest.param({0: (END,), 1: ()}, ["ranks [0] issue it"], id="a collective of one rank"),
        pytest.param({0: (END,), 1: (replace(END, num_bytes=8),)}, ["0 bytes", "8 bytes"], id="8"),
        pytest.param({0: (END,), 1: (replace(END, ranks=(1,)),)}, ["ranks [1]"], id="other ranks"),
        pytest.param(
            {0: (collective("a"), collective("b")), 1: (collective("b"), collective("a"))},
            ["Deadlock: ranks [0, 1]", "(a on 'a')", "(b on 'b')"],
            id="collectives in opposite order",
        ),
    ],
)
def test_what_blocks_is_found_and_named(lists: Lists, said: list[str]) -> None:
    assert_found(lists, *said)


def test_what_goes_together_or_in_queues_of_its_own_does_not_block() -> None:
    check_rendezvous({0: (BACK, THERE), 1: (BACK, THERE)})
    check_rendezvous({0: (BOTH,), 1: (BOTH,)})
    check_rendezvous({0: (APART, THERE), 1: (THERE, APART)})
    check_rendezvous({0: (END,), 1: (END,)})


@pytest.mark.parametrize(
    ("lists", "said"),
    [
        ({0: (move((1, 2)),), 1: (), 2: ()}, "from rank 1 to rank 2; exactly one end must be"),
        ({0: (move((0, 0)),)}, "from rank 0 to rank 0"),
        *(
            ({0: (replace(WAIT, waits_for=(at,)),)}, rf"\(F0\) waits for operation {at}")
            for at in (0, 1, -1)
        ),
    ],
)
def test_lists_that_no_rank_can_issue_are_refused(lists: Lists, said: str) -> None:
    with pytest.raises(RendezvousError, match=said):
        check_rendezvous(lists)


def two_by_two(*, headers_apart: bool = True) -> Lists:
    plan = ParallelPlan.even(world_size=4, num_layers=4, num_stages=2)
    iteration = Iteration(
        world_size=4,
        num_microbatches=(4, 4),
        activation_bytes=64,
        headers_apart=headers_apart,
    )
    return operations_of(plan, Ownership.HOLDERS, iteration, tied=False)


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
