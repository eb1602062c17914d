"""Refuse uses of slices in hooks and optimizers whose results would differ for whole parameters.

Functions of single elements or single rows do to a slice what they do to the whole. (A row is an
index of the dim that is cut, which is the second dim of some parameters under tensor parallelism.)
A norm, a mean, a position in a parameter or a matrix product differs from rank to rank. So torch
functions of parameters and gradients that aren't whole here are watched after training steps. A
function is refused if its result isn't a slice of the whole's result, judged by shapes
(`whole_shapes`), or if it mixes rows (`rows_mixed`). Watching costs time, so it is done after few
steps: a use in every step is found after the first.

A gradient may be whole here and None on all other ranks, which then skip it. So hooks may compute
no numbers of it, either; an optimizer of whole matrices may.

Sizes are answered for the whole (`slice_sizes`): once hooks ask for them, every step is watched.
Hooks may ask whether gradients are finite: they never get gradients that aren't.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from lightning_hetero.core.errors import StepError
from lightning_hetero.runtime.callers import calling_frame, is_asked_by_library, is_own
from lightning_hetero.runtime.leaves import tensors_in, tree_leaves
from lightning_hetero.runtime.slices.known_by_shape import SIZES
from lightning_hetero.runtime.slices.rows_mixed import mixes_rows
from lightning_hetero.runtime.slices.slice_sizes import SliceSize, for_slice, size_of_whole
from lightning_hetero.runtime.slices.weights import SliceStore
from lightning_hetero.runtime.slices.whole_shapes import KnownTensor, cut_dim_of, made_of_slices

__all__ = ["KnownUses", "SliceUses"]

_TELLING = {"numpy", "tolist", "item", "array", "allclose", "is_nonzero"}
"""Names of functions that return values to Python."""
_COPYING = {nn.Parameter.__deepcopy__.__code__, Tensor._typed_storage.__code__}
"""Torch's own code that reads values to copy or save them."""
_GRADIENT: Any = vars(torch._C.TensorBase)["grad"].__get__
_OF_LISTS = "foreach_"
"""Prefix of functions that process each tensor of a list separately."""
_OF_FORM = "new_"
"""Prefix of methods that use nothing of a tensor but its dtype and device."""
# fmt: off
_TAKING_SIZES = {
    "zeros", "ones", "empty", "full", "rand", "randn", "randint", "normal", "view", "reshape",
    "expand", "repeat", "tile", "resize", "narrow", "split", "chunk", "unflatten", "broadcast_to",
    "as_strided", "getitem", "setitem",
}
_MADE_OF_SIZES = {"zeros", "ones", "empty", "full"}
_MADE_OF_SIZES |= {f"new_{name}" for name in _MADE_OF_SIZES}
_TAKING_VALUE = {"setitem", "full", "new_full"}
"""Functions whose last argument is a value, not a size."""
_DRAWING = {
    "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal", "uniform",
    "bernoulli", "random", "exponential", "cauchy", "log_normal", "geometric", "randperm",
    "multinomial", "dropout",
}
_REPEATING = {"repeat", "tile"}
_COUNTING = {"arange", "linspace", "logspace", "eye", "getitem", "narrow"} | _REPEATING
"""Functions whose results depend on the number of elements, or on their positions."""
# fmt: on
_TURNED = {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH")}
_ASKING_FOR_FINITE = {"isfinite", "isnan", "isinf"}
_CHOOSING = {"getitem", "setitem", "select", "narrow", "index_select"}
"""Names of functions that take rows by index."""


_OF_FROZEN = (
    "{} is called outside of a step on parameter {}, which is frozen, so that its values are only "
    "where a step uses them. If hooks change it, as averages of weights do, let it require "
    "gradients and use it under torch.no_grad(): then it travels in each step."
)


@dataclass(frozen=True)
class _Call:
    """A call with the arguments that one device would have."""

    func: Callable[..., Any]
    name: str
    args: Sequence[Any]
    kwargs: dict[str, Any]


@dataclass
class KnownUses:
    """What is known of a run's hooks, which are the same in each of its generations."""

    were_watched: bool = False
    """Whether they were watched after an iteration."""
    ask_first: bool = False
    """Whether any asks for sizes before the first step, so that each generation watches there."""
    ask_later: bool = False
    """Whether any asks for sizes after a step, so that each step is watched."""

    def learn(self, told: Iterable["KnownUses"]) -> None:
        """Merge in what the ranks know."""
        for other in told:
            self.were_watched |= other.were_watched
            self.ask_first |= other.ask_first
            self.ask_later |= other.ask_later


class SliceUses(TorchFunctionMode):
    """Watches the functions that are called between two steps.

    Args:
        store: The rank's slices.
        others_lack: Whether other ranks lack the parameters that are whole here.
        known: Updated when hooks ask for sizes.
    """

    def __init__(
        self, store: SliceStore, *, others_lack: bool = False, known: KnownUses | None = None
    ) -> None:
        super().__init__()
        self._known = known or KnownUses()
        self._store = store
        self.others_lack = others_lack
        """Whether other ranks lack the parameters that are whole here."""
        self._names: dict[int, tuple[ReferenceType[Tensor], KnownTensor]] = {}
        """Marked tensors by id: slices, and tensors made of them."""
        self._whole: dict[int, str] = {}
        """Names of the parameters that other ranks lack."""
        self.is_after_step = False
        """Whether the code that is watched runs after a training step, so after each of them."""
        self._is_active, self._are_hooks = False, True

    def start(self) -> None:
        """Start watching, unless there is nothing to watch."""
        if self._is_active:
            return
        for name, master in self._store.masters.items():
            if tuple(master.shape) != tuple(self._store.specs[name].shape):
                self._mark(master, self._whole_of(name, is_cut=True))
            elif self.others_lack:
                self._whole[id(master)] = name
                self._mark(master, self._whole_of(name, is_cut=False))
        if self._names or self._whole:
            self._is_active = True
            self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> bool:
        """Stop watching; return whether this has watched."""
        if not self._is_active:
            return False
        # Under a mode that was entered later, this one must stay; it then looks at nothing.
        if _get_current_function_mode() is self:  # type: ignore[no-untyped-call]
            self.__exit__(None, None, None)
        self._is_active = False
        # Tensors that somebody has kept stay marked.
        kept = self._names.items()
        self._names = {key: item for key, item in kept if item[1].is_cut and item[0]() is not None}
        self._whole.clear()
        return True

    def leave_hooks(self) -> None:
        """Stop watching whole parameters: the optimizer steps now."""
        self._are_hooks = False
        if self._is_active:
            self._names = {key: item for key, item in self._names.items() if item[1].is_cut}

    def return_to_hooks(self) -> None:
        """Watch whole parameters again, after the optimizer's step."""
        self._are_hooks = True

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a torch function with the slices' sizes, and refuse it if it isn't allowed."""
        name = _name_of(func)
        kwargs = kwargs or {}
        if name in _DRAWING and self._is_active:
            self._check_drawing(name, args, kwargs)
        if name in _COUNTING and self._is_active:
            self._check_counting(name, args, kwargs)
        whole_args, whole_kwargs = args, kwargs
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
            if cut := self._known_among(tensors_in((args, kwargs))) if self._is_active else []:
                self._refuse(name, cut[0][1].parameter, error)
            raise
        if func in SIZES:
            return self._size(func, result, args, kwargs) if self._is_active else result
        if func == _GRADIENT:
            self._follow_gradient(args[0], result)
        elif self._is_active and not self._is_known_of_all(name, args, result):
            if name in _MADE_OF_SIZES:
                self._know_made(whole_args[: len(args) - (name in _TAKING_VALUE)], result)
            name = "t" if func in _TURNED else name
            self._look(_Call(func, name, whole_args, whole_kwargs), args, kwargs, result)
        return result

    def _know_made(self, given: Sequence[Any], made: Tensor) -> None:
        """Mark a tensor that was made with a slice's sizes as cut like the slice."""
        sizes = [item for item in tree_leaves(given) if isinstance(item, int)]
        cut = next(filter(_is_cut, sizes), None)
        if isinstance(cut, SliceSize) and len(sizes) == made.ndim:
            self._mark(made, KnownTensor(cut.parameter, True, tuple(map(int, sizes))))

    def _follow_gradient(self, parameter: Tensor, gradient: Tensor | None) -> None:
        """Mark a gradient that somebody reads."""
        if gradient is None:
            return
        if id(parameter) in self._whole:
            if self._are_hooks:
                self._mark(gradient, self._whole_of(self._whole[id(parameter)], is_cut=False))
        elif self._is_active and (known := self._known_of(parameter)) is not None:
            self._mark(gradient, known)

    def _is_known_of_all(self, name: str, args: Sequence[Any], result: Any) -> bool:
        """Whether a function returns the same on all ranks, though for different slices."""
        if name not in _ASKING_FOR_FINITE or not isinstance(result, Tensor):
            return False
        # Ranks have checked that gradients are finite before hooks get them.
        known = self._known_of(args[0])
        is_gradient = known is not None and args[0] is self._store.masters[known.parameter].grad
        return is_gradient and bool(result.all() if name == "isfinite" else ~result.any())

    def _check_drawing(self, name: str, args: Sequence[Any], kwargs: Any) -> None:
        """Refuse random numbers for slices: one device draws them for each whole parameter."""
        for item in tree_leaves((args, kwargs)):
            if isinstance(item, Tensor) and (known := self._known_of(item)) is not None:
                self._refuse(name, known.parameter)
            if isinstance(item, SliceSize) or id(item) in self._whole:
                self._refuse(name, self._whole.get(id(item), "that is cut"))

    def _check_counting(self, name: str, args: Sequence[Any], kwargs: Any) -> None:
        """Refuse functions of a slice's sizes that depend on numbers or positions of elements."""
        given = tree_leaves((args, kwargs))
        bounds = [i for item in given if isinstance(item, slice) for i in (item.start, item.stop)]
        cut = next(filter(_is_cut, (*given, *bounds)), None)
        # A single row that is repeated is the same in each slice.
        is_one = name in _REPEATING and args[0].shape[:1] in ((), (1,))
        if isinstance(cut, SliceSize) and not is_one:
            self._refuse(name, cut.parameter)

    def _size(self, func: Any, own: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the answer to a question for sizes: those of the whole if it is of a slice."""
        known = self._known_of(args[0])
        name = self._whole.get(id(args[0])) if known is None else known.parameter
        if name is None or is_asked_by_library():
            return own
        shape = known.whole if known is not None else None
        shape = self._whole_shape_of(args[0], name) if shape is None else shape
        if shape is None:
            return own
        self._known.ask_later |= self.is_after_step
        self._known.ask_first |= not self.is_after_step
        answer = size_of_whole(func, own, args, kwargs, shape, name)
        if func == Tensor.__len__ and answer != own:
            self._refuse("len", name)  # Python makes a plain `int` of it.
        return answer

    def _whole_shape_of(self, tensor: Tensor, name: str) -> tuple[int, ...] | None:
        """Return the whole's shape for a tensor shaped like a slice or its flat elements."""
        whole, own = tuple(self._store.specs[name].shape), self._store.masters[name]
        if tensor.shape == own.shape:
            return whole
        is_flat = tensor.dim() == 1 and tensor.numel() == own.numel()
        return (prod(whole),) if is_flat else None

    def _whole_of(self, name: str, *, is_cut: bool) -> KnownTensor:
        # A scalar's slice has one dim, but the scalar has none.
        return KnownTensor(name, is_cut, tuple(self._store.specs[name].shape) or None)

    def _look(self, call: "_Call", args: Sequence[Any], kwargs: Any, result: Any) -> None:
        name, given = call.name, tensors_in((args, kwargs))
        known = self._known_among(given)
        if not known or name.startswith(_OF_FORM):
            return
        first, told = known[0]
        if _writes(call.func) and given[0] is first and told.parameter in self._store.frozen:
            self._refuse(name, told.parameter)
        if name in _TELLING or type(result) in (float, complex) or _copies(name):
            self._refuse(name, told.parameter)
        cut = [item for item in known if item[1].is_cut]
        if cut:
            self._check_rows(name, args, kwargs, cut)
        changed = set(map(id, given))
        made = [item for item in tensors_in(result) if id(item) not in changed]
        if name.startswith(_OF_LISTS):
            self._look_at_lists(call, args, made)
            return
        if made and cut:
            by_id = {id(item): found for item, found in known}
            found = made_of_slices(name, call.func, call.args, call.kwargs, by_id, made)
        else:
            found = _made_of_wholes(known, made, keeps=name in _CHOOSING)
        for item, what in zip(made, found, strict=True):
            if what is None:
                self._refuse(name, (cut or known)[0][1].parameter)
            else:
                self._mark(item, what)
        self._follow_target(call.func, given[0], first, told)

    def _follow_target(
        self, func: Callable[..., Any], target: Tensor, first: Tensor, told: KnownTensor
    ) -> None:
        """Mark the first argument, which may have been changed in place, as averages are."""
        if target is first:
            return
        if target.shape == first.shape:
            self._mark(target, told)
        elif _writes(func):
            self._mark(target, replace(told, whole=None))

    def _look_at_lists(self, call: "_Call", args: Sequence[Any], made: Sequence[Tensor]) -> None:
        """Mark the results, or the changed tensors, of a function of lists, index by index."""
        lists = [item for item in args if isinstance(item, list | tuple) and item]
        for place, target in enumerate(made or lists[0] if lists else ()):
            sources = [item[place] for item in lists if place < len(item)]
            known = [found for item in sources if (found := self._known_of(item)) is not None]
            if known and target.shape != sources[0].shape:
                self._refuse(call.name, known[0].parameter)
            elif known:
                self._mark(target, known[0])

    def _check_rows(
        self, name: str, args: Sequence[Any], kwargs: Any, cut: Sequence[tuple[Tensor, KnownTensor]]
    ) -> None:
        """Refuse functions that mix rows, or combine different rows of several parameters."""
        tensor, known = cut[0]
        direct = set(map(id, args))
        if args and args[0] is tensor and mixes_rows(name, args, kwargs, cut_dim_of(*cut[0])):
            self._refuse(name, known.parameter)
        for item, other in cut[1:] if id(tensor) in direct else ():
            are_alike = item.shape == tensor.shape and other.whole == known.whole
            kept = self._store.kept[known.parameter], self._store.kept[other.parameter]
            if id(item) in direct and are_alike and kept[0] != kept[1]:
                self._refuse(name, other.parameter)

    def _known_among(self, given: Sequence[Tensor]) -> list[tuple[Tensor, KnownTensor]]:
        """Return the marked tensors with what is known of them."""
        return [(item, known) for item in given if (known := self._known_of(item)) is not None]

    def _known_of(self, tensor: Tensor) -> KnownTensor | None:
        found = self._names.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def _mark(self, tensor: Tensor, known: KnownTensor) -> None:
        self._names[id(tensor)] = ref(tensor), known

    def _refuse(self, function: str, parameter: str, error: BaseException | None = None) -> None:
        """Refuse a use, unless it is the package's own.

        Raises:
            StepError: The use is the user's, or an optimizer's.
        """
        frame = calling_frame()
        if frame is None or is_own(frame):
            return
        if parameter in self._store.frozen:
            raise StepError(_OF_FROZEN.format(function, parameter)) from error
        raise StepError(
            f"{function} is called on parameter {parameter} or its gradient outside of a step "
            f"(in {frame.f_code.co_qualname}, line {frame.f_lineno}), where every rank has only "
            "its slice, so each would get a number of its own. For clipping use "
            "Trainer(gradient_clip_val=...) or self.clip_gradients in configure_gradient_clipping, "
            "which take the norm over all ranks. Whole weights come from "
            "`trainer.strategy.whole_state_dict()`, called by all ranks. Optimizers of whole "
            'matrices run with HeteroStrategy(ownership="parameter").'
        ) from error


def _is_cut(size: Any) -> bool:
    return isinstance(size, SliceSize) and size.own != size


def _made_of_wholes(
    known: Sequence[tuple[Tensor, KnownTensor]], made: Sequence[Tensor], *, keeps: bool
) -> list[KnownTensor | None]:
    """Judge tensors made of parameters that other ranks lack; None for those to refuse."""
    rows = {item.shape[:1] for item, _ in known}
    largest = max(item.numel() for item, _ in known)
    are_kept = [keeps or m.shape[:1] in rows or m.numel() >= largest for m in made]
    return [known[0][1] if is_kept else None for is_kept in are_kept]


def _writes(func: Callable[..., Any]) -> bool:
    """Whether a function writes into its first argument, which may have another shape."""
    name = func.__name__
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _name_of(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", "").strip("_")


def _copies(name: str) -> bool:
    """Whether torch reads values to copy or save them."""
    # Frame 1 is `_look`, 2 is `__torch_function__`, 3 is its caller.
    return name in ("clone", "untyped_storage") and sys._getframe(3).f_code in _COPYING
