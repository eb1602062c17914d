"""Find out by trial whether layers let samples of a micro-batch *meet*: affect each other.

What a layer returns for a sample must not depend on the other samples: on one device these are the
whole batch's, in a stage only one micro-batch's. Hand-written statistics over a batch, attention
that ignores where packed samples end, and experts with a capacity do depend on them. So in the
first iteration, and a few later ones, layers are called again for one micro-batch: with other
values in all samples but the first, then but the last. That one's output must stay the same.

A micro-batch of one sample is tried as if it held that sample twice. If a layer can't be called
again, or it is unclear where samples lie in its input, nothing is found. Hooks inside a layer
aren't called, and whatever it leaves on its modules is removed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_map_only

from lightning_hetero.core.errors import ModelError
from lightning_hetero.models.batches import sizes_of
from lightning_hetero.runtime.random_state import PreservedRandomState, TorchState, seed_everything
from lightning_hetero.runtime.results.numbers.sample_places import sample_groupings
from lightning_hetero.runtime.stage.layer_calls import LayerCall, hidden_output
from lightning_hetero.runtime.stage.side_tensors import LayerLeavings

__all__ = ["LayerTrial"]

_NEGLIGIBLE, _ROUNDINGS = 1e-5, 8
"""Largest change, as a share of a sample's output or in roundings, that rounding may explain."""
_FACTOR = -0.5
"""Other values are those of other features times this: none grows, so that scales of low-precision
formats stay as they are."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@contextmanager
def _unwatched() -> Iterator[None]:
    """In this context, disable all torch function modes but the one of the default device."""
    modes: list[Any] = []
    while (depth := torch._C._len_torch_function_stack()) and not isinstance(
        torch._C._get_function_stack_at(depth - 1), DeviceContext
    ):
        modes.append(torch._C._pop_torch_function_stack())
    try:
        yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


class LayerTrial:
    """Tries each layer that a micro-batch passes, when it is first called.

    Args:
        microbatch: The step's micro-batch. If samples are packed end to end, its `cu_seqlens` says
            where each begins and where the last one ends.
        tries_shared: Whether all ranks try layers in this iteration. If not, layers that several
            ranks compute together aren't tried, because these would wait for each other.
    """

    def __init__(self, microbatch: Any, *, tries_shared: bool = True) -> None:
        self._tries_shared = tries_shared
        self._num_samples = sizes_of(microbatch)[0]
        self._starts: Tensor | None = getattr(microbatch, "cu_seqlens", None)
        self._tried: set[int] = set()

    @_unwatched()
    def begin(self, call: LayerCall, key: int | str | None, *, is_shared: bool) -> "_Trial | None":
        """Begin a layer's trial before it runs: copy its input. None if there is nothing to try.

        Args:
            call: The layer's call.
            key: Which argument is the hidden state; None if unknown.
            is_shared: Whether other ranks compute the layer together with this one.
        """
        is_due = call.index not in self._tried and (self._tries_shared or not is_shared)
        self._tried.add(call.index)
        try:
            key = call.hidden_argument() if key is None else key
        except ModelError:
            return None
        call = call.without_caches()
        hidden: Tensor = call.argument(key)
        if not is_due or not self._num_samples or not hidden.is_floating_point():
            return None
        is_packed, is_doubled = self._starts is not None, self._num_samples == 1
        if is_doubled:
            if is_shared or is_packed or 1 not in hidden.shape[:2]:
                return None
            call, dim = _doubled(call, [*hidden.shape].index(1))
            groupings = [(dim, torch.arange(2))]
        elif is_shared and not is_packed:
            # All ranks must call it equally often, though their numbers of tokens may differ.
            is_first = len(hidden) == self._num_samples
            groupings = [(0, torch.arange(self._num_samples))] if is_first else []
        else:
            groupings = sample_groupings(hidden.shape, self._num_samples, self._starts)
        if not groupings:
            return None
        call = call.with_argument(key, call.argument(key).detach().clone())
        return _Trial(call, key, groupings, is_doubled=is_doubled, is_shared=is_shared)


def _doubled(call: LayerCall, dim: int) -> tuple[LayerCall, int]:
    """Return the call with its only sample twice along `dim`, and `dim`."""

    def twice(item: Tensor) -> Tensor:
        is_of_samples = item.ndim > dim and item.shape[dim] == 1
        return torch.cat([item, item], dim) if is_of_samples else item

    args, kwargs = tree_map_only(Tensor, twice, (call.args, call.kwargs))
    return LayerCall(call.index, call.forward, args, kwargs), dim


class _Trial:
    """The trial of one layer."""

    def __init__(
        self,
        call: LayerCall,
        key: int | str,
        groupings: list[tuple[int, Tensor]],
        *,
        is_doubled: bool,
        is_shared: bool,
    ) -> None:
        self._call = call
        self._key = key
        self._hidden: Tensor = call.argument(key)
        self._groupings = groupings
        self._is_doubled = is_doubled
        self._is_shared = is_shared

    @_unwatched()
    def check(self, layer: nn.Module, leavings: LayerLeavings) -> None:
        """Try the layer, after it has run.

        Args:
            layer: The layer.
            leavings: Removes what the trial leaves on its modules.

        Raises:
            ModelError: The layer's output for a sample depends on other samples.
        """
        # Two samples occur only in trials: compilers needn't see them.
        stance = "force_eager" if self._is_doubled else "default"
        run = partial(_run, layer, leavings)
        try:
            with PreservedRandomState(), torch.no_grad(), torch.compiler.set_stance(stance):
                meets = self._meets(run)
        except Exception:
            # If it can't be called again, for any reason, nothing is shown. But others may wait.
            if self._is_shared:
                raise
            return
        if meets:
            raise ModelError(
                f"Layer {self._call.index}, a {type(layer).__name__}, lets samples meet: what it "
                "returns for a sample depends on the others in its micro-batch, as statistics over "
                "a batch do, attention that ignores where packed samples end, and experts with a "
                "capacity. One device has the whole batch there. Compute each sample by itself "
                "(LayerNorm, GroupNorm, attention by cu_seqlens), or accept it as DDP does: "
                "HeteroStrategy(local_buffers=True)."
            )

    def _meets(self, run: Callable[[LayerCall], "_Outcome"]) -> bool:
        hidden = self._hidden

        def outcome_of(given: Tensor) -> _Outcome:
            return run(self._call.with_argument(self._key, given.clone()))  # May change in place.

        def changes(dim: int, is_kept: Tensor) -> bool:
            """Whether other samples' values change the output of the kept sample."""
            kept = is_kept.nonzero()[:, 0]
            repeated = torch.where(is_kept, torch.arange(len(is_kept)), kept[:1])
            mask = is_kept.view([-1 if item == dim else 1 for item in range(hidden.ndim)])
            # Copies of the kept sample crowd whatever it uses, such as its experts.
            for other in (
                _FACTOR * hidden.flip(-1),
                hidden.index_select(dim, repeated.to(hidden.device)),
            ):
                given = torch.where(mask.to(hidden.device), hidden, other)
                outcomes.append(outcome_of(given))
            if base.output.shape[: dim + 1] != hidden.shape[: dim + 1]:
                return False  # It is unclear which sample an output belongs to.
            return any(item.differs(base, dim, kept) for item in outcomes[-2:])

        base = outcome_of(hidden)
        outcomes: list[_Outcome] = []
        # All calls are made, whatever the first ones show, because other ranks make them, too.
        met = [
            [changes(dim, samples == kept) for kept in (0, int(samples.max()))]
            for dim, samples in self._groupings
        ]
        if outcome_of(hidden).differs(base, 0, torch.arange(len(base.output))):
            return False  # The output changes from call to call anyway.
        # Buffers that depend on the micro-batch are refused by `BufferWatch`.
        is_known = all(item.draws_like(base) and not item.has_changed for item in outcomes)
        return bool(met) and is_known and all(map(any, met))


class _Outcome(NamedTuple):
    """The result of one call."""

    output: Tensor
    drawn: TorchState
    """The generators' states after it."""
    has_changed: bool
    """Whether it has changed buffers."""

    def differs(self, base: "_Outcome", dim: int, places: Tensor) -> bool:
        """Whether the output at places of a dim differs from another call's beyond rounding."""
        places = places.to(self.output.device)
        if self.output.shape != base.output.shape:
            return False
        after, before = (item.output.index_select(dim, places) for item in (self, base))
        allowed = max(_NEGLIGIBLE, _ROUNDINGS * _rounding(self.output)) * before.abs().amax()
        return bool(before.isfinite().all() and not (after - before).abs().amax() <= allowed)

    def draws_like(self, base: "_Outcome") -> bool:
        """Whether another call has drawn as many random numbers."""
        return all(
            one is None or other is None or torch.equal(one, other)
            for one, other in zip(self.drawn, base.drawn, strict=True)
        )


def _run(layer: nn.Module, leavings: LayerLeavings, call: LayerCall) -> _Outcome:
    """Call a layer, and restore it as if it hadn't been called."""
    before = leavings.look_anew(call.index)
    seed_everything(call.index)
    try:
        with _undisturbed(layer) as buffers:
            output = hidden_output(call.run(), call.index).detach()
            has_changed = any(item._version for item in buffers)
    finally:
        leavings.undo(before)
    return _Outcome(output, TorchState.now(), has_changed)


def _rounding(output: Tensor) -> float:
    device = output.device.type
    kinds = [output.dtype]
    if torch.is_autocast_enabled(device):
        kinds.append(torch.get_autocast_dtype(device))
    return max(torch.finfo(kind).eps for kind in kinds)


@contextmanager
def _undisturbed(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Give a context in which a layer has no hooks inside, and copies of its buffers: these."""
    kept: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
    buffers: list[Tensor] = []
    for part in layer.modules():
        for name in _HOOKS:
            kept.append((hooks := vars(part)[name], dict(hooks)))
            hooks.clear()
        kept.append((part._buffers, dict(part._buffers)))
        copies = {n: item.clone() for n, item in part._buffers.items() if item is not None}
        part._buffers.update(copies)
        buffers += copies.values()
    try:
        yield buffers
    finally:
        for names, before in kept:
            names.clear()
            names.update(before)
