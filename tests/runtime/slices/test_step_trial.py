"""An optimizer's own steps say whether rows are stepped alike whatever rows are beside them."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_hetero.runtime.slices.digests import digest_of
from lightning_hetero.runtime.slices.step_trial import try_steps


class Foreign(torch.optim.Optimizer):
    """An optimizer that nobody knows by name."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, **options})
        self.tried: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.tried.append(1)
        for group in self.param_groups:
            norm = self.norm([item.grad for item in group["params"]])
            for item in group["params"]:
                item.add_(self.direction(item.grad) / norm, alpha=-group["lr"])

    def norm(self, gradients: list[torch.Tensor]) -> Any:
        return 1.0

    def direction(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.sign()


class ByTensor(Foreign):
    def direction(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / gradient.norm()


class Together(Foreign):
    def norm(self, gradients: list[torch.Tensor]) -> Any:
        return torch.stack([gradient.norm() for gradient in gradients]).norm()


class Rounding(Foreign):
    def direction(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + torch.rand_like(gradient)


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape)) for shape in shapes]


@pytest.mark.parametrize(
    ("kind", "pieces", "fewer"),
    [
        (torch.optim.SGD, True, True),
        (torch.optim.AdamW, True, True),
        (torch.optim.Adagrad, True, True),
        (Foreign, True, True),
        (ByTensor, False, True),
        (torch.optim.Muon, False, True),
        (torch.optim.Adafactor, False, True),
        (Together, False, False),
        (Rounding, False, False),
    ],
)
def test_only_steps_that_stay_equal_pass(kind: Any, pieces: bool, fewer: bool) -> None:  # noqa: FBT001
    optimizer = kind(parameters((4, 3), (5, 3)), lr=0.0)  # As at the start of a warm-up.
    assert (try_steps(optimizer, is_cut=True) is not None) == pieces
    assert (try_steps(optimizer, is_cut=False) is not None) == fewer


def test_a_trial_changes_nothing_of_the_optimizer() -> None:
    optimizer = Foreign(parameters((4, 3), (4,)))
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a trial is no step"))
    torch.optim.lr_scheduler.LinearLR(optimizer, 0.5)
    before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    assert try_steps(optimizer, is_cut=True) is not None
    assert optimizer.tried == []
    assert not optimizer.state
    assert all(map(torch.equal, before, optimizer.param_groups[0]["params"]))


def test_an_optimizer_that_moves_nothing_tells_nothing() -> None:
    class Idle(Foreign):
        def step(self, closure: Any = None) -> None: ...

    with pytest.raises(ValueError, match="changes nothing"):
        try_steps(Idle(parameters((4, 3))), is_cut=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_digest_depends_on_each_bit_and_its_place(dtype: torch.dtype) -> None:
    rows = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    digest = digest_of(rows)
    assert digest_of(rows.clone()) == digest
    assert digest_of(rows.flip(0)) != digest
    assert digest_of(rows.t().contiguous().t()) == digest
    for index in range(rows.numel()):
        changed = rows.clone()
        changed.view(torch.uint8).flatten()[index * dtype.itemsize] ^= 1
        assert digest_of(changed) != digest
    assert digest_of(torch.tensor([0.0])) != digest_of(torch.tensor([-0.0]))
