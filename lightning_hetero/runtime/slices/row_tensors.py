"""Tensors that have this rank's rows of a whole tensor, and torch's functions on them.

See `slices.rows`. `Part` says which rows of which parameter a tensor has.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_hetero.core.errors import StepError
from lightning_hetero.exchange.slices import Interval
from lightning_hetero.runtime.slices.frozen import FrozenWeights
from lightning_hetero.runtime.slices.reductions import Reduction, sum_of_powers
from lightning_hetero.runtime.unknown import tensors_in

_TELLING = {"numpy", "tolist", "array", "allclose", "is_nonzero", "bool", "iter"}
"""Names of functions that return values to Python."""
_DRAWING = {"uniform", "normal", "bernoulli", "random", "exponential", "kaiming_uniform"}
_DRAWING |= {"log_normal", "cauchy", "geometric"}
"""Names of functions that draw numbers in place. Ranks would draw the same ones for different rows,
and initialisers would scale them by the number of rows."""
_OF_ONE = {"item", "float", "int"}
"""Names of functions that return the value of a single element, which one of the ranks has."""
_MOVING = {"view", "reshape", "flatten", "ravel", "getitem", "unsqueeze", "squeeze", "cat"}
_MOVING |= {"T", "mT", "t", "transpose", "permute", "concat", "stack"}
"""Names of functions that only move elements."""
_FLATTENING = {"view", "reshape", "flatten", "ravel", "cat", "concat"}
_KEEPING_GRADIENT = {"data", "detach"}
_NOTHING = object()
_REMEDY = (
    "Outside of steps every rank has only its rows of parameters and gradients: "
    "`lightning_hetero.own_rows(parameter)` tells which, as in "
    "`grad[own_rows(parameter) < n] = 0`. Reductions over a whole tensor, such as grad.norm(), "
    "are those of all ranks' rows. Whole weights come from `trainer.strategy.whole_state_dict()`, "
    "called by all ranks. Call the model in steps, such as validation_step, or after a run with "
    "HeteroStrategy(whole_after_run=True)."
)
_EVEN = 'HeteroStrategy(ownership="even") cuts parameters of one shape alike.'


@dataclass(eq=False)
class Ranks:
    """Functions for reductions over all ranks; holds no tensors."""

    reduce: Callable[[Tensor, str], Tensor] | None
    """Returns a "sum", "max" or "min" over all ranks."""
    gradients: Callable[[], list[tuple[str, list[Tensor]]]] | None
    """Returns for each gradient the rows that this rank counts, in the same order on all ranks."""
    are_in_hooks: bool = False
    powers: dict[float, dict[str, Tensor]] = field(default_factory=dict)
    """For each kind of norm, each gradient's sum of powers over the rows of all ranks."""

    def add_up(self, own: Tensor, operation: str) -> Tensor:
        """Return a reduction of a tensor over all ranks; collective."""
        if self.reduce is None or not self.are_in_hooks:
            raise StepError(
                "A tensor of a parameter's rows that was made in a hook is reduced outside of "
                "hooks, where ranks can't wait for each other. Reduce it in the hook."
            )
        return self.reduce(own, operation)

    def forget(self, name: str) -> None:
        """Forget norms of a gradient that a hook has changed."""
        for known in self.powers.values():
            known.pop(name, None)

    def norm_of_gradient(self, name: str, order: float) -> Tensor:
        """Return a whole gradient's norm; one message finds the norms of all gradients."""
        known = self.powers.setdefault(order, {})
        if name not in known:
            assert self.gradients is not None
            found = self.gradients()
            # Only gradients that the hook has changed in the meantime.
            missing = [(other, parts) for other, parts in found if other not in known]
            own = [sum_of_powers(parts, order) for _, parts in missing]
            sums = self.add_up(torch.stack(own), "max" if order == torch.inf else "sum")
            known.update(zip([other for other, _ in missing], sums.unbind(), strict=True))
        return known[name] if order == torch.inf else known[name] ** (1 / order)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Which part of a whole tensor a tensor is."""

    name: str
    """The parameter's name."""
    ranks: Ranks
    kept: tuple[Interval, ...]
    """The rows that this rank has of the parameter."""
    cut_dim: int
    """The dim along which the parameter is cut."""
    is_uncut: bool
    """Whether one rank has all of it."""
    num_whole: int
    """Number of elements of the whole tensor."""
    dim: int | None
    """The dim along which ranks have different rows of this tensor; None if unknown."""
    copies: int = 1
    """Number of ranks that have each row: its owner and, with redundancy, its standby."""
    is_gradient: bool = False
    """Whether it's the gradient itself."""
    frozen: FrozenWeights | tuple[()] = ()
    """Names of the parameters that no rank owns, because they never train."""

    @property
    def is_frozen(self) -> bool:
        """Whether no rank owns the parameter."""
        return self.name in self.frozen


class Rows(Tensor):
    """This rank's rows of a whole tensor."""

    _part: Part

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _call(func, args, kwargs or {})

    def __deepcopy__(self, _: dict[int, Any]) -> NoReturn:
        _refuse("deepcopy", self._part)

    def __reduce_ex__(self, _: Any) -> NoReturn:
        _refuse("pickling or saving", self._part)


class ParameterRows(nn.Parameter):
    """This rank's rows of a parameter, while hooks run."""

    _part: Part
    __torch_function__ = Rows.__torch_function__
    __deepcopy__ = Rows.__deepcopy__
    __reduce_ex__ = Rows.__reduce_ex__


def mark(tensor: Any, part: Part) -> Any:
    """Make a tensor one of rows, in place, and return it; parameters stay as they are."""
    if type(tensor) is Tensor:
        tensor.__class__ = Rows
    if type(tensor) is Rows:
        tensor._part = part
    return tensor


def _call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a torch function on rows; see `slices.rows`."""
    is_accessor = func.__name__ in ("__get__", "__set__")
    name: str = func.__self__.__name__ if is_accessor else func.__name__.strip("_")
    if name == "grad" and is_accessor and isinstance(args[0], ParameterRows):
        return _access_gradient(func, args)
    rows = [item for item in tensors_in((args, kwargs)) if isinstance(item, Rows | ParameterRows)]
    with torch._C.DisableTorchFunctionSubclass():
        if not rows:
            return func(*args, **kwargs)
        found = _special(name, func, args, kwargs, rows)
        if found is not _NOTHING:
            return found
        try:
            result = func(*args, **kwargs)
        except (IndexError, RuntimeError) as error:
            _check_alike(name, rows)
            where = f"{name} is called on parameter {rows[0]._part.name}'s rows in a hook"
            raise StepError(f"{where}: {error}. {_REMEDY}") from error
        if _writes(func):
            for item in rows:
                item._part.ranks.forget(item._part.name)
        return _follow(name, func, args, kwargs, rows, result)


def _special(
    name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any], rows: Sequence[Any]
) -> Any:
    """Return the result of a function that can't simply run on this rank's rows."""
    if name in _TELLING or name in _OF_ONE:
        return _tell(name, func, rows[0])
    if name in _DRAWING and _writes(func) and not rows[0]._part.is_uncut:
        _refuse(name, rows[0]._part)
    if name == "equal":
        return _are_equal(*args)
    if func.__name__ == "_foreach_norm":
        return [_whole_norm(item, *args[1:], **kwargs) for item in args[0]]
    if not args or args[0] is not rows[0]:
        return _NOTHING
    if rows[0]._part.is_frozen and _writes(func) and name not in ("grad", "requires_grad"):
        _refuse_frozen(name, rows[0]._part)
    reduction = Reduction.of(name, args, kwargs)
    if reduction is not None:
        return _reduce(reduction, func, args, kwargs)
    if name in ("getitem", "setitem") and _is_elsewhere(name, *args[:2]):
        return args[0] if name == "getitem" else None
    return _NOTHING


def _tell(name: str, func: Any, rows: Any) -> Any:
    """Return the value of a whole tensor of one element, which one of the ranks has."""
    part: Part = rows._part
    if name in _TELLING or part.num_whole != 1:
        _refuse(name, part)
    reduction = Reduction.of("sum", (rows,), {})
    assert reduction is not None
    return func(reduction.of_whole(rows.detach(), part.copies, part.ranks.add_up))


def _are_equal(first: Any, second: Any) -> bool:
    """Whether whole tensors are equal, by which Lightning compares parameters."""
    if first is second:
        return True
    parts = [item._part for item in (first, second) if isinstance(item, Rows | ParameterRows)]
    if len({part.num_whole for part in parts}) > 1:
        return False
    own = torch.tensor(int(torch.equal(first, second)))
    return bool(parts[0].ranks.add_up(own, "min"))


def _is_elsewhere(name: str, rows: Any, index: Any) -> bool:
    """Whether another rank has all of the rows that an index chooses."""
    part: Part = rows._part
    if part.is_uncut:
        return not rows.numel()
    if _picks(index, rows.ndim, part.dim):
        _refuse(name, part)
    return False


def _access_gradient(func: Any, args: Sequence[Any]) -> Any:
    parameter = args[0]
    part, ask = parameter._part, parameter._ask_gradient
    with torch._C.DisableTorchFunctionSubclass():
        found = func(*args)
    if len(args) == 1:
        return ask(part.name, found)
    part.ranks.forget(part.name)
    return ask(part.name, args[1], is_new=True)


def _follow(
    name: str,
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rows: Sequence[Any],
    result: Any,
) -> Any:
    """Make the results of a function tensors of rows; refuse results that can't be."""
    given = {id(item) for item in tensors_in((args, kwargs))}
    made = [item for item in tensors_in(result) if id(item) not in given]
    target: Any = args[0] if args else None
    is_changed = _writes(func) and type(target) is Tensor and target is not rows[0]
    if is_changed and target.shape == rows[0].shape:
        mark(target, replace(rows[0]._part, is_gradient=False))
    for item in made:
        like = next((own for own in rows if own.shape == item.shape), None)
        if name in _MOVING and (like is None or name not in _FLATTENING):
            mark(item, _moved(name, rows, item))
        elif like is not None:
            _check_alike(name, [own for own in rows if own.shape == item.shape])
            stays = like._part.is_gradient and name in _KEEPING_GRADIENT
            mark(item, replace(like._part, is_gradient=stays))
        elif not name.startswith("new_"):
            _refuse(name, rows[0]._part)
    return result


def _writes(func: Any) -> bool:
    """Whether a function changes its first argument in place."""
    name: str = func.__name__
    if name.endswith("__"):
        return name in ("__set__", "__setitem__") or name.startswith("__i")
    return name.endswith("_")


def _check_alike(name: str, rows: Sequence[Any]) -> None:
    """Refuse a function of several tensors that have different rows."""
    for item in rows[1:]:
        if item._part.kept != rows[0]._part.kept:
            names = f"{rows[0]._part.name} and {item._part.name}"
            raise StepError(
                f"{name} is called in a hook on parameters {names}, of which this rank has other "
                f"rows. {_EVEN}"
            )


def _moved(name: str, rows: Sequence[Any], made: Tensor) -> Part:
    """Return which part of a whole a tensor is after a function has moved its elements."""
    source = rows[0]
    part: Part = source._part
    dim = part.dim if made.ndim == source.ndim else None
    if name in ("T", "mT", "t") and part.dim is not None:
        dim = source.ndim - 1 - part.dim
    elif name in _FLATTENING or name in ("transpose", "permute", "stack"):
        dim = 0 if made.ndim == 1 else None
    num_whole = sum(item._part.num_whole for item in rows)
    return replace(part, dim=dim, num_whole=num_whole, is_gradient=False)


def _reduce(reduction: Reduction, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return a reduction over the whole tensor, or of each row if it reduces rows one by one."""
    rows = args[0]
    part: Part = rows._part
    if part.is_frozen:
        _refuse_frozen(reduction.name, part)
    if reduction.dims is None or part.dim in reduction.dims:
        if reduction.order is not None and reduction.dims is None and part.is_gradient:
            return part.ranks.norm_of_gradient(part.name, reduction.order).to(rows.dtype)
        if not reduction.is_known:
            _refuse(reduction.name, part)
        with torch.no_grad():
            return reduction.of_whole(rows, part.copies, part.ranks.add_up)
    if part.dim is None:
        _refuse(reduction.name, part)
    result = func(*args, **kwargs)
    dim = part.dim
    if not reduction.keeps_dims:
        dim -= sum(item < dim for item in reduction.dims)
    for item in tensors_in(result):
        mark(item, replace(part, dim=dim, is_gradient=False))
    return result


def _whole_norm(rows: Any, order: float = 2.0, **_: Any) -> Tensor:
    reduction = Reduction.of("norm", (rows, order), {})
    assert reduction is not None
    found: Tensor = _reduce(reduction, torch.norm, (rows, order), {})
    return found


def _picks(index: Any, ndim: int, dim: int | None) -> bool:
    """Whether an index chooses rows by number in the cut dim; in any dim if that is None."""
    items = list(index) if isinstance(index, tuple) else [index]
    num_taken = sum(_num_dims(item) for item in items)
    first = 0
    for item in items:
        width = ndim - num_taken if item is Ellipsis else _num_dims(item)
        is_meant = dim is None or first <= dim < first + width
        if width and is_meant and item is not Ellipsis and item != slice(None):
            return not (isinstance(item, Tensor) and item.dtype is torch.bool)
        first += width
    return False


def _num_dims(item: Any) -> int:
    """Return how many dims of a tensor an item of an index is for."""
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if isinstance(item, Tensor) and item.dtype is torch.bool else 1


def _refuse_frozen(name: str, part: Part) -> NoReturn:
    raise StepError(
        f"{name} is called in a hook on parameter {part.name}, which is frozen, so that only steps "
        "have its values. If hooks change it, as averages of weights do, or measure it, let it "
        "require gradients and use it under torch.no_grad(): then it travels in each step. " + _EVEN
    )


def _refuse(name: str, part: Part) -> NoReturn:
    raise StepError(
        f"{name} is called on parameter {part.name} or its gradient in a hook, and would give each "
        f"rank a result of its own. {_REMEDY}"
    )
