"""Ranks are lost, and the others go on in the processes that they are in."""

import os
import signal
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.amp import GradScaler

from lightning_hetero.runtime.iteration import agreement
from lightning_hetero.strategy import processes
from lightning_hetero.strategy.precision import HeteroPrecision
from tests.callbacks.in_place import (
    BATCH,
    AveragedToy,
    Node,
    averaged_toy,
    loader,
    playing,
    toy_of_a_command_line,
    undisturbed,
)
from tests.callbacks.several_nodes import NUM_RANKS as NUM_RANKS_OF_NODES
from tests.callbacks.several_nodes import playing_nodes
from tests.strategy.test_loss_scale import Overflow
from tests.toy import ToyModule, ToyOptions, quiet

pytestmark = [
    pytest.mark.dist,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]

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


def test_lost_ranks_leave_the_losses_and_the_samples_as_they_were(tmp_path: Path) -> None:
    """SIGKILL of rank 0, of another one during the recovery; then SIGKILL and SIGSTOP at once.

    Those who are left have all rows the first time, and no step is lost; then they don't, and go
    back to a checkpoint.
    """
    num_ranks, num_steps = 5, 16
    expected = undisturbed(num_ranks, num_steps)
    options = {"num_steps": num_steps, "every": 8, "heartbeat_s": 6.0, "redundancy": 1}
    with playing(tmp_path / "run", num_ranks, **options) as node:
        # Before the first checkpoint that is due; whoever is struck has written the step down.
        node.wait_for_all(range(num_ranks), 2)
        (node.folder / "struck-in-set-up").write_text(f"1 {int(signal.SIGKILL)}")
        node.strike(0)
        node.wait_for_all((2, 3, 4), 12)
        # In a ring of three one of them stands by for the other.
        node.strike(2, signal.SIGSTOP)
        node.strike(3)
        node.let_go_on_to(num_steps)
        assert node.wait_for_end() == 0, node.log()
        check_steps(trained(node), expected, num_ranks)
        # Each worker has been one process all the time, and the log says who was lost.
        assert [len([i for i in node.records(4) if "begin" in i])] == [3]
        noted, (live, saved) = node.events("generation"), node.events("recovered")
    assert [(sorted(item["lost"]), item["ranks"]) for item in noted] == [([0, 1], 3), ([2, 3], 1)]
    assert all(item["idle_s"] > 0 for item in noted)
    assert [item["steps_again"] for item in noted] == [0, 4]
    assert (live["is_live"], live["lost_steps"], live["step"]) == (True, 0, 2)
    assert (saved["is_live"], saved["step"]) == (False, 8)
    assert "without ranks [0, 1] of the generation before: " in saved["why_not_live"]


def test_averages_of_weights_go_on_after_a_loss(tmp_path: Path) -> None:
    made: list[AveragedToy] = []

    def make_module() -> AveragedToy:
        made.append(averaged_toy())
        return made[0]

    undisturbed(3, 6, make_module=make_module)
    options = {"num_steps": 6, "every": 3, "redundancy": 1, "make_module": averaged_toy}
    with playing(tmp_path / "run", 3, **options) as node:
        node.wait_for_all(range(3), 4)
        node.strike(1)
        node.let_go_on_to(6)
        assert node.wait_for_end() == 0, node.log()
        found = [item["norms"] for rank in (0, 2) for item in node.records(rank) if "norms" in item]
    assert found == [pytest.approx(made[0].norms, rel=1e-5)] * 2


def test_on_the_device_of_a_lost_process_another_one_starts_and_joins(tmp_path: Path) -> None:
    """Not on that of one that leaves. Losses stay, and no step is trained again."""
    num_steps = 40
    expected = undisturbed(3, num_steps)
    options = {"num_steps": num_steps, "every": 100, "heartbeat_s": 30.0, "redundancy": 1}
    with playing(tmp_path / "run", 3, replaces=True, **options) as node:
        node.wait_for_all(range(3), 2)
        first = node.pid_of(0)
        node.strike(0)
        came = node.go_on_until(
            lambda: node.pid_of(0) != first and bool(node.records(0)), first=3, last=32
        )
        node.wait_for_all(range(3), came + 3)
        node.strike(1, signal.SIGTERM)
        node.let_go_on_to(num_steps)
        assert node.wait_for_end() == 0, node.log()
        check_steps(trained(node), expected, 3)
        noted = node.events("generation")
        assert f"joins the run on the device of process {first}, which was lost." in node.log()
        # Rank 0 may be another process: all of them know their own rank, and callbacks are told.
        for name in range(3):
            for item in (item for item in node.records(name) if "begin" in item):
                rank, is_zero, heard = item["zero"]
                assert (rank, is_zero) == (item["rank"], item["rank"] == 0)
                assert not heard or heard[1:] == [item["rank"], item["size"]]
    changes = [(len(item["lost"]), item["joined"], item["ranks"]) for item in noted]
    assert changes == [(1, [], 2), (0, [3], 3), (1, [], 2)]
    assert [item["steps_again"] for item in noted] == [0, 0, 0]


def test_without_redundancy_a_process_joins_and_another_leaves_and_no_step_is_trained_again(
    tmp_path: Path,
) -> None:
    """All save first. Who leaves is told in the set-up of the generation in which it joins."""
    num_steps = 40
    expected = undisturbed(2, num_steps)
    options = {"num_steps": num_steps, "every": 100, "heartbeat_s": 30.0}
    options["make_module"] = toy_of_a_command_line
    with playing(tmp_path / "run", 2, **options) as node:
        (node.folder / "struck-in-set-up").write_text(f"1 {int(signal.SIGTERM)}")
        node.wait_for_all((0,), 2)
        node.join(NEW)
        joined = node.go_on_until(lambda: bool(node.records(NEW)), first=3, last=num_steps - 8)
        node.wait_for_all((0, NEW), joined + 4)
        node.let_go_on_to(num_steps)
        assert node.wait_for_end() == 0, node.log()
        check_steps(trained(node), expected, 2)
        # It was started by itself, and shares the machine's cores with the others all the same.
        own = [item["threads"] for item in node.records(NEW) if "begin" in item]
        assert max(own) == max(1, len(os.sched_getaffinity(0)) // 3)
        noted, recovered = node.events("generation"), node.events("recovered")
    changes = [(item["lost"], item["joined"], item["ranks"]) for item in noted]
    assert changes == [([], [2], 3), ([1], [], 2)]
    assert [item["steps_again"] for item in noted] == [0, 0]
    assert [item["is_live"] for item in recovered] == [False] * 2


def test_a_lost_node_loses_no_step_and_without_the_stores_node_the_run_ends(
    tmp_path: Path,
) -> None:
    """Keepers and workers of whole nodes are lost at once; also the one that serves the store."""
    expected = undisturbed(NUM_RANKS_OF_NODES, 6)
    options = {"num_steps": 1000, "every": 100, "heartbeat_s": 6.0, "redundancy": 1}
    with playing_nodes(tmp_path / "run", **options) as nodes:
        nodes.wait_for_all(range(NUM_RANKS_OF_NODES), 3)
        nodes.lose(1)
        nodes.wait_for_all((0, 3), 6)
        for rank in (0, 3):
            found = {i["step"]: i["loss"] for i in nodes.records(rank) if "step" in i}
            assert list(found.values()) == pytest.approx(expected, rel=1e-5)
        (lost,) = nodes.events("generation")
        assert (sorted(lost["lost"]), lost["ranks"], lost["steps_again"]) == ([1, 2], 2, 0)
        # Who loses the store can't know who else is left: it ends, to be started again.
        nodes.lose(0)
        nodes.let_go_on_to(1000)
        assert nodes.wait_for_end() not in (0, None)
        assert max(item.get("step", 0) for item in nodes.records(3)) <= 7


LAST_STEP = 3


class Split(ToyModule):
    """Rank 0 is lost as it sends what all need after `LAST_STEP`; rank 1 gets it, 2 doesn't."""

    def __init__(self, owner: Any, name: str) -> None:
        super().__init__(ToyOptions(num_layers=4))
        self.owner, self.name = owner, name

    def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:
        if self.owner is processes:  # After the rows nothing else may be needed of others.
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        rank, share = self.trainer.global_rank, getattr(self.owner, self.name)

        def share_and_fail(*given: Any) -> Tensor:
            setattr(self.owner, self.name, share)
            found = share(*given)
            if rank == 0:
                time.sleep(0.5)  # Until the others have it.
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError(f"Connection closed by peer, without {found}")

        at_first = self.trainer.world_size == 3
        if self.trainer.global_step == LAST_STEP and at_first and rank in (0, 2):
            setattr(self.owner, self.name, share_and_fail)


def split_rows() -> Split:
    """Split the rows of an iteration's agreement."""
    return Split(agreement.Rows, "share")


def split_norm() -> Split:
    """Split the norm of the gradients."""
    return Split(processes, "reduce_over")


@pytest.mark.parametrize("make_module", [split_rows, split_norm])
def test_where_some_have_stepped_and_some_have_not_all_go_back_to_a_checkpoint(
    tmp_path: Path, make_module: Any
) -> None:
    expected = undisturbed(3, 5, make_module=make_module)
    options = {"num_steps": 5, "every": LAST_STEP, "heartbeat_s": 12.0, "redundancy": 1}
    with playing(tmp_path / "run", 3, make_module=make_module, **options) as node:
        assert node.wait_for_end() == 0, node.log()
        for rank in (1, 2):
            losses = {item["step"]: item["loss"] for item in node.records(rank) if "step" in item}
            assert list(losses.values()) == pytest.approx(expected, rel=1e-5)
        (recovered,) = node.events("recovered")
    assert not recovered["is_live"]
    assert recovered["step"] in (0, LAST_STEP), "the newest that was complete"


class ScaledToy(ToyModule):
    """Micro-batches with a certain token overflow; each step's scale is written down."""

    def __init__(self, file: Path) -> None:
        super().__init__(ToyOptions(num_layers=4))
        self.file = file

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return Overflow.apply(loss) if (batch[0][:, 0] == 3).any() else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        scale = self.trainer.precision_plugin.state_dict()["scale"]
        with self.file.open("a") as file:
            file.write(f"{self.trainer.global_step} {scale}\n")


def scaler() -> GradScaler:
    return GradScaler("cpu", init_scale=2.0**10, growth_interval=2)


@pytest.mark.slow
def test_survivors_keep_the_loss_scale(tmp_path: Path) -> None:
    plugin = MixedPrecision("16-mixed", "cpu", scaler())
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    L.seed_everything(3, verbose=False)
    trainer = L.Trainer(devices=1, plugins=plugin, **quiet(max_steps=10))
    trainer.fit(ScaledToy(alone), loader(2 * BATCH))
    expected = alone.read_text().splitlines()
    scales = [float(line.split()[1]) for line in expected]
    assert min(scales[6:]) < max(scales[6:]), "nothing was skipped after the loss"
    options = {"num_steps": 10, "every": 100, "redundancy": 1, "num_stages": 2}
    options["precision_plugin"] = HeteroPrecision("16-mixed", scaler())
    options["make_module"] = partial(ScaledToy, shared)
    with playing(tmp_path / "run", 4, **options) as node:
        node.wait_for_all(range(4), 5)
        node.strike(0)
        node.let_go_on_to(10)
        assert node.wait_for_end() == 0, node.log()
    assert set(shared.read_text().splitlines()) == set(expected)
