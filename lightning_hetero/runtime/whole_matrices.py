"""Refuse optimizers that look at whole matrices where slices of them have different owners.

An element-wise optimizer (SGD, Adam, ...) does the same to a slice as to the whole. One that
orthogonalises a matrix, or keeps a factor for each of its rows and columns, would run on a slice
without complaint and train something else.
"""

from collections.abc import Iterable, Mapping, Sequence

from torch.optim import Optimizer

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.slices import Slice

__all__ = ["check_optimizers", "needs_whole_matrices"]

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


def needs_whole_matrices(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is known, by its class's name, to need whole parameters."""
    names = [kind.__name__.lower() for kind in type(optimizer).__mro__]
    return any(known in name for name in names for known in _WHOLE_MATRIX_NAMES)


def check_optimizers(
    optimizers: Iterable[Optimizer], slices: Mapping[str, Sequence[Slice]]
) -> None:
    """Refuse a known whole-matrix optimizer while any parameter has more than one owner.

    Raises:
        ConfigurationError: On every rank alike, since all know all slices.
    """
    cut = [name for name, items in slices.items() if len(items) > 1]
    for optimizer in optimizers:
        if cut and needs_whole_matrices(optimizer):
            raise ConfigurationError(
                f"{type(optimizer).__name__} needs whole matrices, but {len(cut)} parameters are "
                f"cut into slices with several owners, such as {cut[0]} with {len(slices[cut[0]])}."
                ' Use HeteroStrategy(ownership="parameter"), which gives each parameter one owner.'
            )
