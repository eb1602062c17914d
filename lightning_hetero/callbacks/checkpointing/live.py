"""The state that a rank keeps after each step, so that others may be lost and no step with them.

The slices change in the optimizer's step only, so they needn't be copied: it is enough to know that
they are still those of the last step when a rank is lost. What else a checkpoint holds and an
iteration changes is noted at the end of each step, at the same point at which a step is saved:
counters of loops, schedulers, callbacks, the data's progress and random numbers. All that stays is
read when a rank is lost. A validation that follows a step is done again after a loss, and so is the
end of an epoch, or of training, whose validation a loss has cut short. While the hooks of an
epoch's end run nothing is held; when the next one begins, what they have changed is noted anew.

Counted: 0.15 to 0.25 ms a step on one busy core for a toy of 49 tensors, a third of it for the
generators of random numbers, and 0.3 µs for each tensor more. A module or a callback with a hook
`on_save_checkpoint` is asked after each step, which takes as long as its hook, and 0.4 ms.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_hetero.callbacks.checkpointing.noted import (
    LOADERS,
    Gathered,
    complete,
    copied,
    dump_step,
    metrics_of,
    on_host,
    places_of,
    trackers_of,
)
from lightning_hetero.callbacks.checkpointing.owned import OwnedState
from lightning_hetero.callbacks.checkpointing.training_state import (
    content_of,
    dump_metadata,
    go_on_after_step,
    hooks_that_save,
    is_end_near,
    is_validation_due,
    stop_of,
)
from lightning_hetero.callbacks.run import run_of
from lightning_hetero.checkpoint import (
    CheckpointId,
    Recovered,
    SliceNeed,
    Tier,
    Transport,
    recover,
)
from lightning_hetero.checkpoint.survivors import (
    Follows,
    Keepers,
    LiveState,
    Newcomer,
    NothingLive,
    recover_from_survivors,
)
from lightning_hetero.checkpoint.transport import gather_json
from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.core.owners import serve_without
from lightning_hetero.runtime.random_state import RandomState

if TYPE_CHECKING:
    from torchmetrics import Metric

__all__ = ["Found", "LiveSteps", "find_saved"]

_version_of = attrgetter("_version")

_IN_STEP = NothingLive("it was lost in the middle of an optimizer's step")
_IN_EVALUATION = NothingLive(
    "the end of an epoch, or a validation of its own, follows its last step, and was under way"
)
_NO_STEP = NothingLive("it had trained no step in this process")
_NO_COPIES = NothingLive("the run has no redundancy")
_PLATEAU = NothingLive("a scheduler waits for a plateau, and steps after the step's end")
_CUT_SHORT = NothingLive("its device hadn't come to the end of the step when it was cut off")
_BUFFERS = NothingLive("training changes buffers of the module, which have no second copy")


@dataclass(frozen=True)
class Found:
    """The state that a fit begins with."""

    recovered: Recovered | None
    """None where it begins anew."""
    is_live: bool = False
    """Whether it is what the ranks still held in memory, not a checkpoint."""
    has_newcomers: bool = False
    """Whether a rank has joined and not trained a step yet, so that it has gathered nothing."""
    why_not_live: str | None = None
    """Why ranks didn't go on from memory after one was lost; None if none was."""


@dataclass(frozen=True, kw_only=True)
class _Noted:
    """The state noted at the end of a step."""

    step: int
    versions: int
    """Of all that has to stay as it is."""
    metadata: dict[str, Any]
    """Entries that an iteration changes, by their names in a checkpoint; or all of them."""
    counts: list[dict[str, Any]]
    """The state of each counter of the loops."""
    num_stepped: int
    random_state: RandomState
    is_whole: bool
    """Whether the metadata are complete, because hooks had to be asked."""
    is_validation_due: bool
    """Whether a validation follows the step; a run that goes on from it repeats that."""
    follows: Follows
    gathered: Gathered


class LiveSteps:
    """One rank's last step; called by every rank alike, and `keep` by those that are left."""

    def __init__(self) -> None:
        self.state: LiveState | NothingLive | Newcomer = Newcomer()
        """The step to continue from: set by `keep`, until the next generation ends a step."""
        self._noted: _Noted | NothingLive = _NO_STEP
        self._watched: list[tuple[dict[str, Any], str]] = []
        """Where the tensors are that have to stay as they are."""
        self._trackers: list[Any] = []
        """The counters of the loops."""
        self._metrics: list[Metric] = []
        self._ended: _Noted | None = None
        """The last step of an epoch whose end is under way."""
        self._before_evaluation: Gathered | None = None
        """Gathered by the module before the validation that is under way."""
        self._before_first_step: Gathered | None = None
        """The same before the first step that is trained from `state` on."""
        self._means: Any = None
        """The means of the epoch that were logged by the step of `state`."""
        self._newest: dict[str, Any] = {}
        """The newest values that were logged by then, which callbacks may monitor."""

    def begin_change(self) -> None:
        """Count the slices as changing, from before an optimizer's step to the step's end.

        Not from its hooks and clipping on, in which ranks wait for each other: they change nothing
        that is noted.
        """
        if not isinstance(self._noted, NothingLive):
            self._noted = _IN_STEP

    def begin_evaluation(self, trainer: pl.Trainer) -> None:
        """Count callbacks and schedulers as changing, from before a validation on, unless noted."""
        metrics = list(metrics_of(trainer.lightning_module))
        self._before_evaluation = Gathered(trainer, metrics)
        noted = self._noted
        if isinstance(noted, NothingLive):
            return
        # Hooks may have stopped training since.
        ends = is_end_near(trainer)
        if ends or noted.is_validation_due:
            metadata = {**noted.metadata, **stop_of(trainer)}
            follows = Follows.END if ends else noted.follows
            self._noted = replace(noted, follows=follows, metadata=metadata)
        else:
            self._noted = _IN_EVALUATION

    def end_evaluation(self) -> None:
        """Keep what a validation has left in the module."""
        self._before_evaluation = None

    def begin_epoch_end(self) -> None:
        """Count all as changing that hooks of an epoch's end change, which can't be run again."""
        if not isinstance(self._noted, NothingLive):
            self._ended, self._noted = self._noted, _IN_EVALUATION
        if isinstance(self.state, LiveState):
            self.state = _IN_EVALUATION

    def begin_epoch(self, trainer: pl.Trainer) -> None:
        """Note what the end of an epoch has changed; communicates nothing.

        Whoever goes on from it begins the epoch again, after the last step of the one before.
        """
        ended, self._ended = self._ended, None
        if ended is None:
            return
        new = self._note(trainer)
        same = ("loops", "epoch", LOADERS)
        metadata = {**new.metadata, **{k: ended.metadata[k] for k in same if k in ended.metadata}}
        # The loops as of the step: going on, Lightning itself begins the epoch.
        kept: dict[str, Any] = {"counts": ended.counts, "num_stepped": ended.num_stepped}
        self._noted = replace(new, metadata=metadata, follows=Follows.EPOCH, **kept)

    def note_step(self, trainer: pl.Trainer) -> None:
        """Note a step's end, where a checkpoint would be saved; communicates nothing."""
        strategy = run_of(trainer).strategy
        if strategy is None or not strategy.processes.outlives_ranks:
            return
        # All have ended a step since the last recovery.
        self.state, self._means, self._before_first_step = _NO_STEP, None, None
        engine = strategy.engine
        engine.comms.step_end.note(engine.device)
        if not engine.store.has_standbys:
            self._noted = _NO_COPIES
        elif not engine.buffers.are_shared:
            self._noted = _BUFFERS
        elif any(
            item.reduce_on_plateau and item.interval == "step"
            for item in trainer.lr_scheduler_configs
        ):
            self._noted = _PLATEAU
        else:
            self._noted = self._note(trainer)

    def _note(self, trainer: pl.Trainer) -> _Noted:
        is_whole = bool(hooks_that_save(trainer))
        metadata = dump_metadata(trainer, OwnedState(trainer)) if is_whole else dump_step(trainer)
        if not self._watched:
            self._watched = list(places_of(trainer))
            self._trackers = list(trackers_of(trainer.fit_loop))
            self._metrics = list(metrics_of(trainer.lightning_module))
        epoch_loop: Any = trainer.fit_loop.epoch_loop
        return _Noted(
            step=trainer.global_step,
            versions=self._versions(),
            metadata=copied(metadata),
            counts=[dict(vars(tracker)) for tracker in self._trackers],
            num_stepped=epoch_loop._batches_that_stepped,
            random_state=RandomState.now(),
            is_whole=is_whole,
            is_validation_due=is_validation_due(trainer),
            follows=Follows.END if is_end_near(trainer) else Follows.STEP,
            gathered=Gathered(trainer, self._metrics),
        )

    def can_go_on(self, trainer: pl.Trainer, leaving: Collection[int]) -> bool:
        """Whether the last step is held here, and every row of it by some rank not `leaving`."""
        if isinstance(self._noted, NothingLive) or self._noted.follows is Follows.END:
            return False
        return not serve_without(_keepers(trainer).slices, leaving).missing

    def keep(self, trainer: pl.Trainer, start: CheckpointId, generation: int) -> bool:
        """Hold on to the last step's state, if it is still there; communicates nothing.

        Args:
            trainer: Whose fit has ended because ranks are lost, leave or come; not torn down yet.
            start: Names the run's checkpoints.
            generation: Number of the generation that has ended.

        Returns:
            Whether it is.
        """
        noted, self._noted, self._ended = self._noted, _NO_STEP, None
        cut_short, self._before_evaluation = self._before_evaluation, None
        if cut_short is not None:
            cut_short.put_back()
        if self._before_first_step is not None:
            self._before_first_step.put_back()
        if isinstance(noted, NothingLive):
            # What a generation that has trained no step began with is there still.
            if noted is not _NO_STEP:
                self.state = noted
        else:
            try:
                self.state = self._kept(trainer, noted, start, generation)
            except Exception as error:
                # What a user's object raises mustn't end a rank that can go on otherwise.
                self.state = NothingLive(f"{type(error).__name__}: {error}")
        self._watched, self._trackers = [], []
        return isinstance(self.state, LiveState)

    def _kept(
        self, trainer: pl.Trainer, noted: _Noted, start: CheckpointId, generation: int
    ) -> LiveState | NothingLive:
        strategy = run_of(trainer).strategy
        if strategy is not None and not strategy.engine.comms.step_end.is_reached:
            return _CUT_SHORT
        if self._versions() != noted.versions:
            return NothingLive("weights or buffers have changed since the end of its last step")
        owned = OwnedState(trainer)
        self._rewind(trainer, noted)
        metadata = noted.metadata
        if not noted.is_whole:
            metadata = complete(dump_metadata(trainer, owned), metadata, trainer)
        noted.random_state.put_back()
        id_ = replace(start, step=noted.step)
        content = content_of(trainer, owned, id_, metadata, with_standbys=True)
        noted.gathered.put_back()
        self._means = noted.gathered.results
        self._newest = dict(trainer.callback_metrics)
        return LiveState(
            content=on_host(content),
            generation=generation,
            keepers=_keepers(trainer),
            follows=noted.follows,
        )

    def recover(
        self, trainer: pl.Trainer, needs: Sequence[SliceNeed], transport: Transport
    ) -> Found:
        """Return what the ranks of this generation still have; every rank calls it. Communicates.

        Args:
            trainer: Whose fit begins.
            needs: What this rank keeps from now on.
            transport: The ranks.
        """
        live = recover_from_survivors(needs, _keepers(trainer), self.state, transport)
        if not isinstance(live, NothingLive):
            # The generation in which they came may have trained none: then they still are.
            are_new = gather_json(transport, isinstance(self.state, Newcomer))
            return Found(live, is_live=True, has_newcomers=any(are_new))
        rank_zero_info("Going back to the newest checkpoint, because %s.", live.why)
        self.state = live  # Nobody goes on from what was later than that checkpoint any more.
        return Found(None, why_not_live=live.why)

    def go_on(self, trainer: pl.Trainer, found: Found) -> None:
        """Let what this process has besides go with the state that was found and restored."""
        if found.is_live and not found.has_newcomers:
            assert isinstance(self.state, LiveState)
            assert found.recovered is not None
            ends = self.state.follows is Follows.END
            go_on_after_step(trainer, found.recovered, ends=ends)
            trainer.fit_loop.epoch_loop._results = self._means
            trainer._logger_connector._callback_metrics.update(self._newest)
            self._before_first_step = Gathered(trainer, list(metrics_of(trainer.lightning_module)))
        elif found.is_live or found.why_not_live is not None:
            # As in a new process, which newcomers are: all ranks must have gathered the same. And
            # steps that are trained again would count twice.
            for metric in metrics_of(trainer.lightning_module):
                metric.reset()

    def begin_training(self, trainer: pl.Trainer) -> None:
        """Have what was logged again, which Lightning has reset since the fit began."""
        if self._before_first_step is not None:
            self._before_first_step.put_back()
            connector = trainer._logger_connector
            connector._callback_metrics.update(self._newest)
            if isinstance(self.state, LiveState) and self.state.follows is Follows.STEP:
                # Else the epoch's means would begin with the next batch, as with its first one.
                connector._first_loop_iter = True
            # What was put back may be changed in place.
            self._before_first_step = Gathered(trainer, list(metrics_of(trainer.lightning_module)))

    def _rewind(self, trainer: pl.Trainer, noted: _Noted) -> None:
        """Put the loops' counters back to a step's end; the loops are thrown away after it."""
        for tracker, counts in zip(self._trackers, noted.counts, strict=True):
            vars(tracker).update(counts)
        epoch_loop: Any = trainer.fit_loop.epoch_loop
        epoch_loop._batches_that_stepped = noted.num_stepped

    def _versions(self) -> int:
        """Return a number that is another one after any change of what has to stay."""
        tensors = [registered[name] for registered, name in self._watched]
        # Another tensor has another id, one that evaluation has made no version.
        try:
            versions: int = sum(map(_version_of, tensors))
        except RuntimeError:
            versions = sum(item._version for item in tensors if not item.is_inference())
        return sum(map(id, tensors)) + versions


def find_saved(
    needs: Sequence[SliceNeed], tiers: Sequence[Tier], *, why_not_live: str | None, **seen: Any
) -> Found:
    """Return the newest checkpoint's state; every rank calls it. Communicates.

    Args:
        needs: What this rank keeps from now on.
        tiers: Where checkpoints are.
        why_not_live: Why it has to do, where a rank was lost and this generation follows.
        **seen: What `recover` takes.

    Raises:
        CheckpointError: A rank was lost, and there is nothing to go on from; and see `recover`.
    """
    recovered = recover(needs, tiers, **seen)
    if recovered is None and why_not_live is not None:
        raise CheckpointError(
            f"A rank was lost before any checkpoint was complete, and {why_not_live}; so there is "
            "nothing to go on from in place. Start again."
        )
    return Found(recovered, why_not_live=why_not_live)


def _keepers(trainer: pl.Trainer) -> Keepers:
    strategy = run_of(trainer).strategy
    assert strategy is not None
    store = strategy.engine.store
    dims = {name: spec.cut_dim for name, spec in store.specs.items()}
    return Keepers(slices=store.slices, dims=dims)
