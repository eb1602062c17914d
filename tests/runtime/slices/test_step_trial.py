"""An optimizer's own steps say whether rows are stepped alike whatever rows are beside them."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.exchange.slices import Slice
from lightning_hetero.runtime.slices.step_trial import (
    Likeness,
    check_steps,
    try_steps,
)


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


DIFFERENT, CLOSE, EXACT = Likeness


@pytest.mark.parametrize(
    ("kind", "pieces", "fewer"),
    [
        (torch.optim.SGD, EXACT, EXACT),
        (torch.optim.AdamW, EXACT, EXACT),
        (torch.optim.Adagrad, EXACT, EXACT),
        (Foreign, EXACT, EXACT),
        (ByTensor, DIFFERENT, EXACT),
        (torch.optim.Muon, DIFFERENT, EXACT),
        (torch.optim.Adafactor, DIFFERENT, EXACT),
        (Together, DIFFERENT, DIFFERENT),
        (Rounding, DIFFERENT, DIFFERENT),
    ],
)
def test_only_steps_that_stay_equal_pass(kind: Any, pieces: Likeness, fewer: Likeness) -> None:
    optimizer = kind(parameters((4, 3), (5, 3)), lr=0.0)  # As at the start of a warm-up.
    trial = try_steps(optimizer, is_cut=True)
    assert (trial.pieces, trial.fewer) == (pieces, fewer)
    assert trial.num_losses == (kind in (torch.optim.SGD, torch.optim.AdamW, *TORCHS))


TORCHS = (torch.optim.Adagrad, torch.optim.Muon, torch.optim.Adafactor)


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_only_rounds_otherwise_is_close(options: dict[str, bool], dtype: torch.dtype) -> None:
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        items = [nn.Parameter(torch.ones(4, 3, dtype=dtype))]
        trial = try_steps(kind(items, lr=1e-6, weight_decay=0.1, **options), is_cut=True)
        assert min(trial.pieces, trial.fewer) >= CLOSE


def test_bf16_tells_a_norm_of_a_tensor_from_rounding() -> None:
    items = [nn.Parameter(torch.ones(4, 3, dtype=torch.bfloat16))]
    for kind in (ByTensor, torch.optim.Muon, torch.optim.Adafactor):
        assert try_steps(kind(items, lr=1e-5), is_cut=True).pieces is DIFFERENT


@pytest.mark.parametrize("kind", ["NAdam", "RAdam", "Adamax", "RMSprop", "Rprop", "ASGD"])
def test_torchs_optimizers_that_go_by_elements_pass(kind: str) -> None:
    trial = try_steps(getattr(torch.optim, kind)(parameters((4, 3), (7,))), is_cut=True)
    assert min(trial.pieces, trial.fewer) >= CLOSE


class Store(SimpleNamespace):
    has_standbys = False


HERE, THERE, BOTH = (Slice(0, 0, 4),), (Slice(1, 0, 4),), (Slice(0, 0, 2), Slice(1, 2, 4))


@pytest.mark.parametrize(
    ("kind", "slices", "refusal"),
    [
        (torch.optim.Muon, {"w": HERE, "v": THERE}, None),
        (
            torch.optim.Muon,
            {"w": HERE, "v": BOTH},
            'needs whole matrices.*v.*ownership="parameter"',
        ),
        (torch.optim.AdamW, {"w": BOTH, "v": BOTH}, None),
        (Together, {"w": HERE, "v": HERE}, None),
        (Together, {"w": HERE, "v": THERE}, "computes with all parameters at once, but 2 ranks"),
        (torch.optim.LBFGS, {"w": HERE, "v": HERE}, "evaluates the loss several times"),
    ],
)
def test_an_optimizer_is_refused_where_it_would_step_slices_otherwise(
    kind: Any, slices: Any, refusal: str | None
) -> None:
    comms: Any = SimpleNamespace(gather_objects=lambda own: [own], global_rank=0)
    store: Any = Store(slices=slices)
    with nullcontext() if refusal is None else pytest.raises(ConfigurationError, match=refusal):
        check_steps([kind(parameters((4, 4)), lr=0.1)], store, comms)


def test_a_trial_changes_nothing_of_the_optimizer() -> None:
    optimizer = Foreign(parameters((4, 3), (4,)))
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a trial is no step"))
    torch.optim.lr_scheduler.LinearLR(optimizer, 0.5)
    before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    assert try_steps(optimizer, is_cut=True).pieces is EXACT
    assert optimizer.tried == []
    assert not optimizer.state
    assert all(map(torch.equal, before, optimizer.param_groups[0]["params"]))


def test_an_optimizer_that_moves_nothing_tells_nothing() -> None:
    class Idle(Foreign):
        def step(self, closure: Any = None) -> None: ...

    with pytest.raises(ValueError, match="changes nothing"):
        try_steps(Idle(parameters((4, 3))), is_cut=True)
