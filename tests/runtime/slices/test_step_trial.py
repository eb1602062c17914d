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

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
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


def parameters(*shapes: tuple[int, ...], dtype: Any = None) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]


DIFFERENT, CLOSE, EXACT = Likeness
BY_ELEMENTS = ["SGD", "Adam", "AdamW", "Adagrad", "NAdam", "RAdam", "Adamax", "RMSprop", "Rprop"]


@pytest.mark.parametrize(
    ("kind", "pieces", "fewer"),
    [
        *((getattr(torch.optim, name), CLOSE, CLOSE) for name in BY_ELEMENTS),
        (Foreign, EXACT, EXACT),
        (ByTensor, DIFFERENT, EXACT),
        (torch.optim.Muon, DIFFERENT, EXACT),
        (torch.optim.Adafactor, DIFFERENT, EXACT),
        (Together, DIFFERENT, DIFFERENT),
        (Rounding, DIFFERENT, DIFFERENT),
    ],
)
def test_only_steps_that_stay_alike_pass(kind: Any, pieces: Likeness, fewer: Likeness) -> None:
    optimizer = kind(parameters((4, 3), (5, 3)), lr=0.0)  # As at the start of a warm-up.
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a trial is no step"))
    before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    num_states = len(optimizer.state)  # Adagrad begins with some.
    trial = try_steps(optimizer, is_cut=True)
    for found, expected in ((trial.pieces, pieces), (trial.fewer, fewer)):
        assert (found is DIFFERENT) == (expected is DIFFERENT)
        assert found >= expected
    assert len(optimizer.state) == num_states
    assert all(map(torch.equal, before, optimizer.param_groups[0]["params"]))


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}])
def test_bf16_tells_a_norm_of_a_tensor_from_rounding(options: dict[str, bool]) -> None:
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        items = parameters((4, 3), dtype=torch.bfloat16)
        trial = try_steps(kind(items, lr=1e-6, weight_decay=0.1, **options), is_cut=True)
        assert min(trial.pieces, trial.fewer) >= CLOSE
    for kind in (ByTensor, torch.optim.Muon, torch.optim.Adafactor):
        items = parameters((4, 3), dtype=torch.bfloat16)
        assert try_steps(kind(items, lr=1e-5), is_cut=True).pieces is DIFFERENT


HERE, THERE, BOTH = (Slice(0, 0, 4),), (Slice(1, 0, 4),), (Slice(0, 0, 2), Slice(1, 2, 4))


@pytest.mark.parametrize(
    ("kind", "slices", "refusal"),
    [
        (torch.optim.Muon, {"w": HERE, "v": THERE}, None),
        (torch.optim.Muon, {"w": HERE, "v": BOTH}, 'whole matrices.*v.*ownership="parameter"'),
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
    store: Any = SimpleNamespace(slices=slices, has_standbys=False)
    with nullcontext() if refusal is None else pytest.raises(ConfigurationError, match=refusal):
        check_steps([kind(parameters((4, 4)), lr=0.1)], store, comms)


class WithoutGroups(Foreign):
    """As Lightning stands in for a `configure_optimizers` that returns None."""

    def add_param_group(self, param_group: Any) -> None: ...


@pytest.mark.filterwarnings("error")
def test_an_optimizer_without_parameters_needs_no_trial() -> None:
    comms: Any = SimpleNamespace(gather_objects=lambda own: [own], global_rank=0)
    store: Any = SimpleNamespace(slices={"w": HERE, "v": THERE}, has_standbys=False)
    check_steps([WithoutGroups(parameters((4, 4)))], store, comms)
