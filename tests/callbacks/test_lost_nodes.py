"""Whole nodes are lost at once, keepers and workers; also the one that serves the store."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_hetero.callbacks.run_log import read_log
from tests.callbacks.in_place import undisturbed
from tests.callbacks.several_nodes import NUM_RANKS, Nodes, playing_nodes

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    options = {"num_steps": 1000, "every": 100, "heartbeat_s": 6.0, "redundancy": 1}
    with playing_nodes(tmp_path / "run", **options) as found:
        yield found


@pytest.mark.filterwarnings("ignore")
def test_a_lost_node_loses_no_step_and_without_the_stores_node_the_run_ends(
    nodes: Nodes,
) -> None:
    expected = undisturbed(NUM_RANKS, 6)
    nodes.let_go_on_to(3)
    for rank in range(NUM_RANKS):
        nodes.wait_for_step(rank, 3)
    nodes.lose(1)
    nodes.let_go_on_to(6)
    records: list[dict[str, Any]] = []
    for rank in (0, 3):
        nodes.wait_for_step(rank, 6)
        records += [item for item in nodes.records(rank) if "step" in item]
    assert [item["loss"] for item in records] == pytest.approx(
        [expected[item["step"] - 1] for item in records], rel=1e-5
    )
    assert [item["step"] for item in records] == [*range(1, 7), *range(1, 7)]
    (lost,) = [e for e in read_log(nodes.folder / "events.jsonl") if e["event"] == "generation"]
    assert (sorted(lost["lost"]), lost["ranks"], lost["steps_again"]) == ([1, 2], 2, 0)
    # Who loses the store can't know who else is left: it ends, for the launcher to start again.
    nodes.lose(0)
    nodes.let_go_on_to(1000)
    assert nodes.wait_for_end() not in (0, None)
    assert max(item.get("step", 0) for item in nodes.records(3)) <= 7
