"""A loss at any moment of a fit, or of a validation in it, changes nothing of what a run trains."""

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
from lightning_hetero.checkpoint.claims import OWNER_FILE
from lightning_hetero.runtime.generation.keeper import KEPT
from lightning_hetero.runtime.ranks.communicators import StepEnd
from lightning_hetero.runtime.ranks.failure import AgreedExit
from lightning_hetero.strategy.generations import Generations
from tests.processes import free_port
from tests.toy import TokenRows, ToyModule, ToyOptions, quiet

pytestmark = pytest.mark.filterwarnings("ignore")
EPOCH = 4


class Lost(Exception):
    """Stands for the loss of another rank."""


class TellsLosses(ToyModule):
    """Tells the losses of steps and of validations; each step draws a random number."""

    plateau = False

    def __init__(self) -> None:
        super().__init__(ToyOptions(num_layers=1))
        self.told: dict[tuple[Any, ...], float] = {}

    def training_step(self, batch: Any, index: int) -> Any:
        return super().training_step(batch, index) * (1 + 0.1 * torch.rand(()))

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", super().training_step(batch, index))

    def tell(self, what: str, value: float) -> None:
        key = what, self.trainer.fit_loop.epoch_loop.total_batch_idx, self.trainer.current_epoch
        assert self.told.setdefault(key, value) == value, "what is trained again is the same"

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if not self.plateau:
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        plan = {"scheduler": scheduler, "interval": "step", "monitor": "val_loss", "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": plan}


class WaitsForPlateau(TellsLosses):
    plateau = True


Loss = tuple[str, int, int]
"""A hook, the steps before it, and which of its calls it is then."""


class Tells(Callback):
    """Tells of steps and the end, and lets ranks be lost in hooks, each once."""

    def __init__(self, losses: Sequence[Loss] = ()) -> None:
        self.left = {loss: loss[2] for loss in losses}
        self.has_lost = False
        for hook in {hook for hook, _, _ in losses}:
            setattr(self, hook, partial(self.lose, hook, getattr(self, hook)))

    def lose(self, hook: str, before: Callable[..., None], trainer: Any, *arguments: Any) -> None:
        before(trainer, *arguments)
        for loss in self.left:
            if loss[:2] == (hook, trainer.global_step) and not trainer.sanity_checking:
                self.left[loss] -= 1
                if self.left[loss] == 0:
                    if (
                        not self.has_lost
                    ):  # However slow the disk is, the first checkpoint is there.
                        (saving,) = (c for c in trainer.callbacks if hasattr(c, "saved"))
                        saving.saved.wait_until_uploaded(300.0)
                    self.has_lost = True
                    raise Lost

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # As with standbys: on one rank there is nobody to stand by.
        trainer.strategy.engine.store.has_standbys = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        assert all(part.training for part in pl_module.modules())
        pl_module.tell("step", float(outputs["loss"]))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            pl_module.tell("validated", float(trainer.callback_metrics["val_loss"]))


class LetsJoin(Tells):
    """Joiners wait from some steps on, none of which comes once it is let in."""

    def __init__(self, steps: Sequence[int]) -> None:
        super().__init__()
        self.steps = [0, *steps]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self.steps.pop(0)  # A generation begins, the first or that of a joiner.
        trainer.strategy.processes.membership.look_for_joiners = lambda: (
            bool(self.steps) and trainer.global_step + 1 >= self.steps[0]
        )


class Cools(Callback):
    """Changes a rate at the start of each step."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] *= 0.9


class Changes(Tells):
    """Changes a weight before a step."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            with torch.no_grad():
                next(pl_module.parameters()).add_(1.0)


class Keeps(Callback):
    """Adds an entry to checkpoints."""

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        checkpoint["mine"] = trainer.global_step

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        assert checkpoint["mine"] == checkpoint["global_step"]


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

    def run(
        name: str, tells: Tells, *callbacks: Callback, make: Any = TellsLosses, **options: Any
    ) -> Any:
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
        module = make()
        loader = StatefulDataLoader(TokenRows(4 * EPOCH), batch_size=4, shuffle=True)
        trainer.fit(module, loader, StatefulDataLoader(TokenRows(8), batch_size=2))
        assert all(left <= 0 for left in tells.left.values())
        noted = [item for item in read_log(log.path) if item["event"] == "recovered"]
        return module.told, noted

    yield run
    del store


class Taken(Callback):
    """Sees between two generations whether the folder is one that no other job may write to."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def on_generation(self, trainer: Any, old: Any, new: Any) -> None:
        folder = Path(trainer.checkpoint_callback.places.path_or_url)
        self.seen += [(folder / OWNER_FILE).exists()]


def test_no_other_job_can_take_a_folder_between_two_generations(fit: Any, tmp_path: Path) -> None:
    fit("run", Tells([("on_before_zero_grad", 2, 1)]), taken := Taken())
    assert taken.seen == [True]
    assert not (tmp_path / "run" / OWNER_FILE).exists()


class Leaves(Tells):
    """Ends as a rank that leaves alone (0), or as all do (14)."""

    code = 0

    def on_before_zero_grad(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            raise AgreedExit(self.code)


@pytest.mark.parametrize("code", [0, 14])
def test_who_leaves_alone_leaves_its_folder_to_the_others(
    fit: Any, tmp_path: Path, code: int
) -> None:
    leaves = Leaves()
    leaves.code = code
    with pytest.raises(SystemExit):
        fit("run", leaves)
    assert (tmp_path / "run" / OWNER_FILE).exists() == (code == 0)


def patient() -> Callback:
    return EarlyStopping("val_loss", patience=100, min_delta=100.0)


@pytest.mark.parametrize(
    ("tells", "more", "options"),
    [
        # In a step, in the next epoch's first, in a validation in mid-epoch.
        ([("on_before_zero_grad", 2, 1), ("on_train_batch_start", EPOCH, 1)], [patient, Cools], {}),
        ([("on_validation_batch_start", 2, 2)], [patient], {"val_check_interval": 2}),
        # Twice before another step has ended.
        ([("on_before_zero_grad", 2, 1), ("on_after_backward", 2, 1)], [Keeps], {}),
        ([("on_before_optimizer_step", 3, 1)], [], {"accumulate_grad_batches": 2}),
        ([2, EPOCH], [patient], {"val_check_interval": 2}),
    ],
)
def test_it_goes_on_without_losing_a_step(
    fit: Any, tells: list[Any], more: list[Any], options: dict[str, Any]
) -> None:
    """The last case lets joiners in where validations follow, in mid-epoch and at its end."""
    undisturbed, _ = fit("undisturbed", Tells(), *(make() for make in more), **options)
    kind = Tells if isinstance(tells[0], tuple) else LetsJoin
    told, noted = fit("disturbed", kind(tells), *(make() for make in more), **options)
    assert [item["is_live"] for item in noted] == [True] * len(tells)
    assert told == undisturbed
    if kind is LetsJoin:
        # A checkpoint of an epoch's last step lacks what the epoch's end changes.
        assert [item["step"] for item in noted] == [2, EPOCH + 1]


@pytest.mark.parametrize(
    ("loss", "kind", "options", "why"),
    [
        (("on_validation_batch_start", EPOCH, 3), Tells, {}, "the end of an epoch, or of training"),
        (("on_train_epoch_end", EPOCH, 1), Tells, {}, "the end of an epoch, or of training"),
        (("on_train_batch_end", 2, 1), Tells, {}, "in the middle of an optimizer's step"),
        (("on_train_batch_start", 2, 1), Changes, {}, "weights or buffers have changed"),
        (("on_train_batch_start", 2, 1), Tells, {"make": WaitsForPlateau}, "waits for a plateau"),
        # As an abort leaves it where the device still waited for another rank.
        (("on_train_batch_start", 2, 1), Tells, {"is_reached": False}, "hadn't come to the end"),
    ],
)
def test_where_the_last_step_cannot_be_used_it_goes_back_to_a_checkpoint_and_says_so(
    fit: Any, monkeypatch: Any, loss: Loss, kind: Any, options: dict[str, Any], why: str
) -> None:
    undisturbed, _ = fit("undisturbed", kind(), make=options.get("make", TellsLosses))
    if "is_reached" in options:
        monkeypatch.setattr(
            StepEnd, "is_reached", property(lambda self: False, lambda *_: None), raising=False
        )
    told, noted = fit("disturbed", kind([loss]), make=options.get("make", TellsLosses))
    assert [item["is_live"] for item in noted] == [False]
    assert why in noted[0]["why_not_live"]
    assert told == undisturbed


class Sees(Callback):
    """Writes down what is done, in order, and may end the fit at a validation's start."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at = stop_at
        self.done: list[tuple[str, int, float, int]] = []

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step == self.stop_at:
            trainer.checkpoint_callback.saved.wait_until_confirmed(60.0)
            raise Lost

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._see("validated", trainer, trainer.callback_metrics["val_loss"])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self._see("trained", trainer, outputs["loss"])

    def _see(self, what: str, trainer: Any, loss: Any) -> None:
        num_stepped = trainer.fit_loop.epoch_loop._batches_that_stepped
        self.done.append((what, trainer.global_step, float(loss), num_stepped))


def test_a_new_process_makes_up_for_a_validation_that_was_due_when_its_step_was_saved(
    tmp_path: Path,
) -> None:
    def fit(sees: Sees, name: str) -> Sees:
        L.seed_everything(5, verbose=False)
        saving = LayerwiseCheckpoint(tmp_path / name, every_n_train_steps=2, shared_memory=False)
        trainer = L.Trainer(
            strategy=HeteroStrategy(num_stages=1),
            devices=1,
            callbacks=[saving, sees],
            val_check_interval=2,
            **{**quiet(max_epochs=1), "enable_checkpointing": True, "num_sanity_val_steps": 0},
        )
        loader = StatefulDataLoader(TokenRows(20), batch_size=4, shuffle=True)
        trainer.fit(TellsLosses(), loader, StatefulDataLoader(TokenRows(4)))
        return sees

    undisturbed, first = fit(Sees(), "a"), Sees(4)
    with pytest.raises(Lost):
        fit(first, "b")
    again = fit(Sees(), "b")
    assert again.done[0][:2] == ("validated", 4)
    assert first.done + again.done == undisturbed.done
