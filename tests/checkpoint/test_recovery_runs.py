"""Which run goes on and with which attempt; parts of two starts or runs never mix."""

from dataclasses import replace

import pytest

from lightning_hetero.checkpoint import (
    CheckpointId,
)
from lightning_hetero.core.errors import CheckpointError
from tests.checkpoint.stand_ins import FaultyStore, MemoryStore
from tests.checkpoint.states import (
    PLANS,
    Nodes,
    assert_is_state,
    begin_run,
    contents,
    disk,
    needs_of,
    recover,
    recover_all,
    save_all,
)


def test_parts_of_two_attempts_at_one_step_never_mix_nor_those_of_other_numbers_of_ranks() -> None:
    plan, size = PLANS["tp 2"]
    nodes = Nodes(["a", "b"], remote=False)
    save_all(nodes, ["a", "b"], contents(2, plan, size))
    save_all(nodes, ["a", "b"], contents(4, plan, size, attempt=0))
    save_all(nodes, ["a", "b"], contents(4, plan, size, attempt=1))
    for store in (nodes.memory["a"], nodes.disk["a"]):
        for name in [n for n in store.files if n.startswith("step-000000000004-000001")]:
            store.remove([name])
    for store in (nodes.memory["b"], nodes.disk["b"]):
        for name in [n for n in store.files if n.startswith("step-000000000004-000000")]:
            store.remove([name])
    needs = [needs_of(rank, plan, size) for rank in range(size)]
    with pytest.raises(CheckpointError, match="step 4"):
        recover_all(nodes, ["a", "b"], needs, step=4)
    two, three = Nodes(["a"], remote=False), Nodes(["a"], remote=False)
    save_all(two, ["a", "a"], contents(6, plan, 2))
    save_all(three, ["a", "a", "a"], contents(6, PLANS["dp 3"][0], 3))
    store = MemoryStore()
    store.files = {n: x for n, x in three.disk["a"].files.items() if "00000." not in n}
    store.files |= {n: x for n, x in two.disk["a"].files.items() if "00001." not in n}
    with pytest.raises(CheckpointError, match="none is complete"):
        recover([], [disk(store)])


def test_what_is_saved_while_a_place_cannot_be_read_is_newer_than_what_is_there() -> None:
    """Else it would be pruned there, or become the other half of what an earlier start saved."""
    plan, size = PLANS["one device"]
    nodes = Nodes(["a"])
    needs = needs_of(0, plan, size)
    run = replace(begin_run(nodes.tiers("a"), node="a"), step=4)
    save_all(nodes, ["a"], [replace(contents(4, plan, size)[0], id=run)])
    local = [dict(store.files) for store in (nodes.memory["a"], nodes.disk["a"])]
    for attempt in (1, 2):
        later = replace(contents(8, plan, size)[0], id=replace(run, step=8, attempt=attempt))
        save_all(nodes, ["a"], [later])
    nodes.memory["a"].files, nodes.disk["a"].files = local

    def down(called: str, name: str) -> None:
        raise ConnectionError(f"{name} answered 500")

    remote, nodes.remote = nodes.remote, FaultyStore(nodes.remote, down)
    recovered = recover_all(nodes, ["a"], [needs], skip_unreadable=True)[0]
    assert_is_state(recovered, needs, 4)
    nodes.remote = remote
    assert recovered is not None
    again = replace(run, step=6, attempt=recovered.attempt)
    save_all(nodes, ["a"], [replace(contents(6, plan, size)[0], id=again)])
    assert_is_state(recover_all(nodes, ["a"], [needs])[0], needs, 6)


def test_a_run_that_went_back_is_newer_than_the_one_it_left() -> None:
    plan, size = PLANS["one device"]
    nodes = Nodes(["a"], remote=False)
    needs = needs_of(0, plan, size)
    save_all(nodes, ["a"], contents(9, plan, size))
    attempt = begin_run(nodes.tiers("a"), node="a").attempt
    assert attempt == 1
    save_all(nodes, ["a"], contents(5, plan, size, attempt=attempt))
    recovered = recover_all(nodes, ["a"], [needs])[0]
    assert_is_state(recovered, needs, 5)
    assert recovered is not None
    assert recovered.attempt == 2
    for step in (6, 7):
        save_all(nodes, ["a"], contents(step, plan, size, attempt=attempt))
    folders = {name.split("/")[0][-8:] for name in nodes.disk["a"].files if "/" in name}
    assert folders == {"6-000001", "7-000001"}


def test_where_every_checkpoint_is_incomplete_nothing_begins_anew() -> None:
    plan, size = PLANS["tp 2"]
    nodes = Nodes(["a", "b"], remote=False)
    save_all(nodes, ["a", "b"], contents(4, plan, size, attempt=3))
    nodes.lose("b")
    with pytest.raises(CheckpointError, match=r"step 4 \(attempt 3\)\), but none is complete"):
        recover_all(nodes, ["a", "b"], [[], []])
    with pytest.raises(CheckpointError, match="none is complete"):
        begin_run(nodes.tiers("a"), node="a")


def test_a_first_save_that_never_finished_is_begun_anew_with_another_attempt() -> None:
    plan, size = PLANS["tp 2"]
    nodes = Nodes(["a", "b"], remote=False)
    save_all(nodes, ["a", "b"], contents(4, plan, size, attempt=3))
    nodes.lose("b")
    for store in (nodes.memory["a"], nodes.disk["a"]):
        store.remove([name for name in store.files if name.endswith(("confirmed", ".json"))])
    assert recover_all(nodes, ["a", "b"], [[], []]) == [None, None]
    assert begin_run(nodes.tiers("a"), node="a") == CheckpointId(0, 4)


def test_what_was_only_in_the_memory_of_a_lost_node_keeps_no_run_from_beginning_anew() -> None:
    plan, size = PLANS["tp 2"]
    nodes = Nodes(["a", "b"])
    run = begin_run(nodes.tiers("a"), node="a")
    parts = [replace(part, id=replace(run, step=4)) for part in contents(4, plan, size)]
    save_all(nodes, ["a", "b"], parts)
    # The upload had not ended, and there are no disks.
    assert isinstance(nodes.remote, MemoryStore)
    for store in (nodes.remote, *nodes.disk.values()):
        for name in [name for name in store.files if "/" in name]:
            del store.files[name]
    needs = [needs_of(rank, plan, size) for rank in range(size)]
    assert_is_state(recover_all(nodes, ["a", "b"], needs)[0], needs[0], 4)
    nodes.lose("b")
    assert recover_all(nodes, ["a", "b"], needs) == [None, None]
    assert begin_run(nodes.tiers("a"), node="a") == replace(run, attempt=1)


def test_another_runs_checkpoints_are_never_gone_on_from() -> None:
    plan, size = PLANS["one device"]
    needs = needs_of(0, plan, size)
    nodes = Nodes(["a"])
    old = begin_run(nodes.tiers("a"), node="a")
    assert begin_run(nodes.tiers("a"), node="a") == old
    save_all(nodes, ["a"], [replace(contents(9, plan, size)[0], id=replace(old, step=9))])
    assert isinstance(nodes.remote, MemoryStore)
    nodes.remote.files.clear()
    with pytest.raises(CheckpointError, match="place that all nodes share is empty"):
        recover(needs, nodes.tiers("a"), node="a")
    nodes.disk["a"].files.clear()
    # What is left in shared memory belongs to a run that has been deleted.
    assert recover(needs, nodes.tiers("a"), node="a") is None
    new = begin_run(nodes.tiers("a"), node="a")
    assert new.run > old.run
    save_all(nodes, ["a"], [replace(contents(3, plan, size)[0], id=replace(new, step=3))])
    recovered = recover(needs, nodes.tiers("a"), node="a")
    assert_is_state(recovered, needs, 3)
    assert recovered is not None
    assert recovered.id.run == new.run
    # The old run's are left alone all the same.
    assert {name.split("/")[0][-12:] for name in nodes.memory["a"].files if "/" in name} == {
        old.run[-12:],
        new.run[-12:],
    }


def test_where_the_name_of_the_run_is_torn_nothing_is_started() -> None:
    plan, size = PLANS["one device"]
    nodes = Nodes(["a"])
    save_all(nodes, ["a"], contents(2, plan, size))
    assert isinstance(nodes.remote, MemoryStore)
    for torn in (b"", b'{"run": ', b'{"run": "../x"}', b"[]"):
        nodes.remote.files["run.json"] = torn
        with pytest.raises(CheckpointError, match=r"run\.json is torn.*skip_unreadable=True"):
            recover([], nodes.tiers("a"), node="a")
