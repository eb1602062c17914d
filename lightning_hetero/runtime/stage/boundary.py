"""Turn the user's whole model into one stage of it, micro-batch by micro-batch.

Every layer's `forward` is wrapped once. While a micro-batch passes, layers before the stage return
unknown tensors, its first layer takes the activation received from the previous stage, and its last
layer ends the user's step with `StageEnd`, unless it is the model's last one: then the step goes
on, and the user's own code makes the loss. Nothing of the model's own forward is replaced, so
whatever it computes before the layers (masks, rotary tables) is there on every stage.

Random numbers are seeded before the step, at each layer and after the last one, from the iteration
and the micro-batch, so that they don't depend on which stage draws them.

Stages need a chain: each layer is called once, in order. Where one stage runs them all they are
called as the user likes: more than once, by turns, or not at all.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetero.core.errors import ModelError
from lightning_hetero.runtime.random_state import seed_everything
from lightning_hetero.runtime.stage.layer_calls import LayerCall, hidden_output
from lightning_hetero.runtime.stage.microbatch_pass import MicrobatchPass, StageEnd
from lightning_hetero.runtime.stage.rehearsal import describe_call
from lightning_hetero.runtime.stage.side_tensors import LayerLeavings
from lightning_hetero.runtime.stage.skipped_layer import SkippedLayer
from lightning_hetero.runtime.tensor_parallel.collectives import StageGroup
from lightning_hetero.runtime.unknown import Unknown, check_known

__all__ = ["StageBoundary"]


class StageBoundary:
    """The wrapped layers of one module.

    Args:
        layers: The model's layers in order.
        wrap_layer: Applied to each layer's forward once, such as compilation.
        group: The stage's tensor-parallel group; None if no plan may have a degree above 1.

    Must be made while the layers' parameters are whole.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        wrap_layer: Callable[[int, Callable[..., Any]], Callable[..., Any]] | None = None,
        group: StageGroup | None = None,
    ) -> None:
        self._layers = tuple(layers)
        self._leavings = LayerLeavings(self._layers)
        self._skipped = [
            SkippedLayer(layer, index, self._leavings) for index, layer in enumerate(self._layers)
        ]
        self._current: MicrobatchPass | None = None
        self._again: MicrobatchPass | None = None
        """The micro-batch whose backward pass runs."""
        self._group = group
        self._changes_input = False
        """Whether the first layer was seen to change its input in place."""
        self.first_call: str | None = None
        """The form of the first call of a layer in training; see `rehearsal`."""
        self._compiled = {
            index: layer._compiled_call_impl
            for index, layer in enumerate(self._layers)
            if layer._compiled_call_impl is not None
        }
        """The compiled calls of layers of which the user called `compile`."""
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
        """Give the layers their own forward back."""
        for index, layer in enumerate(self._layers):
            if index in self._compiled:
                layer._compiled_call_impl = self._compiled[index]
            else:
                del layer.forward

    def forward_of(self, current: MicrobatchPass) -> "_Forward":
        """Run the user's step inside this context.

        Raises:
            StageEnd: The stage ends before the step does.
            StepError, ModelError: The step does what a stage can't, or ends without its layers.
        """
        return _Forward(self, current)

    def begin(self, current: MicrobatchPass) -> None:
        """Enter the context of `forward_of`."""
        self._current = current
        current.with_gradients = torch.is_grad_enabled()
        seed_everything(current.step_seed)
        current.is_free = not current.has_stages and self._group is None
        if not self._layers:
            if current.wait_unit is not None:
                current.wait_unit(0)
            current.loss_watch.leave_layers(None)
        elif current.is_free or current.is_last_stage:
            current.loss_watch.resume()
        if current.reads is not None:
            current.reads.__enter__()  # type: ignore[no-untyped-call]

    def end(self, current: MicrobatchPass, error: type[BaseException] | None) -> None:
        """Leave the context of `forward_of`."""
        self._current = None
        current.loss_watch.end()
        if current.reads is not None:
            current.reads.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if error is None and not current.is_free:
            current.check_finished()

    def run_backward(
        self,
        current: MicrobatchPass,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
    ) -> None:
        """Run the backward of a forward pass; layers that the user's model checkpoints run again.

        Args:
            current: That pass.
            outputs: What it has made.
            gradients: Of each.
        """
        self._again = current
        try:
            torch.autograd.backward(outputs, gradients)
        finally:
            self._again = None

    def call(self, call: LayerCall) -> Any:
        """Do what the current micro-batch asks of a layer; plain forward without one."""
        current, index = self._current, call.index
        if current is None:
            return call.run() if self._again is None else self._call_again(self._again, call)
        if current.with_gradients and not torch.is_grad_enabled():
            current.note_checkpoint(index)
        watch = current.loss_watch
        if index == 0:
            watch.see_arguments(call.values)
        if current.is_free:
            return self._call_freely(current, call)
        if watch.is_active:
            watch.pause()
        current.check_order(index)
        if current.has_stages:
            self._check_arguments(current, call)
        if index >= current.layers.start:
            return self._call_in_stage(current, call)
        output = self._skip(current, call)
        current.keep_hidden(hidden_output(output, index))
        return output

    def _call_freely(self, current: MicrobatchPass, call: LayerCall) -> Any:
        """Run a layer of a stage that has all layers."""
        current.called.append(call.index)
        suspended = current.loss_watch.suspend()
        try:
            current.begin_layer(call.index)
            output = self._compute(current, call)
        finally:
            current.loss_watch.proceed(suspended)
        if call.index + 1 == current.num_layers:
            current.begin_layer(current.num_layers)
        if current.is_chain:
            current.loss_watch.leave_layers(output)
        return output

    def _call_again(self, current: MicrobatchPass, call: LayerCall) -> Any:
        """Compute in backward what the forward computed, or skipped.

        Nothing is asked for after the last layer of a stage: the step ended there.
        """
        if call.index < current.layers.start:
            return self._skip(current, call)
        if call.index >= current.layers.stop:
            return self._skipped[call.index](call, self._hidden_of(current, call))
        return self._call_in_stage(current, call, again=True)

    def _call_in_stage(
        self, current: MicrobatchPass, call: LayerCall, *, again: bool = False
    ) -> Any:
        """Run a layer of the stage, for the first time or `again` in backward.

        Raises:
            StageEnd: It was the stage's last one, and not the model's.
        """
        if call.index == current.layers.start:
            call = self._enter(current, call)
            if not again and current.has_stages and current.lists is not None:
                current.lists.reach_layers()
        if again:
            current.begin_layer(call.index, again=True)
            output = call.run()
        elif current.reads is None:
            output = self._run(current, call)
        else:
            with current.reads.pause():  # Layers and pulls read no outer weights.
                output = self._run(current, call)
        if call.index + 1 < current.layers.stop:
            return output
        if self._group is not None:
            output = self._leave(self._group, call.index, output)
        if again:
            current.begin_layer(current.num_layers, again=True)
        else:
            self._end_stage(current, hidden_output(output, call.index))
        return output

    def _enter(self, current: MicrobatchPass, call: LayerCall) -> LayerCall:
        """Return what the stage's first layer computes."""
        if current.receive is not None or self._group is not None:
            key = self._hidden_argument(current, call)
            hidden = current.stage_input(call.argument(key))
            if self._group is not None:
                hidden = self._group.enter(hidden)
            call = call.with_argument(key, hidden)
        if current.reads is not None:
            current.reads.reach_layers(call.given)
        return call

    def _run(self, current: MicrobatchPass, call: LayerCall) -> Any:
        """Run a layer, and note what it leaves for later stages."""
        cuts = self._group is not None and self._group.cuts_tokens()
        current.begin_layer(call.index)
        is_looked_at = cuts or not current.is_last_stage
        before = self._leavings.look(call.index) if is_looked_at else None
        versions = call.versions() if current.has_stages else ()
        if current.handed_on.kept:
            self._leavings.hand_on(call.values, current.handed_on)
        output = self._compute(current, call)
        for tensor, version in versions:
            if tensor._version != version:
                self._note_change(current, call, tensor)
        current.handed_on.changes_input |= self._changes_input
        hidden = hidden_output(output, call.index)
        if type(hidden) is not Tensor:
            check_known(hidden, f"Layer {call.index} computes with")
        current.keep_hidden(hidden)
        if before is None:
            return output
        rest = _rest_of(output, call) if type(output) is not Tensor else ()
        if cuts:
            self._leavings.refuse_pieces(call.index, before, rest)
        if not current.is_last_stage and len(current.handed_on.left) == call.index:
            # Other stages may cut tokens elsewhere, or nowhere.
            form = self._group.form_of_whole(hidden) if self._group and cuts else hidden
            self._leavings.note(before, form, rest, current.handed_on)
        return output

    def _compute(self, current: MicrobatchPass, call: LayerCall) -> Any:
        """Run a layer for the first time."""
        if self.first_call is None and current.with_gradients:
            self.first_call = describe_call(call)
        hidden, layer = current.hidden_arguments.get(call.index), self._layers[call.index]
        if current.layer_trial is None:
            return current.recomputation.run(call, layer, hidden)
        is_shared = self._group is not None and self._group.peers is not None
        trial = current.layer_trial.begin(call, hidden, is_shared=is_shared)
        output = current.recomputation.run(call, layer, hidden)
        if trial is not None:
            trial.check(layer, self._leavings)
        return output

    def _note_change(self, current: MicrobatchPass, call: LayerCall, changed: Tensor) -> None:
        """Note that a layer has changed an argument in place: other stages have it as it was."""
        hidden = self._hidden_argument(current, call)
        for key, tensor in call.given.items():
            if tensor is changed and key != hidden:
                raise ModelError(
                    f"Layer {call.index} changes its argument {key!r} in place, which the layers "
                    "of other stages wouldn't see. Let it work on a copy, or use a plan whose "
                    "pipelines have one stage."
                )
        # Later layers get what a layer has made, and nobody else has that on other stages.
        self._changes_input |= call.index == 0

    def _leave(self, group: StageGroup, index: int, output: Any) -> Any:
        """Return what the last layer of a tensor-parallel stage returns."""
        hidden = group.leave(hidden_output(output, index))
        return hidden if isinstance(output, Tensor) else (hidden, *output[1:])

    def _end_stage(self, current: MicrobatchPass, hidden: Tensor) -> None:
        """Leave the step with what the next stage gets; on a last stage the step goes on."""
        current.finished = True
        if not current.is_last_stage:
            current.handed_on.kept = ()
            current.handed_on.tensors[:1] = [hidden]
            raise StageEnd(current.handed_on)
        if current.lists is not None:
            current.lists.leave_layers()
        current.begin_layer(current.num_layers)
        current.loss_watch.leave_layers(hidden)

    def _skip(self, current: MicrobatchPass, call: LayerCall) -> Any:
        """Do what is done here of a layer that an earlier stage computes."""
        handover = current.arrived()
        before = self._leavings.look(call.index) if handover.left[call.index] else None
        hidden: Tensor = call.argument(current.hidden_arguments[call.index])
        if call.index == 0 and handover.changes_input and not isinstance(hidden, Unknown):
            current.loss_watch.outdated = hidden
        output = self._skipped[call.index](call, hidden, handover.forms[call.index])
        if before is None:
            return output
        rest = self._leavings.restore(call.index, before, _rest_of(output), handover)
        return (output[0], *rest) if rest else output

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
        if index < first or (index > first and len(call.values) == 1):
            return  # Nothing computes with it here, or the stage's own layer has made it.
        others: Sequence[Any] = call.values
        if index == first > 0:
            others = [item for at, item in call.given.items() if at != key]
        if others:
            check_known(others, f"Layer {index} takes")
            current.loss_watch.check_current(others)

    def _hidden_argument(self, current: MicrobatchPass, call: LayerCall) -> int | str:
        key = current.hidden_arguments.get(call.index)
        return call.hidden_argument() if key is None else key

    def _hidden_of(self, current: MicrobatchPass, call: LayerCall) -> Tensor:
        hidden: Tensor = call.argument(self._hidden_argument(current, call))
        return hidden


class _Forward:
    """The context of one step."""

    def __init__(self, boundary: StageBoundary, current: MicrobatchPass) -> None:
        self._boundary, self._current = boundary, current

    def __enter__(self) -> None:
        self._boundary.begin(self._current)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._boundary.end(self._current, kind)


class _LayerForward:
    """Stands in for a layer's `forward`; an object, so that the layer can still be pickled."""

    def __init__(self, boundary: StageBoundary, index: int, forward: Callable[..., Any]) -> None:
        self._boundary = boundary
        self._index = index
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._boundary.call(LayerCall(self._index, self._forward, args, kwargs))


def _rest_of(output: Any, call: LayerCall | None = None) -> tuple[Any, ...]:
    """Return what a layer returned besides the hidden state; None in place of what it was given."""
    if not isinstance(output, tuple | list):
        return ()
    given = () if call is None else call.values
    return tuple(None if any(item is i for i in given) else item for item in output[1:])
