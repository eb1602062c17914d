"""No operation that the runtime really issues blocks under NCCL's rules.

NCCL isn't here to block. So gloo runs record what each rank issues and waits for, from the first
message of a fit to the last one of a test, and the checker executes that.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from lightning_hetero import ParallelPlan
from lightning_hetero.runtime.stage.messages import LENGTHS_BYTES
from tests.processes import ProcessPool
from tests.rendezvous.checker import RendezvousError, check_rendezvous
from tests.rendezvous.operations import (
    CONTROL,
    EXCHANGE,
    HEADERS,
    STAGES,
    Operation,
    OperationKind,
)
from tests.rendezvous.recorder import REST
from tests.rendezvous.runs import Found, Job, record, record_with_streams
from tests.rendezvous.stepwise import runs_through
from tests.rendezvous.test_checker import Lists, assert_found, swapped
from tests.runtime.runs import pipeline, plan_of, stage

pytestmark = pytest.mark.dist


def plans(*found: dict[str, Any]) -> tuple[ParallelPlan, ...]:
    return tuple(map(ParallelPlan.from_dict, found))


UNEQUAL = plan_of(pipeline(stage(0, 0, 3)), pipeline(stage(1, 0, 2), stage(2, 2, 3)))
LONG = plan_of(pipeline(stage(2, 0, 1), stage(0, 1, 2), stage(1, 2, 3)))
IDLE = plan_of(pipeline(stage(1, 0, 2), stage(0, 2, 3)))
WITHOUT_WORK = plan_of(
    pipeline(stage(0, 0, 3), num_microbatches=0), pipeline(stage(2, 0, 1), stage(1, 1, 3))
)
EQUAL = plan_of(*(pipeline(stage(rank, 0, 3)) for rank in range(3)))
TWO_AND_ONE = plan_of(
    pipeline(stage(0, 0, 2), stage(1, 2, 3)), pipeline(stage(2, 0, 3), num_microbatches=1)
)
MANY = plan_of(pipeline(stage(0, 0, 1), stage(1, 1, 3), num_microbatches=4))
SHARED = plan_of(pipeline(stage([0, 1], 0, 2), stage([2, 3], 2, 3)))
SHARED_AND_SINGLE = plan_of(pipeline(stage([0, 2], 0, 3)), pipeline(stage(1, 0, 1), stage(3, 1, 3)))
SPREAD = plan_of(pipeline(stage(2, 0, 1), stage([3, 0], 1, 2), stage(1, 2, 3)))
THERE_AND_BACK = plan_of(
    pipeline(*(stage(rank, i, i + 1) for i, rank in enumerate([0, 1, 2, 2, 1, 0])))
)
AROUND = plan_of(pipeline(*(stage(i % 3, i, i + 1) for i in range(6)), num_microbatches=4))
TWO_GROUPS = plan_of(pipeline(*(stage(g, i, i + 1) for i, g in enumerate([[0, 1], 2, [0, 1]]))))
TP_PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

JOBS = {
    "unequal pipelines": Job(plans=plans(UNEQUAL), world_size=3),
    "changes of plan": Job(
        plans=plans(UNEQUAL, LONG, IDLE, WITHOUT_WORK), world_size=3, num_iterations=5, tied=True
    ),
    "many micro-batches": Job(
        plans=plans(MANY), world_size=2, num_iterations=2, options={"ownership": "even"}
    ),
    "tensor parallelism": Job(
        plans=plans(SHARED, SHARED_AND_SINGLE, SPREAD),
        world_size=4,
        options={"tp_plan": TP_PLAN},
    ),
    "chunks": Job(
        plans=plans(THERE_AND_BACK, AROUND),
        world_size=3,
        num_layers=6,
        tied=True,
        num_iterations=5,
        options={"ownership": "even"},
    ),
    "shared chunks": Job(
        plans=plans(TWO_GROUPS),
        world_size=3,
        options={"tp_plan": TP_PLAN, "ownership": "even"},
    ),
    "collectives": Job(
        plans=plans(EQUAL, TWO_AND_ONE, UNEQUAL),
        world_size=3,
        options={"exchange": "collectives"},
    ),
}


@pytest.fixture(scope="module")
def recorded(pool: ProcessPool) -> dict[str, list[Found]]:
    return {name: pool.run(record, job.world_size, job) for name, job in JOBS.items()}


def lists_of(found: Sequence[Found]) -> Lists:
    return {rank: item.operations for rank, item in enumerate(found)}


@pytest.mark.parametrize("name", JOBS)
def test_what_a_run_issues_never_blocks_under_the_rules_of_nccl(recorded, name):
    lists = lists_of(recorded[name])
    check_rendezvous(lists)
    assert runs_through(lists)
    job = JOBS[name]
    for rank, items in lists.items():
        queues = {item.communicator for item in items}
        assert {EXCHANGE, CONTROL} <= queues
        assert any(queue.startswith(STAGES) for queue in queues) == any(
            (place := plan.place(rank)) is not None
            and plan.pipelines[place.pipeline_index].num_stages > 1
            for plan in job.plans
        )
    assert runs_in_one_queue(lists)
    shared = {
        item.ranks
        for items in lists.values()
        for item in items
        if item.ranks and not item.communicator.startswith(EXCHANGE)
    }
    shared.discard(tuple(range(job.world_size)))
    groups = {s.ranks for plan in job.plans for _, _, s in plan.iter_stages() if s.tp_degree > 1}
    assert shared == {tuple(sorted(ranks)) for ranks in groups}


@pytest.mark.parametrize("has_streams", [False, True])
def test_both_legs_of_a_push_by_node_never_block_under_the_rules_of_nccl(pool, has_streams):
    """Whether second legs follow all first ones, or each its own, as where nobody waits for it."""
    plan = plan_of(*(pipeline(stage(rank, 0, 3)) for rank in (3, 0, 2, 1)))
    job = Job(plans=plans(plan), world_size=4, nodes="abab", options={"exchange": "by-node"})
    found = pool.run(record_with_streams if has_streams else record, 4, job)
    lists = lists_of(found)
    check_rendezvous(lists)
    assert runs_through(lists)
    assert runs_in_one_queue(lists)
    for rank, near in enumerate(("[0, 2]", "[1, 3]") * 2):
        legs = [
            item.communicator
            for item in found[rank].iterations[-1]
            if item.label.startswith("all_to_all")
        ]
        num_units, both = len(legs) // 2, [f"{EXCHANGE} {near}", EXCHANGE]
        assert num_units > 1
        assert legs == (both * num_units if has_streams else sorted(both * num_units, reverse=True))


def runs_in_one_queue(lists: Lists) -> bool:
    """Return whether pulls and pushes run through if a rank runs one at a time, whatever the group.

    So many kernels of communicators can be on a device that one has to wait for another.
    """
    queued = {}
    for rank, items in lists.items():
        last, waiting = None, []
        for position, item in enumerate(items):
            if item.communicator.startswith(EXCHANGE):
                before = item.waits_for if last is None else (*item.waits_for, last)
                last, item = position, replace(item, waits_for=before)
            waiting.append(item)
        queued[rank] = tuple(waiting)
    check_rendezvous(queued)
    return runs_through(queued)


Message = tuple[int, int, int]


def messages_of(items: Sequence[Operation]) -> dict[str, list[list[Message]]]:
    """Return by communicator the groups of messages in the order issued."""
    queues: dict[str, list[list[Message]]] = defaultdict(list)
    parts: dict[tuple[int, int], list[int]] = defaultdict(list)
    for item in items:
        for x in item.transfers if item.communicator.endswith(REST) else ():
            parts[x.source, x.destination].append(x.num_bytes)
    rests = {ends: iter(sizes) for ends, sizes in parts.items()}
    for item in items:
        # What ranks agree on travels beside the headers, and behind all actions.
        is_agreed = item.communicator == CONTROL and not re.search(r" [FB]\d", item.label)
        if item.kind is OperationKind.TRANSFER and not is_agreed:
            if item.communicator.endswith(REST):
                continue
            found = sorted((x.source, x.destination, x.num_bytes) for x in item.transfers)
            # Headers of pieces have a queue of their own beside what all ranks agree on.
            name = CONTROL if item.communicator.startswith(HEADERS) else item.communicator
            # On a new link what doesn't fit into buffers follows, which the model leaves out.
            (source, destination, num_bytes), *_ = found
            if num_bytes == LENGTHS_BYTES and name.startswith((STAGES, CONTROL)):
                found = [(source, destination, num_bytes + next(rests[source, destination]))]
            queues[name].append(found)
    return dict(queues)


@pytest.mark.parametrize("name", JOBS)
def test_an_iteration_issues_the_messages_of_its_model(recorded, name):
    for found in recorded[name]:
        assert len(found.iterations) == len(found.expected) == JOBS[name].num_iterations
        for issued, expected in zip(found.iterations, found.expected, strict=True):
            assert messages_of(issued) == messages_of(expected)
            assert collectives_of(issued) == collectives_of(expected)


def collectives_of(items: Sequence[Operation]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return pulls and pushes of units by collectives, in the order issued."""
    return [
        (
            item.communicator,
            re.sub(r"^(all|reduce)_\S+ |\.post|of unit ", "", item.label),
            item.ranks,
        )
        for item in items
        if item.kind is OperationKind.COLLECTIVE and item.communicator.startswith(EXCHANGE)
    ]


def test_pieces_of_another_size_in_a_recorded_collective_are_found(recorded):
    lists = lists_of(recorded["collectives"])
    items = list(lists[1])
    place = next(i for i, x in enumerate(items) if x.transfers and "all_to_all" in x.label)
    first = items[place].transfers[0]
    larger = replace(first, num_bytes=first.num_bytes + 4)
    items[place] = replace(items[place], transfers=(larger, *items[place].transfers[1:]))
    assert_found(lists | {1: tuple(items)}, "all_to_all_single", f"of {first.num_bytes} bytes")


def test_each_unit_is_one_collective_each_way_and_no_iteration_makes_a_group(recorded):
    job = JOBS["collectives"]
    for found in recorded["collectives"]:
        for issued in found.iterations:
            together = collectives_of(issued)
            assert len(set(together)) == len(together) <= 2 * (job.num_layers + 2)
            names = {item.communicator.split(" ")[0] for item in issued if item.communicator}
            assert names <= {EXCHANGE, STAGES, CONTROL}
            assert not any(x.transfers for x in issued if x.label.startswith("batch_isend"))


def test_what_ranks_agree_on_goes_up_a_tree_and_is_broadcast(recorded):
    for found in recorded["unequal pipelines"]:
        # Objects travelled in earlier iterations, as there was something new to tell.
        control = [item for item in found.iterations[-1] if item.communicator == CONTROL]
        assert control[-1].label.startswith("broadcast")
        assert all(item.transfers for item in control[:-1])
        assert 1 <= len(control[:-1]) <= 2


def test_an_order_that_is_wrong_on_one_rank_is_found_though_gloo_takes_it(pool):
    job = replace(JOBS["unequal pipelines"], num_iterations=1, swaps_pulls=1)
    assert_found(lists_of(pool.run(record, 3, job)), "rank 1", "'pull.post 0'", "'pull.post 1'")


def test_wrong_orders_planted_in_a_recorded_run_are_found(recorded):
    lists = lists_of(recorded["unequal pipelines"])
    labels = [item.label for item in lists[0]]
    pull, push = (labels.index(f"batch_isend_irecv {what}.post 1") for what in ("pull", "push"))
    assert_found(lists | {0: swapped(lists[0], pull, push)}, "'push.post 1'", "'pull.post 1'")
    first, second = [
        position for position, item in enumerate(lists[2]) if item.communicator.startswith(STAGES)
    ][:2]
    assert_found(lists | {2: swapped(lists[2], first, second)}, "'F0'", "'F1'")


def test_one_communicator_for_both_directions_of_a_pipeline_would_block(recorded):
    lists = {
        rank: tuple(
            replace(item, communicator="both") if item.communicator.startswith(STAGES) else item
            for item in items
        )
        for rank, items in lists_of(recorded["changes of plan"]).items()
    }
    with pytest.raises(RendezvousError, match="'both'"):
        check_rendezvous(lists)
