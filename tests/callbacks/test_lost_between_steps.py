"""A rank is lost while it sends values on which each of the others acts alone: some step."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lightning_hetero.callbacks.run_log import read_log
from lightning_hetero.runtime.iteration import agreement
from lightning_hetero.strategy import processes
from tests.callbacks.in_place import playing, undisturbed
from tests.toy import ToyModule, ToyOptions

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

NUM_RANKS, NUM_STEPS, LAST_STEP, SAVED_STEP = 4, 5, 3, 3


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class SplitToy(ToyModule):
    """A toy whose rank 0 is lost in the iteration after `LAST_STEP`, as it sends values."""

    def __init__(self) -> None:
        super().__init__(ToyOptions(num_layers=4))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == LAST_STEP and self.trainer.world_size == NUM_RANKS:
            self.split(self.trainer.global_rank)

    def split(self, rank: int) -> None:
        """Prepare the loss."""


class SplitRows(SplitToy):
    """The rows of the agreement reach all ranks but one."""

    def split(self, rank: int) -> None:
        share = agreement.Rows.share

        def share_and_fail(rows: agreement.Rows) -> Tensor:
            agreement.Rows.share = share  # type: ignore[method-assign]
            found = share(rows)
            if rank == 0:
                time.sleep(0.5)  # Until the others have them.
                die()
            raise RuntimeError(f"Connection closed by peer, without {found}")

        if rank in (0, 2):
            agreement.Rows.share = share_and_fail  # type: ignore[method-assign]


class SplitNorm(SplitToy):
    """The norm of the gradients reaches all ranks but one."""

    def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")

    def split(self, rank: int) -> None:
        reduce_over = processes.reduce_over

        def reduce_and_fail(*given: Any) -> Tensor:
            processes.reduce_over = reduce_over
            norm = reduce_over(*given)
            if rank == 0:
                die()
            raise RuntimeError(f"Connection closed by peer, without {norm}")

        if rank in (0, 2):
            processes.reduce_over = reduce_and_fail


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make_module", [SplitRows, SplitNorm])
def test_the_others_go_on_from_the_newest_checkpoint(tmp_path: Path, make_module: Any) -> None:
    """Some have stepped and some haven't, so no step is left of which all slices are known."""
    expected = undisturbed(NUM_RANKS, NUM_STEPS, make_module=make_module)
    options = {"num_steps": NUM_STEPS, "every": SAVED_STEP, "heartbeat_s": 12.0, "redundancy": 1}
    with playing(tmp_path / "run", NUM_RANKS, make_module=make_module, **options) as node:
        assert node.wait_for_end() == 0, node.log()
        records = [node.records(rank) for rank in range(1, NUM_RANKS)]
        events = list(read_log(node.folder / "events.jsonl"))
    for found in records:
        losses = {item["step"]: item["loss"] for item in found if "step" in item}
        assert list(losses.values()) == pytest.approx(expected, rel=1e-5)
    (recovered,) = [item for item in events if item["event"] == "recovered"]
    assert not recovered["is_live"]
    assert recovered["step"] in (0, SAVED_STEP), "the newest that was complete"
