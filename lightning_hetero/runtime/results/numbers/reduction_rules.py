"""Judge the results of torch functions by name: of samples, of constants, of one reduction."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from lightning_hetero.runtime.results.numbers.kinds import (
    CONSTANT,
    LINEAR,
    TOGETHER,
    UNKNOWN,
    Kind,
    Reduction,
)
from lightning_hetero.runtime.results.numbers.torch_calls import (
    PRODUCTS,
    TorchCall,
    is_of_each_with_each,
    is_outer,
    is_product,
)
from lightning_hetero.runtime.results.numbers.written_numbers import (
    rows_in_argument,
    rows_of_operand,
)

__all__ = [
    "FACTORIES",
    "FLOORS",
    "JOINING",
    "KEEPING",
    "NONLINEAR",
    "NOT_BY_ELEMENT",
    "REDUCTIONS",
    "REORDERING",
    "WITH_DIMS",
    "ZERO",
    "constant_of",
    "made_anew",
    "of_one",
    "reduced",
    "some_dims",
]

REDUCTIONS = {
    "sum": Kind.SUM,
    "nansum": Kind.SUM,
    "count_nonzero": Kind.SUM,
    "mean": Kind.MEAN,
    "amax": Kind.MAX,
    "max": Kind.MAX,
    "amin": Kind.MIN,
    "min": Kind.MIN,
}
"""Functions that make one number of many, and its kind over samples."""
# fmt: off
_OTHER_REDUCTIONS = {
    "var", "std", "norm", "vector_norm", "prod", "median", "logsumexp", "nanmean", "nanmedian",
    "quantile", "cumsum",
}
_ALONG = {"softmax", "log_softmax", "normalize", "sort", "argsort"}
KEEPING = {
    "float", "double", "half", "bfloat16", "to", "type", "type_as", "detach", "clone", "contiguous",
    "squeeze", "unsqueeze", "reshape", "view", "flatten", "ravel", "expand", "long", "int", "cpu",
    "cuda", "item", "nan_to_num", "neg", "alias", "get",
}
"""Functions that return the numbers that they are given, perhaps in another form."""
FACTORIES = {
    "tensor", "as_tensor", "scalar_tensor", "zeros", "ones", "full", "arange", "zeros_like",
    "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "new_tensor", "linspace",
    "logspace", "eye", "tril_indices", "triu_indices",
}
"""Functions that make tensors without the values of others."""
# fmt: on
_FILLED = {
    **dict.fromkeys(("tensor", "as_tensor", "scalar_tensor", "new_tensor"), 0),
    **dict.fromkeys(("full", "full_like", "new_full"), 1),
}
"""Those of them that take values, and the index of that argument in the user's call."""
WITH_DIMS = REDUCTIONS.keys() | _OTHER_REDUCTIONS | _ALONG
"""Functions that run along dims."""
FLOORS = {"clamp", "clamp_min", "clip", "maximum", "max"}
"""Functions that keep a number from being too small, such as a divisor."""
JOINING = {"stack", "cat", "hstack", "concat", "concatenate"}
"""Functions that make one tensor of several."""
NONLINEAR = {"sqrt", "rsqrt", "square"}
"""Functions f of one number, where the mean of f isn't f of the mean."""
REORDERING = {"flip", "flipud", "roll", "getitem", "index_select"}
"""Functions that may change the positions of samples."""
NOT_BY_ELEMENT = (
    WITH_DIMS
    | FACTORIES
    | PRODUCTS
    | REORDERING
    | {"stack", "einsum", "randperm", "rand", "randn", "argsort", "bincount"}
    | {"select", "narrow", "batch_norm"}
)
"""Functions whose results of samples may be something else than samples."""
_MAY_BE_LINEAR = {"nanmean", "logsumexp", "cumsum", "prod"}
"""Functions over samples that may be means or sums, or run over something else where dim 0 is time.
"""
ZERO = Reduction(Kind.CONSTANT)
"""For a zero, with which a sum may begin."""


def made_anew(call: TorchCall, result: Tensor) -> Reduction:
    """Judge the result of one of `FACTORIES`."""
    if result.numel() != 1:
        return CONSTANT
    is_filled = call.name in _FILLED
    numbers = [item for item in call.args if type(item) in (int, float)]
    if "zeros" in call.name or (is_filled and 0 in numbers):
        return ZERO
    if is_filled and rows_in_argument(_FILLED[call.name]):
        return Reduction(Kind.CONSTANT, count=1, value=result)
    return CONSTANT


def reduced(
    call: TorchCall, tensors: Sequence[Tensor], known: Sequence[Reduction | None], result: Tensor
) -> Reduction | None:
    """Judge a function of tensors that are no reductions; None if its result is none, either."""
    name, source = call.name, tensors[0]
    if len(tensors) == 2 and known[1] is None and is_product(name, call.args, tensors[1]):
        is_known = known[0] is None and is_of_each_with_each(name, *tensors)
        return TOGETHER if is_known else UNKNOWN
    if len(tensors) == 2 and known == [None, None] and is_outer(*tensors):
        return TOGETHER
    if name == "bincount":
        return UNKNOWN
    if len(tensors) > 1 or source.ndim == 0 or name not in WITH_DIMS:
        return None
    dims = call.dims(source.ndim)
    if dims is not None and 0 not in dims:
        return None
    if name in _OTHER_REDUCTIONS:
        order = (*call.args[1:2], call.kwargs.get("p"), call.kwargs.get("ord"))
        is_sum = "norm" in name and 1 in order
        return UNKNOWN if is_sum or name in _MAY_BE_LINEAR else TOGETHER
    if name not in REDUCTIONS:
        return None if dims is None else UNKNOWN
    count = source.numel() if dims is None else source.shape[0]
    return Reduction(REDUCTIONS[name], count=count, value=result.detach())


def of_one(call: TorchCall, known: Reduction) -> Reduction | None:
    """Judge a function of one reduction and no other tensor; None if no rule covers it."""
    name = call.name
    if name in KEEPING and (name != "neg" or known.kind in LINEAR):
        return known
    if name in REDUCTIONS and len(call.args) + len(call.kwargs) == 1:
        # The source is a vector of such numbers.
        kind = REDUCTIONS[name]
        return known if known.kind is kind or {known.kind, kind} <= set(LINEAR) else UNKNOWN
    return None


def some_dims(call: TorchCall, tensors: Sequence[Tensor]) -> Sequence[int]:
    """Return the dims along which a function of one tensor runs; none if it runs along all."""
    if call.name not in WITH_DIMS or len(tensors) != 1 or tensors[0].ndim < 2:
        return ()
    dims = call.dims(tensors[0].ndim) or ()
    return dims if len(dims) < tensors[0].ndim else ()


def constant_of(value: float, *, is_left: bool) -> Reduction:
    """Judge a number that the user's code gives to an operation, on its left or its right."""
    value = value.item() if isinstance(value, np.generic) else value
    # Integers may count samples of this micro-batch; other numbers do only if the code shows it.
    rows = rows_of_operand(is_left=is_left)
    counts = bool(rows) or (rows is None and type(value) is int)
    return Reduction(Kind.CONSTANT, count=counts, value=value)
