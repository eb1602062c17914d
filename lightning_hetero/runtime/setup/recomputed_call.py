"""Call a function so that its backward recomputes the tensors that autograd would have kept.

Autograd saves empty slots in place of tensors. When backward needs the first of them, the function
is called a second time, until all slots are filled. `torch.utils.checkpoint` (use_reentrant=False)
does the same with more Python: this saves about a third of the time that it adds to a short layer
on a CPU (`python -m tests.benchmarks selective` measures both).

Recomputation may also be selective: the outputs of matrix products and attention are kept, and the
second call gets them instead of computing them. Norms, rotations and activation functions are cheap
beside them, but keep about as much.

As there, changes of tensors within lists, tuples and dicts of the arguments aren't detected.
"""

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_hetero.core.errors import ModelError
from lightning_hetero.runtime.random_state import TorchState
from lightning_hetero.runtime.setup.products import Products

__all__ = ["computed_again", "computed_again_but_products"]


def computed_again(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return a function's result, and keep only its arguments until backward.

    ::

        output = computed_again(layer, hidden, mask=mask)
        output.sum().backward()  # Calls the layer again.

    Args:
        function: Called again in backward, with the same state of torch's generators, autocast and
            default device.
        *args: Its arguments. Tensors among them mustn't be changed in place until backward.
        **kwargs: The same.

    Raises:
        ModelError: In backward: an argument was changed in place, or something that backward
            needs, or the function does something else the second time.
    """
    call = _RecomputedCall(function, args, kwargs)
    with saved_tensors_hooks(call.reserve, call.fetch):
        return function(*args, **kwargs)


def computed_again_but_products(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return a function's result, and keep its arguments and outputs of products and attention.

    As `computed_again`, but the second call doesn't run the matrix products and attention.
    """
    products = Products()
    call = _RecomputedCall(function, args, kwargs, products)
    with saved_tensors_hooks(call.reserve, call.fetch), products.record():
        output = function(*args, **kwargs)
    call.keep_products()
    return output


class _Slot:
    """Saved by autograd in place of a tensor."""

    __slots__ = ("__weakref__", "form", "tensor", "version")

    def __init__(self, like: Tensor) -> None:
        self.form = like.shape, like.dtype
        self.tensor: Tensor | None = None
        self.version = 0


class _AllFilled(Exception):
    """Ends the second call once all slots are filled.

    An `Exception`: for others modules wouldn't call their hooks with `always_call`.
    """


class _RecomputedCall:
    """One call with recomputation; autograd keeps it alive by its hooks for saved tensors."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        products: Products | None = None,
    ) -> None:
        given: dict[int | str, Any] = dict(enumerate(args)) | kwargs
        # Autograd saves no inference tensors.
        tensors = {
            key: item
            for key, item in given.items()
            if isinstance(item, Tensor) and not item.is_inference()
        }
        self._function = function
        self._num_args = len(args)
        self._tensor_keys = tuple(tensors)
        self._others = given | dict.fromkeys(tensors)
        self._kept = _keep(*tensors.values())
        self._random = TorchState.now()
        kinds = {"cpu", *(tensor.device.type for tensor in tensors.values())}
        self._autocast = {kind: _autocast_now(kind) for kind in kinds}
        self._device = torch.get_default_device()
        self._slots: list[weakref.ref[_Slot]] = []
        """Weak: a tensor that backward has freed isn't kept when it is recomputed."""
        self._num_filled = 0
        self._products = products
        self._kept_products: Any = None

    def reserve(self, tensor: Tensor) -> _Slot:
        """Return the slot that autograd saves in place of a tensor."""
        slot = _Slot(tensor)
        self._slots.append(weakref.ref(slot))
        if self._products is not None:
            self._products.note_saved()
        return slot

    def keep_products(self) -> None:
        """Keep the outputs of the first call's products for the second call."""
        assert self._products is not None
        self._kept_products = _keep(*self._products.hand_over())

    def fetch(self, slot: _Slot) -> Tensor:
        """Return the tensor of a slot; the first time, recompute those of all slots."""
        if slot.tensor is None:
            self._call_again()
        tensor, slot.tensor = slot.tensor, None  # Freed as soon as backward has used it.
        assert tensor is not None
        if tensor._version != slot.version:
            raise ModelError(
                "A layer that is computed again in backward changes a tensor in place that its "
                f"backward needs, {tensor.dtype} {list(tensor.shape)}. Let it make a new one."
            )
        return tensor

    def _call_again(self) -> None:
        self._num_filled = 0
        random = TorchState.now()
        with ExitStack() as stack:
            stack.callback(random.put_back)
            self._random.put_back()
            for kind, options in self._autocast.items():
                if options is not None and options != _autocast_now(kind):
                    stack.enter_context(torch.autocast(kind, **options))
            if torch.get_default_device() != self._device:
                stack.enter_context(self._device)
            stack.enter_context(torch.enable_grad())
            if self._products is not None:
                tensors = _saved(self._kept_products, "What a matrix product returned in a layer")
                stack.enter_context(self._products.give(tensors))
            stack.enter_context(saved_tensors_hooks(self._fill, _as_it_is))
            try:
                self._call()
            except Exception:
                # The function may have caught `_AllFilled`, and raised something else.
                if self._num_filled < len(self._slots):
                    raise
        if self._num_filled < len(self._slots):
            raise _other_work(f"{self._num_filled} tensors instead of {len(self._slots)}")

    def _call(self) -> Any:
        tensors = _saved(self._kept, "An argument of a layer")
        given = self._others | dict(zip(self._tensor_keys, map(_apart, tensors), strict=True))
        args = [given.pop(index) for index in range(self._num_args)]
        return self._function(*args, **given)

    def _fill(self, tensor: Tensor) -> Tensor:
        if self._num_filled == len(self._slots):
            raise _AllFilled  # The function has caught the first one, and goes on.
        tensor = tensor.detach()  # Else a node that saves its own output would keep itself alive.
        slot = self._slots[self._num_filled]()
        if slot is not None:
            if slot.form != (tensor.shape, tensor.dtype):
                raise _other_work(f"{tensor.dtype} {list(tensor.shape)} in place of {slot.form}")
            slot.tensor, slot.version = tensor, tensor._version
        self._num_filled += 1
        if self._num_filled == len(self._slots):
            raise _AllFilled
        return tensor


class _Kept(torch.autograd.Function):
    """Saves tensors by autograd, which detects changes in place and applies outer hooks."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        """Save tensors for `_saved`; there is no backward."""
        ctx.save_for_backward(*tensors)
        return torch.empty_like(anchor)


def _keep(*tensors: Tensor) -> Any:
    """Return a tensor whose `grad_fn` has them as its `saved_tensors`.

    The caller must hold the tensor: torch 2.11's node frees them with its output.
    """
    anchor = torch.empty(0, requires_grad=True)
    return _Kept.apply(anchor, *tensors)  # type: ignore[no-untyped-call]


def _saved(anchor: Any, what: str) -> tuple[Tensor, ...]:
    """Return the tensors that `_keep` has kept."""
    try:
        tensors: tuple[Tensor, ...] = anchor.grad_fn.saved_tensors
    except RuntimeError as error:
        if "inplace" not in str(error):
            raise  # Of outer hooks for saved tensors, which keep them elsewhere.
        raise ModelError(
            f"{what} that is computed again in backward was changed in place after the layer got "
            f"it. Let it be, or don't recompute the layer. ({error})"
        ) from None
    return tensors


def _autocast_now(kind: str) -> dict[str, Any] | None:
    """Return the options of autocast on a kind of device; None if it has no autocast."""
    if not torch.amp.is_autocast_available(kind):
        return None
    return {
        "enabled": torch.is_autocast_enabled(kind),
        "dtype": torch.get_autocast_dtype(kind),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }


def _apart(tensor: Tensor) -> Tensor:
    """Return an alias of a tensor for the second call, in which its hooks must not run again."""
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _other_work(what: str) -> ModelError:
    return ModelError(
        f"A layer that was computed again in backward saves {what}. A recomputed layer must do "
        "the same both times: let it count no calls and look at nothing that changes in between, "
        "or don't recompute it."
    )
