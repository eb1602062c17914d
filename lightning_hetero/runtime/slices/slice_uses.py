"""Refuse what hooks and optimizers make of slices that would be something else of the whole.

Adding, scaling and whatever else goes by elements, or by rows, does to a slice what it does to the
whole. A norm, a mean, a place in a parameter or a matrix product doesn't: each rank would have its
own. So functions of parameters and gradients that aren't whole here are watched, from the end of a
training step on, and what leaves fewer rows than the slice has is refused. Watching costs time, so
that is done after few steps: a use that comes with each step is found after the first.
"""

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._pytree import tree_leaves

from lightning_hetero.core.errors import StepError
from lightning_hetero.runtime.slices.weights import SliceStore

__all__ = ["SliceUses"]

_OWN, _TORCH = "lightning_hetero.", "torch."
_TELLING = {"numpy", "tolist"}
"""Names of functions that give all values away."""
_OF_FORM = "new_"
"""How functions begin that take nothing of a tensor but its dtype and device."""
_CHOOSING = {"getitem", "setitem", "select", "narrow", "index_select"}
"""Names of functions that take rows by their numbers."""


class SliceUses(TorchFunctionMode):
    """Watches the functions that are called between two steps.

    Args:
        store: The rank's slices.
    """

    def __init__(self, store: SliceStore) -> None:
        super().__init__()
        self._store = store
        self._names: dict[int, tuple[ReferenceType[Tensor], str]] = {}
        """Of slices, and of what has rows for theirs."""
        self._is_active = False

    def start(self) -> None:
        """Watch from now on."""
        if self._is_active:
            return
        for name, master in self._store.masters.items():
            if tuple(master.shape) != tuple(self._store.specs[name].shape):
                self._mark(master, name)
        if self._names:
            self._is_active = True
            self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> bool:
        """Watch no longer; returns whether it did."""
        was_active = self._is_active
        # What was entered over it, and not left, keeps its place: then it looks at nothing.
        if was_active and _get_current_function_mode() is self:  # type: ignore[no-untyped-call]
            self.__exit__(None, None, None)
        self._is_active = False
        self._names.clear()
        return was_active

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Look at what torch is asked."""
        result = func(*args, **(kwargs or {}))
        if self._is_active:
            self._look(getattr(func, "__name__", "").strip("_"), args, kwargs, result)
        return result

    def _look(self, name: str, args: Sequence[Any], kwargs: Any, result: Any) -> None:
        given = [item for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
        cut = [(item, known) for item in given if (known := self._name_of(item)) is not None]
        if not cut or name.startswith(_OF_FORM):
            return
        first, parameter = cut[0]
        if name in _TELLING or (name in _CHOOSING and _chooses(args)):
            self._refuse(name, parameter)
        rows = {item.shape[0] for item, _ in cut}
        largest = max(item.numel() for item, _ in cut)
        changed = set(map(id, given))
        for made in tree_leaves(result):
            if not isinstance(made, Tensor) or id(made) in changed:
                continue
            if made.ndim and (made.shape[0] in rows or made.numel() >= max(largest, 1)):
                self._mark(made, parameter)
            else:
                self._refuse(name, parameter)
        target = given[0]
        if target is not first and target.shape == first.shape:
            self._mark(target, parameter)  # It may have been changed in place, as averages are.

    def _name_of(self, tensor: Tensor) -> str | None:
        held, name = self._names.get(id(tensor), (None, None))
        return name if held is not None and held() is tensor else None

    def _mark(self, tensor: Tensor, name: str) -> None:
        self._names[id(tensor)] = ref(tensor), name

    def _refuse(self, function: str, parameter: str) -> None:
        """Refuse a use, unless it is the package's own.

        Raises:
            StepError: It is the user's, or an optimizer's.
        """
        frame: FrameType | None = sys._getframe(3)
        while frame is not None and _module_of(frame).startswith(_TORCH):
            frame = frame.f_back
        if frame is None or _module_of(frame).startswith(_OWN):
            return
        raise StepError(
            f"{function} is called on parameter {parameter} or its gradient outside of a step "
            f"(in {frame.f_code.co_qualname}, line {frame.f_lineno}), where every rank has only "
            "its slice, so each would get a number of its own. For clipping use "
            "Trainer(gradient_clip_val=...) or self.clip_gradients in configure_gradient_clipping, "
            "which take the norm over all ranks. Whole weights come from "
            "`trainer.strategy.whole_state_dict()`, called by all ranks. Optimizers of whole "
            'matrices run with HeteroStrategy(ownership="parameter").'
        )


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")) + "."


def _chooses(args: Sequence[Any]) -> bool:
    """Whether rows are taken by their numbers."""
    index = args[1] if len(args) > 1 else None
    first = index[0] if isinstance(index, tuple) and index else index
    if isinstance(first, Tensor) and first.dtype is torch.bool:
        return False
    return first is not None and first is not Ellipsis and first != slice(None)
