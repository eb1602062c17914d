"""Record the torch functions that a step calls, and replay them with other values of one tensor.

The step itself isn't run again: what it counts, appends or writes happens once. Only tensors that
the calls took from outside are held; those in between are computed again.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode

from lightning_hetero.runtime.callers import calling_frame, takes_written_rows
from lightning_hetero.runtime.leaves import tensors_in, tree_leaves, tree_map
from lightning_hetero.runtime.random_state import PreservedRandomState, seed_torch

__all__ = ["Call", "Change", "Recording", "Value"]

_MOST_CALLS = 1_000
_MOST_BYTES = 2**28
"""Largest result: calls with larger ones aren't replayed, since memory may not suffice."""
_ESCAPES = {"item", "tolist", "bool", "int", "float", "index", "numpy", "contains"}
"""Names, without underscores, of functions that return a tensor's values to Python."""
_WITH_STATE = {"batch_norm", "instance_norm"}
"""Functions that change statistics without incrementing their versions."""
_DRAWING_BY_VALUE = {"standard_gamma", "sample_dirichlet", "poisson", "binomial"}
"""Functions that draw more or fewer numbers depending on values, so that later draws differ."""

_AS_OF_ONE = {"squeeze", "view_as", "reshape_as", "unflatten"}
"""Functions whose result may have another form for two samples."""
_COUNTING = {
    **dict.fromkeys(("arange", "ones_like", "new_ones"), None),
    **dict.fromkeys(("ones", "eye"), 0),
    **dict.fromkeys(("linspace", "logspace"), 2),
}
"""Functions that make a given number of elements; the index of that argument, if simple."""
_JOINING = {"stack", "cat", "hstack", "vstack", "concat", "concatenate", "repeat_interleave"}
"""Functions whose number of tensors or repeats may come from Python's lists."""


class Value(NamedTuple):
    """Stands for a tensor in a recorded call."""

    number: int


class Call(NamedTuple):
    """A recorded call."""

    func: Callable[..., Any]
    name: str
    args: Any
    kwargs: Any
    """With a `Value` for each tensor."""
    takes: tuple[int, ...]
    """Numbers of the tensors among its arguments."""
    results: tuple[int, ...]
    """Numbers of the tensors that it returned."""
    takes_nothing: bool
    """Whether the results have no elements, though the first tensor argument has one row."""
    rounding: float
    """Relative rounding error of the coarsest scalar among the results; 0 without scalars."""
    changes: bool
    """Whether it changed a tensor in place."""
    is_written: bool
    """Whether it takes rows by indices written in the user's code."""
    autocast: tuple[bool, torch.dtype]


Change = Callable[[Call, int, Tensor], Tensor]
"""Returns what a call gets in place of an argument, given as call, number and tensor."""


class Recording(TorchFunctionMode):
    """Records the calls in its context, to replay those that depend on a source tensor.

    Args:
        source: The tensor whose values `replay` replaces.
    """

    def __init__(self, source: Tensor) -> None:
        super().__init__()
        self.is_complete = True
        """Whether all calls can be made again."""
        self.has_escaped = False
        """Whether Python has read values, on which later calls may depend."""
        self.calls: list[Call] = []
        self.source = source.detach()
        self._device_type = source.device.type
        self._numbers: dict[int, tuple[ReferenceType[Tensor], int]] = {}
        self._leaves: dict[int, Tensor] = {}
        """Tensors by number that the calls took from outside; *leaves*."""
        self._memory: set[int] = set()
        """Addresses of the leaves' and the source's storages."""
        self._depending: set[int] = set()
        self._num_values = 0
        self._give_number(source)
        self._depending.add(0)
        self._memory.add(source.untyped_storage().data_ptr())

    def number_of(self, tensor: object) -> int | None:
        """Return the number of a tensor of the recorded calls, None for others."""
        held, number = self._numbers.get(id(tensor), (None, None))
        return number if held is not None and held() is tensor else None

    def depends(self, number: int | None) -> bool:
        """Whether a tensor depends on the source, as far as calls show it."""
        return number in self._depending

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Make a call and record it."""
        kwargs = kwargs or {}
        # Compilers trace what is called here, too, and can't trace the checks of tensors.
        if torch.compiler.is_compiling() or not self.is_complete:
            return func(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        given = [item for item in leaves if isinstance(item, Tensor)]
        if not all(map(_is_plain, given)):
            self.is_complete = False  # Subclasses may communicate with other processes.
            return func(*args, **kwargs)
        versions = [_version_of(item) for item in given]
        result = func(*args, **kwargs)
        changed = [i for i, v in zip(given, versions, strict=True) if _version_of(i) != v]
        made = tensors_in(result)
        name = getattr(func, "__name__", "").strip("_")
        self.has_escaped |= name in _ESCAPES and not made  # `x.float()` makes a tensor.
        if not all(map(_is_plain, made)):
            self.is_complete = False
        elif made or changed:
            is_random = any(isinstance(item, torch.Generator) for item in leaves)
            if is_random and not changed:
                return result  # The generator is the user's: what it drew becomes a leaf.
            self._check(func, name, made, is_changing=is_random)
            self._note(func, name, args, kwargs, given, made, changed)
        return result

    def _check(
        self, func: Callable[..., Any], name: str, made: Sequence[Tensor], *, is_changing: bool
    ) -> None:
        foreign = isinstance(func, OpOverload | OpOverloadPacket) and "aten" not in str(func)
        large = any(item.numel() * item.element_size() > _MOST_BYTES for item in made)
        many = len(self.calls) >= _MOST_CALLS
        if foreign or large or many or is_changing or name in _WITH_STATE | _DRAWING_BY_VALUE:
            self.is_complete = False

    def _note(  # noqa: PLR0913 - a call from all sides
        self,
        func: Callable[..., Any],
        name: str,
        args: Any,
        kwargs: Any,
        given: Sequence[Tensor],
        made: Sequence[Tensor],
        changed: Sequence[Tensor],
    ) -> None:
        numbers = [self._number_of_given(item) for item in given]
        if any(item.untyped_storage().data_ptr() in self._memory for item in changed):
            self.is_complete = False  # To call it again would change tensors from outside.
        taken, named = tree_map(self._stand_in, (args, kwargs))
        results = tuple(self._give_number(item) for item in made)
        if any(number in self._depending for number in numbers):
            self._depending.update(results, map(self._number_of_given, changed))
        self.calls.append(
            Call(
                func,
                name,
                taken,
                named,
                tuple(numbers),
                results,
                takes_nothing=_takes_nothing(given, made),
                rounding=_rounding_of(made),
                changes=bool(changed),
                is_written=name == "getitem" and _is_written(),
                autocast=self._autocast(),
            )
        )

    def _autocast(self) -> tuple[bool, torch.dtype]:
        kind = self._device_type
        return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def _stand_in(self, item: Any) -> Any:
        return Value(self._number_of_given(item)) if isinstance(item, Tensor) else item

    def _number_of_given(self, tensor: Tensor) -> int:
        number = self.number_of(tensor)
        if number is None:
            number = self._give_number(tensor)
            self._leaves[number] = tensor
            self._memory.add(tensor.untyped_storage().data_ptr())
        return number

    def _give_number(self, tensor: Tensor) -> int:
        number = self._num_values
        self._numbers[id(tensor)] = ref(tensor), number
        self._num_values += 1
        return number

    def double(self, numbers: Sequence[int]) -> bool:
        """Repeat tensors of one sample along dim 0; return whether calls work the same for two.

        Args:
            numbers: Numbers of the tensors that are wanted.
        """
        calls = self.needed_for(numbers)
        if self.source.shape[0] != 1 or any(call.name in _AS_OF_ONE for call in calls):
            return False
        self.calls = [_of_two(call) for call in calls]
        self.source = torch.cat([self.source, self.source])
        for number, leaf in self._leaves.items():
            if leaf.ndim and leaf.shape[0] == 1 and not isinstance(leaf, nn.Parameter):
                self._leaves[number] = torch.cat([leaf, leaf])
        return True

    def count_two(self) -> None:
        """Let functions that make one element per sample make two, after `double`."""
        self.calls = [_counting_two(call) for call in self.calls]

    # -- calling again ----------------------------------------------------------------------------

    def needed_for(self, numbers: Sequence[int]) -> list[Call]:
        """Return the calls that are needed to make tensors, given by their numbers."""
        wanted, needed = set(numbers), []
        for call in reversed(self.calls):
            if call.changes or wanted.intersection(call.results):
                wanted.update(call.takes)
                needed.append(call)
        return needed[::-1]

    def leaves_where(self, holds: Callable[[Tensor], bool]) -> set[int]:
        """Return the numbers of the leaves for which `holds` is true."""
        return {number for number, leaf in self._leaves.items() if holds(leaf)}

    def counting(self) -> set[int]:
        """Return the numbers of tensors that are made only of sizes and constants of the code.

        Those made of Python's lists, which may hold data, aren't among them. If any such tensor is
        changed in place, there are none.
        """
        found: set[int] = set()
        for call in self.calls:
            takes, given = call.takes, tree_leaves((call.args, call.kwargs))
            begins = call.name in _COUNTING or any(isinstance(item, range) for item in given)
            goes_on = bool(takes) and found.issuperset(takes) and call.name not in _JOINING
            if call.changes and found.intersection(takes):
                return set()
            if begins or (goes_on and not (call.name == "getitem" and _has_list(call.args[1]))):
                found.update(call.results)
        return found

    def replay(
        self, source: Tensor, numbers: Sequence[int], change: Change | None = None
    ) -> list[Tensor]:
        """Return the values that tensors would have with another source.

        Random numbers are the same each time. Errors of the functions are raised.

        Args:
            source: The other source.
            numbers: Numbers of those tensors.
            change: Returns what a call takes in place of each tensor except the source.
        """
        calls = self.needed_for(numbers)
        last_use = {number: at for at, call in enumerate(calls) for number in call.takes}
        values = {**self._leaves, 0: source}
        with torch.no_grad(), PreservedRandomState():
            seed_torch(0)
            for at, call in enumerate(calls):
                given = values
                if change is not None:
                    taken = {number for number in call.takes if number}
                    given = values | {i: change(call, i, values[i]) for i in taken}
                made = self._call(call, given)
                values.update(zip(call.results, made, strict=True))
                for number in (*call.takes, *call.results):
                    if last_use.get(number, at) <= at and number not in numbers:
                        values.pop(number, None)
        return [values[number] for number in numbers]

    def _call(self, call: Call, values: dict[int, Tensor]) -> list[Tensor]:
        args, kwargs = tree_map(
            lambda item: values[item.number] if type(item) is Value else item,
            (call.args, call.kwargs),
            leaf=Value,
        )
        if call.autocast == self._autocast():
            result = call.func(*args, **kwargs)
        else:
            enabled, dtype = call.autocast
            with torch.autocast(self._device_type, dtype, enabled):
                result = call.func(*args, **kwargs)
        made = tensors_in(result)
        if "empty" in call.name:
            made = [item.zero_() for item in made]
        return made


def _of_two(call: Call) -> Call:
    """Return a call that reshapes a tensor of one sample as the same call for two samples."""
    if call.name not in ("view", "reshape", "expand"):
        return call
    tensor, *sizes = call.args
    is_flat = not sizes or not isinstance(sizes[0], list | tuple)
    sizes = sizes if is_flat else list(sizes[0])
    if sizes and sizes[0] == 1:
        sizes[0] = 2
    return call._replace(args=(tensor, *sizes) if is_flat else (tensor, tuple(sizes)))


def _has_list(index: object) -> bool:
    items = index if isinstance(index, tuple) else (index,)
    return any(isinstance(item, list) for item in items)


def _counting_two(call: Call) -> Call:
    args = list(call.args)
    if call.name == "arange" and args:
        start, end, step = (0, *args, 1) if len(args) == 1 else (*args, 1)[:3]
        if all(isinstance(item, int | float) for item in args) and 0 < (end - start) / step <= 1:
            return call._replace(args=(start, end + step, step))
    place = _COUNTING.get(call.name)
    args = [range(2) if item == range(1) else item for item in args]
    if place is not None and args[place : place + 1] == [1]:
        args[place] = 2
    return call._replace(args=tuple(args))


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is one of torch's own, with strides, and not inside of `torch.func`."""
    is_own = type(tensor) in (Tensor, nn.Parameter)
    is_wrapped = is_own and torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return is_own and not is_wrapped and tensor.layout is torch.strided and not tensor.is_nested


def _is_written() -> bool:
    frame = calling_frame()
    return frame is not None and takes_written_rows(frame)


def _takes_nothing(given: Sequence[Tensor], made: Sequence[Tensor]) -> bool:
    has_one_row = bool(given) and given[0].shape[:1] == (1,)
    return has_one_row and not any(item.numel() for item in made)


def _rounding_of(made: Sequence[Tensor]) -> float:
    numbers = (item for item in made if item.numel() == 1 and item.is_floating_point())
    return max((torch.finfo(item.dtype).eps for item in numbers), default=0.0)


def _version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
