"""What a rank holds on to is what a checkpoint at its last step's end would hold, or nothing."""

import copy
import itertools
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, EMAWeightAveraging, ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_hetero import HeteroStrategy, LayerwiseCheckpoint
from lightning_hetero.callbacks import ElasticRestart, elastic
from lightning_hetero.callbacks.checkpointing import live, places
from lightning_hetero.callbacks.checkpointing.owned import OwnedState
from lightning_hetero.callbacks.checkpointing.training_state import dump_metadata
from lightning_hetero.checkpoint.live import LiveState, NothingYet
from lightning_hetero.runtime.random_state import RandomState
from lightning_hetero.runtime.ranks.communicators import StepEnd
from lightning_hetero.strategy.generations import Generations
from lightning_hetero.strategy.processes import Processes
from tests.toy import TokenRows, ToyModule, ToyOptions, quiet

pytestmark = pytest.mark.filterwarnings("ignore")
EPOCH = 4


class Stop(Exception):
    """Stands for the loss of another rank."""


class Saves(Checkpoint):
    """Dumps all that a checkpoint would hold, after each step."""

    def __init__(self) -> None:
        self.step = 0
        self.metadata: dict[str, Any] = {}
        self.random_state: dict[str, Any] = {}
        self.weights: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # As with standbys: on one rank there is nobody to stand by.
        trainer.strategy.engine.store.has_standbys = True

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.fit_loop._should_accumulate():
            owned = OwnedState(trainer)
            self.step = trainer.global_step
            self.metadata = copy.deepcopy(dump_metadata(trainer, owned))
            self.random_state = RandomState.now().to_dict()
            self.weights = tensors_of(owned.kept_contents())


class Loses(Callback):
    """Ends the fit at a hook, as the loss of a rank does, after so many steps."""

    def __init__(self, hook: str, step: int, saving: LayerwiseCheckpoint) -> None:
        self.kept: Any = None

        def lose(trainer: Any, *_: Any, **__: Any) -> None:
            if trainer.global_step >= step:
                saving.keep_live(trainer, 3)
                self.kept = saving._live.state  # `on_exception` forgets it.
                raise Stop

        setattr(self, hook, lose)


class LosesLast(Loses, Checkpoint):
    """Called after other callbacks' and the module's hooks of an epoch's end."""


class Model(ToyModule):
    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.training_step(batch, index))

    def training_step(self, batch: Any, index: int) -> Any:
        torch.rand(())  # The generators move on.
        return super().training_step(batch, index)


def tensors_of(slices: Any) -> dict[str, Any]:
    return {
        f"{item.parameter} {key}": tensor.clone()
        for item in slices
        for key, tensor in {"weight": item.weight, **item.state, **item.whole_state}.items()
    }


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


@pytest.fixture
def lose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what trains until a hook ends it, and returns what was kept and what was saved."""
    monkeypatch.setattr(Processes, "outlives_ranks", property(lambda _: True))

    numbers = itertools.count()

    def run(hook: str, step: int, *callbacks: Callback, **options: Any) -> tuple[Any, Saves]:
        L.seed_everything(5, verbose=False)
        folder = tmp_path / str(next(numbers))
        saving = LayerwiseCheckpoint(folder, every_n_train_steps=100, shared_memory=False)
        saves = Saves()
        is_last = hook == "on_train_epoch_end"
        loses = (LosesLast if is_last else Loses)(hook, step, saving)
        others = [saving, saves, loses] if is_last else [loses, saving, saves]
        trainer = L.Trainer(
            strategy=HeteroStrategy(num_stages=1),
            devices=1,
            callbacks=[*callbacks, *others],
            default_root_dir=folder,
            **{**quiet(max_epochs=3), "enable_checkpointing": True, **options},
        )
        rows = TokenRows(4 * EPOCH)
        loader = StatefulDataLoader(rows, batch_size=4, shuffle=True)
        module: Any = Model(ToyOptions(num_layers=1))
        if hook == "configure_gradient_clipping":
            setattr(module, hook, lambda *_, **__: loses.configure_gradient_clipping(trainer))
        with pytest.raises(Stop):
            trainer.fit(module, loader, StatefulDataLoader(rows))
        return loses.kept, saves

    return run


@pytest.mark.parametrize(
    ("hook", "step", "more"),
    [
        ("on_train_batch_start", 2, {}),
        ("on_before_optimizer_step", 3, {"accumulate_grad_batches": 2}),
        ("on_before_zero_grad", EPOCH + 2, {}),
        ("configure_gradient_clipping", 2, {"gradient_clip_val": 1.0}),
        ("on_train_batch_start", EPOCH + 1, {}),
        ("on_validation_batch_start", 2, {"val_check_interval": 2}),
        ("on_train_batch_start", 2, {"val_check_interval": 2}),
    ],
)
def test_it_is_what_a_checkpoint_of_the_last_step_would_be(
    lose: Any, hook: str, step: int, more: dict[str, Any]
) -> None:
    best = ModelCheckpoint(monitor="val_loss", save_last=False)
    state, saves = lose(hook, step, best, **more)
    assert isinstance(state, LiveState), state
    content = state.content
    assert content.id.step == saves.step > 0
    assert state.generation == 3
    for key, value in saves.metadata.items():
        assert is_same(value, content.metadata[key]), key
    assert content.metadata.keys() == saves.metadata.keys()
    assert is_same(saves.random_state, content.rank_metadata)
    assert is_same(saves.weights, tensors_of(content.slices))


def test_averages_and_what_hooks_save_are_of_the_same_step(lose: Any) -> None:
    class Saved(Callback):
        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
            checkpoint["mine"] = [trainer.global_step]

    average = EMAWeightAveraging(decay=0.5)
    state, saves = lose("on_train_batch_start", 3, average, Saved())
    assert isinstance(state, LiveState), state
    assert state.content.metadata["mine"] == [3]
    assert is_same(saves.metadata, dict(state.content.metadata))
    assert is_same(saves.weights, tensors_of(state.content.slices))
    assert any("average" in key for key in saves.weights)


def test_nothing_is_kept_of_a_step_that_is_under_way(lose: Any, monkeypatch: Any) -> None:
    class Changes(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                with torch.no_grad():
                    next(module.parameters()).add_(1.0)

    # The optimizer has stepped, and the step hasn't ended.
    state, _ = lose("on_train_batch_end", 2)
    assert "in the middle of an optimizer's step" in state.why
    state, _ = lose("on_train_batch_start", 2, Changes())
    assert "weights or buffers have changed" in state.why
    # As an abort leaves it where the device still waited for another rank.
    monkeypatch.setattr(StepEnd, "__init__", lambda self: setattr(self, "is_reached", False))
    state, _ = lose("on_train_batch_start", 2)
    assert "its device hadn't come to the end of the step" in state.why


@pytest.mark.parametrize(
    ("hook", "step", "more"),
    [
        ("on_train_epoch_end", EPOCH, {}),
        ("on_validation_batch_start", EPOCH, {}),
        ("on_validation_start", EPOCH + 2, {"max_steps": EPOCH + 2, "val_check_interval": 2}),
    ],
)
def test_nothing_is_kept_while_the_end_of_an_epoch_is_under_way(
    lose: Any, hook: str, step: int, more: dict[str, Any]
) -> None:
    """What hooks have done to the module can't be undone, and they may not bear it twice."""
    state, _ = lose(hook, step, **more)
    assert "the end of an epoch, or of training, follows its last step" in state.why
    state, _ = lose("on_train_batch_start", EPOCH)
    assert isinstance(state, LiveState), state
    assert state.content.id.step == EPOCH


class Sees(Callback):
    """Writes down what is done, in order, and may end the fit at a validation's start."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at = stop_at
        self.done: list[tuple[str, int, float, int]] = []

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step == self.stop_at:
            trainer.checkpoint_callback.saved.wait_until_confirmed(60.0)
            raise Stop

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._see("validated", trainer, trainer.callback_metrics["val_loss"])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self._see("trained", trainer, outputs["loss"])

    def _see(self, what: str, trainer: Any, loss: Any) -> None:
        num_stepped = trainer.fit_loop.epoch_loop._batches_that_stepped
        self.done.append((what, trainer.global_step, float(loss), num_stepped))


@pytest.mark.parametrize(("interval", "stop_at"), [(1, 2), (3, 6)])
def test_a_validation_that_was_due_when_a_step_was_saved_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: int, stop_at: int
) -> None:
    monkeypatch.setattr(places, "SHARED_MEMORY", tmp_path)

    def fit(sees: Sees, name: str) -> Sees:
        L.seed_everything(5, verbose=False)
        saving = LayerwiseCheckpoint(local_dir=tmp_path / name, every_n_train_steps=1)
        trainer = L.Trainer(
            strategy=HeteroStrategy(num_stages=1),
            devices=1,
            callbacks=[saving, sees],
            val_check_interval=interval,
            **{**quiet(max_epochs=1), "enable_checkpointing": True, "num_sanity_val_steps": 0},
        )
        rows = TokenRows(32)
        loader = StatefulDataLoader(rows, batch_size=4, shuffle=True)
        trainer.fit(Model(ToyOptions(num_layers=1)), loader, StatefulDataLoader(TokenRows(4)))
        return sees

    undisturbed, first = fit(Sees(), "a"), Sees(stop_at)
    with pytest.raises(Stop):
        fit(first, "b")
    again = fit(Sees(), "b")
    assert again.done[0][:2] == ("validated", stop_at)
    assert first.done + again.done == undisturbed.done


def test_a_validation_that_nobody_foresaw_counts_too(lose: Any, monkeypatch: Any) -> None:
    for name in ("is_end_near", "is_validation_due"):
        monkeypatch.setattr(live, name, lambda _: False)
    state, _ = lose("on_validation_end", EPOCH, num_sanity_val_steps=1)
    assert "a validation that its last step doesn't call for" in state.why


def test_a_rank_lost_in_a_validation_leaves_no_module_in_its_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Processes, "outlive_ranks", lambda *_: None)

    class Ends(Callback):
        def on_validation_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            self.during = {module.training for module in pl_module.modules()}
            Generations(trainer.strategy, trainer, timedelta(seconds=2))._end_fit(0)
            self.after = {module.training for module in pl_module.modules()}
            raise Stop

    ends = Ends()
    options = {**quiet(max_epochs=1, callbacks=[ends]), "num_sanity_val_steps": 0}
    trainer = L.Trainer(strategy=HeteroStrategy(num_stages=1), devices=1, **options)
    with pytest.raises(Stop):
        trainer.fit(Model(ToyOptions(num_layers=1)), *[StatefulDataLoader(TokenRows(4))] * 2)
    assert (ends.during, ends.after) == ({False}, {True})


def test_nothing_is_kept_before_a_plateau_scheduler_has_stepped(
    lose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def configure(module: Model) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        plan = {"scheduler": scheduler, "interval": "step", "monitor": "val_loss", "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": plan}

    monkeypatch.setattr(Model, "configure_optimizers", configure)
    state, _ = lose("on_train_batch_start", 2)
    assert "waits for a plateau" in state.why


def test_whoever_has_trained_no_step_keeps_what_it_came_with(monkeypatch: Any) -> None:
    state, none = object.__new__(LiveState), None
    for own in (state, NothingYet()):
        steps: Any = live.LiveSteps()
        steps.state = own
        for _ in range(2):  # Two generations in a row that end before a step.
            assert steps.keep(none, none, 1) == (own is state)
            assert steps.state is own
    # Who has trained since, and has nothing of the last step, is no newcomer any more.
    steps._noted = live._IN_STEP
    for _ in range(2):
        assert not steps.keep(none, none, 1)
        assert steps.state is live._IN_STEP
    # What was given up for a checkpoint is gone, though others may be at one step by then.
    steps.state, nothing = state, live.NothingLive("the ranks had come to different steps")
    monkeypatch.setattr(live, "recover_live", lambda *_: nothing)
    assert steps.recover([], none) is nothing
    assert not steps.keep(none, none, 2)
    assert steps.state is nothing


def test_newcomers_are_held_back_where_their_save_would_lack_something(monkeypatch: Any) -> None:
    waits, due, now_s = [True], [False], [0.0]
    membership = SimpleNamespace(look_for_joiners=lambda: waits[0])
    strategy = SimpleNamespace(processes=SimpleNamespace(membership=membership))
    monkeypatch.setattr(elastic, "run_of", lambda _: SimpleNamespace(strategy=strategy))
    monkeypatch.setattr(elastic, "is_epoch_ending", lambda _: due[0])
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    trainer: Any = SimpleNamespace(is_global_zero=True)
    seen = ElasticRestart(in_place=True)
    assert seen._sees_joiners(trainer)
    due[0] = True
    # Also where each step ends an epoch they come in.
    assert [seen._sees_joiners(trainer) for _ in range(4)] == [False, True, False, True]
    # A save that failed isn't repeated at each step.
    due[0], seen._lets_in_at_s = False, 60.0
    assert not seen._sees_joiners(trainer)
    now_s[0] = 60.0
    assert seen._sees_joiners(trainer)
    waits[0] = False
    assert not seen._sees_joiners(trainer)
