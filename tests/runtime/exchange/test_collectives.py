"""Whichever way weights and gradients travel, a run is the same bit for bit."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from lightning_hetero.core.errors import ConfigurationError
from tests.processes import ProcessPool
from tests.runtime.exchange_runs import Exchanged, run_by
from tests.runtime.runs import Case, pipeline, plan_of, stage, train

pytestmark = pytest.mark.dist

EQUAL = plan_of(*(pipeline(stage(rank, 0, 3)) for rank in (2, 0, 1)))
UNEQUAL = plan_of(pipeline(stage(0, 0, 3)), pipeline(stage(1, 0, 2), stage(2, 2, 3)))
SHARED = plan_of(pipeline(stage([0, 2], 0, 3)), pipeline(stage(1, 0, 1), stage(3, 1, 3)))
PARTS = plan_of(pipeline(stage([0, 3], 0, 3)), pipeline(stage([2, 1], 0, 3)))
TP_PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

CASES = {
    "equal pipelines": Case(plan=EQUAL, world_size=3, width=32, num_rows=12),
    "whole parameters": Case(plan=EQUAL, world_size=3, ownership="parameter", num_rows=12),
    "unequal pipelines, bf16": Case(
        plan=UNEQUAL, world_size=3, num_microbatches=2, precision="bf16-mixed", num_rows=8
    ),
    "the same part of two pipelines": Case(
        plan=PARTS, world_size=4, width=32, options=(("tp_plan", TP_PLAN),), num_rows=8
    ),
    "owners everywhere, tensor parallelism": Case(
        plan=SHARED,
        world_size=4,
        ownership="even",
        tied=True,
        options=(("tp_plan", TP_PLAN),),
        num_rows=8,
    ),
}


def ways_of(found: list[dict[str, Exchanged]], kind: str) -> Counter[str]:
    return sum((item[kind].ways for item in found), Counter())


def assert_same_bits(found: list[dict[str, Exchanged]]) -> None:
    """Check that runs by messages and by collectives gave the same losses and weights."""
    for item in found:
        one, other = item["messages"].outcome, item["collectives"].outcome
        assert one.losses == other.losses
        for key, weights in one.weights.items():
            assert np.array_equal(weights, other.weights[key]), key


@pytest.mark.parametrize("name", CASES)
def test_collectives_give_what_messages_give_bit_for_bit(pool: ProcessPool, name: str) -> None:
    case = CASES[name]
    found = pool.run(run_by, case.world_size, case, ("messages", "collectives"))
    assert_same_bits(found)
    assert all(way.endswith("messages") for way in ways_of(found, "messages"))
    ways = ways_of(found, "collectives")
    assert all(way.endswith("collective") for way in ways)
    is_even = name in ("equal pipelines", "the same part of two pipelines")
    assert ("GatheredUnit collective" in ways) == is_even or name.startswith("unequal")
    assert ("PushedParcels collective" in ways) != is_even


def test_a_reduce_scatter_gives_the_same_but_for_rounding(pool: ProcessPool) -> None:
    case = CASES["equal pipelines"]
    found = pool.run(run_by, case.world_size, case, ("collectives", "reduce-scatter"))
    for item in found:
        one, other = item["collectives"].outcome, item["reduce-scatter"].outcome
        np.testing.assert_allclose(one.losses, other.losses, rtol=1e-5)
        for key, weights in one.weights.items():
            np.testing.assert_allclose(weights, other.weights[key], rtol=1e-4, atol=1e-5)


FIVE = plan_of(*(pipeline(stage(rank, 0, 3)) for rank in (2, 0, 1, 4, 3)))
TWICE = plan_of(pipeline(stage([0, 1], 0, 3)), pipeline(stage([2, 3], 0, 3)))
ON_NODES = {
    # Of two nodes with two ranks, half of what each would send leaves a node.
    "aabb": (Case(plan=plan_of(*(pipeline(stage(i, 0, 3)) for i in range(4))), num_rows=16), 1 / 2),
    # Straight, of 5 pieces two ranks send 3, three send 2: 12. By node 2 relays of 3, 3 of 2: 5.
    "abbba": (Case(plan=FIVE, width=64, num_rows=20), 5 / 12),
    # Each part of a stage is a circle of two, with one rank on each node: nothing is summed there.
    "abab": (Case(plan=TWICE, width=32, options=(("tp_plan", TP_PLAN),), num_rows=8), 1),
}


@pytest.mark.parametrize("nodes", ON_NODES)
def test_gradients_summed_on_nodes_give_the_same_but_for_rounding(
    pool: ProcessPool, nodes: str
) -> None:
    case, share = ON_NODES[nodes]
    case = replace(case, world_size=len(nodes))
    kinds = ("collectives", "by-node")
    found = pool.run(run_by, case.world_size, case, kinds, nodes)
    again = pool.run(run_by, case.world_size, case, ("by-node",), nodes)
    for item, repeated in zip(found, again, strict=True):
        one, other = item["collectives"].outcome, item["by-node"].outcome
        np.testing.assert_allclose(one.losses, other.losses, rtol=1e-5)
        for key, weights in one.weights.items():
            np.testing.assert_allclose(weights, other.weights[key], rtol=1e-4, atol=1e-5)
            assert np.array_equal(other.weights[key], repeated["by-node"].outcome.weights[key])
    assert ("SummedByNode collective" in ways_of(found, "by-node")) == (share < 1)
    straight, by_node = (sum(item[kind].far_bytes for item in found) for kind in kinds)
    assert by_node == pytest.approx(share * straight, rel=0.02)


def test_few_ranks_send_messages_on_gloo_unless_told_otherwise(pool: ProcessPool) -> None:
    case = CASES["equal pipelines"]
    found = pool.run(run_by, case.world_size, case, ("auto",))
    assert all(way.endswith("messages") for way in ways_of(found, "auto"))


def train_by_own_way(rank: int, case: Case, ways: tuple[str, ...]) -> str:
    """Return why a run is refused whose ranks exchange in different ways."""
    with pytest.raises(ConfigurationError) as caught:
        train(rank, replace(case, options=(("exchange", ways[rank]),)))
    return str(caught.value)


def test_ranks_that_exchange_otherwise_are_refused_on_all(pool: ProcessPool) -> None:
    case = replace(CASES["equal pipelines"], num_rows=6)
    for text in pool.run(train_by_own_way, 3, case, ("collectives", "by-node", "collectives")):
        assert "Ranks don't run the same" in text
