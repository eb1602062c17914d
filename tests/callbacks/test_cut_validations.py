"""A loss in a validation, or at an epoch's end, changes nothing of what a run trains."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EarlyStopping
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_hetero import ElasticRestart, HeteroStrategy, LayerwiseCheckpoint, RunLog
from lightning_hetero.callbacks.run_log import read_log
from lightning_hetero.runtime.generation.keeper import KEPT
from lightning_hetero.strategy.generations import Generations
from tests.processes import free_port
from tests.toy import TokenRows, ToyModule, ToyOptions, quiet

pytestmark = pytest.mark.filterwarnings("ignore")
EPOCH = 4


class Lost(Exception):
    """Stands for the loss of another rank."""


class TellsLosses(ToyModule):
    """Tells the losses of steps and of validations."""

    def __init__(self) -> None:
        super().__init__(ToyOptions(num_layers=1))
        self.told: dict[tuple[Any, ...], float] = {}

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", super().training_step(batch, index))

    def tell(self, what: str, value: float) -> None:
        key = what, self.trainer.global_step, self.trainer.current_epoch
        assert self.told.setdefault(key, value) == value, "what is trained again is the same"

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [scheduler]


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

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            pl_module.tell("validated", float(trainer.callback_metrics["val_loss"]))


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

    monkeypatch.setattr(Generations, "_reason_to_go_on", reason)

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
        module = TellsLosses()
        loader = StatefulDataLoader(TokenRows(4 * EPOCH), batch_size=4, shuffle=True)
        trainer.fit(module, loader, StatefulDataLoader(TokenRows(8), batch_size=2))
        assert all(left <= 0 for left in tells.left.values())
        noted = [item for item in read_log(log.path) if item["event"] == "recovered"]
        return module.told, noted

    yield run
    del store


@pytest.mark.parametrize(
    ("losses", "options"),
    [
        # In a step, in the next epoch's first, in a validation in mid-epoch.
        ([("on_before_zero_grad", 2, 1), ("on_train_batch_start", EPOCH, 1)], {}),
        ([("on_validation_batch_start", 2, 2)], {"val_check_interval": 2}),
        # Twice before another step has ended.
        ([("on_before_zero_grad", 2, 1), ("on_after_backward", 2, 1)], {}),
    ],
)
def test_it_goes_on_without_losing_a_step(
    fit: Any, losses: list[Loss], options: dict[str, Any]
) -> None:
    patient = partial(EarlyStopping, "val_loss", patience=100, min_delta=100.0)
    undisturbed, _ = fit("undisturbed", Tells(), patient(), **options)
    told, noted = fit("disturbed", Tells(losses), patient(), **options)
    assert [item["is_live"] for item in noted] == [True] * len(losses)
    assert told == undisturbed


def test_from_the_end_of_an_epoch_it_goes_back_to_a_checkpoint_and_says_so(fit: Any) -> None:
    undisturbed, _ = fit("undisturbed", Tells())
    told, noted = fit("disturbed", Tells([("on_validation_batch_start", EPOCH, 3)]))
    assert [item["is_live"] for item in noted] == [False]
    assert "the end of an epoch, or of training, follows" in noted[0]["why_not_live"]
    assert told == undisturbed
