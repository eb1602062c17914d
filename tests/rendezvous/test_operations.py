import re
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.core.actions import most_held
from lightning_hetero.core.errors import PlanError
from lightning_hetero.core.owners import assign_owners
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.slices import Ownership
from lightning_hetero.core.transfers import TransferTable
from lightning_hetero.schedules import usual_actions
from tests.core.message_lists import pulls_of, pushes_of
from tests.core.sample_plans import random_plan, small_model
from tests.rendezvous.operations import (
    CONTROL,
    EXCHANGE,
    HEADERS,
    Iteration,
    Operation,
    iteration_operations,
    random_orders,
)

RULES = st.sampled_from([Ownership.HOLDERS, Ownership.EVEN, Ownership.PARAMETER])


def table_of(plan: ParallelPlan, world_size: int, rule: Ownership) -> TransferTable:
    specs = small_model(plan.num_layers, tied=True)
    slices = assign_owners(specs, plan, world_size=world_size, ownership=rule)
    return TransferTable(specs, slices, plan)


def random_iteration(
    rng: Random, rule: Ownership
) -> tuple[ParallelPlan, TransferTable, Iteration, dict[int, tuple[Operation, ...]]]:
    plan, world_size = random_plan(rng)
    iteration = Iteration(
        world_size=world_size,
        num_microbatches=tuple(rng.randint(0, 5) for _ in plan.pipelines),
        activation_bytes=100,
        value_bytes=2,
        orders_of=rng.choice([usual_actions, random_orders(rng)]),
    )
    table = table_of(plan, world_size, rule)
    return plan, table, iteration, iteration_operations(plan, table, iteration)


def is_action(item: Operation) -> bool:
    return re.fullmatch(r"[FBIW]\d+", item.label) is not None


@given(rng=st.randoms(use_true_random=False), rule=RULES)
def test_every_rank_pulls_computes_pushes_and_ends_in_that_order(rng, rule):
    plan, _, iteration, operations = random_iteration(rng, rule)
    assert list(operations) == list(range(iteration.world_size))
    for rank, items in operations.items():
        assert items[-1].communicator == CONTROL
        assert items[-1].ranks == tuple(range(iteration.world_size))
        verbs = [item.label.split()[0] for item in items[:-1]]
        order = [{"pull": 0, "push": 2}.get(verb, 1) for verb in verbs]
        assert order == sorted(order)
        units = [int(x.label.split()[-1]) for x in items if x.label.startswith("pull")]
        assert units == sorted(set(units))
        units = [int(x.label.split()[-1]) for x in items if x.label.startswith("push")]
        assert units == sorted(set(units), reverse=True)
        steps = [item.label for item in items if is_action(item)]
        place = plan.place(rank)
        expected = (
            ()
            if place is None
            else iteration.orders_of(
                plan.pipelines[place.pipeline_index].workers,
                iteration.num_microbatches[place.pipeline_index],
            )[place.stage_index]
        )
        assert steps == [str(action) for action in expected]


@given(rng=st.randoms(use_true_random=False), rule=RULES)
def test_a_step_waits_for_what_it_receives_and_a_send_for_what_it_sends(rng, rule):
    _, _, _, operations = random_iteration(rng, rule)
    for items in operations.values():
        position = {item.label: index for index, item in enumerate(items)}
        pulled = {index for index, item in enumerate(items) if item.label.startswith("pull")}
        for item in items:
            if is_action(item):
                needs = set(pulled) if item.label.startswith("F") else set()
                received = position.get(f"receive {item.label}")
                if received is not None:
                    gathered = position.get(f"gather {item.label}", received)
                    assert gathered == received or items[gathered].waits_for == (received,)
                    needs.add(gathered)
                assert set(item.waits_for) == needs
            elif item.label.startswith("send "):
                step = item.label.removeprefix("send ")
                assert item.waits_for == (position.get(f"reduce {step}", position[step]),)


@given(rng=st.randoms(use_true_random=False), rule=RULES)
def test_traffic_is_the_tables_messages_and_one_activation_for_each_border(rng, rule):
    plan, table, iteration, operations = random_iteration(rng, rule)
    total = 0
    for rank, items in operations.items():
        headed = [item for item in items if not item.communicator.startswith(HEADERS)]
        transfers = [transfer for item in headed for transfer in item.transfers]
        messages = [
            m
            for m in [*pulls_of(table, rank), *pushes_of(table, rank)]
            if m.source != m.destination
        ]
        sent = [m.numel * 2 for m in messages if m.source == rank]
        received = [m.numel * 2 for m in messages if m.destination == rank]
        if place := plan.place(rank):
            degrees = plan.pipelines[place.pipeline_index].tp_degrees
            own, stage = degrees[place.stage_index], place.stage_index
            count = iteration.num_microbatches[place.pipeline_index]
            for other in (*degrees[max(stage - 1, 0) : stage], *degrees[stage + 1 : stage + 2]):
                # A larger group puts pieces together.
                received += [100 // own if own > other else 100] * count
        incoming = [item.num_bytes for item in transfers if item.destination == rank]
        assert sorted(incoming) == sorted(received)
        outgoing = [item.num_bytes for item in transfers if item.source == rank]
        assert not Counter(sent) - Counter(outgoing)
        total += sum(outgoing) - sum(incoming)
    assert total == 0


def test_a_rank_without_work_pushes_at_once_and_an_idle_owner_only_exchanges():
    plan = ParallelPlan.even(world_size=2, num_layers=1)
    iteration = Iteration(world_size=3, num_microbatches=(0, 2), activation_bytes=8)
    operations = iteration_operations(plan, table_of(plan, 3, Ownership.EVEN), iteration)
    for rank in (0, 2):
        assert {item.communicator for item in operations[rank]} == {EXCHANGE, CONTROL}
        pushes = [item for item in operations[rank] if item.label.startswith("push")]
        assert pushes
        assert all(item.waits_for == () for item in pushes)
    last_backward = [item.label for item in operations[1]].index("B1")
    pushes = [item for item in operations[1] if item.label.startswith("push")]
    assert all(item.waits_for == (last_backward,) for item in pushes)


@pytest.mark.parametrize("counts", [(), (1,), (1, 2, 3), (1, -1)])
def test_wrong_numbers_of_microbatches_are_refused_by_value(counts):
    plan = ParallelPlan.even(world_size=2, num_layers=1)
    iteration = Iteration(world_size=2, num_microbatches=counts, activation_bytes=8)
    with pytest.raises(PlanError, match="each of the 2 pipelines") as caught:
        iteration_operations(plan, table_of(plan, 2, Ownership.HOLDERS), iteration)
    assert str(list(counts)) in str(caught.value)


def test_too_few_ranks_are_refused():
    plan = ParallelPlan.even(world_size=2, num_layers=1)
    iteration = Iteration(world_size=1, num_microbatches=(1, 1), activation_bytes=8)
    with pytest.raises(PlanError, match="1 processes run"):
        iteration_operations(plan, table_of(plan, 2, Ownership.HOLDERS), iteration)


@given(rng=st.randoms(use_true_random=False), rule=RULES)
def test_receives_are_posted_before_their_senders_can_send(rng, rule):
    """Activations as far ahead as the stage before may hold, gradients behind their activations."""
    plan, _, iteration, operations = random_iteration(rng, rule)
    for rank, items in operations.items():
        position = {item.label: index for index, item in enumerate(items)}
        for forward in (label for label in position if label.startswith("receive F")):
            read = position[f"read header of {forward.removeprefix('receive ')}"]
            assert read < position[forward]
            header = position[forward.replace("receive", "receive header of")]
            assert items[read].waits_for == (header,)
        place = plan.place(rank)
        if place is None or not place.stage_index:
            continue
        count = iteration.num_microbatches[place.pipeline_index]
        workers, before = plan.pipelines[place.pipeline_index].workers, place.stage_index - 1
        ahead = most_held(iteration.orders_of(workers, count)[before]).get(before, 0)
        for index in range(count - ahead):
            assert position[f"F{index}"] < position[f"receive header of F{index + ahead}"]
            if index + 1 < count - ahead:
                assert position[f"receive header of F{index + ahead}"] < position[f"F{index + 1}"]
        for label in (label for label in position if re.match(r"receive [BI]\d", label)):
            assert position[label] > position[f"F{label[9:]}"]
