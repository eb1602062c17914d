"""Ranks on CUDA devices are lost, and the others go on in their processes, over NCCL."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_hetero.callbacks.run_log import read_log
from tests.callbacks.in_place import Node, playing, undisturbed
from tests.callbacks.test_in_place import check_steps, trained
from tests.processes import ProcessPool
from tests.toy import ToyModule, ToyOptions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.dist,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

NUM_RANKS = max(2, min(4, torch.cuda.device_count()))
NUM_STEPS, LAST_SAVED, LAST = 20, 4, 6
OPTIONS: dict[str, Any] = {
    "num_steps": NUM_STEPS,
    "every": LAST_SAVED,
    "heartbeat_s": 5.0,
    "redundancy": 1,
    "accelerator": "cuda",
}
STRUCK = NUM_RANKS - 1


def expected_losses(rank: int) -> list[float]:
    return undisturbed(NUM_RANKS, NUM_STEPS, accelerator="cuda")


class Dies(ToyModule):
    """One rank dies when all have agreed on a step, and its device hasn't come to its sums."""

    def __init__(self) -> None:
        super().__init__(ToyOptions(num_layers=4))

    @property
    def _dies(self) -> bool:
        return os.environ["FIRST_RANK"] == str(STRUCK) and self.trainer.global_step == LAST

    def training_step(self, batch: Any, index: int) -> Any:
        if self._dies:
            torch.cuda._sleep(20 * 10**9)  # Cycles, so about ten seconds.
        return super().training_step(batch, index)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self._dies:
            os.kill(os.getpid(), signal.SIGKILL)


def recovery_of(node: Node) -> dict[str, Any]:
    """Return how the run went on, in the processes that it was in."""
    begun = [[item for item in node.records(rank) if "begin" in item] for rank in range(STRUCK)]
    assert [len(items) for items in begun] == [2] * STRUCK
    events = list(read_log(node.folder / "events.jsonl"))
    (found,) = [item for item in events if item["event"] == "recovered"]
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_is_lost_between_two_steps_and_no_step_with_it(
    pool: ProcessPool, tmp_path: Path, number: signal.Signals
) -> None:
    expected = pool.run(expected_losses, 1)[0]
    with playing(tmp_path / "run", NUM_RANKS, **OPTIONS) as node:
        node.let_go_on_to(LAST)
        for rank in range(NUM_RANKS):
            node.wait_for_step(rank, LAST)  # Which reads its loss, so the device is there.
        node.strike(STRUCK, number)
        node.let_go_on_to(NUM_STEPS)
        assert node.wait_for_end() == 0, node.log()
        check_steps(trained(node), expected, NUM_RANKS)
        found = recovery_of(node)
    assert (found["is_live"], found["step"], found["lost_steps"]) == (True, LAST, 0)


def test_a_step_whose_sums_never_came_is_trained_again(pool: ProcessPool, tmp_path: Path) -> None:
    """The hosts have agreed on it, and their devices go on with anything once NCCL is aborted."""
    expected = pool.run(expected_losses, 1)[0]
    with playing(tmp_path / "run", NUM_RANKS, **OPTIONS, make_module=Dies) as node:
        node.let_go_on_to(LAST)
        for rank in range(NUM_RANKS):
            node.wait_for_step(rank, LAST)
        node.let_go_on_to(NUM_STEPS)
        assert node.wait_for_end() == 0, node.log()
        for rank in range(STRUCK):
            losses = {item["step"]: item["loss"] for item in node.records(rank) if "step" in item}
            assert [losses[step + 1] for step in range(NUM_STEPS)] == pytest.approx(
                expected, rel=1e-5
            )
        found = recovery_of(node)
    assert not found["is_live"]
    assert found["step"] <= LAST_SAVED  # Which may not have been complete yet.
