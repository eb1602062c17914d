"""Read and write the state that one rank owns: slices, their optimizer state and averages.

A rank also recovers the rows that it keeps as a standby, but doesn't save them. Checkpoints contain
nothing else that depends on the plan, so they can be read under any other plan (AutoHet §IV-C).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hetero.checkpoint import RestoredSlice, SliceContent, SliceNeed
from lightning_hetero.checkpoint.content import OF_CALLBACKS, optimizer_state_dict
from lightning_hetero.core.errors import CheckpointError, ConfigurationError
from lightning_hetero.exchange.slices import Interval, Ownership, ParameterSpec, kept_rows
from lightning_hetero.exchange.transfers import unit_of
from lightning_hetero.runtime.slices.weights import local_rows, narrow_rows
from lightning_hetero.strategy.run import run_of

if TYPE_CHECKING:
    from torch.optim.swa_utils import AveragedModel


@dataclass(frozen=True, kw_only=True)
class OwnedSlice:
    """The slice that this rank keeps of a parameter."""

    spec: ParameterSpec
    kept: tuple[Interval, ...]
    """The rows that it keeps, as owner or standby."""
    owned: tuple[Interval, ...]
    """The rows that it owns, and therefore saves."""
    parameter: nn.Parameter
    """The optimizer's parameter for the kept rows; empty if there are none."""

    def rows(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """Return rows of the parameter out of a tensor like `parameter`."""
        if self.kept == ((start, stop),):
            return tensor
        local = local_rows(self.kept, start, stop)
        assert local is not None, f"rows {start}-{stop} are not kept here"
        return narrow_rows(tensor, self.spec, *local)


class OwnedState:
    """The part of a run's state that one rank owns.

    Args:
        trainer: A trainer whose strategy has been set up.

    Raises:
        ConfigurationError: A callback keeps state that can't be saved in slices.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._engine = engine = run_of(trainer).strategy.engine
        engine.settle()  # Raises if the last iteration's sums are bad: they mustn't be saved.
        layout, store = engine.layout, engine.store
        self.plan = engine.plan
        self._all = tuple(
            OwnedSlice(
                spec=spec,
                kept=store.kept[name],
                owned=store.owned[name],
                parameter=store.masters[name],
            )
            for name, spec in store.specs.items()
        )
        self.slices = tuple(
            item for item in self._all if any(stop > start for start, stop in item.kept)
        )
        self.num_layers = layout.num_layers
        self.names_of_slots = {slot.name for slots in layout.slots.values() for slot in slots}
        self.optimizers: Sequence[Optimizer] = trainer.optimizers
        self._averages = tuple(model.module for model in average_models(trainer))

    def contents(self, *, with_standbys: bool = False) -> tuple[SliceContent, ...]:
        """Return the slices to save, or all that are kept; their tensors are the originals."""
        with torch._C.DisableTorchFunctionSubclass():  # Plain tensors, not those that hooks get.
            return tuple(
                self._content(item, *rows)
                for item in self.slices
                for rows in (item.kept if with_standbys else item.owned)
            )

    def needs(self) -> list[SliceNeed]:
        """Return the slices to recover: those kept here, and shares of weights without owners."""
        kept = [(item.spec, item.kept) for item in self.slices]
        store = self._engine.store
        specs = [store.specs[name] for name in store.frozen.sources]
        slices = store.frozen.find_owners(specs)
        kept += [(spec, kept_rows(slices[spec.name], store.global_rank)) for spec in specs]
        return [
            SliceNeed(spec.name, spec.shape, spec.cut_dim, rows, not spec.requires_grad)
            for spec, rows in kept
            if rows
        ]

    def trains(self) -> dict[str, bool]:
        """Return whether each parameter trains now, by name."""
        with torch._C.DisableTorchFunctionSubclass():
            return {item.spec.name: item.parameter.requires_grad for item in self._all}

    def freeze(self, trains: Mapping[str, bool]) -> None:
        """Freeze or unfreeze parameters, by name, as callbacks did in the run that was saved."""
        with torch._C.DisableTorchFunctionSubclass():
            for item in self._all:
                if item.spec.name in trains:
                    item.parameter.requires_grad = trains[item.spec.name]

    def frozen_fingerprints(self) -> dict[str, int]:
        """Return a hash of each weight without owners, by which a restart can compare it."""
        store = self._engine.store
        return {name: store.frozen.fingerprint(store.specs[name]) for name in store.frozen.sources}

    def own_all_saved(self, metadata: Mapping[str, Any]) -> bool:
        """Give owners to frozen weights that had owners when a checkpoint was saved.

        Returns whether there were any: then this object is out of date.

        Raises:
            CheckpointError: A weight that the checkpoint lacks has another value now.
        """
        saved, own = metadata.get("frozen", {}), self.frozen_fingerprints()
        for name, fingerprint in saved.items():
            if own.get(name, fingerprint) != fingerprint:
                raise CheckpointError(
                    f"The frozen weight {name} isn't the one with which this checkpoint was "
                    "trained, and checkpoints don't hold frozen weights. Load the same pretrained "
                    "model, or build the module from the same seed."
                )
        names = [name for name in own if name not in saved]
        if names:
            self._engine.plans.thaw(names)
        return bool(names)

    def optimizer_groups(self) -> list[dict[str, Any]]:
        """Return each optimizer's groups as in its `state_dict`, with names in place of indices."""
        names = self._names()
        return [
            {
                "param_groups": [
                    {**group, "params": [names[id(p)] for p in group["params"]]}
                    for group in optimizer.param_groups
                ]
            }
            for optimizer in self.optimizers
        ]

    def load_weights(self, by_name: Mapping[str, RestoredSlice]) -> None:
        """Put recovered weights into the module."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for item in self.slices:
                # A missing parameter is frozen, and had no owner when the checkpoint was saved.
                if item.spec.name in by_name:
                    item.parameter.copy_(by_name[item.spec.name].weight)

    def load_averages(self, by_name: Mapping[str, RestoredSlice]) -> None:
        """Put recovered averages of weights in place."""
        with torch.no_grad():
            for item in self.slices:
                state = by_name[item.spec.name].state if item.spec.name in by_name else {}
                for key, tensor in self._averages_of(item).items():
                    if key in state:
                        tensor.copy_(state[key])

    def optimizer_states(
        self, by_name: Mapping[str, RestoredSlice], saved: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return each optimizer's `state_dict`, made of recovered groups and slices.

        Raises:
            CheckpointError: The optimizers' groups differ from those that were saved.
        """
        names = [
            [[group["params"] for group in entry["param_groups"]] for entry in entries]
            for entries in (saved, self.optimizer_groups())
        ]
        if names[0] != names[1]:
            raise CheckpointError(
                "The checkpoint's optimizers have other groups, or other parameters in them. "
                "Configure the optimizers as they were when the checkpoint was saved."
            )
        return [optimizer_state_dict(entry["param_groups"], by_name) for entry in saved]

    def _content(self, item: OwnedSlice, start: int, stop: int) -> SliceContent:
        optimizer = self._optimizer_of(item)
        tensors, scalars = _optimizer_state(optimizer, item)
        is_whole = self._is_whole(optimizer)

        def owned(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
            like = item.parameter.shape
            return {
                key: item.rows(value, start, stop) if value.shape == like else value
                for key, value in values.items()
            }

        return SliceContent(
            parameter=item.spec.name,
            unit=unit_of(item.spec, self.num_layers),
            shape=item.spec.shape,
            dim=item.spec.cut_dim,
            start=start,
            stop=stop,
            weight=item.rows(item.parameter.detach(), start, stop),
            state=owned(self._averages_of(item) | ({} if is_whole else tensors)),
            whole_state=tensors if is_whole else {},
            scalars=scalars,
        )

    def _optimizer_of(self, item: OwnedSlice) -> Optimizer | None:
        return next((o for o in self.optimizers if item.parameter in o.state), None)

    def _is_whole(self, optimizer: Optimizer | None) -> bool:
        """Whether an optimizer's state must never be cut, even if it has the parameter's shape.

        The shape doesn't tell: the preconditioner of a square matrix has the same shape as a
        momentum. Torch's own optimizers have only state that can be cut.
        """
        bases = type(optimizer).__mro__ if optimizer is not None else ()
        known = any(b is not Optimizer and b.__module__.startswith("torch.optim.") for b in bases)
        return self._engine.config.ownership is Ownership.PARAMETER and not known

    def _averages_of(self, item: OwnedSlice) -> dict[str, Tensor]:
        """Return this slice of the module's copies that weight averaging maintains."""
        return {
            f"{OF_CALLBACKS}average{index}": average.get_parameter(item.spec.name).detach()
            for index, average in enumerate(self._averages)
        }

    def _names(self) -> dict[int, str]:
        return {id(item.parameter): item.spec.name for item in self._all}


def _optimizer_state(
    optimizer: Optimizer | None, item: OwnedSlice
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return an optimizer's tensors of a slice, and its other values.

    Raises:
        ConfigurationError: A value can't be saved.
    """
    state = {} if optimizer is None else optimizer.state[item.parameter]
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    scalars = {key: value for key, value in state.items() if key not in tensors}
    for key, value in scalars.items():
        if not isinstance(value, float | int | bool | str | None):
            raise ConfigurationError(
                f"The optimizer's {key} of {item.spec.name} is a {type(value).__name__}, which "
                "LayerwiseCheckpoint can't save: it takes tensors, numbers and texts."
            )
    return tensors, scalars


def average_models(trainer: pl.Trainer) -> Iterator["AveragedModel"]:
    """Yield the copies of the module that weight averaging keeps."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging):
            raise ConfigurationError(
                "LayerwiseCheckpoint can't save StochasticWeightAveraging. Use WeightAveraging."
            )
        if isinstance(callback, WeightAveraging) and callback._average_model is not None:
            yield callback._average_model
