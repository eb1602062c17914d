"""Ranks are lost, and the others go on in the processes that they are in."""

import os
import signal
from collections import defaultdict
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

from lightning_hetero.callbacks import ElasticRestart
from lightning_hetero.callbacks.run_log import read_log
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.runtime.ranks.failure import GenerationChange
from tests.callbacks.in_place import BATCH, Node, playing, toy_of_a_command_line, undisturbed

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

NUM_RANKS, NUM_STEPS = 5, 20
NEW = "new"


def trained(node: Node) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Return what all ranks wrote of each step, by (ranks that trained it, step)."""
    found: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for records in node.all_records():
        size = 0
        for item in records:
            size = item.get("size", size)
            if "step" in item:
                found[size, item["step"]].append(item)
    return found


def check_steps(
    steps: dict[tuple[int, int], list[dict[str, Any]]], expected: list[float], num_batches: int
) -> None:
    """Compare losses and samples of all steps with plain Lightning's."""
    assert {step for _, step in steps} == set(range(1, len(expected) + 1))
    for (size, step), items in steps.items():
        assert len(items) == size, f"step {step} was trained by {len(items)} of {size} ranks"
        assert [i["loss"] for i in items] == pytest.approx([expected[step - 1]] * size, rel=1e-5)
        rows = [row for item in items for row in item["rows"]]
        assert len(rows) == len(set(rows)) == BATCH * num_batches


@pytest.mark.filterwarnings("ignore")
def test_lost_ranks_leave_the_losses_and_the_samples_as_they_were(tmp_path: Path) -> None:
    """SIGKILL of rank 0, of another one during the recovery; then SIGKILL and SIGSTOP at once.

    Those who are left have all rows the first time, and no step is lost; then they don't, and go
    back to a checkpoint.
    """
    expected = undisturbed(NUM_RANKS, NUM_STEPS)
    options = {"num_steps": NUM_STEPS, "every": 8, "heartbeat_s": 12.0, "redundancy": 1}
    with playing(tmp_path / "run", NUM_RANKS, **options) as node:
        # Before the first checkpoint that is due.
        node.let_go_on_to(2)
        for rank in range(NUM_RANKS):
            node.wait_for_step(rank, 2)  # Whoever is struck has written it down.
        (node.folder / "dies-in-set-up").write_text("1")
        node.strike(0)
        node.let_go_on_to(14)
        for rank in (2, 3, 4):
            node.wait_for_step(rank, 14)
        # In a ring of three one of them stands by for the other.
        node.strike(2, signal.SIGSTOP)
        node.strike(3)
        node.let_go_on_to(NUM_STEPS)
        assert node.wait_for_end() == 0, node.log()
        steps = trained(node)
        events = list(read_log(node.folder / "events.jsonl"))
    check_steps(steps, expected, NUM_RANKS)
    # Each worker has been one process all the time, and the log says who was lost.
    assert [len([i for i in node.records(4) if "begin" in i])] == [3]
    noted = [item for item in events if item["event"] == "generation"]
    assert [(sorted(item["lost"]), item["ranks"]) for item in noted] == [([0, 1], 3), ([2, 3], 1)]
    assert all(item["idle_s"] > 0 for item in noted)
    assert [item["steps_again"] for item in noted] == [0, 6]
    live, saved = [item for item in events if item["event"] == "recovered"]
    assert (live["is_live"], live["lost_steps"], live["step"]) == (True, 0, 2)
    assert (saved["is_live"], saved["step"]) == (False, 8)
    assert "kept by lost ranks alone ([0, 1] of the generation" in saved["why_not_live"]


@pytest.mark.filterwarnings("ignore")
def test_on_the_device_of_a_lost_process_another_one_starts_and_joins(tmp_path: Path) -> None:
    """Not on that of one that leaves. Losses stay, and no step is trained again."""
    num_steps = 44
    expected = undisturbed(3, num_steps)
    options = {"num_steps": num_steps, "every": 100, "heartbeat_s": 30.0, "redundancy": 1}
    with playing(tmp_path / "run", 3, replaces=True, **options) as node:
        node.let_go_on_to(2)
        for rank in range(3):
            node.wait_for_step(rank, 2)
        first = node.pid_of(0)
        node.strike(0)
        came = node.go_on_until(
            lambda: node.pid_of(0) != first and bool(node.records(0)), first=3, last=36
        )
        node.let_go_on_to(came + 3)
        for rank in range(3):
            node.wait_for_step(rank, came + 3)
        node.strike(1, signal.SIGTERM)
        node.let_go_on_to(num_steps)
        assert node.wait_for_end() == 0, node.log()
        check_steps(trained(node), expected, 3)
        noted = [i for i in read_log(node.folder / "events.jsonl") if i["event"] == "generation"]
        assert f"joins the run on the device of process {first}, which was lost." in node.log()
    changes = [(len(item["lost"]), item["joined"], item["ranks"]) for item in noted]
    assert changes == [(1, [], 2), (0, [3], 3), (1, [], 2)]
    assert [item["steps_again"] for item in noted] == [0, 0, 0]


@pytest.mark.filterwarnings("ignore")
def test_a_process_joins_and_leaves_between_two_steps_and_no_step_is_trained_again(
    tmp_path: Path,
) -> None:
    """Rank 0 is lost while the joiner is there. No checkpoint is saved but the first and last."""
    num_steps = 60
    expected = undisturbed(2, num_steps)
    options = {"num_steps": num_steps, "every": 100, "heartbeat_s": 30.0, "redundancy": 1}
    options["make_module"] = toy_of_a_command_line
    with playing(tmp_path / "run", 2, **options) as node:
        node.let_go_on_to(2)
        node.wait_for_step(0, 2)
        node.join(NEW)
        joined = node.go_on_until(lambda: bool(node.records(NEW)), first=3, last=num_steps - 20)
        node.let_go_on_to(joined + 2)
        for name in (0, 1, NEW):
            node.wait_for_step(name, joined + 2)
        node.strike(0)
        node.let_go_on_to(joined + 6)
        for name in (1, NEW):
            node.wait_for_step(name, joined + 6)
        node.strike(NEW, signal.SIGTERM)
        node.let_go_on_to(num_steps)
        assert node.wait_for_end() == 0, node.log()
        node.joiners[NEW].join()
        assert node.joiners[NEW].exitcode == 0, "it has left as it was told to"
        check_steps(trained(node), expected, 2)
        # It was started by itself, and shares the machine's cores with both others all the same.
        own = [item["threads"] for item in node.records(NEW) if "begin" in item]
        assert set(own) == {max(1, len(os.sched_getaffinity(0)) // 3)}
        # A joiner knows of the generations after its first one.
        for name, told in ((1, [0, 3, 2, 1]), (NEW, [0, 2])):
            begun = [item for item in node.records(name) if "begin" in item]
            assert [(i["zero"][2] or [0])[-1] for i in begun] == told
            for item in begun:
                rank, is_zero, heard = item["zero"]
                assert (rank, is_zero) == (item["rank"], item["rank"] == 0)
                assert not heard or heard[1:] == [item["rank"], item["size"]]
        events = list(read_log(node.folder / "events.jsonl"))
    noted = [item for item in events if item["event"] == "generation"]
    changes = [(item["lost"], item["joined"], item["ranks"]) for item in noted]
    assert changes == [([], [2], 3), ([0], [], 2), ([2], [], 1)]
    assert [item["steps_again"] for item in noted] == [0, 0, 0]
    assert [item["is_live"] for item in events if item["event"] == "recovered"] == [True] * 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("error", [None, "full"])
@pytest.mark.parametrize("others", [True, False])
def test_ranks_that_stop_save_only_where_somebody_has_not_all_rows(
    error: str | None, monkeypatch: pytest.MonkeyPatch, *, others: bool
) -> None:
    """And joiners wait where that save isn't safe."""
    rows = [[(False, False)] * 2, [True, others], [None, error]]
    ranks = SimpleNamespace(gather=lambda _: rows.pop(0))
    monkeypatch.setattr("lightning_hetero.callbacks.elastic.Ranks", lambda _: ranks)
    elastic: Any = ElasticRestart(in_place=True)
    membership = SimpleNamespace(loses_store=lambda _: False)
    strategy = SimpleNamespace(processes=SimpleNamespace(membership=membership))
    trainer: Any = SimpleNamespace(world_size=2, global_step=7)
    run = SimpleNamespace(control=None, strategy=strategy)
    monkeypatch.setattr("lightning_hetero.callbacks.elastic.run_of", lambda _: run)
    elastic._checkpoint = mock.Mock(node_of_rank=("a", "b"))
    elastic._stop_in_place(trainer, frozenset())
    assert elastic._checkpoint.save.called == (not others)
    assert (elastic._change is None) == (not others and error is not None)


def test_a_sigterm_between_two_fits_is_heeded_by_the_next_and_the_last_leaves_no_handler() -> None:
    seen: list[int] = []
    original = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    before = signal.getsignal(signal.SIGTERM)
    rule, module = ElasticRestart(in_place=True), Any
    connector = SimpleNamespace(cluster_environment=None)
    trainer: Any = SimpleNamespace(_accelerator_connector=connector, local_rank=0)
    trainer.strategy = mock.Mock()
    try:
        for told_before in (True, False):  # In a set-up, whose handler is Lightning's own.
            trainer.received_sigterm = told_before
            early = ElasticRestart(in_place=True)
            early.on_train_start(trainer, module)
            assert early.is_leaving == told_before
            early.on_train_end(trainer, module)
        for number in range(3):
            signals = _SignalConnector(trainer)
            signals.register_signal_handlers()
            rule.on_train_start(trainer, module)
            assert rule.is_leaving == (number == 2)
            if number == 2:
                rule.on_train_end(trainer, module)
            signals.teardown()
            rule.teardown(trainer, module, "fit")
            if number == 1:
                os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is before
        assert seen == []
    finally:
        signal.signal(signal.SIGTERM, original)


@pytest.mark.parametrize("leaving", [(), (1,)])
@pytest.mark.parametrize(("ends_epoch", "is_done"), [(False, False), (True, True), (False, True)])
def test_joiners_let_a_validation_end_that_nobody_would_make_up_for(
    leaving: tuple[int, ...],
    ends_epoch: bool,  # noqa: FBT001
    is_done: bool,  # noqa: FBT001
) -> None:
    progress = SimpleNamespace(is_last_batch=ends_epoch)
    epoch_loop = SimpleNamespace(batch_progress=progress, _is_training_done=is_done)
    trainer: Any = SimpleNamespace(fit_loop=SimpleNamespace(epoch_loop=epoch_loop))
    elastic: Any = ElasticRestart(in_place=True)
    elastic._change = GenerationChange("", frozenset(leaving))
    goes_on_now = bool(leaving) or not is_done
    with pytest.raises(GenerationChange) if goes_on_now else nullcontext():
        elastic.on_validation_start(trainer, None)
    assert (elastic._change is None) == goes_on_now


def test_bad_options_say_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match="heartbeat_timeout is"):
        ElasticRestart(in_place=True, heartbeat_timeout=timedelta(0))
