"""What a sample of token ids is: a row of integers, or a mapping that holds one as "input_ids"."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_hetero.core.errors import BatchError

__all__ = ["row_of", "token_ids"]


def token_ids(sample: Any, name: str = "A sample") -> Any:
    """Return a sample's row of token ids: it is one, or a mapping that holds one.

    Raises:
        BatchError: There is none; the message calls the sample by its name.
    """
    if not isinstance(sample, Mapping):
        return sample
    if "input_ids" not in sample:
        raise BatchError(
            f"{name} has {', '.join(map(repr, sample)) or 'nothing'}, but no 'input_ids'. "
            "Tokenise it, or give its token ids that name."
        )
    return sample["input_ids"]


def row_of(values: Any, name: str) -> Tensor:
    """Return token ids as one row, int64, (tokens,).

    Raises:
        BatchError: They are no row of integers, or none; the message calls them by the name.
    """
    if isinstance(values, Tensor):
        row = values
    else:
        array = np.asarray(values)
        if array.dtype.kind not in "iub":
            raise BatchError(f"{name} holds {array.dtype} values, not token ids. Give integers.")
        row = torch.from_numpy(array.astype(np.int64))
    if row.is_floating_point() or row.dim() != 1 or row.numel() == 0:
        raise BatchError(
            f"{name} has shape {tuple(row.shape)} and dtype {row.dtype}; a sample must be "
            "a row of at least one integer. Drop it or tokenise it."
        )
    return row.to(torch.int64)
