"""Parameters and gradients in hooks: this rank's rows, whose norms and sums are those of the whole.

Between steps a parameter is this rank's rows of it, and so is its gradient. Hooks get both as
subclasses of torch's own, which do three things:

1. A function that keeps rows apart, such as `grad.mul_(0.5)`, returns such a tensor again.
2. A reduction over the rows, such as `grad.norm()`, `weight.mean()` or `grad.abs().max()`, adds up
   all ranks' rows, so that each rank gets the number of one device. All ranks must call it. So
   `clip_grad_norm_` and Lightning's `grad_norm` work as they are written.
3. What would silently differ is refused: rows chosen by their numbers (see `own_rows`), values
   given to numpy, copies and files of single ranks' rows.

Steps of optimizers, and the package itself, see plain tensors: `Hooks.enter` gives the slices these
classes when hooks begin, and `Hooks.leave` takes them away.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_hetero.core.errors import StepError
from lightning_hetero.core.slices import Interval
from lightning_hetero.runtime.leaves import tensors_in, tree_map
from lightning_hetero.runtime.slices.reductions import Reduction, sum_of_powers
from lightning_hetero.runtime.slices.weights import SliceStore

__all__ = ["HookedSlices", "own_rows"]

_TELLING = {"numpy", "tolist", "array", "allclose", "is_nonzero", "bool", "iter"}
"""Names of functions that give values to Python."""
_OF_ONE = {"item", "float", "int"}
"""Names of functions that do so for a single element, which one of the ranks has."""
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
    "called by all ranks."
)


def own_rows(parameter: Tensor) -> Tensor:
    """Return the numbers of the rows (indices of dim 0) that this rank has of a parameter.

    Between steps `parameter` has as many rows; under another strategy they are all of them. So a
    hook trains only the new rows of an embedding by ::

        def on_before_optimizer_step(self, optimizer):
            table = self.model.embed.weight
            table.grad[own_rows(table) < self.num_old_rows] = 0
    """
    part: _Part | None = vars(parameter).get("_part")
    kept: tuple[Interval, ...] = ((0, parameter.shape[0] if parameter.ndim else 1),)
    if part is not None and part.cut_dim == 0:
        kept = part.kept or ((0, 0),)
    return torch.cat([torch.arange(*rows, device=parameter.device) for rows in kept])


@dataclass(eq=False)
class _Ranks:
    """What reductions over all ranks need; holds no tensors of the slices itself."""

    reduce: Callable[[Tensor, str], Tensor] | None
    """Returns a "sum", "max" or "min" over all ranks."""
    gradients: Callable[[], list[tuple[str, list[Tensor]]]] | None
    """Returns each gradient's rows that count here, in the same order on all ranks."""
    are_in_hooks: bool = False
    powers: dict[float, dict[str, Tensor]] = field(default_factory=dict)
    """For each kind of norm each gradient's sum of powers, of all ranks' rows."""

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
        """Return a whole gradient's norm: those of all are found in one message, and kept."""
        known = self.powers.setdefault(order, {})
        if name not in known:
            assert self.gradients is not None
            found = self.gradients()
            # Only those that the hook has changed in the meantime.
            missing = [(other, parts) for other, parts in found if other not in known]
            own = [sum_of_powers(parts, order) for _, parts in missing]
            sums = self.add_up(torch.stack(own), "max" if order == torch.inf else "sum")
            known.update(zip([other for other, _ in missing], sums.unbind(), strict=True))
        return known[name] if order == torch.inf else known[name] ** (1 / order)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Which part of a whole tensor a tensor is."""

    name: str
    """The parameter's name."""
    ranks: _Ranks
    kept: tuple[Interval, ...]
    """The rows that this rank has of the parameter."""
    cut_dim: int
    """The dim along which the parameter is cut."""
    is_uncut: bool
    """Whether one rank has all of it."""
    num_whole: int
    """Elements of the whole."""
    dim: int | None
    """The dim along which ranks have different rows of this tensor; None if unknown."""
    counted: Tensor | None = None
    """Where standbys have rows, too: which elements are counted here. Shaped like the tensor."""
    is_gradient: bool = False
    """Whether it's the gradient itself."""


class _Rows(Tensor):
    """This rank's rows of a whole tensor."""

    _part: _Part

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _call(func, args, kwargs or {})

    def __deepcopy__(self, _: dict[int, Any]) -> NoReturn:  # type: ignore[override]
        _refuse("deepcopy", self._part)

    def __reduce_ex__(self, _: Any) -> NoReturn:
        _refuse("pickling or saving", self._part)


class _ParameterRows(nn.Parameter):
    """This rank's rows of a parameter, while hooks run."""

    _part: _Part
    __torch_function__ = _Rows.__torch_function__
    __deepcopy__ = _Rows.__deepcopy__  # type: ignore[assignment]
    __reduce_ex__ = _Rows.__reduce_ex__  # type: ignore[assignment]


class HookedSlices:
    """Gives hooks a store's slices as tensors that know of the other ranks.

    ::

        hooked = HookedSlices(store, reduce)
        hooked.enter()  # Hooks run.
        hooked.leave()  # The optimizer steps, or an iteration begins.

    Args:
        store: The rank's slices.
        reduce: Returns a "sum", "max" or "min" of a tensor over all ranks.
        is_needed: Whether ranks have different rows; else hooks get the slices as they are.
    """

    def __init__(
        self, store: SliceStore, reduce: Callable[[Tensor, str], Tensor], *, is_needed: bool
    ) -> None:
        self._store = store
        self._is_needed = is_needed
        self._ranks = _Ranks(reduce, self._counted_gradients)
        self._with_gradients: set[str] = set()
        """Names of the parameters for which some rank has rows of a gradient."""
        self._given: dict[str, Tensor] = {}
        """Gradients that hooks have asked for."""
        for name, master in store.masters.items() if is_needed else ():
            part = _part_of(store, name, self._ranks)
            vars(master).update(_part=part, _ask_gradient=self._ask_gradient)

    def enter(self) -> None:
        """Give hooks the slices from now on."""
        if self._is_needed:
            self._ranks.are_in_hooks = True
            for master in self._store.masters.values():
                master.__class__ = _ParameterRows

    def leave(self) -> None:
        """Make the slices plain parameters again."""
        if not self._ranks.are_in_hooks:
            return
        self._ranks.are_in_hooks = False
        self._ranks.powers.clear()
        for master in self._store.masters.values():
            master.__class__ = nn.Parameter
        for name, gradient in self._given.items():
            gradient.__class__ = Tensor
            if not self._store.owns(name):
                self._store.masters[name].grad = None  # An optimizer skips it then.
        self._given.clear()

    def close(self) -> None:
        """Leave hooks for good; breaks the cycles of references through the slices."""
        self.leave()
        self._ranks.reduce = self._ranks.gradients = None
        for master in self._store.masters.values():
            vars(master).pop("_part", None)
            vars(master).pop("_ask_gradient", None)

    def note_gradients(self, names: Iterable[str], *, are_first: bool) -> None:
        """Note for which parameters an iteration has made gradients, on any rank.

        Args:
            names: The parameters' names, the same on all ranks.
            are_first: Whether there were none before.
        """
        if are_first:
            self._with_gradients.clear()
        self._with_gradients.update(names)

    def norm(self, parameters: Iterable[Tensor], order: float = 2.0) -> Tensor:
        """Return the norm of parameters' gradients over all ranks; collective.

        Args:
            parameters: Slices.
            order: Kind of the norm.
        """
        names = {id(master): name for name, master in self._store.masters.items()}
        parameters = list(parameters)
        with torch._C.DisableTorchFunctionSubclass():
            found = [
                part
                for item in parameters
                if item.grad is not None
                for part in self._store.owned_parts(names[id(item)], item.grad)
            ]
            # A rank may own no slice that has a gradient; its device still takes part in the sum.
            own = sum_of_powers(found, order, device=parameters[0].device)
            assert self._ranks.reduce is not None
            return self._ranks.reduce(own, "sum") ** (1 / order)

    def _ask_gradient(
        self, name: str, gradient: Tensor | None, *, is_new: bool = False
    ) -> Tensor | None:
        """Return a gradient for a hook: empty where this rank has no rows of one that exists.

        Args:
            name: The parameter's name.
            gradient: The slice's gradient.
            is_new: Whether the hook has set it.
        """
        exists = name in self._with_gradients
        if gradient is None and exists and not is_new and not self._store.owns(name):
            master = self._store.masters[name]
            with torch._C.DisableTorchFunctionSubclass():
                gradient = master.grad = torch.empty_like(master, requires_grad=False)
        if gradient is None:
            self._with_gradients.discard(name)
            return None
        if gradient is not self._given.get(name):
            if (before := self._given.get(name)) is not None:
                _mark(before, replace(before._part, is_gradient=False))  # type: ignore[attr-defined]
            part: _Part = vars(self._store.masters[name])["_part"]
            self._given[name] = _mark(gradient, replace(part, is_gradient=True))
            self._with_gradients.add(name)
        return gradient

    def _counted_gradients(self) -> list[tuple[str, list[Tensor]]]:
        found = []
        for name, master in self._store.masters.items():
            if name in self._with_gradients:
                gradient = torch.empty_like(master) if master.grad is None else master.grad
                found.append((name, self._store.owned_parts(name, gradient)))
        return found


def _part_of(store: SliceStore, name: str, ranks: _Ranks) -> _Part:
    master, spec = store.masters[name], store.specs[name]
    counted = None
    if store.has_standbys:
        counted = torch.zeros(master.shape, dtype=torch.bool, device=master.device)
        for part in store.owned_parts(name, counted):
            part.fill_(1)
    return _Part(
        name=name,
        ranks=ranks,
        kept=store.kept[name],
        cut_dim=spec.cut_dim,
        is_uncut=len(store.slices[name]) == 1,
        num_whole=prod(spec.shape),
        dim=spec.cut_dim,
        counted=counted,
    )


def _mark(tensor: Any, part: _Part) -> Any:
    if type(tensor) is Tensor:
        tensor.__class__ = _Rows
    if type(tensor) is _Rows:
        tensor._part = part
    return tensor


def _call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a torch function of rows, as the module's docstring says."""
    is_accessor = func.__name__ in ("__get__", "__set__")
    name: str = func.__self__.__name__ if is_accessor else func.__name__.strip("_")
    if name == "grad" and is_accessor and isinstance(args[0], _ParameterRows):
        return _access_gradient(func, args)
    rows = [item for item in tensors_in((args, kwargs)) if isinstance(item, _Rows | _ParameterRows)]
    with torch._C.DisableTorchFunctionSubclass():
        if not rows:
            return func(*args, **kwargs)
        found = _special(name, func, args, kwargs, rows)
        if found is not _NOTHING:
            return found
        try:
            result = func(*args, **kwargs)
        except (IndexError, RuntimeError) as error:
            error.add_note(f"This is called on parameter {rows[0]._part.name}'s rows. {_REMEDY}")
            raise
        if _writes(func):
            for item in rows:
                item._part.ranks.forget(item._part.name)
        return _follow(name, func, args, kwargs, rows, result)


def _special(
    name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any], rows: Sequence[Any]
) -> Any:
    """Return the result of a function that isn't run on this rank's rows by itself."""
    if name in _TELLING or name in _OF_ONE:
        return _tell(name, func, rows[0])
    if name == "equal":
        return _are_equal(*args)
    if func.__name__ == "_foreach_norm":
        return [_whole_norm(item, *args[1:], **kwargs) for item in args[0]]
    if not args or args[0] is not rows[0]:
        return _NOTHING
    reduction = Reduction.of(name, args, kwargs)
    if reduction is not None:
        return _reduce(reduction, func, args, kwargs)
    if name in ("getitem", "setitem") and _is_elsewhere(name, *args[:2]):
        return args[0] if name == "getitem" else None
    return _NOTHING


def _tell(name: str, func: Any, rows: Any) -> Any:
    """Return the value of a whole of one element, which one of the ranks has."""
    part: _Part = rows._part
    if name in _TELLING or part.num_whole != 1:
        _refuse(name, part)
    reduction = Reduction.of("sum", (rows,), {})
    assert reduction is not None
    return func(reduction.of_whole(rows.detach(), part.counted, part.ranks.add_up))


def _are_equal(first: Any, second: Any) -> bool:
    """Whether whole tensors are equal; Lightning compares parameters so."""
    if first is second:
        return True
    parts = [item._part for item in (first, second) if isinstance(item, _Rows | _ParameterRows)]
    if len({part.num_whole for part in parts}) > 1:
        return False
    own = torch.tensor(int(torch.equal(first, second)))
    return bool(parts[0].ranks.add_up(own, "min"))


def _is_elsewhere(name: str, rows: Any, index: Any) -> bool:
    """Whether another rank has all of the rows that an index chooses.

    Raises:
        StepError: Several ranks may have them.
    """
    part: _Part = rows._part
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
    """Mark the tensors that a function has made of rows, or changed; refuse other results."""
    given = {id(item) for item in tensors_in((args, kwargs))}
    made = [item for item in tensors_in(result) if id(item) not in given]
    target: Any = args[0] if args else None
    is_changed = _writes(func) and type(target) is Tensor and target is not rows[0]
    if is_changed and target.shape == rows[0].shape:
        _mark(target, replace(rows[0]._part, is_gradient=False))
    for item in made:
        like = next((own for own in rows if own.shape == item.shape), None)
        if name in _MOVING and (like is None or name not in _FLATTENING):
            _mark(item, _moved(name, func, args, kwargs, rows, item))
        elif like is not None:
            _check_alike(name, [own for own in rows if own.shape == item.shape])
            stays = like._part.is_gradient and name in _KEEPING_GRADIENT
            _mark(item, replace(like._part, is_gradient=stays))
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
    """Refuse a function of several tensors' rows that aren't the same rows."""
    for item in rows[1:]:
        if item._part.kept != rows[0]._part.kept:
            _refuse(f"{name} with other rows of {rows[0]._part.name}", item._part)


def _moved(
    name: str,
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rows: Sequence[Any],
    made: Tensor,
) -> _Part:
    """Return which part of a whole a tensor is whose elements a function has moved."""
    part, source = rows[0]._part, rows[0]
    dim = part.dim if made.ndim == source.ndim else None
    if name in ("T", "mT", "t") and part.dim is not None:
        dim = source.ndim - 1 - part.dim
    elif name in _FLATTENING or name in ("transpose", "permute", "stack"):
        dim = 0 if made.ndim == 1 else None
    counted = None
    if part.counted is not None:

        def counts(item: Any) -> Any:
            return item._part.counted if isinstance(item, _Rows | _ParameterRows) else item

        counted = func(*tree_map(counts, tuple(args)), **tree_map(counts, dict(kwargs)))
    num_whole = sum(item._part.num_whole for item in rows)
    return replace(part, dim=dim, counted=counted, num_whole=num_whole, is_gradient=False)


def _reduce(reduction: Reduction, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return a reduction of a whole tensor; of rows if it reduces each row by itself."""
    rows = args[0]
    part: _Part = rows._part
    if reduction.dims is None or part.dim in reduction.dims:
        if reduction.order is not None and reduction.dims is None and part.is_gradient:
            return part.ranks.norm_of_gradient(part.name, reduction.order).to(rows.dtype)
        if not reduction.is_known:
            _refuse(reduction.name, part)
        with torch.no_grad():
            return reduction.of_whole(rows, part.counted, part.ranks.add_up)
    if part.dim is None:
        _refuse(reduction.name, part)
    result = func(*args, **kwargs)
    dim = part.dim
    if not reduction.keeps_dims:
        dim -= sum(item < dim for item in reduction.dims)
    counted = part.counted
    if counted is not None:
        counted = counted.amax(reduction.dims, keepdim=reduction.keeps_dims)
    for item in tensors_in(result):
        _mark(item, replace(part, dim=dim, counted=counted, is_gradient=False))
    return result


def _whole_norm(rows: Any, order: float = 2.0, **_: Any) -> Tensor:
    reduction = Reduction.of("norm", (rows, order), {})
    assert reduction is not None
    found: Tensor = _reduce(reduction, torch.norm, (rows, order), {})
    return found


def _picks(index: Any, ndim: int, dim: int | None) -> bool:
    """Whether an index chooses rows by their numbers, in the dim that is cut (None: in any)."""
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


def _refuse(name: str, part: _Part) -> NoReturn:
    raise StepError(
        f"{name} is called on parameter {part.name} or its gradient in a hook, and would give each "
        f"rank a result of its own. {_REMEDY}"
    )
