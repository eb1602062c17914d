"""Turn the user's whole model into one stage of it, micro-batch by micro-batch.

Every layer's `forward` is wrapped once. While a stage propagates, layers before it return unknown
tensors, its first layer takes the hidden state received from the previous stage, and its last layer
ends the user's step with `StageEnd`, unless it is the model's last one: then the step goes on, and
the user's own code makes the loss. Nothing of the model's own forward is replaced, so whatever it
computes before the layers (masks, rotary tables) is there on every stage.

Random numbers are seeded before the step, at each layer and behind the last one, from the iteration
and the micro-batch, so that they don't depend on which stage draws them.

Stages need a chain: each layer is called once, in order. Where one stage runs them all they are
called as the user likes: more than once, by turns, or not at all.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from lightning_hetero.core.errors import ModelError
from lightning_hetero.runtime.random_state import seed_everything, seed_of
from lightning_hetero.runtime.stage.hidden_state import hidden_output, hidden_place, named_arguments
from lightning_hetero.runtime.stage.layer_calls import check_finished, check_order, note_checkpoint
from lightning_hetero.runtime.stage.microbatch_pass import MicrobatchPass, StageEnd
from lightning_hetero.runtime.stage.side_tensors import LayerLeavings
from lightning_hetero.runtime.stage.skipped_layer import SkippedLayer
from lightning_hetero.runtime.stage.stage_input import StageInput
from lightning_hetero.runtime.unknown import check_known

__all__ = ["StageBoundary"]

_BEHIND_LAYERS = -1
"""Stands for the code behind the layers where a layer index seeds the generators."""


class StageBoundary:
    """The wrapped layers of one module.

    Args:
        layers: The model's layers in order.
        wrap_layer: Applied to each layer's forward once, such as checkpointing or compilation.
        enter_stage: Applied to the whole hidden state that a stage's first layer gets.
        leave_stage: Gives back the whole hidden state that a stage's last layer made.
        cuts_tokens: Whether layers see some of the tokens only.

    Must be made while the layers' parameters are whole.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        wrap_layer: Callable[[int, Callable[..., Any]], Callable[..., Any]] | None = None,
        enter_stage: Callable[[Tensor], Tensor] | None = None,
        leave_stage: Callable[[Tensor], Tensor] | None = None,
        cuts_tokens: Callable[[], bool] | None = None,
    ) -> None:
        self._layers = tuple(layers)
        self._leavings = LayerLeavings(self._layers)
        self._skipped = [
            SkippedLayer(layer, index, self._leavings) for index, layer in enumerate(self._layers)
        ]
        self._run: MicrobatchPass | None = None
        self._again: MicrobatchPass | None = None
        """The micro-batch whose backward runs."""
        self._enter_stage = enter_stage
        self._leave_stage = leave_stage
        self._cuts_tokens = cuts_tokens
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

    @contextmanager
    def running(self, run: MicrobatchPass) -> Iterator[None]:
        """Run the user's step inside this context; checks that it called the model once."""
        self._run = run
        run.with_gradients = torch.is_grad_enabled()
        seed_everything(seed_of(*run.seed))
        if not self._layers:
            run.before_layer(0)
        if self._is_free(run) or run.is_last_stage:
            run.watch()
        try:
            with run.reads or nullcontext():
                yield
        finally:
            run.end_watch()
            self._run = None

    def check_finished(self, run: MicrobatchPass) -> None:
        """Refuse a step that has ended without all layers of a stage.

        Raises:
            StepError, ModelError: See `layer_calls.check_finished`.
        """
        if not self._is_free(run):
            check_finished(run)

    def _is_free(self, run: MicrobatchPass) -> bool:
        """Whether layers are called as the user likes."""
        return not run.has_stages and self._enter_stage is None

    @contextmanager
    def backward_of(self, run: MicrobatchPass) -> Iterator[None]:
        """Compute layers that the user's model checkpoints again as in this run's forward."""
        self._again = run
        try:
            yield
        finally:
            self._again = None

    def call(
        self, index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Do what the current micro-batch asks of layer `index`; plain forward without one."""
        run = self._run
        if run is None:
            if self._again is None:
                return forward(*args, **kwargs)
            return self._call_again(self._again, index, forward, args, kwargs)
        note_checkpoint(run, index)
        if self._is_free(run):
            return self._call_freely(run, index, forward, args, kwargs)
        run.pause_watch()
        check_order(run, index)
        if run.has_stages:
            self._check_call(run, index, named_arguments(args, kwargs))
        if index < run.layers.start:
            output = self._skip(run, index, forward, args, kwargs)
            run.keep_hidden(hidden_output(output, index))
            return output
        if index == run.layers.start:
            args, kwargs = self._enter(run, args, kwargs)
        run.seed_torch(index)
        run.before_layer(index)
        output = self._compute(run, index, forward, args, kwargs)
        if index + 1 == run.layers.stop:
            output = self._leave(run, output)
        return output

    def _compute(
        self,
        run: MicrobatchPass,
        index: int,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a layer of the stage, and note what it leaves for stages behind."""
        cuts = self._cuts_tokens is not None and self._cuts_tokens()
        before = [] if run.is_last_stage and not cuts else self._leavings.look(index)
        with nullcontext() if run.reads is None else _disable_current_modes():
            output = forward(*args, **kwargs)
        hidden = hidden_output(output, index)
        check_known(hidden, f"Layer {index} computes with")
        run.keep_hidden(hidden)
        rest = _rest_of(output, (*args, *kwargs.values()))
        if cuts:
            self._leavings.refuse_pieces(index, before, rest)
        if not run.is_last_stage and len(run.handed_on.left) == index:
            self._leavings.note(before, hidden, rest, run.handed_on)
        return output

    def _check_call(self, run: MicrobatchPass, index: int, given: dict[int | str, Any]) -> None:
        """Find the hidden state among the arguments, and check that the others are known."""
        place = hidden_place(given, run.last_hidden if index else None, index)
        before = run.hidden_places.get(index - 1, place)
        if self._enter_stage is not None and place != before:
            raise ModelError(
                f"Layer {index} gets the hidden state as argument {place!r} and layer {index - 1} "
                f"as argument {before!r}. Under tensor parallelism all layers must get it as the "
                "same one, the first tensor."
            )
        run.hidden_places[index] = place
        run.check_unchanged(index)
        if index >= run.layers.start:
            comes_in = index == run.layers.start > 0
            others = [item for at, item in given.items() if not (comes_in and at == place)]
            check_known(others, f"Layer {index} takes")

    def _enter(
        self, run: MicrobatchPass, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if run.receive is not None:
            run.stage_input = StageInput(run.arrived().tensors[0])
        args, kwargs = self._first_arguments(run, args, kwargs)
        if run.reads is not None:
            run.reads.use((args, kwargs))
            run.reads.uses_all = True
        return args, kwargs

    def _first_arguments(
        self, run: MicrobatchPass, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what the stage's first layer gets."""
        if run.stage_input is None and self._enter_stage is None:
            return args, kwargs
        given = named_arguments(args, kwargs)
        index = run.layers.start
        place = run.hidden_places.get(index)
        place = hidden_place(given, None, index) if place is None else place
        hidden = given[place] if run.stage_input is None else run.stage_input.give()
        given[place] = hidden if self._enter_stage is None else self._enter_stage(hidden)
        return tuple(given[i] for i in range(len(args))), {name: given[name] for name in kwargs}

    def _last_output(self, index: int, output: Any) -> Any:
        """Return what the stage's last layer returns."""
        if self._leave_stage is None:
            return output
        hidden = self._leave_stage(hidden_output(output, index))
        return hidden if isinstance(output, Tensor) else (hidden, *output[1:])

    def _leave(self, run: MicrobatchPass, output: Any) -> Any:
        run.finished = True
        index = run.layers.stop - 1
        output = self._last_output(index, output)
        if not run.is_last_stage:
            run.handed_on.tensors[:1] = [hidden_output(output, index)]
            raise StageEnd(run.handed_on)
        run.seed_torch(_BEHIND_LAYERS)
        run.before_layer(run.num_layers)
        run.behind_layers.forget()
        run.watch()
        return output

    def _call_freely(
        self,
        run: MicrobatchPass,
        index: int,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a layer of a stage that has all layers."""
        run.called.append(index)
        run.seed_torch(index)
        run.before_layer(index)
        with run.unwatched():
            output = forward(*args, **kwargs)
        if index + 1 == run.num_layers:
            run.seed_torch(_BEHIND_LAYERS)
            run.before_layer(run.num_layers)
        if run.is_chain:
            run.behind_layers.forget()  # Losses are made behind the layers.
        return output

    def _call_again(
        self,
        run: MicrobatchPass,
        index: int,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Compute in backward what the forward computed, or skipped.

        Nothing is asked for behind the last layer of a stage: the step ended there.
        """
        if index < run.layers.start:
            return self._skip(run, index, forward, args, kwargs)
        if index >= run.layers.stop:
            return self._skipped[index](forward, args, kwargs, _hidden_of(run, index, args, kwargs))
        if index == run.layers.start:
            args, kwargs = self._first_arguments(run, args, kwargs)
        run.seed_torch(index, again=True)
        output = forward(*args, **kwargs)
        if index + 1 == run.layers.stop:
            output = self._last_output(index, output)
            run.seed_torch(_BEHIND_LAYERS, again=True)
        return output

    def _skip(
        self,
        run: MicrobatchPass,
        index: int,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Do what is done here of a layer that an earlier stage computes."""
        handover = run.arrived()
        before = self._leavings.look(index)
        hidden = _hidden_of(run, index, args, kwargs)
        shape, dtype = handover.forms[index]
        made = torch.empty(shape, dtype=dtype, device=hidden.device)
        output = self._skipped[index](forward, args, kwargs, hidden, made)
        rest = self._leavings.restore(index, before, _rest_of(output), handover)
        return (output[0], *rest) if rest else output


class _LayerForward:
    """Stands in for a layer's `forward`; an object, so that the layer can still be pickled."""

    def __init__(self, boundary: StageBoundary, index: int, forward: Callable[..., Any]) -> None:
        self._boundary = boundary
        self._index = index
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._boundary.call(self._index, self._forward, args, kwargs)


def _rest_of(output: Any, given: Sequence[Any] = ()) -> tuple[Any, ...]:
    """Return what a layer returned besides the hidden state; None in place of what it was given."""
    if not isinstance(output, tuple | list):
        return ()
    return tuple(None if any(item is i for i in given) else item for item in output[1:])


def _hidden_of(
    run: MicrobatchPass, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    given = named_arguments(args, kwargs)
    place = run.hidden_places.get(index)
    hidden: Tensor = given[hidden_place(given, None, index) if place is None else place]
    return hidden
