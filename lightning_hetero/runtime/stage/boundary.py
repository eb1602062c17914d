"""Turn the user's whole model into one stage of it, micro-batch by micro-batch.

Every layer's `forward` is wrapped once. Example: a stage that has layers 4 to 7 of 12. In the
user's step layers 0 to 3 don't run; they return unknown tensors, which have a shape but no values
(see `runtime.unknown`). Layer 4 takes the activation that was received from the previous stage.
After layer 7 the exception `StageEnd` ends the step. Only on the last stage does the step go on
after the layers, where the user's own code computes the loss. What the model computes before the
layers (masks, rotary tables) is there on every stage.

Random number generators are seeded before the step, before each layer and after the last one, by
iteration, micro-batch and layer. So a layer draws the same numbers on whichever stage it runs.

Stages need a *chain*: each layer is called once, in order. If one stage runs all layers, the model
may call them *freely*: several times, in any order, or not at all.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import _StopRecomputationError

from lightning_hetero.core.errors import ModelError
from lightning_hetero.runtime.random_state import seed_everything
from lightning_hetero.runtime.setup.products import KeptProducts
from lightning_hetero.runtime.stage.microbatch_pass import MicrobatchPass, StageEnd
from lightning_hetero.runtime.stage.recomputation import LayerCall, hidden_output
from lightning_hetero.runtime.stage.rehearsal import describe_call
from lightning_hetero.runtime.stage.side_tensors import SideTensors, refuse_pieces
from lightning_hetero.runtime.tensor_parallel.collectives import StageGroup
from lightning_hetero.runtime.unknown import check_known

_UNWATCHED = nullcontext()


class StageBoundary:
    """The wrapped layers of one module; made while their parameters are whole.

    Args:
        layers: The model's layers in order.
        wrap_layer: Applied to each layer's forward once, such as compilation.
        group: The stage's tensor-parallel group; None if no plan may have a degree above 1.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        wrap_layer: Callable[[int, Callable[..., Any]], Callable[..., Any]] | None = None,
        group: StageGroup | None = None,
    ) -> None:
        self._layers = tuple(layers)
        self._products = [KeptProducts() for _ in self._layers]
        self._sides = SideTensors(self._layers)
        self._current: MicrobatchPass | None = None
        self._backward: MicrobatchPass | None = None
        """The micro-batch whose backward pass runs."""
        self._group = group
        self._changes_input = False
        """Whether the first layer was seen to change its input in place."""
        self.first_call: str | None = None
        """Description of the first call of a layer in training; see `rehearsal`."""
        self._compiled = {
            index: layer._compiled_call_impl
            for index, layer in enumerate(self._layers)
            if layer._compiled_call_impl is not None
        }
        """The compiled calls of layers that the user has compiled by `layer.compile()`."""
        for index, layer in enumerate(self._layers):
            forward = self._compiled.get(index, layer.forward)
            if wrap_layer is not None:
                forward = wrap_layer(index, forward)
            wrapped = _LayerForward(self, index, forward)
            if index in self._compiled:
                layer._compiled_call_impl = wrapped  # What it does must not be compiled itself.
            else:
                layer.forward = wrapped

    def remove(self) -> None:
        """Restore the layers' own forward."""
        for index, layer in enumerate(self._layers):
            if index in self._compiled:
                layer._compiled_call_impl = self._compiled[index]
            else:
                del layer.forward

    def run_step(self, current: MicrobatchPass, step: Callable[[Any], Any], microbatch: Any) -> Any:
        """Run the user's step on a micro-batch, and return what it returns.

        Raises:
            StageEnd: At the end of a stage that isn't the last.
            StepError, ModelError: The step does something that a stage can't do, or ends before all
                layers of the stage were called.
        """
        self._current = current
        current.with_gradients = torch.is_grad_enabled()
        seed_everything(current.step_seed)
        current.is_free = not current.has_stages and self._group is None
        if not self._layers and current.wait_unit is not None:
            current.wait_unit(0)
        try:
            with current.reads or _UNWATCHED:
                output = step(microbatch)
        except AttributeError as error:
            self._sides.explain(error, current.layers)
            raise
        finally:
            self._current = None
        if not current.is_free:
            current.check_finished()
        return output

    def run_backward(
        self,
        current: MicrobatchPass,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
    ) -> None:
        """Run the backward of a forward pass; layers that the model checkpoints run again."""
        self._backward = current
        try:
            torch.autograd.backward(outputs, gradients)
        finally:
            self._backward = None

    def gradients_of(
        self, current: MicrobatchPass, loss: Tensor, parameters: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """Return the gradients of a forward pass's loss, without adding them to `grad`."""
        if not current.is_reentrant:
            self._backward = current
            try:
                return torch.autograd.grad(loss, parameters, allow_unused=True)
            finally:
                self._backward = None
        # Reentrant checkpoints don't support `autograd.grad`.
        self.run_backward(current, [loss], [torch.ones_like(loss)])
        found = [item.grad for item in parameters]
        for item in parameters:
            item.grad = None
        return found

    def call(self, call: LayerCall) -> Any:
        """Run or skip a layer, as the current micro-batch needs; outside of steps just run it."""
        current, index = self._current, call.index
        if current is None:
            return call.run() if self._backward is None else self._call_again(self._backward, call)
        if current.with_gradients and not torch.is_grad_enabled():
            trains = any(item.requires_grad for item in self._layers[index].parameters())
            trains |= any(isinstance(i, Tensor) and i.requires_grad for i in call.given.values())
            current.note_without_autograd(index, trains=trains)
        if current.is_free:
            return self._call_freely(current, call)
        current.check_order(index)
        if current.has_stages:
            self._check_arguments(current, call)
        if index >= current.layers.start:
            return self._call_in_stage(current, call)
        output = self._skip(current, call)
        current.keep_hidden(hidden_output(output, index))
        return output

    def _call_freely(self, current: MicrobatchPass, call: LayerCall) -> Any:
        """Run a layer of a stage that has all layers, where layers may be called in any way."""
        current.begin_layer(call.index)
        output = self._compute(current, call)
        if isinstance(output, Tensor):
            current.keep_hidden(output)
        if call.index + 1 == current.num_layers:
            current.begin_layer(current.num_layers)
        return output

    def _call_again(self, current: MicrobatchPass, call: LayerCall) -> Any:
        """Repeat in backward what the forward did: run the layer, or skip it."""
        if call.index < current.layers.start:
            return self._skip(current, call)
        return self._call_in_stage(current, call, again=True)

    def _call_in_stage(
        self, current: MicrobatchPass, call: LayerCall, *, again: bool = False
    ) -> Any:
        """Run a layer of the stage, for the first time or `again` in backward.

        Raises:
            StageEnd: It was the stage's last layer, and not the model's.
        """
        if call.index == current.layers.start:
            call = self._enter(current, call)
        if again:
            current.begin_layer(call.index, again=True)
            output = call.run()
        elif current.reads is None:
            output = self._run(current, call)
        else:
            with current.reads.pause():  # Layers and pulls read no weights outside the layers.
                output = self._run(current, call)
        if call.index + 1 < current.layers.stop:
            return output
        if self._group is not None:
            hidden = self._group.leave(hidden_output(output, call.index))
            output = hidden if isinstance(output, Tensor) else (hidden, *output[1:])
        if again:
            if not current.is_last_stage:
                raise _StopRecomputationError  # Here the step ended in the forward pass.
            current.begin_layer(current.num_layers, again=True)
        else:
            self._end_stage(current, hidden_output(output, call.index))
        return output

    def _enter(self, current: MicrobatchPass, call: LayerCall) -> LayerCall:
        """Return the call of the stage's first layer, with the received activation as its input."""
        if current.receive is not None or self._group is not None:
            key = self._hidden_argument(current, call)
            hidden = current.stage_input(call.given[key])
            if self._group is not None:
                hidden = self._group.enter(hidden)
            call = call.with_argument(key, hidden)
        if current.reads is not None:
            current.reads.reach_layers(call.given)
        return call

    def _run(self, current: MicrobatchPass, call: LayerCall) -> Any:
        """Run a layer, and note what it returns for later stages."""
        current.begin_layer(call.index)
        before = None if current.is_last_stage else self._sides.before(call.index)
        is_first = call.index == 0 and current.has_stages
        given = call.given[self._hidden_argument(current, call)] if is_first else None
        version = None if given is None or given.is_inference() else given._version
        output = self._compute(current, call)
        if given is not None and version is not None:
            # The model may have kept its input, and use it after the layers.
            self._changes_input |= given._version != version
        current.handed_on.changes_input |= self._changes_input
        hidden = hidden_output(output, call.index)
        if type(hidden) is not Tensor:
            check_known(hidden, f"Layer {call.index} computes with")
        current.keep_hidden(hidden)
        cuts = self._group is not None and self._group.cuts_tokens()
        if cuts:
            refuse_pieces(call, output)
        if before is not None and len(current.handed_on.layer_outputs) == call.index:
            # The shape of the whole, since other stages may cut tokens differently, or not at all.
            form = self._group.form_of_whole(hidden) if self._group and cuts else hidden
            self._sides.note(before, call, output, form, current.handed_on)
        return output

    def _compute(self, current: MicrobatchPass, call: LayerCall) -> Any:
        """Run a layer for the first time."""
        if self.first_call is None and current.with_gradients:
            self.first_call = describe_call(call)
        hidden, layer = current.hidden_arguments.get(call.index), self._layers[call.index]
        return current.recomputation.run(call, layer, hidden, self._products[call.index])

    def _end_stage(self, current: MicrobatchPass, hidden: Tensor) -> None:
        """End the step with the handover to the next stage; on the last stage the step goes on."""
        current.finished = True
        current.keep_hidden(hidden)
        if not current.is_last_stage:
            current.handed_on.tensors[:1] = [hidden]
            raise StageEnd(current.handed_on)
        current.begin_layer(current.num_layers)

    def _skip(self, current: MicrobatchPass, call: LayerCall) -> Any:
        """Return what a layer of an earlier stage returns, unknown where it wasn't received."""
        key, handover = current.hidden_arguments[call.index], current.arrived()
        if call.index == 0 and handover.changes_input and call.given[key].is_floating_point():
            # NaN, so that no code after the layers uses the old values unnoticed.
            call.given[key].data.fill_(torch.nan)
        return self._sides.skip(call, key, handover)

    def _check_arguments(self, current: MicrobatchPass, call: LayerCall) -> None:
        """Find the hidden state among the arguments, and check that the others are known."""
        index = call.index
        key = call.hidden_argument(current.last_hidden if index else None)
        current.hidden_arguments[index] = key
        before = key if self._group is None else current.hidden_arguments.get(index - 1, key)
        if key != before:
            raise ModelError(
                f"Layer {index} gets the hidden state as argument {key!r} and layer {index - 1} "
                f"as argument {before!r}. Under tensor parallelism all layers must get it as the "
                "same one, the first tensor."
            )
        current.check_unchanged(index)
        first = current.layers.start
        if index < first or (index > 0 and len(call.given) == 1):
            return  # This stage doesn't run the layer, or there is only the hidden state.
        others = [*call.given.values()]
        if index == first > 0:
            others = [item for at, item in call.given.items() if at != key]
        if any(type(item) is not Tensor for item in others):
            check_known(others, f"Layer {index} takes")

    def _hidden_argument(self, current: MicrobatchPass, call: LayerCall) -> int | str:
        key = current.hidden_arguments.get(call.index)
        return call.hidden_argument() if key is None else key


class _LayerForward:
    """Stands in for a layer's `forward`; an object, so that the layer can still be pickled."""

    def __init__(self, boundary: StageBoundary, index: int, forward: Callable[..., Any]) -> None:
        self._boundary = boundary
        self._index = index
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._boundary.call(LayerCall(self._index, self._forward, args, kwargs))
