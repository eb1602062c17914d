"""Turn the user's whole model into one stage of it, micro-batch by micro-batch.

Every layer's `forward` is wrapped once. While a stage propagates, layers before it hand their input
on, its first layer takes the hidden state received from the previous stage, and its last layer ends
the user's step with `StageEnd`, unless it is the model's last layer: then the step goes on, and the
user's own code makes the loss. Nothing of the model's own forward is replaced, so whatever it
computes before the layers (masks, rotary tables) is there on every stage.

Random numbers are seeded before the step, at each layer and behind the last one, from the iteration
and the micro-batch, so that they don't depend on which stage draws them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetero.core.errors import ModelError, StepError
from lightning_hetero.runtime.hidden_state import hidden_argument, hidden_output
from lightning_hetero.runtime.microbatch_run import MicrobatchRun, StageEnd
from lightning_hetero.runtime.random_state import seed_everything, seed_of
from lightning_hetero.runtime.side_tensors import LayerLeavings
from lightning_hetero.runtime.stage_input import StageInput, is_checkpointed_reentrantly

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

    Must be made while the layers' parameters are whole.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        wrap_layer: Callable[[int, Callable[..., Any]], Callable[..., Any]] | None = None,
        enter_stage: Callable[[Tensor], Tensor] | None = None,
        leave_stage: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._layers = tuple(layers)
        self._leavings = LayerLeavings(self._layers)
        self._shapes = [
            {name: tuple(item.shape) for name, item in layer.named_parameters()}
            for layer in self._layers
        ]
        self._templates: dict[int, tuple[Any, ...] | None] = {}
        self._unknown: set[int] = set()
        """Ids of the tensors in templates: they stand for values that this stage doesn't know."""
        self._run: MicrobatchRun | None = None
        self._again: MicrobatchRun | None = None
        """The micro-batch whose backward runs."""
        self._enter_stage = enter_stage
        self._leave_stage = leave_stage
        for index, layer in enumerate(self._layers):
            forward = layer.forward
            if wrap_layer is not None:
                forward = wrap_layer(index, forward)
            layer.forward = _LayerForward(self, index, forward)

    @property
    def has_layers(self) -> bool:
        """Whether there are layers at all; a module without them runs as it is."""
        return bool(self._layers)

    def remove(self) -> None:
        """Give the layers their own forward back."""
        for layer in self._layers:
            del layer.forward

    @contextmanager
    def running(self, run: MicrobatchRun) -> Iterator[None]:
        """Run the user's step inside this context; checks that it called the model once."""
        self._run = run
        run.with_gradients = torch.is_grad_enabled()
        seed_everything(seed_of(*run.seed))
        if not self._layers:
            run.before_layer(0)
            _watch(run)
        try:
            yield
        finally:
            if run.watching:
                run.behind_layers.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._run = None

    @contextmanager
    def backward_of(self, run: MicrobatchRun) -> Iterator[None]:
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
        has_stages = len(run.layers) < run.num_layers
        if run.with_gradients and not torch.is_grad_enabled() and is_checkpointed_reentrantly():
            run.is_reentrant = True
            if has_stages:
                raise ModelError(
                    f"Layer {index} runs in torch.utils.checkpoint with use_reentrant=True, which "
                    "hides from a stage what it computes. Use use_reentrant=False, or leave the "
                    "checkpoints out: HeteroStrategy(activation_checkpointing='full')."
                )
        if index > 0 and has_stages:
            self._check_known(index, args, kwargs)
            _check_nothing_between(run, index, args, kwargs)
        if index < run.layers.start:
            output = self._skip(run, index, args, kwargs)
            run.last_hidden = hidden_output(output, index)
            return output
        if index == run.layers.start:
            args, kwargs = self._enter(run, args, kwargs)
        run.seed_torch(index)
        run.before_layer(index)
        before = [] if run.is_last_stage else self._leavings.look(index)
        output = forward(*args, **kwargs)
        run.last_hidden = hidden_output(output, index, is_alone=not has_stages)
        if not run.is_last_stage and len(run.handed_on.left) == index:
            self._leavings.note(before, run.last_hidden, run.handed_on)
        if index + 1 == run.layers.stop:
            output = self._leave(run, output)
        return output

    def _enter(
        self, run: MicrobatchRun, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if run.entered:
            raise StepError(
                "The step calls the model twice. A pipeline carries one pass of each micro-batch: "
                "call the model once, for instance on the concatenation of both inputs."
            )
        run.entered = True
        if run.receive is not None:
            run.stage_input = StageInput(run.arrived().tensors[0])
        return self._first_arguments(run, args, kwargs)

    def _first_arguments(
        self, run: MicrobatchRun, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what the stage's first layer gets."""
        if run.stage_input is None and self._enter_stage is None:
            return args, kwargs
        hidden, replace = hidden_argument(args, kwargs)
        if run.stage_input is not None:
            hidden = run.stage_input.give()
        return replace(hidden if self._enter_stage is None else self._enter_stage(hidden))

    def _last_output(self, run: MicrobatchRun, output: Any) -> Any:
        """Return what the stage's last layer returns."""
        if self._leave_stage is None:
            return output
        assert run.last_hidden is not None
        hidden = run.last_hidden = self._leave_stage(run.last_hidden)
        return hidden if isinstance(output, Tensor) else (hidden, *output[1:])

    def _leave(self, run: MicrobatchRun, output: Any) -> Any:
        run.finished = True
        output = self._last_output(run, output)
        if not run.is_last_stage:
            assert run.last_hidden is not None
            run.handed_on.tensors[:1] = [run.last_hidden]
            raise StageEnd(run.handed_on)
        run.seed_torch(_BEHIND_LAYERS)
        run.before_layer(run.num_layers)
        _watch(run)
        return output

    def _call_again(
        self,
        run: MicrobatchRun,
        index: int,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Compute in backward what the forward computed, or skipped.

        Nothing is asked for behind the last layer of a stage: the step ended there.
        """
        if index < run.layers.start:
            return self._skip(run, index, args, kwargs)
        if index >= run.layers.stop:
            return self._pass_through(index, args, kwargs)
        if index == run.layers.start:
            args, kwargs = self._first_arguments(run, args, kwargs)
        run.seed_torch(index, again=True)
        output = forward(*args, **kwargs)
        if index + 1 == run.layers.stop:
            run.last_hidden = hidden_output(output, index, is_alone=True)
            output = self._last_output(run, output)
            run.seed_torch(_BEHIND_LAYERS, again=True)
        return output

    def _skip(
        self, run: MicrobatchRun, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Do what is done here of a layer that an earlier stage computes."""
        before = self._leavings.look(index)
        output = self._pass_through(index, args, kwargs)
        self._leavings.restore(index, before, run.arrived())
        return output

    def _pass_through(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the layer's input in the form of its output, without computing it."""
        hidden, _ = hidden_argument(args, kwargs)
        if index not in self._templates:
            self._templates[index] = self._probe(index, args, kwargs)
        rest, given = self._templates[index], _named(args, kwargs)
        if rest is None:
            return hidden
        return hidden, *(given[i.place] if isinstance(i, _Given) else i for i in rest)

    def _probe(
        self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...] | None:
        """Return what the layer's output holds besides the hidden state; None for a bare tensor.

        What it was given and hands on is a `_Given`, since that differs from call to call. Runs the
        layer once on weights of zeros, without gradients. They take a layer's memory for that time:
        kernels for experts refuse weights expanded from one element.
        """
        hidden, _ = hidden_argument(args, kwargs)
        zeros = {
            name: torch.zeros(shape, dtype=hidden.dtype, device=hidden.device)
            for name, shape in self._shapes[index].items()
        }
        (run, again), self._run, self._again = (self._run, self._again), None, None
        try:
            with torch.no_grad():
                output = torch.func.functional_call(self._layers[index], zeros, args, kwargs)
        finally:
            self._run, self._again = run, again
        if isinstance(output, Tensor):
            return None
        hidden_output(output, index)
        places = {id(value): place for place, value in _named(args, kwargs).items()}
        rest = tuple(_Given(places[id(i)]) if id(i) in places else i for i in output[1:])
        self._unknown |= {id(item) for item in rest if isinstance(item, Tensor)}
        return rest

    def _check_known(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(id(value) in self._unknown for value in (*args, *kwargs.values())):
            raise ModelError(
                f"Layer {index} takes a tensor that layer {index - 1} returns besides the hidden "
                "state, and a stage that begins between them would never see it. Compute it "
                "before the layers, or use a plan whose pipelines have one stage."
            )


@dataclass(frozen=True)
class _Given:
    """Stands in a layer's output for an argument that the layer hands on."""

    place: int | str


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int | str, Any]:
    named: dict[int | str, Any] = dict(enumerate(args))
    return named | kwargs


class _LayerForward:
    """Stands in for a layer's `forward`; an object, so that the layer can still be pickled."""

    def __init__(self, boundary: StageBoundary, index: int, forward: Callable[..., Any]) -> None:
        self._boundary = boundary
        self._index = index
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._boundary.call(self._index, self._forward, args, kwargs)


def _check_nothing_between(
    run: MicrobatchRun, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    hidden, _ = hidden_argument(args, kwargs)
    if run.entered and not run.finished and index <= run.layers.start:
        return  # A second call of the model, which `_enter` refuses.
    if run.last_hidden is not None and hidden is not run.last_hidden:
        raise ModelError(
            f"The model computes something between layer {index - 1} and layer {index}, which "
            "would be lost where a stage ends there: a layer's input must be the very tensor that "
            "the layer before returned. Move the computation into the layers, or use a plan whose "
            "pipelines have one stage."
        )


def _watch(run: MicrobatchRun) -> None:
    run.watching = True
    run.behind_layers.__enter__()  # type: ignore[no-untyped-call]
