"""One pass of one micro-batch through the user's step on a stage, and how a stage ends it.

It knows which calls of layers stages can carry, and refuses others by name: stages need a chain,
each layer called once, in order, where autograd sees it.
"""

import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from lightning_hetero.core.errors import ModelError, StepError
from lightning_hetero.runtime.random_state import seed_of, seed_torch, seeds_of
from lightning_hetero.runtime.results.appended_lists import AppendedLists
from lightning_hetero.runtime.results.targets import LossWatch
from lightning_hetero.runtime.stage.activations import Handover
from lightning_hetero.runtime.stage.layer_trial import LayerTrial
from lightning_hetero.runtime.stage.outer_parameters import ReadWatch
from lightning_hetero.runtime.stage.recomputation import Recomputation

__all__ = ["MicrobatchPass", "StageEnd", "in_place_between"]

_UNCOUNTED = -1
"""Stands for the version of a tensor that has none."""


class StageEnd(BaseException):
    """Leaves the user's step at the end of a stage that isn't the last.

    It is no error, and no `except Exception` of the user's may stop it.
    """

    def __init__(self, handed_on: Handover) -> None:
        self.handed_on = handed_on


@dataclass
class MicrobatchPass:
    """One pass of one micro-batch through the user's step on this stage.

    Made for each forward pass, and kept until its backward pass has run.
    """

    layers: range
    """Layers of the stage."""
    num_layers: int
    """Layers of the model."""
    seed: tuple[int, ...]
    """All that the micro-batch's random numbers depend on."""
    receive: Callable[[], Handover] | None
    """Returns what the stage before hands on; None on first stages."""
    wait_unit: Callable[[int], None] | None
    """Waits for the weights of a layer, or with `num_layers` for those after the layers; None where
    all are here."""
    loss_watch: LossWatch
    """Watches the torch functions called after the layers, or outside of them all."""
    recomputation: Recomputation = field(default_factory=Recomputation)
    """The layers whose activations it computes again in backward."""
    reads: ReadWatch | None = None
    """Follows what the stage uses of parameters outside the layers, while that isn't known yet."""
    layer_trial: LayerTrial | None = None
    """Of the layers, in iterations that try them."""
    lists: AppendedLists | None = None
    """The module's lists, to which layers of a stage may append nothing."""
    called: list[int] = field(default_factory=list)
    """Indices of the layers called so far, where they are called as the user likes."""
    num_called: int = 0
    """Layers of a chain called so far, also those that run on other stages."""
    finished: bool = False
    """Whether the stage's last layer has run."""
    received: Handover | None = field(default=None, repr=False)
    handed_on: Handover = field(default_factory=Handover, repr=False)
    """For the next stage, as far as it is known."""
    with_gradients: bool = False
    """Whether the step began with autograd switched on."""
    is_reentrant: bool = False
    """Whether a checkpoint of the older kind hides layers from autograd."""
    last_hidden: Tensor | None = field(default=None, repr=False)
    """Returned by the layer before, to see that nothing is computed between layers."""
    last_version: int = 0
    """How often that had been changed in place when the layer returned it."""
    hidden_arguments: dict[int, int | str] = field(default_factory=dict, repr=False)
    """Which argument of each layer called was the hidden state."""
    _given: Tensor | None = field(default=None, repr=False)
    """The received activation as the stage's first layer got it."""
    _given_version: int = 0
    _seeds: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.has_stages = len(self.layers) < self.num_layers
        """Whether other stages run layers of the model, too."""
        self.is_last_stage = self.layers.stop == self.num_layers
        """Whether the stage holds the model's last layer."""
        self._drawn = seeds_of(self.num_layers + 2, *self.seed)
        """Seeds of the step, of the first call of each layer, and of what comes after them all."""
        self.step_seed = self._last_seed = self._drawn[0]
        """Of all generators, where the step begins."""
        self.is_free = False
        """Whether layers are called as the user likes."""
        self._times = [0] * (self.num_layers + 1)
        """How often each layer has begun, and what comes after them all."""

    @property
    def is_chain(self) -> bool:
        """Whether each layer was called once, in order."""
        return self.called == list(range(self.num_layers))

    def arrived(self) -> Handover:
        """Return what the stage before hands on; waits for it the first time."""
        if self.received is None:
            assert self.receive is not None
            self.received = self.receive()
            self.handed_on = self.received.copy()
        return self.received

    def stage_input(self, hidden: Tensor) -> Tensor:
        """Return what the stage's first layer computes on, where it is called with `hidden`.

        On later stages that is the received activation, each time anew: the layer may change it in
        place, as it might change what the layer before it returned. And a model that checkpoints
        its own layers runs the layer again in backward, on the same activation.

        Raises:
            ModelError: The layer changed what it got the first time.
        """
        if self.receive is None:
            return hidden
        received = self.arrived().tensors[0]
        if not received.requires_grad:
            return received
        # No view of it to autograd, which would forbid operations in place on one of a leaf.
        given: Tensor = torch.ops.aten._unsafe_view(received, received.shape)
        if self._given is None:
            self._given, self._given_version = given, given._version
        elif self._given._version != self._given_version:
            raise ModelError(
                "A layer that changes its input in place is computed again in backward, where its "
                "input is needed as it was. Don't checkpoint it, or let it leave its input alone."
            )
        return given

    def begin_layer(self, index: int, *, again: bool = False) -> None:
        """Seed torch and wait for weights before layer `index`, or after all with `num_layers`.

        A layer that is called more than once draws other numbers each time. One that is computed
        `again` draws those of the first time: a checkpoint has put the generators back to where
        they were, so the seed before this one tells which time that was.
        """
        drawn = torch.default_generator.initial_seed()
        if again:
            seed_torch(self._seeds.get((drawn, index), self._drawn[index + 1]))
            return
        if drawn not in (self._last_seed, self.step_seed):
            _warn_of_seeding()
        times = self._times[index]
        seed = seed_of(*self.seed, index, times) if times else self._drawn[index + 1]
        self._times[index] += 1
        self._seeds[drawn, index] = self._last_seed = seed
        seed_torch(seed)
        if self.wait_unit is not None:
            self.wait_unit(index)

    def keep_hidden(self, hidden: Tensor) -> None:
        """Remember what a layer returned."""
        # Inference counts no versions; the next stage then sees it, on its unknown tensor.
        self.last_hidden = hidden
        self.last_version = _UNCOUNTED if hidden.is_inference() else hidden._version

    def check_unchanged(self, index: int) -> None:
        """Refuse to run layer `index` on a hidden state that was changed in place."""
        hidden = self.last_hidden if index and self.last_version != _UNCOUNTED else None
        if hidden is not None and hidden._version != self.last_version:
            raise ModelError(in_place_between(index - 1))

    def note_checkpoint(self, index: int) -> None:
        """Note that autograd doesn't see a layer of a training step for the time being.

        Raises:
            ModelError: The pipeline has several stages.
        """
        if _is_checkpointed_reentrantly():
            self.is_reentrant = True
            if self.has_stages:
                raise ModelError(
                    f"Layer {index} runs in torch.utils.checkpoint with use_reentrant=True, which "
                    "hides from a stage what it computes. Use use_reentrant=False, or leave the "
                    "checkpoints out: HeteroStrategy(activation_checkpointing='full')."
                )

    def check_order(self, index: int) -> None:
        """Note that a layer of a chain is called.

        Raises:
            StepError: The model is called a second time.
            ModelError: It isn't the next layer's turn.
        """
        if self.finished and index == 0:
            raise StepError(
                "The step calls the model twice. Stages carry one pass of each micro-batch: call "
                "the model once, for instance on the concatenation of both inputs, or use a plan "
                "whose pipelines have one stage."
            )
        if index != self.num_called:
            after = f"after layer {self.num_called - 1}" if self.num_called else "first"
            raise _no_chain(f"Layer {index} is called {after}")
        self.num_called += 1

    def check_finished(self) -> None:
        """Refuse a step that has ended without all layers of a stage.

        Raises:
            StepError: It called none.
            ModelError: It called some.
        """
        if self.finished:
            return
        if not self.num_called:
            raise StepError(
                "The step returned without calling the model's layers. Call the model once in it."
            )
        raise _no_chain(f"The step ends with layer {self.num_called - 1} of {self.num_layers}")


def in_place_between(index: int) -> str:
    """Return what to say where the output of layer `index` is changed in place."""
    return (
        f"The model computes something in place between layer {index} and layer {index + 1}, which "
        "would be lost where a stage ends there. Move the computation into the layers, or use a "
        "plan whose pipelines have one stage."
    )


def _warn_of_seeding() -> None:
    """Say that layers draw other numbers than the seed of a step would let them, as they must."""
    warnings.warn(
        "A step seeds torch's generators. Layers, and what comes after them, are seeded anew for "
        "each micro-batch, and before them all micro-batches draw the same numbers, so it isn't "
        "what one device would draw. Leave it out, or draw what doesn't depend on samples from a "
        "torch.Generator of your own.",
        stacklevel=2,
    )


def _no_chain(what: str) -> ModelError:
    return ModelError(
        f"{what}, but stages and tensor parallelism need a chain: all layers of the list, each "
        "called once, in order. For layers that are reused, chosen or left out use a plan whose "
        "pipelines have one stage, or name the list that is a chain: "
        'HeteroStrategy(layers="model.blocks").'
    )


def _is_checkpointed_reentrantly() -> bool:
    """Whether this is called inside of `torch.utils.checkpoint` with use_reentrant=True."""
    forward = CheckpointFunction.forward.__code__
    return any(frame.f_code is forward for frame, _ in traceback.walk_stack(None))
