"""Refuse what hooks and optimizers make of slices that would be something else of the whole.

Adding, scaling and whatever else goes by elements, or by rows, does to a slice what it does to the
whole. A norm, a mean, a place in a parameter or a matrix product doesn't: each rank would have its
own. So functions of parameters and gradients that aren't whole here are watched, from the end of a
training step on, and what leaves fewer rows than the slice has is refused. Watching costs time, so
that is done after few steps: a use that comes with each step is found after the first.

A gradient may be whole here and None on all other ranks, which then leave it out. So hooks may make
no numbers of it, either; the optimizer of whole matrices may.

Sizes are answered for the whole (`slice_sizes`), so who reads them behind a step is watched from
then on. Whether gradients are finite is known: those that aren't never come to hooks.
"""

import sys
from collections.abc import Callable, Sequence
from math import prod
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._pytree import tree_leaves

from lightning_hetero.core.errors import StepError
from lightning_hetero.runtime.callers import calling_frame, is_asked_by_library, is_own
from lightning_hetero.runtime.slices.known_by_shape import SIZES
from lightning_hetero.runtime.slices.slice_sizes import SliceSize, for_slice, size_of_whole
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
# fmt: off
_TAKING_SIZES = {
    "zeros", "ones", "empty", "full", "rand", "randn", "randint", "normal", "arange", "linspace",
    "eye", "view", "reshape", "expand", "repeat", "tile", "resize", "narrow", "split", "chunk",
    "unflatten", "broadcast_to", "as_strided", "getitem", "setitem",
}
_TAKING_VALUE = {"setitem", "full", "new_full"}
"""Those of them whose last argument is a number."""
_DRAWING = {
    "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal", "uniform",
    "bernoulli", "random", "exponential", "cauchy", "log_normal", "geometric",
}
# fmt: on
_ASKING_FOR_FINITE = {"isfinite", "isnan", "isinf"}
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
        self.is_behind_step = False
        """Whether what is watched comes after a training step, as often as they do."""
        self.tells_sizes = False
        """Whether somebody asked for sizes there, and must be answered in the same way again."""
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
                self._mark(master, name, is_cut=False)
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
        # What somebody keeps is what it was.
        kept = self._names.items()
        self._names = {key: item for key, item in kept if item[2] and item[0]() is not None}
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
        name = _name_of(func)
        kwargs = kwargs or {}
        if name in _DRAWING and self._is_active:
            self._check_drawing(name, args, kwargs)
        if name in _TAKING_SIZES or name.startswith(_OF_FORM):
            num_sizes = len(args) - (name in _TAKING_VALUE)
            args = *for_slice(args[:num_sizes]), *args[num_sizes:]
            kwargs = {
                key: item if key == "fill_value" else for_slice(item)
                for key, item in kwargs.items()
            }
        try:
            result = func(*args, **kwargs)
        except (IndexError, RuntimeError) as error:
            if cut := self._known_among(args, kwargs) if self._is_active else []:
                self._refuse(name, cut[0][1][0], error)
            raise
        if func in SIZES:
            return self._size(func, result, args, kwargs) if self._is_active else result
        if func == _GRADIENT and id(args[0]) in self._whole:
            if result is not None and self._are_hooks:
                self._mark(result, self._whole[id(args[0])], is_cut=False)
        elif self._is_active and not self._is_known_of_all(name, args, result):
            self._look(name, args, kwargs, result)
        return result

    def _is_known_of_all(self, name: str, args: Sequence[Any], result: Any) -> bool:
        """Whether all ranks are told the same, though by different slices."""
        if name not in _ASKING_FOR_FINITE or not isinstance(result, Tensor):
            return False
        # Each rank has looked at the gradients that it made, before anybody stepped on them.
        known = self._known_of(args[0])
        is_gradient = known is not None and args[0] is self._store.masters[known[0]].grad
        return is_gradient and bool(result.all() if name == "isfinite" else ~result.any())

    def _check_drawing(self, name: str, args: Sequence[Any], kwargs: Any) -> None:
        """Refuse random numbers for slices: one device draws those of all parameters in a row."""
        for item in tree_leaves((args, kwargs)):
            if isinstance(item, Tensor) and (known := self._known_of(item)) is not None:
                self._refuse(name, known[0])
            if isinstance(item, SliceSize) or id(item) in self._whole:
                self._refuse(name, self._whole.get(id(item), "that is cut"))

    def _size(self, func: Any, own: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Answer a question for the sizes of what may be a slice."""
        name, _ = self._known_of(args[0]) or (self._whole.get(id(args[0])), False)
        if name is None or is_asked_by_library():
            return own
        shape = self._whole_shape_of(args[0], name)
        if shape is None:
            return own
        self.tells_sizes |= self.is_behind_step
        answer = size_of_whole(func, own, args, kwargs, shape)
        if func == Tensor.__len__ and answer != own:
            self._refuse("len", name)  # Python keeps no more of it than a number.
        return answer

    def _whole_shape_of(self, tensor: Tensor, name: str) -> tuple[int, ...] | None:
        """Return the shape that a tensor like a slice, or like all its elements, would have."""
        whole, own = tuple(self._store.specs[name].shape), self._store.masters[name]
        if tensor.shape == own.shape:
            return whole
        is_flat = tensor.dim() == 1 and tensor.numel() == own.numel()
        return (prod(whole),) if is_flat else None

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
            is_as_large = made.numel() >= largest if largest else not made.numel()
            if is_kept or made.shape[:1] in rows or is_as_large:
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
