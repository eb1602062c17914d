"""Find out by trial whether users' own backward code scales with the gradients that it gets.

Backward passes begin with a micro-batch's number of targets, and the sums of gradients are divided
once by the batch's number. That gives one device's gradient only if backward is linear: a gradient
twice as large must lead to gradients twice as large. Torch's own functions are. A user's
`autograd.Function` or hook may clip, normalise, or add something. So each is called once more in
the first iteration, with much larger gradients.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_hetero.core.errors import StepError
from lightning_hetero.runtime.callers import called_by_library
from lightning_hetero.runtime.random_state import PreservedRandomState

__all__ = ["trying_functions", "trying_hooks"]

_FACTOR = 2.0**16
"""A power of two, so that rounding stays the same."""
_TOLERANCE = 0.02
"""Largest relative error, since devices may add in any order."""
_MOST_BYTES = 2**28
"""Most bytes of a function's saved tensors and gradients: a trial needs as much memory again."""
_OF_LIBRARIES = ("torch.", "lightning_hetero.")
_Function = Callable[..., Any]


def trying_functions(outputs: Iterable[Tensor]) -> None:
    """Try each user's function of a graph when the backward pass reaches it.

    Args:
        outputs: The tensors where the backward pass will begin.
    """
    waiting = [item.grad_fn for item in outputs if item.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node: Any = waiting.pop()
        function = getattr(type(node), "_forward_cls", None)
        if function is not None and not f"{function.__module__}.".startswith(_OF_LIBRARIES):
            node.register_prehook(partial(_try_function, function, node))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def _try_function(function: Any, node: Any, gradients: Sequence[Tensor | None]) -> None:
    def run(given: Sequence[Tensor | None]) -> Any:
        return function.backward(_Context(node), *given)

    tensors = tree_leaves((node.saved_tensors, vars(node), gradients))
    if sum(item.nbytes for item in tensors if isinstance(item, Tensor)) > _MOST_BYTES:
        return
    _try(run, f"The backward of {function.__qualname__}", gradients)


class _Context:
    """A copy of a function's context: its backward may change saved tensors in place."""

    def __init__(self, node: Any) -> None:
        self._node = node
        vars(self).update(_copied(vars(node)))
        self.saved_tensors = _copied(node.saved_tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)


def _copied(value: Any) -> Any:
    return tree_map_only(Tensor, torch.clone, value)


@contextmanager
def trying_hooks(module: nn.Module) -> Iterator[None]:
    """Try backward hooks on modules, and on tensors that forward passes in this context set."""
    with ExitStack() as stack:
        for part in module.modules():
            for hooks in (part._backward_hooks, part._backward_pre_hooks):
                if hooks:
                    stack.callback(hooks.update, dict(hooks))
                    hooks.update(_tried(hooks))
        stack.enter_context(_trying_hooks_on_tensors())
        yield


def _tried(hooks: Mapping[int, _Function]) -> dict[int, _Function]:
    return {key: _with_trial(hook, is_of_module=True) for key, hook in hooks.items()}


@contextmanager
def _trying_hooks_on_tensors() -> Iterator[None]:
    # `register_hook` can't be hooked, and modes don't see it inside layers: so it is replaced.
    original: Any = Tensor.register_hook

    def register(tensor: Tensor, hook: _Function) -> Any:
        return original(tensor, hook if called_by_library() else _with_trial(hook))

    Tensor.register_hook = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.register_hook = original  # type: ignore[method-assign]


def _with_trial(hook: _Function, *, is_of_module: bool = False) -> _Function:
    """Return a hook that is tried with larger gradients if it changes gradients."""

    def run(*args: Any) -> Any:
        result = hook(*args)
        if result is not None:
            first, gradients = (args[0], args[1:]) if is_of_module else (None, args)
            before = () if first is None else (first,)
            name = getattr(hook, "__qualname__", type(hook).__qualname__)
            _try(lambda given: hook(*before, *given), f"The backward hook {name}", gradients)
        return result

    return run


def _try(run: Callable[[Any], Any], name: str, gradients: Any) -> None:
    """Compare the results for some gradients and for larger ones.

    Raises:
        StepError: They don't scale.
    """
    try:
        with torch.no_grad(), PreservedRandomState():
            made = _real(run(_copied(gradients)))
        with torch.no_grad(), PreservedRandomState():
            larger = _real(run(tree_map_only(Tensor, lambda item: item * _FACTOR, gradients)))
    except Exception:
        return  # Code that can't be called again, for any reason, shows nothing.
    for item, other in zip(made, larger, strict=False):
        expected = item.double() * _FACTOR
        distance, size = (other.double() - expected).norm(), expected.norm()
        if other.isfinite().all() and distance > _TOLERANCE * size:
            raise StepError(
                f"{name} doesn't scale what it gets: of a gradient {_FACTOR:g} times as large it "
                "makes none that is. It clips or normalises gradients, or adds some of its own, as "
                "auxiliary losses do. Here the gradients of micro-batches count by their numbers "
                "of targets, so it would do that by other measures than on one device. Clip "
                "parameters' gradients by Trainer(gradient_clip_val=...), and add auxiliary losses "
                "to the loss."
            )


def _real(made: Any) -> list[Tensor]:
    tensors = (item for item in tree_leaves(made) if isinstance(item, Tensor))
    return [item for item in tensors if item.is_floating_point()]
