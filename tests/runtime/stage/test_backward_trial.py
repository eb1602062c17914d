"""What users do in a backward pass scales what it gets, or is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetero.core.errors import StepError
from lightning_hetero.runtime.stage.backward_trial import trying_functions, trying_hooks
from tests.processes import ProcessPool
from tests.runtime.step_cases import STAGES, TinyModule, fit_each


class Reverses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return -ctx.scale * gradients[0], None


class FusedLoss(torch.autograd.Function):
    """Keeps the gradient from its forward, and scales it in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(2 * x)
        return x.square().sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (kept,) = ctx.saved_tensors
        return kept.mul_(gradients[0])


class Clips(Reverses):
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].clamp(-1, 1), None


class Normalises(Reverses):
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] / gradients[0].norm(), None


class AddsLoss(torch.autograd.Function):
    """Trains an auxiliary loss that it leaves out of the loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], torch.ones(())


def _gradient(function: Callable[[Tensor], Tensor], *, tried: bool) -> Tensor:
    x = torch.linspace(-1, 1, 5, requires_grad=True)
    loss = function(x)
    if tried:
        trying_functions([loss])
    loss.backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize(
    "function",
    [lambda x: Reverses.apply(x * x, 0.3).sum(), lambda x: FusedLoss.apply(x * 3) * 2],
)
def test_functions_that_scale_gradients_are_left_alone(function: Any) -> None:
    found, expected = (_gradient(function, tried=tried) for tried in (True, False))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: Clips.apply(x * x, 1.0).sum(),
        lambda x: Normalises.apply(x * x, 1.0).sum(),
        lambda x: AddsLoss.apply(x * x, x.sum()).sum(),
    ],
)
def test_functions_that_do_something_of_their_own_are_refused(function: Any) -> None:
    with pytest.raises(StepError, match="doesn't scale what it gets"):
        _gradient(function, tried=True)


def _run(module: nn.Linear, hook: Callable[[Tensor], Any] | None = None) -> Tensor:
    x = torch.linspace(-1, 1, 5)
    with trying_hooks(module):
        y = module(x)
        if hook is not None:
            y.register_hook(hook)
        y.sum().backward()
    assert module.weight.grad is not None
    return module.weight.grad


def test_hooks_on_tensors_and_modules_are_tried() -> None:
    seen: list[Tensor] = []
    module = nn.Linear(5, 2)
    torch.testing.assert_close(_run(module, lambda g: g * 0.5)[0], torch.linspace(-1, 1, 5) / 2)
    _run(module, seen.append)
    assert len(seen) == 1, "a hook that changes nothing is called once"
    with pytest.raises(StepError, match="hook"):
        _run(module, lambda g: g.clamp(max=0.5))
    handle = module.register_full_backward_pre_hook(lambda _, g: (g[0].sign(),))
    with pytest.raises(StepError, match="hook"):
        _run(module)
    handle.remove()
    assert not module._backward_pre_hooks
    _run(module)


class AddsInStep(TinyModule):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        kept: Tensor = AddsLoss.apply(logits, logits.square().mean())
        return F.cross_entropy(kept.flatten(0, 1), labels.flatten())


class ClipsInLayer(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.model.layers[0].append(_Clipping())


class _Clipping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        clipped: Tensor = Clips.apply(x, 1.0)
        return clipped


@pytest.mark.dist
@pytest.mark.parametrize("make", [AddsInStep, ClipsInLayer])
def test_steps_and_layers_are_looked_at(pool: ProcessPool, make: Callable[[], TinyModule]) -> None:
    for (message,) in pool.run(fit_each, 2, [make], STAGES):
        assert "doesn't scale what it gets" in message
