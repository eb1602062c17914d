"""Refuse what hooks and optimizers make of slices that would be something else of the whole.

Adding, scaling and whatever else goes by elements, or by rows, does to a slice what it does to the
whole. A norm, a mean, a place in a parameter or a matrix product doesn't: each rank would have its
own. So functions of parameters and gradients that aren't whole here are watched, from the end of a
training step on, and what leaves fewer rows than the slice has is refused. Watching costs time, so
that is done after few steps: a use that comes with each step is found after the first.

A gradient may be whole here and None on all other ranks, which then leave it out. So hooks may make
no numbers of it, either; the optimizer of whole matrices may.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._pytree import tree_leaves

from lightning_hetero.core.errors import StepError
from lightning_hetero.runtime.callers import calling_frame, is_own
from lightning_hetero.runtime.slices.weights import SliceStore

__all__ = ["SliceUses"]

_TELLING = {"numpy", "tolist", "item", "array", "allclose", "is_nonzero"}
"""Names of functions that give values away."""
_Known = tuple[str, bool]
"""Name of a parameter, and whether this rank has a slice of it only."""
_COPYING = {nn.Parameter.__deepcopy__.__code__, Tensor._typed_storage.__code__}
"""Torch's own code that asks for values to copy or save them."""
_GRADIENT: Any = vars(torch._C.TensorBase)["grad"].__get__
_OF_FORM = "new_"
"""How functions begin that take nothing of a tensor but its dtype and device."""
_CHOOSING = {"getitem", "setitem", "select", "narrow", "index_select"}
"""Names of functions that take rows by their numbers."""


class SliceUses(TorchFunctionMode):
    """Watches the functions that are called between two steps.

    Args:
        store: The rank's slices.
        others_lack: Whether what is whole here isn't on other ranks.
    """

    def __init__(self, store: SliceStore, *, others_lack: bool = False) -> None:
        super().__init__()
        self._store = store
        self.others_lack = others_lack
        """Whether what is whole here isn't on other ranks."""
        self._names: dict[int, tuple[ReferenceType[Tensor], str, bool]] = {}
        """Of slices, and of what has rows for theirs; with whether they are cut."""
        self._whole: dict[int, str] = {}
        """Names of the parameters that other ranks lack."""
        self._is_active = False
        self._are_hooks = True

    def start(self) -> None:
        """Watch from now on."""
        if self._is_active:
            return
        for name, master in self._store.masters.items():
            if tuple(master.shape) != tuple(self._store.specs[name].shape):
                self._mark(master, name)
            elif self.others_lack:
                self._whole[id(master)] = name
        if self._names or self._whole:
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
        self._whole.clear()
        return was_active

    def leave_hooks(self) -> None:
        """Let the optimizer, which steps now, do what it likes with whole parameters."""
        self._are_hooks = False
        self._names = {key: item for key, item in self._names.items() if item[2]}

    def return_to_hooks(self) -> None:
        """Look at whole parameters again."""
        self._are_hooks = True

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Look at what torch is asked."""
        try:
            result = func(*args, **(kwargs or {}))
        except (IndexError, RuntimeError) as error:
            if cut := self._known_among(args, kwargs) if self._is_active else []:
                self._refuse(_name_of(func), cut[0][1][0], error)
            raise
        if func == _GRADIENT and id(args[0]) in self._whole:
            if result is not None and self._are_hooks:
                self._mark(result, self._whole[id(args[0])], is_cut=False)
        elif self._is_active:
            self._look(_name_of(func), args, kwargs, result)
        return result

    def _look(self, name: str, args: Sequence[Any], kwargs: Any, result: Any) -> None:
        cut = self._known_among(args, kwargs)
        if not cut or name.startswith(_OF_FORM):
            return
        first, (parameter, is_cut) = cut[0]
        if name in _TELLING or type(result) in (float, complex) or _copies(name):
            self._refuse(name, parameter)
        if name in _CHOOSING and _chooses(args) and is_cut:
            self._refuse(name, parameter)
        rows = {item.shape[:1] for item, _ in cut}
        largest = max(item.numel() for item, _ in cut)
        given = [item for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
        changed = set(map(id, given))
        is_kept = name in _CHOOSING and not is_cut
        for made in tree_leaves(result):
            if not isinstance(made, Tensor) or id(made) in changed:
                continue
            if is_kept or made.shape[:1] in rows or made.numel() >= max(largest, 1):
                self._mark(made, parameter, is_cut=is_cut)
            else:
                self._refuse(name, parameter)
        target = given[0]
        if target is not first and target.shape == first.shape:
            # It may have been changed in place, as averages are.
            self._mark(target, parameter, is_cut=is_cut)

    def _known_among(self, args: Sequence[Any], kwargs: Any) -> list[tuple[Tensor, _Known]]:
        """Return the tensors among arguments of which a parameter is known."""
        given = (item for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor))
        return [(item, known) for item in given if (known := self._known_of(item)) is not None]

    def _known_of(self, tensor: Tensor) -> _Known | None:
        found = self._names.get(id(tensor))
        return found[1:] if found is not None and found[0]() is tensor else None

    def _mark(self, tensor: Tensor, name: str, *, is_cut: bool = True) -> None:
        self._names[id(tensor)] = ref(tensor), name, is_cut

    def _refuse(self, function: str, parameter: str, error: BaseException | None = None) -> None:
        """Refuse a use, unless it is the package's own.

        Raises:
            StepError: It is the user's, or an optimizer's.
        """
        frame = calling_frame()
        if frame is None or is_own(frame):
            return
        raise StepError(
            f"{function} is called on parameter {parameter} or its gradient outside of a step "
            f"(in {frame.f_code.co_qualname}, line {frame.f_lineno}), where every rank has only "
            "its slice, so each would get a number of its own. For clipping use "
            "Trainer(gradient_clip_val=...) or self.clip_gradients in configure_gradient_clipping, "
            "which take the norm over all ranks. Whole weights come from "
            "`trainer.strategy.whole_state_dict()`, called by all ranks. Optimizers of whole "
            'matrices run with HeteroStrategy(ownership="parameter").'
        ) from error


def _name_of(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", "").strip("_")


def _copies(name: str) -> bool:
    """Whether torch asks for values to copy or save them."""
    # From here over the look and the mode to who called.
    return name in ("clone", "untyped_storage") and sys._getframe(3).f_code in _COPYING


def _chooses(args: Sequence[Any]) -> bool:
    """Whether rows are taken by their numbers."""
    index = args[1] if len(args) > 1 else None
    first = index[0] if isinstance(index, tuple) and index else index
    if isinstance(first, Tensor) and first.dtype is torch.bool:
        return False
    return first is not None and first is not Ellipsis and first != slice(None)
