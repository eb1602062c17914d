"""No operation that the runtime really issues blocks under NCCL's rules.

NCCL isn't here to block. So gloo runs record what each rank issues and waits for, from the first
message of a fit to the last one, and `find_block` executes that.
"""

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from lightning_hetero import ParallelPlan
from tests.core.sample_plans import random_plan
from tests.fits import Case
from tests.plans import CUT_LATE, TRIPLE, TURNED, Plan, pipeline, plan_of, stage
from tests.processes import ProcessPool
from tests.rendezvous.operations import (
    CONTROL,
    EXCHANGE,
    STAGES,
    Lists,
    find_block,
)
from tests.rendezvous.runs import record, record_with_streams

pytestmark = pytest.mark.dist


ROWS = 4
"""Of the batch of each of the first plan's pipelines."""


def case_of(*plans: Plan, num_iterations: int = 3, **more: Any) -> Case:
    """Return a run that changes its plan after each iteration."""
    options = {"whole_after_run": False, **more.pop("options", {})}
    num_pipelines = max(len(plan["pipelines"]) for plan in plans)
    return Case(
        model="validated",
        plan=plans[0],
        later=(*plans[1:], plans[0]) if len(plans) > 1 else (),
        num_rows=ROWS * num_pipelines * num_iterations,
        batch_size=ROWS,
        num_microbatches=2,
        max_steps=num_iterations,
        options=options,
        **more,
    )


def plans_of(case: Case) -> list[ParallelPlan]:
    """Return all plans of a run."""
    return [ParallelPlan.from_dict(plan) for plan in (case.plan or {}, *case.later)]


def random_plans(count: int, num_layers: int, world_size: int) -> Iterator[Plan]:
    rng = Random(5)
    while count:
        plan, size = random_plan(
            rng, max_ranks=world_size, max_layers=num_layers, degrees=(1, 2), has_chunks=True
        )
        if (size, plan.num_layers) == (world_size, num_layers):
            count -= 1
            yield replace(plan, owner_shares=None, host_owners=()).to_dict()


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

TP = {"options": {"tp_plan": TP_PLAN}}
EVEN = {"ownership": "even"}
CASES = {
    "unequal pipelines": case_of(CUT_LATE),
    "changes of plan": case_of(
        CUT_LATE, LONG, TURNED, WITHOUT_WORK, world_size=3, num_iterations=5, tied=True
    ),
    "many micro-batches": case_of(MANY, num_iterations=2, **EVEN),
    "tensor parallelism": case_of(SHARED, SHARED_AND_SINGLE, SPREAD, **TP),
    "chunks": case_of(THERE_AND_BACK, AROUND, num_layers=6, tied=True, num_iterations=5, **EVEN),
    "shared chunks": case_of(TWO_GROUPS, **TP, **EVEN),
    "random plans": case_of(
        *random_plans(6, num_layers=4, world_size=4),
        world_size=4,
        num_layers=4,
        num_iterations=6,
        **TP,
    ),
    "collectives": case_of(TRIPLE, TWO_AND_ONE, CUT_LATE, options={"exchange": "collectives"}),
}


@pytest.fixture(scope="module")
def recorded(pool: ProcessPool) -> dict[str, Lists]:
    return {name: dict(enumerate(pool.run(record, c.size, c))) for name, c in CASES.items()}


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


@pytest.mark.parametrize("name", CASES)
def test_what_a_run_issues_never_blocks_under_the_rules_of_nccl(recorded, name):
    lists, case = recorded[name], CASES[name]
    plans = plans_of(case)
    assert find_block(lists) == ""
    assert find_block(in_one_queue(lists)) == ""
    for rank, items in lists.items():
        queues = {item.communicator for item in items}
        assert {EXCHANGE, CONTROL} <= queues
        assert any(queue.startswith(STAGES) for queue in queues) == any(
            (place := plan.place(rank)) is not None
            and len({s.ranks for s in plan.pipelines[place.pipeline_index].stages}) > 1
            for plan in plans
        )
    shared = {
        item.ranks
        for items in lists.values()
        for item in items
        if item.ranks and not item.communicator.startswith(EXCHANGE)
    }
    shared.discard(tuple(range(case.size)))
    groups = {s.ranks for plan in plans for _, _, s in plan.iter_stages() if s.tp_degree > 1}
    assert shared == {tuple(sorted(ranks)) for ranks in groups if len(ranks) < case.size}


@pytest.mark.parametrize("has_streams", [False, True])
def test_both_legs_of_a_push_by_node_never_block_under_the_rules_of_nccl(pool, has_streams):
    """Whether second legs follow all first ones, or each its own, as where nobody waits for it."""
    plan = plan_of(*(pipeline(stage(rank, 0, 3)) for rank in (3, 0, 2, 1)))
    case = case_of(plan, options={"exchange": "by-node"})
    found = pool.run(record_with_streams if has_streams else record, 4, case, "abab")
    lists = dict(enumerate(found))
    assert find_block(lists) == ""
    assert find_block(in_one_queue(lists)) == ""
    for rank, near in enumerate(("[0, 2]", "[1, 3]") * 2):
        legs = [i.communicator for i in found[rank] if i.label.startswith("all_to_all")]
        legs = legs[-len(legs) // case.max_steps :]
        num_units, both = len(legs) // 2, [f"{EXCHANGE} {near}", EXCHANGE]
        assert num_units > 1
        assert legs == (both * num_units if has_streams else sorted(both * num_units, reverse=True))


def test_an_order_that_is_wrong_on_one_rank_is_found_though_gloo_takes_it(pool):
    found = find_block(dict(enumerate(pool.run(record, 3, CASES["unequal pipelines"], "", 1))))
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
