"""The state of one micro-batch's pass through the user's step on a stage, and how a stage ends it.

Stages and tensor parallelism need the layers to be a *chain*: the step calls each layer once, in
order, where autograd records it. Other calls of layers are refused with an error that names the
layer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_hetero.core.errors import ModelError, StepError
from lightning_hetero.runtime.random_state import seed_of, seed_torch, seeds_of
from lightning_hetero.runtime.stage.activations import Handover
from lightning_hetero.runtime.stage.outer_parameters import ReadWatch
from lightning_hetero.runtime.stage.recomputation import Recomputation

_UNCOUNTED = -1
"""Stands for the version of a tensor without a version counter."""


class StageEnd(BaseException):
    """Raised to leave the user's step at the end of a stage that isn't the last.

    Not an `Exception`: it isn't an error, and a user's `except Exception` mustn't catch it.
    """

    def __init__(self, handed_on: Handover) -> None:
        self.handed_on = handed_on


@dataclass
class MicrobatchPass:
    """One pass of one micro-batch through the user's step on this stage.

    Made for each forward pass and kept until its backward pass has run.
    """

    layers: range
    """Layers of the stage."""
    num_layers: int
    """Layers of the model."""
    seed: tuple[int, ...]
    """The numbers that seed the micro-batch's random number generators."""
    receive: Callable[[], Handover] | None
    """Receives the handover from the previous stage; None on first stages."""
    wait_unit: Callable[[int], None] | None
    """Waits for the weights of a layer, or, given `num_layers`, for the weights after the layers;
    None if all weights have arrived."""
    recomputation: Recomputation = field(default_factory=Recomputation)
    """The layers whose activations this micro-batch recomputes in backward."""
    reads: ReadWatch | None = None
    """Records which parameters outside the layers the stage uses; None if that is known."""
    drawn: tuple[int, ...] = ()
    """Seeds of the step, of each layer's first call, and of the code after the layers; computed
    from `seed` if left out."""
    num_called: int = 0
    """Number of layers of the chain that were called so far, including those skipped on this
    stage."""
    finished: bool = False
    """Whether the stage's last layer has run."""
    received: Handover | None = field(default=None, repr=False)
    handed_on: Handover = field(default_factory=Handover, repr=False)
    """The handover to the next stage, as far as it has been built."""
    with_gradients: bool = False
    """Whether the step began with autograd enabled."""
    is_reentrant: bool = False
    """Whether `torch.utils.checkpoint` with use_reentrant=True hides layers from autograd."""
    last_hidden: Tensor | None = field(default=None, repr=False)
    """What the last layer returned: the next layer must get this very tensor."""
    last_version: int = 0
    """The tensor's version when the layer returned it."""
    hidden_arguments: dict[int, int | str] = field(default_factory=dict, repr=False)
    """For each layer called so far, the argument that was the hidden state."""
    _seeds: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.has_stages = len(self.layers) < self.num_layers
        """Whether other stages run some of the model's layers."""
        self.is_last_stage = self.layers.stop == self.num_layers
        """Whether the stage holds the model's last layer."""
        self.drawn = self.drawn or seeds_of(self.num_layers + 2, *self.seed)
        self.step_seed = self.drawn[0]
        """The seed of all random number generators when the step begins."""
        self.is_free = False
        """Whether layers may be called freely: several times, in any order, or not at all."""
        self._times = [0] * (self.num_layers + 1)
        """How often each layer has begun; the last entry counts the code after the layers."""

    def arrived(self) -> Handover:
        """Return the handover from the previous stage; the first call waits for it."""
        if self.received is None:
            assert self.receive is not None
            self.received = self.receive()
            self.handed_on = self.received.copy()
        return self.received

    def stage_input(self, hidden: Tensor) -> Tensor:
        """Return the input of the stage's first layer, which the model calls with `hidden`.

        On later stages that is the received activation, as a new tensor each time: the layer may
        change it in place, as it may change the previous layer's output on one device.
        """
        if self.receive is None:
            return hidden
        received = self.arrived().tensors[0]
        if not received.requires_grad:
            return received
        # `_unsafe_view`, since autograd forbids in-place operations on a view of a leaf, and this
        # result doesn't count as a view.
        given: Tensor = torch.ops.aten._unsafe_view.default(received, received.shape)
        return given

    def begin_layer(self, index: int, *, again: bool = False) -> None:
        """Seed torch and wait for weights before layer `index`; `num_layers`: after all layers.

        A layer that is called several times draws other numbers each time. A layer that runs
        `again` in backward draws the same numbers as before: its checkpoint has restored the
        generators, so their present seed tells which call it repeats.
        """
        drawn = torch.default_generator.initial_seed()
        if again:
            seed_torch(self._seeds.get((drawn, index), self.drawn[index + 1]))
            return
        times = self._times[index]
        seed = seed_of(*self.seed, index, times) if times else self.drawn[index + 1]
        self._times[index] += 1
        self._seeds[drawn, index] = seed
        seed_torch(seed)
        if self.wait_unit is not None:
            self.wait_unit(index)

    def keep_hidden(self, hidden: Tensor) -> None:
        """Remember the hidden state that a layer returned."""
        # Inference tensors have no version counter; then a change is seen on the next stage's
        # tensor.
        self.last_hidden = hidden
        self.last_version = _UNCOUNTED if hidden.is_inference() else hidden._version

    def check_unchanged(self, index: int) -> None:
        """Refuse to run layer `index` on a hidden state that was changed in place."""
        hidden = self.last_hidden if index and self.last_version != _UNCOUNTED else None
        if hidden is not None and hidden._version != self.last_version:
            raise ModelError(in_place_between(index - 1))

    def note_without_autograd(self, index: int, *, trains: bool) -> None:
        """Note that a layer of a training step is called with autograd disabled.

        That happens in a frozen part under `torch.no_grad`, and in a reentrant checkpoint. It is
        refused if the layer `trains`, so its parameters or arguments require gradients, and the
        pipeline has several stages.
        """
        self.is_reentrant |= trains
        if trains and self.has_stages:
            raise ModelError(
                f"Layer {index} runs with autograd disabled, as in torch.utils.checkpoint with "
                "use_reentrant=True, which hides from a stage what it computes. Use "
                "use_reentrant=False, or leave the checkpoints out: "
                "HeteroStrategy(activation_checkpointing='full'). A part that isn't to train needs "
                "requires_grad_(False)."
            )

    def check_order(self, index: int) -> None:
        """Note that a layer of a chain is called.

        Raises:
            StepError: The model is called a second time.
            ModelError: It isn't this layer's turn.
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
        """Refuse a step that has ended before all layers of the stage were called.

        Raises:
            StepError: It called none.
            ModelError: It called some.
        """
        if self.finished:
            return
        if not self.num_called:
            raise StepError(
                "The step returned without calling the model's layers. Call the model once in it: "
                "no step can be left out, and a copy of the model, such as an average, has other "
                "layers. Lightning's WeightAveraging validates an average."
            )
        raise _no_chain(f"The step ends with layer {self.num_called - 1} of {self.num_layers}")


def in_place_between(index: int) -> str:
    """Return the error message for an in-place change of the output of layer `index`."""
    return (
        f"The model computes something in place between layer {index} and layer {index + 1}, which "
        "would be lost where a stage ends there. Move the computation into the layers, or use a "
        "plan whose pipelines have one stage."
    )


def _no_chain(what: str) -> ModelError:
    return ModelError(
        f"{what}, but stages and tensor parallelism need a chain: all layers of the list, each "
        "called once, in order. For layers that are reused, chosen or left out use a plan whose "
        "pipelines have one stage, or name the list that is a chain: "
        'HeteroStrategy(layers="model.blocks").'
    )
