"""Laws of the table of a plan: nothing unknown is shown, like pipelines share their lines."""

import pytest

from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.simulator import MemoryTerms
from lightning_hetero.simulator.report import (
    TERM_NAMES,
    StageFacts,
    devices_line,
    plan_table,
)

PLAN = ParallelPlan.even(world_size=8, num_layers=6, num_stages=2)


def facts_of(*devices, **known):
    return [[StageFacts(device=device, **known)] * 2 for device in devices]


def test_like_pipelines_share_their_lines_and_list_their_ranks():
    memory = MemoryTerms(weights=2.0**31)
    known = {"memory": memory, "device_bytes": 2**30 * 40 / 0.9, "busy": 0.5}
    facts = facts_of("A", "A", "B", "A", **known)
    filled = [name for name in TERM_NAMES if name != "reserved"]
    terms = MemoryTerms(**{name: n * 2.0**30 for n, name in enumerate(filled, start=1)})
    whole = facts_of(*"AAAA", memory=terms, device_bytes=80 * 2**30)[0][0]
    assert (whole.used_bytes, whole.usable_bytes) == (45 * 2**30, pytest.approx(75.8 * 2**30))
    facts[1][1] = facts[1][1]._replace(busy=0.75, memory=MemoryTerms(2.0**31, 7))
    table = plan_table(PLAN, facts, [4, 4, 4, 2])
    cells = [dict(zip(table.header, row, strict=True)) for row in table.rows]
    assert [row["pipeline"] for row in cells] == ["0-1 (2 ×)", "", "2", "", "3", ""]
    assert [row["ranks"] for row in cells] == ["0,2", "1,3", "4", "5", "6", "7"]
    assert cells[1]["busy"] == "75%"
    assert cells[0]["memory GiB"] == "2.0 of 41.7"
    assert [row["micro-batches"] for row in cells] == ["4", "", "4", "", "2", ""]
    assert [len(section) for section in table.sections] == [2, 2, 2]


def test_columns_of_which_nothing_is_known_are_left_out():
    table = plan_table(PLAN, facts_of("A", "A", "A", "A"), [None] * 4)
    assert table.header == ("pipeline", "stage", "device", "ranks", "TP", "layers")
    assert table.rows[1] == ("", "1", "A", "1,3,5,…", "1", "3-5 (3)")
    small = plan_table(PLAN, facts_of(*"AAAA", memory=MemoryTerms(3.0 * 2**20)), [1] * 4)
    assert small.rows[0][small.header.index("memory MiB")] == "3.0"


def test_what_stages_recompute_is_said_where_any_does():
    even = PLAN.to_dict()
    for stages, first in zip(
        (0, 1), ({"recomputed_layers": 2}, {"recomputed_layers": 0}), strict=True
    ):
        even["pipelines"][stages]["stages"][0] |= first
    even["pipelines"][2]["stages"][1]["activation_budget_bytes"] = 3 * 2**30
    table = plan_table(ParallelPlan.from_dict(even), facts_of(*"AAAA"), [1] * 4)
    found = [row[table.header.index("recomputed")] for row in table.rows]
    assert found == ["2 layers", "", "", "", "", "within 3 GiB"]
    assert [row[0] for row in table.rows] == ["0", "", "1,3 (2 ×)", "", "2", ""]


def test_devices_are_counted_over_nodes():
    nodes = [Node(device="A100-80GB", count=n) for n in (4, 2)]
    cluster = Cluster(nodes=(*nodes, Node(device="T4", count=1)))
    assert devices_line(cluster) == "6 × A100-80GB, 1 × T4"
