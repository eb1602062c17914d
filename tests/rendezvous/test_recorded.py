"""No operation that the runtime really issues blocks under NCCL's rules.

NCCL isn't here to block. So gloo runs record what each rank issues and waits for, from the first
message of a fit to the last one of a test, and `find_block` executes that.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from lightning_hetero import ParallelPlan
from tests.core.sample_plans import random_plan
from tests.plans import CUT_LATE, TRIPLE, TURNED, pipeline, plan_of, stage
from tests.processes import ProcessPool
from tests.rendezvous.operations import (
    CONTROL,
    EXCHANGE,
    STAGES,
    Lists,
    Operation,
    OperationKind,
    Transfer,
    find_block,
)
from tests.rendezvous.runs import Job, record, record_with_streams

pytestmark = pytest.mark.dist


def plans(*found: dict[str, Any]) -> tuple[ParallelPlan, ...]:
    return tuple(map(ParallelPlan.from_dict, found))


def random_plans(count: int, num_layers: int, world_size: int) -> Iterator[ParallelPlan]:
    rng = Random(5)
    while count:
        plan, size = random_plan(
            rng, max_ranks=world_size, max_layers=num_layers, degrees=(1, 2), has_chunks=True
        )
        if (size, plan.num_layers) == (world_size, num_layers):
            count -= 1
            yield replace(plan, owner_shares=None, host_owners=())


LONG = plan_of(pipeline(stage(2, 0, 1), stage(0, 1, 2), stage(1, 2, 3)))
WITHOUT_WORK = plan_of(
    pipeline(stage(0, 0, 3), num_microbatches=0), pipeline(stage(2, 0, 1), stage(1, 1, 3))
)
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
    "unequal pipelines": Job(plans=plans(CUT_LATE), world_size=3),
    "changes of plan": Job(
        plans=plans(CUT_LATE, LONG, TURNED, WITHOUT_WORK), world_size=3, num_iterations=5, tied=True
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
    "random plans": Job(
        plans=tuple(random_plans(6, num_layers=4, world_size=4)),
        world_size=4,
        num_layers=4,
        num_iterations=6,
        options={"tp_plan": TP_PLAN},
    ),
    "collectives": Job(
        plans=plans(TRIPLE, TWO_AND_ONE, CUT_LATE),
        world_size=3,
        options={"exchange": "collectives"},
    ),
}


@pytest.fixture(scope="module")
def recorded(pool: ProcessPool) -> dict[str, Lists]:
    return {name: dict(enumerate(pool.run(record, j.world_size, j))) for name, j in JOBS.items()}


def in_one_queue(lists: Lists) -> Lists:
    """Return the lists where a rank runs one pull or push at a time, whatever the group.

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
    return queued


@pytest.mark.parametrize("name", JOBS)
def test_what_a_run_issues_never_blocks_under_the_rules_of_nccl(recorded, name):
    lists, job = recorded[name], JOBS[name]
    assert find_block(lists) == ""
    assert find_block(in_one_queue(lists)) == ""
    for rank, items in lists.items():
        queues = {item.communicator for item in items}
        assert {EXCHANGE, CONTROL} <= queues
        assert any(queue.startswith(STAGES) for queue in queues) == any(
            (place := plan.place(rank)) is not None
            and len({s.ranks for s in plan.pipelines[place.pipeline_index].stages}) > 1
            for plan in job.plans
        )
    shared = {
        item.ranks
        for items in lists.values()
        for item in items
        if item.ranks and not item.communicator.startswith(EXCHANGE)
    }
    shared.discard(tuple(range(job.world_size)))
    groups = {s.ranks for plan in job.plans for _, _, s in plan.iter_stages() if s.tp_degree > 1}
    assert shared == {tuple(sorted(ranks)) for ranks in groups if len(ranks) < job.world_size}


@pytest.mark.parametrize("has_streams", [False, True])
def test_both_legs_of_a_push_by_node_never_block_under_the_rules_of_nccl(pool, has_streams):
    """Whether second legs follow all first ones, or each its own, as where nobody waits for it."""
    plan = plan_of(*(pipeline(stage(rank, 0, 3)) for rank in (3, 0, 2, 1)))
    job = Job(plans=plans(plan), world_size=4, nodes="abab", options={"exchange": "by-node"})
    found = pool.run(record_with_streams if has_streams else record, 4, job)
    lists = dict(enumerate(found))
    assert find_block(lists) == ""
    assert find_block(in_one_queue(lists)) == ""
    for rank, near in enumerate(("[0, 2]", "[1, 3]") * 2):
        legs = [i.communicator for i in found[rank] if i.label.startswith("all_to_all")]
        legs = legs[-len(legs) // job.num_iterations :]
        num_units, both = len(legs) // 2, [f"{EXCHANGE} {near}", EXCHANGE]
        assert num_units > 1
        assert legs == (both * num_units if has_streams else sorted(both * num_units, reverse=True))


def test_an_order_that_is_wrong_on_one_rank_is_found_though_gloo_takes_it(pool):
    job = replace(JOBS["unequal pipelines"], num_iterations=1, swaps_pulls=1)
    found = find_block(dict(enumerate(pool.run(record, 3, job))))
    assert all(part in found for part in ("rank 1", "'pull.post 0'", "'pull.post 1'")), found


def test_one_communicator_for_both_directions_of_a_pipeline_would_block(recorded):
    """A stage posts receives ahead of what it sends: its sends would wait behind them."""
    lists = {
        rank: tuple(
            replace(item, communicator="both") if item.communicator.startswith(STAGES) else item
            for item in items
        )
        for rank, items in recorded["changes of plan"].items()
    }
    assert "'both'" in find_block(lists)


def move(*transfers: tuple[int, int], tag: str = "x", num_bytes: int = 4) -> Operation:
    """Return a transfer of the given (source, destination) pairs on the exchange communicator."""
    members = tuple(Transfer(a, b, num_bytes, tag) for a, b in transfers)
    label = f"move {tag}"
    return Operation(
        kind=OperationKind.TRANSFER, label=label, communicator=EXCHANGE, transfers=members
    )


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
        ([(BACK, THERE), (THERE, BACK)], "rank 0 operation 0 (move back on 'exchange'); rank 1"),
        ([(THERE, BACK), (BACK, THERE)], "rank 0 operation 0 (move there on 'exchange'); rank 1"),
        ([(C, A), (A, B), (B, C)], "rank 2 operation 0"),
        ([(APART, WAIT, THERE), (THERE, WAIT, APART)], "(move back on 'backward')"),
        ([(THERE, A), (THERE,)], "wait for ever: rank 0 operation 1"),
        ([(), (THERE,)], "wait for ever: rank 1 operation 0"),
        ([(THERE,), (move((0, 1), tag="there"),)], "num_bytes=24"),
        ([(END,), ()], "rank 0 operation 0 (end on 'end')"),
        ([(END,), (replace(END, num_bytes=8),)], "These differ: rank 0 operation 0"),
        ([(collective("a"), collective("b")), (collective("b"), collective("a"))], "rank 1"),
        ([(BACK, THERE), (BACK, THERE)], ""),
        ([(BOTH,), (BOTH,)], ""),
        ([(APART, THERE), (THERE, APART)], ""),
        ([(END,), (END,)], ""),
    ],
)
def test_what_blocks_is_found_and_nothing_else(lists: list[Sequence[Operation]], said: str) -> None:
    found = find_block(dict(enumerate(lists)))
    assert (said in found) if said else (found == "")
