"""Parameters with the whole shape but no values: a use of values raises ConfigurationError.

While an optimizer is configured, a rank's slices report the shape of the whole parameter. After a
run the module has stand-ins for weights whose slices are spread over the ranks. `torch.zeros_like`
and similar functions make tensors of the shape of this rank's slice.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_hetero.core.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning_hetero.runtime.slices.frozen import Reader
    from lightning_hetero.runtime.slices.weights import SliceStore


def _getters(*names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names}


SIZES: frozenset[Any] = frozenset(
    {
        *_getters("shape", "ndim", "nbytes"),
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement),
        *(Tensor.__len__, Tensor.stride, torch.numel),
    }
)
"""Functions that ask for sizes: they return those of the whole parameter."""
_OWN: frozenset[Any] = frozenset(
    {
        *_getters("requires_grad", "grad", "grad_fn", "retains_grad", "is_leaf", "dtype", "layout"),
        *_getters("device", "is_meta", "is_cuda", "is_cpu", "is_sparse", "is_nested", "itemsize"),
        *_getters("_backward_hooks", "_post_accumulate_grad_hooks"),
        *(vars(torch._C.TensorBase)[name].__set__ for name in ("requires_grad", "grad")),
        *(Tensor.element_size, Tensor.is_contiguous, Tensor.requires_grad_, Tensor.__hash__),
        *(Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex),
        *(torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like),
    }
)
"""Other functions that use no values: they run on the tensor that is here."""
_MOVES: frozenset[Any] = frozenset(
    {
        *(Tensor.to, torch._has_compatible_shallow_copy_type),
        vars(torch._C.TensorBase)["data"].__set__,
    }
)
"""What `Module.to` calls."""
ASKS_FOR_NO_VALUE = SIZES | _OWN
"""All functions that don't use a parameter's values."""


class KnownByShape(nn.Parameter):
    """A parameter that reports a whole shape, and refuses functions that use values."""

    _whole: Tensor
    _refusal: str
    _is_copy = False
    """Whether it belongs to a copy of the module, which will have the same slices as the module."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in SIZES:
            return func(args[0]._whole, *args[1:], **kwargs)
        if func in _OWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _MOVES and args[0]._is_copy:
            return args[0] if func is Tensor.to else True
        for item in tree_leaves((args, kwargs)):
            if isinstance(item, KnownByShape):
                item._refuse()
        raise AssertionError(f"{func} was called without a parameter")

    def _refuse(self) -> NoReturn:
        raise ConfigurationError(self._refusal)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self._whole.shape)}, dtype={self._whole.dtype})"

    def __deepcopy__(self, _: dict[int, Any]) -> Any:
        self._refuse()

    def __reduce_ex__(self, _: Any) -> NoReturn:
        self._refuse()


_AFTER_RUN = (
    "Parameter {} is used after the run, where every rank has only its slices of the weights. This "
    "Trainer goes on with them: fit, validate, test, predict and save_checkpoint. "
    "`trainer.strategy.whole_state_dict()`, called by all ranks, gives rank 0 the whole weights. "
    "To have them in every rank's module after each run, at that cost of memory, use "
    "HeteroStrategy(whole_after_run=True)."
)
_BETWEEN_GENERATIONS = (
    "Parameter {} is used between two generations of a run, where its values are still to be "
    "recovered. Use it from on_train_start on."
)


class StandIn(KnownByShape):
    """Stands in a module for a parameter whose values are elsewhere; takes no memory."""

    parameter: str
    """The parameter's name."""
    store: "SliceStore | None"
    """Keeps its slices after a run; None if they will be recovered, after a rank was lost."""
    source: "Reader | None"
    """Reads its values, if it is frozen and has no owners."""

    @classmethod
    def of(cls, store: "SliceStore", name: str, *, is_awaited: bool = False) -> Self:
        """Return the stand-in of a parameter, whose slices the store keeps unless `is_awaited`."""
        master = store.masters[name]
        whole = torch.empty(store.specs[name].shape, dtype=master.dtype, device="meta")
        made: Self = torch.Tensor._make_subclass(cls, whole, master.requires_grad)
        made._whole, made.parameter = whole, name
        made.store, made.source = None if is_awaited else store, store.frozen.sources.get(name)
        made._refusal = (_BETWEEN_GENERATIONS if is_awaited else _AFTER_RUN).format(name)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Slices of a store after a run never change: the next run copies them. A callback that
        # averages weights copies the module, and the average is recovered, too.
        kind = type(self)
        copy: Self = torch.Tensor._make_subclass(kind, self._whole, self.requires_grad)
        vars(copy).update(vars(self), _is_copy=True)
        memo[id(self)] = copy
        return copy


def hide_values(parameter: Any, shape: tuple[int, ...], refusal: str) -> None:
    """Make a parameter answer with a shape, and refuse uses of its values; changes it in place."""
    if not hasattr(parameter, "_whole"):
        parameter._whole = torch.empty(shape, dtype=parameter.dtype, device="meta")
        parameter._refusal = refusal
    parameter.__class__ = KnownByShape


def show_values(parameters: Iterable[Any]) -> None:
    """Undo `hide_values`."""
    for parameter in parameters:
        parameter.__class__ = nn.Parameter


def hide_again(parameters: Iterable[Any]) -> None:
    """Hide the values of those parameters whose values were hidden before."""
    for parameter in parameters:
        if hasattr(parameter, "_whole"):
            parameter.__class__ = KnownByShape


@contextmanager
def with_whole_shapes(store: "SliceStore") -> Iterator[None]:
    """Let a store's slices report the shapes of the whole parameters in this context.

    They remain the same objects, so an optimizer made of them holds the slices.
    """
    kinds = [type(master) for master in store.masters.values()]
    for name, master in store.masters.items():
        hide_values(
            master,
            store.specs[name].shape,
            f"Values of parameter {name} are used in configure_optimizers, where every rank has "
            "only its slice of it. Take what you need of them in the module's __init__ or setup, "
            "before they are cut.",
        )
    try:
        yield
    finally:
        for master, kind in zip(store.masters.values(), kinds, strict=True):
            master.__class__ = kind
