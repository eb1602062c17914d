"""Producers plan ahead; whatever becomes of them, every rank deals the same samples once."""

import os
import signal
import threading
import time
from collections import Counter
from dataclasses import replace
from itertools import islice
from random import Random
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.actions import Assignment
from lightning_hetero.core.errors import (
    BatchError,
    ConfigurationError,
    PeerError,
)
from lightning_hetero.data import ahead
from lightning_hetero.data.ahead import AheadPlanner, AssignmentStore
from lightning_hetero.data.candidates import Candidates, assumed_costs, fill_empty
from lightning_hetero.data.loader import Ticket, TicketDealer
from lightning_hetero.data.order import Cursor, EpochOrder
from lightning_hetero.data.streams import StreamOrder
from lightning_hetero.straggler.prediction import move_ranks
from tests.core.sample_plans import random_plan
from tests.data.rows import Rows, dealers, equal_candidates, lengths_of, request


@st.composite
def runs(draw: st.DrawFn) -> tuple[Candidates, int]:
    """Draw candidate plans of one model and the number of ranks."""
    rng = Random(draw(st.integers(0, 10_000)))
    plans, world_sizes = [], []
    for _ in range(draw(st.integers(1, 3))):
        plan, world_size = random_plan(rng, max_ranks=6, max_layers=4, degrees=(1, 2))
        plans.append(replace(plan, owner_shares=None))  # They are for one world size.
        world_sizes.append(world_size)
    costs = tuple(assumed_costs(plan, context_length=40, tokens_per_step=150) for plan in plans)
    return Candidates(plans=tuple(plans), costs=costs), max(world_sizes)


def by_pipeline(candidates: Candidates, tickets: list[Ticket]) -> list[int]:
    """Check one iteration's tickets of all ranks against each other; return its samples."""
    plan = tickets[0].plan
    assert all(ticket.plan is plan for ticket in tickets)
    assert candidates.plans is not None
    assert plan in candidates.plans
    samples: list[int] = []
    first_index = 0
    for pipeline in plan.pipelines:
        own = {tickets[rank].microbatches for rank in pipeline.ranks}
        assert len(own) == 1, "ranks of a pipeline differ"
        assert {tickets[rank].first_index for rank in pipeline.ranks} == {first_index}
        (batches,) = own
        first_index += len(batches)
        samples += [index for batch in batches for index in batch]
    idle = set(range(len(tickets))) - set(plan.ranks)
    assert all(tickets[rank].microbatches == () for rank in idle)
    return samples


@settings(max_examples=60)
@given(runs(), runs(), st.integers(0, 3), st.data())
def test_every_sample_once_an_epoch_also_if_plans_and_ranks_change_in_it(
    first, second, seed, data
) -> None:
    lengths = lengths_of(data.draw(st.integers(1, 60)), longest=40, seed=seed)
    order = EpochOrder(lengths, tokens_per_step=150, seed=seed)
    cut = data.draw(st.integers(0, len(order)))
    seen: list[int] = []
    cursor = Cursor()
    for (candidates, world_size), count in ((first, cut), (second, len(order) - cut)):
        ranks = [dealer.deal(cursor) for dealer in dealers(order, candidates, world_size)]
        for tickets in islice(zip(*ranks, strict=True), count):
            found = by_pipeline(candidates, list(tickets))
            index = candidates.plans.index(tickets[0].plan)
            for j in range(candidates.plans[index].num_pipelines):
                rank = candidates.plans[index].pipelines[j].ranks[0]
                limit = candidates.costs[index][j].max_len
                for batch in tickets[rank].microbatches:
                    assert sum(lengths[i] for i in batch) <= limit
            assert sum(lengths[i] for i in found) <= 150 + max(lengths)
            seen += found
            cursor = tickets[0].after
    assert sorted(seen) == list(range(len(lengths)))


@settings(max_examples=40)
@given(runs(), st.data())
def test_other_plans_hold_for_all_ranks_from_the_first_iteration_that_was_not_drawn(
    run, data
) -> None:
    candidates, world_size = run
    taken_by = dict(enumerate(data.draw(st.permutations(range(world_size)))))
    moved = replace(
        candidates, plans=tuple(move_ranks(plan, taken_by) for plan in candidates.plans)
    )
    lengths = lengths_of(100, longest=40)
    order = EpochOrder(lengths, tokens_per_step=150)
    last_before = data.draw(st.integers(0, len(order) - 1))
    ranks = dealers(order, candidates, world_size)
    seen: list[int] = []
    ran: Counter[Any] = Counter()
    since = {len(order)}
    for number, tickets in enumerate(zip(*(rank.deal(Cursor()) for rank in ranks), strict=True)):
        seen += by_pipeline(moved if number >= max(since) else candidates, list(tickets))
        ran[tickets[0].plan] += 1
        if number == last_before:
            since = {rank.set_candidates(moved) for rank in ranks}
    assert len(since) == 1
    assert sorted(seen) == list(range(len(lengths)))
    assert all(rank.num_dealt == ran for rank in ranks)


@settings(max_examples=40)
@given(runs(), st.integers(0, 4), st.data())
def test_an_iteration_is_assigned_alike_wherever_a_run_began_and_however_far_it_looks_ahead(
    run, num_ahead, data
) -> None:
    candidates, _ = run
    order = EpochOrder(lengths_of(60, longest=40), tokens_per_step=150)
    whole = list(dealers(order, candidates, 1)[0].deal(Cursor()))
    start = data.draw(st.integers(1, len(whole) - 1))
    planner = AheadPlanner(AssignmentStore())
    planner.num_ahead = num_ahead
    resumed = TicketDealer(order, planner, candidates)
    assert list(resumed.deal(whole[start - 1].after)) == whole[start:]


def test_ranks_that_draw_different_samples_are_told() -> None:
    orders = [EpochOrder(lengths_of(50), tokens_per_step=100, seed=seed) for seed in (0, 1)]
    rows = [Rows([9] * 50).rows for _ in range(2)]
    streams = [
        StreamOrder(items, tokens_per_step=100, context_length=20)
        for items in (rows[0], rows[1][::-1])
    ]
    for sources in (orders, streams):
        store = AssignmentStore()
        first, second = (dealers(s, equal_candidates(2), 2, store)[0] for s in sources)
        assert next(first.deal(Cursor()))
        with pytest.raises(BatchError, match="different samples for the same iteration"):
            next(second.deal(Cursor()))


@pytest.mark.parametrize("kind", ["memory", "torch"])
def test_the_first_text_counts_and_goes_when_all_have_read_it(kind: str) -> None:
    if kind == "memory":
        store = AssignmentStore()
    else:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store = AssignmentStore(dist.PrefixStore("run", server))
    assert store.wait("key", 0.01) is None
    threading.Timer(0.05, store.publish, ("key", "first")).start()
    assert store.wait("key", 100.0) == "first"
    assert store.publish("key", "second") == "first"
    store.retire("key", 2)
    assert store.wait("key", 0.0) == "first"
    store.retire("key", 2)
    assert store.wait("key", 0.0) is None
    if kind == "torch":
        assert not [key for key in server.list_keys() if "key" in key]


def test_a_store_whose_server_has_gone_is_an_error_that_names_it() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    store = AssignmentStore(client)
    store.publish("key", "text")
    del server
    for ask in (
        lambda: store.publish("other", "text"),
        lambda: store.wait("key", 1.0),
        lambda: store.retire("key", 2),
    ):
        with pytest.raises(PeerError, match="Rank 0 died or stopped answering"):
            ask()


def test_what_is_planned_too_late_changes_nothing_and_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    order = EpochOrder(lengths_of(150), tokens_per_step=100, seed=1)
    candidates = equal_candidates(3)
    usual = [rank.deal(Cursor()) for rank in dealers(order, candidates, 3)]
    expected = list(zip(*usual, strict=True))
    store = AssignmentStore()
    planners = [
        AheadPlanner(store, global_rank=rank, world_size=3, num_ahead=4) for rank in range(3)
    ]
    os.kill(planners[0]._process.pid, signal.SIGSTOP)
    for planner in planners:
        planner._patience_s = 0.01
    ranks = [
        TicketDealer(order, planner, candidates, global_rank=rank)
        for rank, planner in enumerate(planners)
    ]
    iterations = zip(*(rank.deal(Cursor()) for rank in ranks), strict=True)
    found = list(islice(iterations, 4))
    assert "plans this iteration itself" in caplog.text
    os.kill(planners[0]._process.pid, signal.SIGCONT)
    for planner in planners:
        planner._patience_s = 200.0
    found += iterations
    planners[0].close()
    assert found == expected


def test_slow_ranks_get_less_from_the_same_iteration_on() -> None:
    lengths = lengths_of(400)
    order = EpochOrder(lengths, tokens_per_step=400)
    ranks = dealers(order, equal_candidates(2), 2)
    shares: list[float] = []
    since: set[int] = set()
    for number, tickets in enumerate(zip(*(r.deal(Cursor()) for r in ranks), strict=True)):
        tokens = [sum(lengths[i] for b in t.microbatches for i in b) for t in tickets]
        shares.append(tokens[0] / sum(tokens))
        if number == 1:
            since = {dealer.set_slowdowns([3.0, 1.0]) for dealer in ranks}
    assert len(since) == 1
    first = since.pop()
    assert 0.4 < np.mean(shares[:first]) < 0.6
    assert max(shares[first:]) < 0.35
    with pytest.raises(ConfigurationError, match="rank 1"):
        ranks[0].set_slowdowns([1.0])


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20), st.integers(1, 5))
def test_no_rank_of_a_strategy_without_plans_stays_without_samples(pipeline_of, num_pipelines):
    rows: list[list[Any]] = [[] for _ in range(num_pipelines)]
    for sample, pipeline in enumerate(pipeline_of):
        rows[pipeline % num_pipelines].append((sample,))
    uneven = Assignment(plan_index=0, microbatches=tuple(map(tuple, rows)), latency_s=1.0)
    if len(pipeline_of) < num_pipelines:
        with pytest.raises(ConfigurationError, match="larger tokens_per_step"):
            fill_empty(uneven)
        return
    filled = fill_empty(uneven).microbatches
    assert all(len(batches) == 1 and batches[0] for batches in filled)
    assert sorted(i for ((*batch,),) in filled for i in batch) == list(range(len(pipeline_of)))


def test_a_killed_process_costs_no_sample_and_a_new_one_takes_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    order = EpochOrder(lengths_of(200), tokens_per_step=100, seed=1)
    candidates = equal_candidates(2)
    expected = list(dealers(order, candidates, 1)[0].deal(Cursor()))
    planner = AheadPlanner(AssignmentStore(), num_ahead=6)
    planner._patience_s = 200.0
    process = planner._process
    assert process is not None
    tickets = TicketDealer(order, planner, candidates).deal(Cursor())
    first_pid = process.pid
    found = list(islice(tickets, 4))
    os.kill(first_pid, signal.SIGKILL)
    found += tickets
    assert "planning process has died" in caplog.text
    assert process.pid != first_pid
    planner.close()
    assert found == expected


def test_closing_ends_what_is_being_planned_at_once_and_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned_here: list[Any] = []
    monkeypatch.setattr(ahead, "plan_text", lambda item: planned_here.append(item) or "")
    planner = AheadPlanner(AssignmentStore(), num_ahead=1)
    assert planner._process is not None
    only_pid = planner._process.pid
    os.kill(only_pid, signal.SIGSTOP)  # It never answers.
    planner.request("key", request(*lengths_of(40)))
    while planner._thread._work_queue.qsize():
        time.sleep(0.01)
    planner.close()
    assert not planned_here
    with pytest.raises(ProcessLookupError):
        os.kill(only_pid, 0)
