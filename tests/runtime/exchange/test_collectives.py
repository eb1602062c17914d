"""Whichever way weights and gradients travel, a run is the same bit for bit."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.runtime.exchange.routes import Routes
from tests.fits import Case, Outcome, assert_same_bits, attempt, fit
from tests.plans import CUT_LATE, pipeline, plan_of, stage
from tests.processes import ProcessPool

pytestmark = pytest.mark.dist


@dataclass(frozen=True)
class Exchanged:
    """What a rank knows after a run, and which way its units went."""

    outcome: Outcome
    ways: Counter[str]
    """Names of the classes of units, with whether a collective carried them."""
    far_bytes: int = 0
    """Bytes of all-to-alls that have left this rank's node."""


def run_by(rank: int, case: Case, kinds: Sequence[str], nodes: str = "") -> dict[str, Exchanged]:
    """Train a case once by each kind of exchange, each rank on the node that it plays."""
    with mock.patch.dict(os.environ, {"GROUP_RANK": nodes[rank]} if nodes else {}):
        return {kind: _run_by(rank, case, kind, nodes) for kind in kinds}


def _run_by(rank: int, case: Case, kind: str, nodes: str) -> Exchanged:
    ways: Counter[str] = Counter()
    far: list[int] = []
    all_to_all = dist.all_to_all_single

    def counting(into: Tensor, given: Tensor, *splits: Any, group: Any, **more: Any) -> Any:
        ranks = dist.get_process_group_ranks(group)
        rows = splits[1] if splits else [1] * len(ranks)
        sent = sum(n for n, peer in zip(rows, ranks, strict=True) if nodes[peer] != nodes[rank])
        far.append(sent * given[0].numel() * given.element_size())
        return all_to_all(into, given, *splits, group=group, **more)

    def noting(found: Any) -> Any:
        def note(routes: Routes, *args: Any) -> Any:
            way = found(routes, *args)
            if way is not None and way.travels:
                by = "messages" if way.group is None else "collective"
                ways[f"{type(way).__name__} {by}"] += 1
            return way

        return note

    case = replace(case, options={**case.options, "exchange": kind})
    with (
        mock.patch.object(Routes, "pulled", noting(Routes.pulled)),
        mock.patch.object(Routes, "pushed", noting(Routes.pushed)),
        mock.patch.object(dist, "all_to_all_single", counting if nodes else all_to_all),
    ):
        outcome = fit(rank, case)
    return Exchanged(outcome, ways, sum(far))


EQUAL = plan_of(*(pipeline(stage(rank, 0, 3)) for rank in (2, 0, 1)))
SHARED = plan_of(pipeline(stage([0, 2], 0, 3)), pipeline(stage(1, 0, 1), stage(3, 1, 3)))
PARTS = plan_of(pipeline(stage([0, 3], 0, 3)), pipeline(stage([2, 1], 0, 3)))
TP_PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

CASES = {
    "equal pipelines": Case(plan=EQUAL, world_size=3, width=32, num_rows=12),
    "whole parameters": Case(plan=EQUAL, world_size=3, ownership="parameter", num_rows=12),
    "unequal pipelines, bf16": Case(
        plan=CUT_LATE, world_size=3, num_microbatches=2, precision="bf16-mixed", num_rows=8
    ),
    "the same part of two pipelines": Case(
        plan=PARTS, world_size=4, width=32, options={"tp_plan": TP_PLAN}, num_rows=8
    ),
    "owners everywhere, tensor parallelism": Case(
        plan=SHARED,
        world_size=4,
        ownership="even",
        tied=True,
        options={"tp_plan": TP_PLAN},
        num_rows=8,
    ),
}


def ways_of(found: list[dict[str, Exchanged]], kind: str) -> Counter[str]:
    return sum((item[kind].ways for item in found), Counter())


def outcomes(found: list[dict[str, Exchanged]], kind: str) -> list[Outcome]:
    return [item[kind].outcome for item in found]


def assert_near(found: list[dict[str, Exchanged]], kind: str, other: str) -> None:
    for one, two in zip(outcomes(found, kind), outcomes(found, other), strict=True):
        np.testing.assert_allclose(one.losses, two.losses, rtol=1e-5)
        for key, weights in one.weights.items():
            np.testing.assert_allclose(weights, two.weights[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_collectives_give_what_messages_give_bit_for_bit(pool: ProcessPool, name: str) -> None:
    case = CASES[name]
    found = pool.run(run_by, case.size, case, ("messages", "collectives"))
    assert_same_bits(outcomes(found, "messages"), outcomes(found, "collectives"))
    assert all(way.endswith("messages") for way in ways_of(found, "messages"))
    ways = ways_of(found, "collectives")
    assert all(way.endswith("collective") for way in ways)
    is_even = name in ("equal pipelines", "the same part of two pipelines")
    assert ("GatheredUnit collective" in ways) == is_even or name.startswith("unequal")
    assert ("PushedParcels collective" in ways) != is_even


def test_few_ranks_send_messages_and_a_reduce_scatter_gives_the_same_but_for_rounding(
    pool: ProcessPool,
) -> None:
    case = CASES["equal pipelines"]
    found = pool.run(run_by, case.size, case, ("auto", "reduce-scatter"))
    assert_near(found, "auto", "reduce-scatter")
    assert all(way.endswith("messages") for way in ways_of(found, "auto"))


FIVE = plan_of(*(pipeline(stage(rank, 0, 3)) for rank in (2, 0, 1, 4, 3)))
TWICE = plan_of(pipeline(stage([0, 1], 0, 3)), pipeline(stage([2, 3], 0, 3)))
ON_NODES = {
    # Of two nodes with two ranks, half of what each would send leaves a node.
    "aabb": (Case(plan=plan_of(*(pipeline(stage(i, 0, 3)) for i in range(4))), num_rows=16), 1 / 2),
    # Straight, of 5 pieces two ranks send 3, three send 2: 12. By node 2 relays of 3, 3 of 2: 5.
    "abbba": (Case(plan=FIVE, width=64, num_rows=20), 5 / 12),
    # Each shard group has two ranks, one on each node: nothing is summed on a node.
    "abab": (Case(plan=TWICE, width=32, options={"tp_plan": TP_PLAN}, num_rows=8), 1),
}


@pytest.mark.parametrize("nodes", ON_NODES)
def test_gradients_summed_on_nodes_give_the_same_but_for_rounding(
    pool: ProcessPool, nodes: str
) -> None:
    case, share = ON_NODES[nodes]
    kinds = ("collectives", "by-node")
    found = pool.run(run_by, case.size, case, kinds, nodes)
    again = pool.run(run_by, case.size, case, ("by-node",), nodes)
    assert_near(found, *kinds)
    assert_same_bits(outcomes(found, "by-node"), outcomes(again, "by-node"))
    assert ("SummedByNode collective" in ways_of(found, "by-node")) == (share < 1)
    straight, by_node = (sum(item[kind].far_bytes for item in found) for kind in kinds)
    assert by_node == pytest.approx(share * straight, rel=0.02)


def refused_by_own_way(rank: int, case: Case, ways: tuple[str, ...]) -> Any:
    return attempt(rank, replace(case, options={"exchange": ways[rank]}))[0]


def test_ranks_that_exchange_otherwise_are_refused_on_all(pool: ProcessPool) -> None:
    case = replace(CASES["equal pipelines"], num_rows=6)
    for text in pool.run(refused_by_own_way, 3, case, ("collectives", "by-node", "collectives")):
        assert "Ranks don't run the same" in text
