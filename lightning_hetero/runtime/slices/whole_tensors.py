"""Refuse optimizers and clipping that need whole tensors while ranks have only slices.

An element-wise optimizer (SGD, Adam, ...) does the same to a slice as to the whole. One that
orthogonalises a matrix, or keeps a factor for each of its rows and columns, would run on a slice
without an error, but train differently. So would one that computes a number from all parameters
together, such as a line search, if they have several owners, and so would clipping by the norm of
one rank's slices.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from lightning_hetero.core.errors import ConfigurationError, StepError
from lightning_hetero.core.slices import Slice
from lightning_hetero.runtime.slices.weights import SliceStore

__all__ = ["NoNorms", "check_optimizers", "needs_all_parameters", "needs_whole_matrices"]

_WHOLE_MATRIX_NAMES = (
    "muon",
    "shampoo",
    "soap",
    "adafactor",
    "galore",
    "kfac",
    "lamb",
    "lars",
    "adalomo",
)
_MANY_LOSSES_NAMES = ("lbfgs",)
_ALL_PARAMETERS_NAMES = (*_MANY_LOSSES_NAMES, "prodigy", "dadapt")


def needs_whole_matrices(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is known, by its class's name, to need whole parameters."""
    return _is_named(optimizer, _WHOLE_MATRIX_NAMES)


def needs_all_parameters(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is known, by its class's name, to need all parameters at once."""
    return _is_named(optimizer, _ALL_PARAMETERS_NAMES)


def _is_named(optimizer: Optimizer, known: Sequence[str]) -> bool:
    names = [kind.__name__.lower() for kind in type(optimizer).__mro__]
    return any(item in name for name in names for item in known)


def check_optimizers(
    optimizers: Iterable[Optimizer], slices: Mapping[str, Sequence[Slice]]
) -> None:
    """Refuse a known whole-matrix optimizer if any parameter has more than one owner.

    Also refuse one that needs all parameters at once if these have more than one owner together,
    and one that needs several losses a step.

    Raises:
        ConfigurationError: On every rank alike, since all know all slices.
    """
    cut = [name for name, items in slices.items() if len(items) > 1]
    owners = {item.owner for items in slices.values() for item in items}
    for optimizer in optimizers:
        if _is_named(optimizer, _MANY_LOSSES_NAMES):
            raise ConfigurationError(
                f"{type(optimizer).__name__} computes with all parameters at once and evaluates "
                "the loss several times a step, where an iteration evaluates it once. Choose an "
                "element-wise optimizer, such as AdamW."
            )
        if len(owners) > 1 and needs_all_parameters(optimizer):
            raise ConfigurationError(
                f"{type(optimizer).__name__} computes with all parameters at once, but "
                f"{len(owners)} ranks own slices of them. Choose an element-wise optimizer, such "
                "as AdamW."
            )
        if cut and needs_whole_matrices(optimizer):
            raise ConfigurationError(
                f"{type(optimizer).__name__} needs whole matrices, but {len(cut)} parameters are "
                f"cut into slices with several owners, such as {cut[0]} with {len(slices[cut[0]])}."
                ' Use HeteroStrategy(ownership="parameter"), which gives each parameter one owner.'
            )


class NoNorms:
    """Refuse `torch.nn.utils.clip_grad_norm_` on a store's gradients inside this context.

    Args:
        store: The rank's slices.
    """

    def __init__(self, store: SliceStore) -> None:
        self._store = store
        # Users have imported `clip_grad_norm_` itself, so the function that it calls is replaced.
        self._original: Any = vars(clip_grad)["_get_total_norm"]

    def __enter__(self) -> None:
        vars(clip_grad)["_get_total_norm"] = self._norm_of

    def __exit__(self, *_: object) -> None:
        vars(clip_grad)["_get_total_norm"] = self._original

    def _norm_of(self, tensors: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        masters = self._store.masters.values()
        own = {id(master.grad) for master in masters if master.grad is not None}
        if any(id(item) in own for item in given):
            raise StepError(
                "torch.nn.utils.clip_grad_norm_ is called in a hook, where every rank has only its "
                "slices of the gradients, so each would clip by a norm of its own. Use "
                "Trainer(gradient_clip_val=...), or self.clip_gradients in "
                "configure_gradient_clipping: they take the norm over all ranks."
            )
        return self._original(given, *args, **kwargs)
