"""A loss in a validation, or at an epoch's end, changes nothing of what a run does and gathers."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import MeanMetric

from lightning_hetero import ElasticRestart, HeteroStrategy, LayerwiseCheckpoint, RunLog
from lightning_hetero.callbacks.run_log import read_log
from lightning_hetero.runtime.generation.worker import KEPT
from lightning_hetero.strategy.generations import _Generations
from tests.processes import free_port
from tests.toy import TokenRows, ToyModule, ToyOptions, quiet

pytestmark = pytest.mark.filterwarnings("ignore")
EPOCH = 4


class Lost(Exception):
    """Stands for the loss of another rank."""


class Gathers(ToyModule):
    """Gathers in metrics, lists and means what it tells at the ends of validations and epochs."""

    def __init__(self) -> None:
        super().__init__(ToyOptions(num_layers=1))
        self.validated, self.trained = MeanMetric(), MeanMetric()
        self.outputs: list[Any] = []
        self.step_losses: list[Any] = []
        self.told: list[tuple[Any, ...]] = []

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        self.step_losses.append(loss.detach())
        self.trained.update(loss.detach())
        self.log("epoch_loss", loss.detach(), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        loss = super().training_step(batch, index)
        self.outputs.append(loss)
        self.validated.update(loss)
        self.log("val_loss", loss)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            mean = float(torch.stack(self.outputs).mean())
            self.tell("validated", len(self.outputs), mean, float(self.validated.compute()))
        self.outputs.clear()
        self.validated.reset()

    def on_train_epoch_end(self) -> None:
        mean = float(torch.stack(self.step_losses).mean())
        self.tell("epoch", len(self.step_losses), mean, float(self.trained.compute()))
        self.step_losses.clear()
        self.trained.reset()

    def tell(self, what: str, *numbers: float) -> None:
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        step, epoch = self.trainer.global_step, self.trainer.current_epoch
        self.told.append((what, step, epoch, rate, *numbers))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
        plan = {"scheduler": plateau, "interval": "epoch", "monitor": "val_loss"}
        return {"optimizer": optimizer, "lr_scheduler": plan}


Loss = tuple[str, int, int]
"""A hook, the steps before it, and which of its calls it is then."""


class Tells(Callback):
    """Tells of steps and the end, and lets ranks be lost in hooks, each once."""

    def __init__(self, losses: Sequence[Loss] = ()) -> None:
        self.left = {loss: loss[2] for loss in losses}
        for hook in {hook for hook, _, _ in losses}:
            setattr(self, hook, partial(self.lose, hook))

    def lose(self, hook: str, trainer: Any, *_: Any) -> None:
        for loss in self.left:
            if loss[:2] == (hook, trainer.global_step) and not trainer.sanity_checking:
                self.left[loss] -= 1
                if self.left[loss] == 0:
                    raise Lost

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # As with standbys: on one rank there is nobody to stand by.
        trainer.strategy.engine.store.has_standbys = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        pl_module.tell("step", float(outputs["loss"]))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        (saving,) = trainer.strategy.run.checkpoints
        # In this generation: lost ranks may have left what was saved before without their parts.
        assert saving.saved.id.step == trainer.global_step
        means = {key: float(value) for key, value in trainer.callback_metrics.items()}
        stopping = trainer.early_stopping_callback
        pl_module.tell("end", means, None if stopping is None else stopping.wait_count)


@pytest.fixture
def fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Return what trains in place, alone, and goes on after `Lost` as after the loss of a rank."""
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    for name, value in {
        KEPT: "-1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": "1",
        "NODE_RANK": "0",
        "LOCAL_RANK": "0",
    }.items():
        monkeypatch.setenv(name, value)

    def reason(_: Any, error: Exception) -> str | None:
        return "A rank is lost." if isinstance(error, Lost) else None

    monkeypatch.setattr(_Generations, "_reason_to_go_on", reason)

    def run(name: str, tells: Tells, *callbacks: Callback, **options: Any) -> Any:
        L.seed_everything(5, verbose=False)
        folder = tmp_path / name
        saving = LayerwiseCheckpoint(folder, every_n_train_steps=100, shared_memory=False)
        log = RunLog(folder / "events.jsonl")
        trainer = L.Trainer(
            strategy=HeteroStrategy(num_stages=1),
            devices=1,
            callbacks=[*callbacks, ElasticRestart(in_place=True), saving, log, tells],
            default_root_dir=folder,
            **{**quiet(max_epochs=3), "enable_checkpointing": True, **options},
        )
        module = Gathers()
        loader = StatefulDataLoader(TokenRows(4 * EPOCH), batch_size=4, shuffle=True)
        trainer.fit(module, loader, StatefulDataLoader(TokenRows(8), batch_size=2))
        assert all(left <= 0 for left in tells.left.values())
        noted = [item for item in read_log(log.path) if item["event"] == "recovered"]
        assert [item["is_live"] for item in noted] == [True] * len(tells.left)
        return module.told

    yield run
    del store


class Stops(Callback):
    """Stops training in mid-epoch."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == EPOCH + 2:
            trainer.should_stop = True


@pytest.mark.parametrize(
    ("losses", "callbacks", "options"),
    [
        # In the validation at an epoch's end, in a step, in the next epoch's first, at the end.
        (
            [
                ("on_validation_batch_start", EPOCH, 3),
                ("on_before_zero_grad", EPOCH + 2, 1),
                ("on_train_batch_start", 2 * EPOCH, 1),
                ("on_validation_batch_start", 3 * EPOCH, 2),
            ],
            [partial(ModelCheckpoint, monitor="epoch_loss", save_last=False)],
            {},
        ),
        # In mid-epoch, and after the very last step.
        (
            [("on_validation_batch_start", 2, 2), ("on_validation_end", EPOCH + 2, 1)],
            [],
            {"max_epochs": None, "max_steps": EPOCH + 2, "val_check_interval": 2},
        ),
        # Twice before another step has ended.
        (
            [("on_before_zero_grad", 2, 1), ("on_after_backward", 2, 1)],
            [],
            {"max_epochs": 1},
        ),
        # After a step that a hook has made the last.
        ([("on_validation_batch_start", EPOCH + 2, 2)], [Stops], {}),
    ],
)
def test_it_goes_on_as_if_nobody_had_been_lost(
    fit: Any, losses: list[Loss], callbacks: list[Any], options: dict[str, Any]
) -> None:
    told = []
    for name, lost in (("undisturbed", []), ("disturbed", losses)):
        patient = EarlyStopping("val_loss", patience=100, min_delta=100.0)
        made = [make() for make in callbacks]
        told.append(fit(name, Tells(lost), patient, *made, **options))
    assert told[0] == told[1]
