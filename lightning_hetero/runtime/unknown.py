"""Tensors whose values this stage can't know: other stages' weights, and what they compute.

An `Unknown` has a shape, a dtype, a device, and a description of its origin. Operations on it cost
nothing and return unknown tensors, so a stage can run the user's whole step. Example: on the first
of two stages the step computes `loss = model(x).mean()`; what the second stage's layers return is
unknown, and so would the loss be. An operation that needs a value, such as `loss.item()`, raises an
error that names the origin: made-up numbers are never used.

Operations that draw random numbers draw as many as they would for known values, because all ranks
of a pipeline must draw the same numbers in a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_hetero.core.errors import ModelError

_KINDS = ("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
_SHAPED_LIKE = {f"aten::{name}" for name in (*_KINDS, "new_zeros", "new_ones", "new_full")}
"""Operations that use only a tensor's shape, so their results are known."""

_BY_VALUE = ("poisson", "binomial", "_standard_gamma", "_sample_dirichlet")
_DRAW_BY_VALUE = {f"aten::{name}" for name in _BY_VALUE}
"""Operations in which the number of random numbers drawn depends on values."""


@dataclass(frozen=True)
class Origin:
    """Where an unknown tensor comes from."""

    what: str
    """What its values are, as the end of a sentence that begins "It needs": "the output of layer 3,
    which another stage computes"."""
    remedy: str


def _refusing(user: str) -> Callable[..., NoReturn]:
    def refuse(tensor: "Unknown", *_: Any, **__: Any) -> NoReturn:
        tensor.refuse(user)

    return refuse


class Unknown(Tensor):
    """A tensor of which this stage knows everything but the values."""

    origin: Origin
    sealed: str | None
    """Error message for changes in place; None if they are allowed."""

    @staticmethod
    def __new__(
        cls, form: "_Form", device: torch.device, origin: Origin, *, sealed: str | None = None
    ) -> "Unknown":
        """Make an unknown tensor with a form."""
        made: Unknown = Tensor._make_wrapper_subclass(
            cls, form.shape, strides=form.strides, dtype=form.dtype, device=device
        )
        made.origin, made.sealed = origin, sealed
        return made

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        origin: Origin,
        sealed: str | None = None,
    ) -> "Unknown":
        """Return a contiguous unknown tensor of a shape."""
        return cls(_contiguous_form(tuple(shape), dtype), device, origin, sealed=sealed)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Compute only the shapes of an operation's results."""
        kwargs = kwargs or {}
        traits = _traits_of(func)
        first = _first_unknown((*args, *kwargs.values()))
        if traits.needs_values:
            first.refuse(f"{_short(func)} needs")
        if traits.is_shaped_like:
            return func(*_each(_filled, args), **_each(_filled, kwargs))
        if traits.writes:
            _check_writes(func, args, kwargs, first)
        if traits.draws:
            func(*_each(_filled, args), **_each(_filled, kwargs))
        device = kwargs.get("device") or first.device
        sealed = first.sealed if traits.is_view else None

        def make(form: Any) -> Any:
            if type(form) is not _Form:
                return form
            return Unknown(form, device, first.origin, sealed=sealed)

        made: Any = _forms_made(func, args, kwargs, first, traits)
        if type(made) is _Form:
            made = Unknown(made, device, first.origin, sealed=sealed)
        else:
            made = _each(make, made)
        changed = traits.returned
        if changed is None:
            return made
        itself = args[changed[0]] if changed[0] < len(args) else kwargs[changed[1]]
        if isinstance(made, Unknown) and itself.shape != made.shape:
            first.refuse(f"{_short(func)} changes a shape in place, and needs")
        return itself

    def refuse(self, user: str) -> NoReturn:
        """Raise ModelError: `user`, such as "tolist needs", asks for the values."""
        raise ModelError(f"{user} {self.origin.what}. {self.origin.remedy}")

    tolist = _refusing("tolist needs")
    numpy = _refusing("numpy needs")
    __array__ = _refusing("NumPy needs")
    __reduce_ex__ = _refusing("Saving needs")

    def __format__(self, format_spec: str) -> str:
        """Refuse to print a value; without a format, say what it is."""
        return self.refuse("Printing needs") if format_spec else repr(self)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Return everything that is known about it."""
        return f"Unknown({self.origin.what}, shape={tuple(self.shape)}, dtype={self.dtype})"


def check_known(value: Any, user: str) -> None:
    """Refuse a value that contains unknown tensors.

    Args:
        value: Any value; its leaves are those of torch's pytrees.
        user: Beginning of the error message, such as "Layer 3 takes".
    """
    for leaf in tree_leaves(value) if type(value) is not Tensor else ():
        if isinstance(leaf, Unknown):
            leaf.refuse(user)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors among the leaves of torch's pytrees."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


@dataclass(frozen=True, slots=True)
class _Form:
    """All that is known of an unknown tensor, apart from its device."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@lru_cache(maxsize=1024)
def _contiguous_form(shape: tuple[int, ...], dtype: torch.dtype) -> _Form:
    return _form_of(torch.empty(shape, dtype=dtype, device="meta"))


def _form_of(tensor: Tensor) -> _Form:
    return _Form(tuple(tensor.shape), tensor.stride(), tensor.dtype)


_MAX_FORMS = 1_000
"""Largest number of results that are cached for one operation."""


def _forms_made(
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    first: Unknown,
    traits: "_Traits",
) -> Any:
    """Return an operation's result, with each tensor replaced by its form."""
    key: Any = _key_of(args), _key_of((*kwargs, *kwargs.values())) if kwargs else ()
    if traits.is_index:
        key = None  # The shape of the result depends on the values of a mask.
        args = (args[0], [_as_indices(item) for item in args[1]])
    try:
        found = None if key is None else traits.forms.get(key)
    except TypeError:  # Some argument can't be hashed.
        found = key = None
    if found is not None:
        return found
    try:
        made = func(*_each(_as_meta, args), **_each(_as_meta, kwargs))
    except NotImplementedError:
        first.refuse(f"{_short(func)} needs")
    forms = _each(lambda item: _form_of(item) if isinstance(item, Tensor) else item, made)
    if key is not None:
        if len(traits.forms) >= _MAX_FORMS:
            traits.forms.clear()
        traits.forms[key] = forms
    return forms


def _key_of(values: Sequence[Any]) -> tuple[Any, ...]:
    key: tuple[Any, ...] = ()
    for value in values:
        kind = type(value)
        if kind is Unknown or kind is Tensor or isinstance(value, Tensor):
            key += ((value.shape, value.stride(), value.dtype),)
        elif kind in (list, tuple):
            key += (_key_of(value),)
        else:
            key += (kind, value)
    return key


def _each(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to all arguments or results of an operation, also in lists and tuples."""
    if isinstance(value, list | tuple):
        items = [_each(function, item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {name: _each(function, item) for name, item in value.items()}
    return function(value)


def _as_meta(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


def _as_indices(value: Any) -> Any:
    """Return the indices that a known mask of one dim stands for."""
    known = isinstance(value, Tensor) and not isinstance(value, Unknown)
    return (
        value.nonzero()[:, 0] if known and value.dtype is torch.bool and value.ndim == 1 else value
    )


def _filled(value: Any) -> Any:
    """Return a tensor to use in place of an unknown one, with values that can be probabilities."""
    if not isinstance(value, Unknown):
        return value
    return torch.ones(value.shape, dtype=value.dtype, device=value.device)


def _short(func: Any) -> str:
    name: str = func._schema.name
    return "item" if "_local_scalar_dense" in name else name.removeprefix("aten::")


class _Traits(NamedTuple):
    """The effects of an operation, as its schema says."""

    needs_values: bool
    is_shaped_like: bool
    """Whether it uses only the shape of a tensor."""
    draws: bool
    """Whether it draws random numbers."""
    is_view: bool
    is_index: bool
    """Whether it selects by tensors: indices or a mask."""
    writes: tuple[tuple[int, str], ...]
    """Place and name of the arguments that it writes to."""
    returned: tuple[int, str] | None
    """Place and name of the argument that it changes and returns."""
    forms: dict[Any, Any]
    """Forms of results by forms of arguments; see `_forms_made`."""


@cache
def _traits_of(func: Any) -> _Traits:
    schema, name = func._schema, func._schema.name
    writes = tuple(
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    aliases = [item.alias_info for item in schema.returns if item.alias_info is not None]
    return _Traits(
        needs_values=name.startswith("c10d::")
        or name in _DRAW_BY_VALUE
        or torch.Tag.data_dependent_output in func.tags,
        is_shaped_like=name in _SHAPED_LIKE,
        draws=torch.Tag.nondeterministic_seeded in func.tags,
        is_view=bool(aliases),
        is_index=name == "aten::index",
        writes=writes,
        returned=writes[0] if any(item.is_write for item in aliases) else None,
        forms={},
    )


def _first_unknown(values: Sequence[Any]) -> Unknown:
    for item in values:
        if type(item) is Unknown:
            return item
    return next(item for item in tensors_in(values) if isinstance(item, Unknown))


def _check_writes(func: Any, args: Sequence[Any], kwargs: dict[str, Any], first: Unknown) -> None:
    writes = _traits_of(func).writes
    for item in tensors_in([args[i] if i < len(args) else kwargs.get(name) for i, name in writes]):
        if not isinstance(item, Unknown):
            first.refuse(f"{_short(func)} writes to a tensor with known values, and needs")
        if item.sealed is not None:
            raise ModelError(item.sealed)
