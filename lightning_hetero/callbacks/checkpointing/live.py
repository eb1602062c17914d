"""Keep each step's state in memory, so that no step is lost if other ranks are.

A checkpoint has three kinds of entries. Slices change only in the optimizer's step, so they aren't
copied: it is enough to know, when a rank is lost, that they are still those of the last step.
Entries that each iteration changes are copied at the end of each step. Entries that never change
are read when a rank is lost. If a rank is lost during an optimizer's step, or at the end of an
epoch or of training, the state of the last step can't be used, and the newest saved checkpoint is.
A validation in mid-epoch that follows the step is run again.

As after any restart, metrics and logged means begin anew, since no checkpoint has them. If the
module or a callback has a hook `on_save_checkpoint`, it is called after each step.
"""

import copy
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, TypeVar

import lightning.pytorch as pl
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_hetero.callbacks.checkpointing.owned import OwnedState, average_models
from lightning_hetero.callbacks.checkpointing.training_state import (
    content_of,
    dump_changing,
    dump_loops,
    dump_metadata,
    hooks_that_save,
    is_end_near,
    is_validation_due,
)
from lightning_hetero.checkpoint import (
    CheckpointId,
    Peers,
    Recovered,
    SliceNeed,
)
from lightning_hetero.checkpoint.live import LiveState, recover_live
from lightning_hetero.exchange.owners import serve_without
from lightning_hetero.runtime.random_state import RandomState
from lightning_hetero.strategy.run import run_of

_T = TypeVar("_T")
_version_of = attrgetter("_version")

_IN_STEP = "it was lost in the middle of an optimizer's step"
_AT_END = "the end of an epoch, or of training, follows its last step"
_IN_EVALUATION = "it was in a validation that its last step doesn't call for"
_NO_STEP = "it had trained no step in this process"
_NO_COPIES = "the run has no redundancy"
_PLATEAU = "a scheduler waits for a plateau, and steps after the step's end"
_CUT_SHORT = "its device hadn't come to the end of the step when it was cut off"
_BUFFERS = "training changes buffers of the module, which have no second copy"
_CHANGED = "weights or buffers have changed since the end of its last step"


@dataclass(frozen=True, kw_only=True)
class _Noted:
    """What is recorded at the end of a step."""

    step: int
    num_changes: int
    """The number of times an optimizer had begun to change the slices."""
    versions: int
    """`LiveSteps._versions` of the tensors that must be unchanged."""
    metadata: dict[str, Any]
    """The checkpoint's entries that each iteration changes; all entries, if hooks change them."""
    groups: list[list[dict[str, Any]]]
    """Options of each optimizer's parameter groups."""
    random_state: RandomState
    is_validation_due: bool
    """Whether a validation follows the step; a run that goes on from the step repeats it."""


class LiveSteps:
    """One rank's record of the last step; every rank makes the same calls, `keep` after a loss."""

    def __init__(self) -> None:
        self.state: LiveState | str | None = None
        """The state to continue from, or why there is none; None before the first step."""
        self._noted: _Noted | str = _NO_STEP
        self._watched: list[tuple[dict[str, Any], str]] = []
        """Dict and key of each tensor that must not change between steps."""
        self._ended: _Noted | None = None
        """The last step of an epoch whose end is being processed."""

    def begin_evaluation(self, trainer: pl.Trainer) -> None:
        """Drop the state before a validation that can't be repeated.

        A validation in mid-epoch after the last step can be repeated, unless averages replace the
        weights during it.
        """
        noted, has_averages = self._noted, any(average_models(trainer))
        if not isinstance(noted, str) and (has_averages or not noted.is_validation_due):
            self._noted = _IN_EVALUATION

    def begin_epoch(self, trainer: pl.Trainer) -> None:
        """Note what the end of the previous epoch has changed; doesn't communicate.

        A run that goes on from this state begins the new epoch again.
        """
        ended, self._ended = self._ended, None
        if ended is not None:
            new = self._note(trainer)
            # The loops' state is that of the step, from which Lightning begins the epoch by itself.
            of_step = {key: ended.metadata[key] for key in ("loops", "epoch")}
            self._noted = replace(new, metadata={**new.metadata, **of_step})

    def note_step(self, trainer: pl.Trainer) -> None:
        """Note the end of a step, where a checkpoint would be saved; doesn't communicate."""
        strategy = run_of(trainer).strategy
        if not strategy.processes.outlives_ranks:
            return
        # At this point all ranks have ended a step since the last recovery.
        self.state, self._ended = _NO_STEP, None
        engine = strategy.engine
        engine.comms.step_end.note(engine.device)
        if not engine.store.has_standbys and trainer.world_size > 1:
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
            if is_end_near(trainer):
                self._ended, self._noted = self._noted, _AT_END

    def _note(self, trainer: pl.Trainer) -> _Noted:
        strategy = run_of(trainer).strategy
        if hooks_that_save(trainer):
            metadata = dump_metadata(trainer, OwnedState(trainer))
        else:
            of_loops = {"epoch": trainer.current_epoch, "loops": dump_loops(trainer)}
            metadata = {**of_loops, **dump_changing(trainer)}
        if not self._watched:
            self._watched = list(_places_of(trainer))
        return _Noted(
            step=trainer.global_step,
            num_changes=strategy.num_changes,
            versions=self._versions(),
            metadata=_copied(metadata),
            groups=_copied(_groups_of(trainer)),
            random_state=RandomState.now(),
            is_validation_due=is_validation_due(trainer),
        )

    def can_go_on(self, trainer: pl.Trainer, leaving: Collection[int]) -> bool:
        """Whether this rank holds the last step, and ranks not `leaving` hold every row of it."""
        if isinstance(self._noted, str):
            return False
        strategy = run_of(trainer).strategy
        return not serve_without(strategy.engine.store.slices, leaving).missing

    def keep(self, trainer: pl.Trainer, start: CheckpointId, generation: int) -> bool:
        """Keep the last step's state in `state`, if it is unchanged; doesn't communicate.

        Args:
            trainer: The trainer, not torn down yet, whose fit is being ended.
            start: Names the run's checkpoints.
            generation: Number of the generation that has ended.

        Returns:
            Whether the state is kept.
        """
        noted, self._noted, self._ended = self._noted, _NO_STEP, None
        if isinstance(noted, str):
            # A generation that has trained no step still has the state with which it began.
            if noted is not _NO_STEP:
                self.state = noted
        else:
            try:
                self.state = self._kept(trainer, noted, start, generation)
            except Exception as error:
                # An error in a user's object mustn't end the rank: it can go on from a checkpoint.
                self.state = f"{type(error).__name__}: {error}"
        self._watched = []
        return isinstance(self.state, LiveState)

    def _kept(
        self, trainer: pl.Trainer, noted: _Noted, start: CheckpointId, generation: int
    ) -> LiveState | str:
        strategy = run_of(trainer).strategy
        if strategy.num_changes != noted.num_changes:
            return _IN_STEP
        if not strategy.engine.comms.step_end.is_reached:
            return _CUT_SHORT
        if self._versions() != noted.versions:
            return _CHANGED
        owned, metadata = OwnedState(trainer), noted.metadata
        if "state_dict" not in metadata:
            metadata = {**dump_metadata(trainer, owned), "global_step": noted.step, **metadata}
            for item, groups in zip(metadata["optimizer_states"], noted.groups, strict=True):
                for group, values in zip(item["param_groups"], groups, strict=True):
                    group.update(values)
        noted.random_state.put_back()
        id_ = replace(start, step=noted.step)
        content = content_of(trainer, owned, id_, metadata, with_standbys=True)
        on_host = replace(content, slices=tuple(item.map(Tensor.cpu) for item in content.slices))
        return LiveState(content=on_host, generation=generation)

    def recover(self, needs: Sequence[SliceNeed], peers: Peers) -> Recovered | str:
        """Recover the state that ranks still hold; every rank calls it. Communicates.

        Args:
            needs: The slices that this rank keeps from now on.
            peers: The ranks.
        """
        live = recover_live(needs, self.state, peers)
        if isinstance(live, str):
            rank_zero_info("Going back to the newest checkpoint, because %s.", live)
            self.state = live  # From now on nobody may use a state newer than that checkpoint.
        return live

    def _versions(self) -> int:
        """Return a number that changes whenever a watched tensor is changed or replaced."""
        tensors = [registered[name] for registered, name in self._watched]
        # A new tensor has another id; a tensor made in inference mode has no version.
        try:
            versions: int = sum(map(_version_of, tensors))
        except RuntimeError:
            versions = sum(item._version for item in tensors if not item.is_inference())
        return sum(map(id, tensors)) + versions


def _places_of(trainer: pl.Trainer) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield (dict, key) under which each master, average and buffer is registered."""
    for root in (trainer.lightning_module, *(model.module for model in average_models(trainer))):
        for module in root.modules():
            for registered in (module._parameters, module._buffers):
                yield from (
                    (registered, name) for name, item in registered.items() if item is not None
                )


def _groups_of(trainer: pl.Trainer) -> list[list[dict[str, Any]]]:
    return [
        [{key: group[key] for key in group if key != "params"} for group in item.param_groups]
        for item in trainer.optimizers
    ]


def _copied(value: _T) -> _T:
    """Return a copy that later in-place changes don't reach, without autograd's graph."""
    detached: _T = apply_to_collection(value, Tensor, Tensor.detach)
    return copy.deepcopy(detached)
