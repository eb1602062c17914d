"""Where a rank has slices only, shapes are those of the whole and values are refused by name."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.runtime.slices.known_by_shape import with_whole_shapes
from tests.processes import ProcessPool
from tests.runtime.runs import pipeline, plan_of, stage
from tests.toy import ToyModule, ToyOptions, loader, quiet


def sliced_layer() -> tuple[nn.Linear, Any]:
    """Return a layer of which two of six rows lie here, and the store that says so."""
    layer = nn.Linear(4, 6, bias=False)
    layer.weight = nn.Parameter(torch.ones(2, 4))
    specs = {"weight": SimpleNamespace(shape=(6, 4))}
    return layer, SimpleNamespace(masters={"weight": layer.weight}, specs=specs)


def test_a_slice_answers_with_the_shape_of_the_whole_and_is_itself_again_afterwards() -> None:
    layer, store = sliced_layer()
    with with_whole_shapes(store):
        weight = layer.weight
        assert (weight.shape, weight.size(0), weight.size()) == ((6, 4), 6, (6, 4))
        assert (weight.ndim, weight.dim(), weight.numel(), len(weight)) == (2, 2, 24, 6)
        assert isinstance(weight, nn.Parameter)
        assert weight.requires_grad
    assert type(layer.weight) is nn.Parameter
    assert layer.weight.shape == (2, 4)


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adagrad", "RMSprop", "Muon", "NAdam", "Rprop"])
def test_an_optimizer_made_of_whole_shapes_steps_the_slices(kind: str) -> None:
    layer, store = sliced_layer()
    with with_whole_shapes(store):
        optimizer = getattr(torch.optim, kind)(layer.parameters(), lr=0.1)
    layer(torch.ones(4)).sum().backward()
    optimizer.step()
    assert layer.weight.shape == (2, 4)
    assert (layer.weight != 1).all()


USES: list[Callable[[nn.Linear], object]] = [
    lambda layer: layer.weight.norm(),
    lambda layer: layer.weight + 1,
    lambda layer: layer.weight.data,
    lambda layer: layer.weight.detach(),
    lambda layer: layer.weight[0],
    lambda layer: layer.weight.cpu(),
    lambda layer: list(layer.weight),
    lambda layer: torch.stack([layer.weight]),
    lambda layer: layer(torch.ones(4)),
    lambda layer: layer.state_dict(),
    lambda layer: nn.init.zeros_(layer.weight),
    lambda layer: copy.deepcopy(layer),
]


@pytest.mark.parametrize("use", USES)
def test_values_are_refused_by_name(use: Callable[[nn.Linear], object]) -> None:
    layer, store = sliced_layer()
    with (
        with_whole_shapes(store),
        pytest.raises(ConfigurationError, match=r"parameter weight .* configure_optimizers"),
    ):
        use(layer)


class BySize(ToyModule):
    """Groups and learning rates that depend on the sizes of parameters."""

    def configure_optimizers(self) -> Any:
        ordered = sorted(self.parameters(), key=lambda p: (p.numel(), tuple(p.shape)))
        groups = [
            {
                "params": [p],
                "lr": 4.0 / (p.shape[0] + len(p)),
                "momentum": 0.9 if p.numel() > 150 else 0.0,
                "weight_decay": 0.1 if p.ndim == 2 else 0.0,
            }
            for p in ordered
        ]
        return torch.optim.SGD(groups, lr=0.1)


class ByNorm(ToyModule):
    """A learning rate that depends on values of a parameter."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1 / float(self.model.wpe.norm()))


TWO = plan_of(pipeline(stage(0, 0, 1), stage(1, 1, 3), num_microbatches=2))
COPIES = plan_of(pipeline(stage(0, 0, 3)), pipeline(stage(1, 0, 3)))


def train(rank: int, plan: dict[str, Any] | None) -> tuple[list[float], str]:
    """Return losses of a module whose optimizer asks for sizes, and what one for values gets."""
    torch.manual_seed(0)
    module, options = BySize(ToyOptions(tied=True)), quiet(devices=1, max_steps=4)
    batch_size = 8
    if plan is not None:
        options |= {"strategy": HeteroStrategy(ParallelPlan.from_dict(plan)), "devices": 2}
        batch_size //= len(plan["pipelines"])
    L.Trainer(**options).fit(module, loader(64, batch_size))
    said = ""
    if plan is not None:
        options["strategy"] = HeteroStrategy(ParallelPlan.from_dict(plan))
        with pytest.raises(ConfigurationError) as caught:
            L.Trainer(**options).fit(ByNorm(ToyOptions()), loader(64, batch_size))
        said = str(caught.value)
    return module.losses, said


@pytest.mark.dist
def test_optimizers_configured_by_size_train_as_on_a_single_device(pool: ProcessPool) -> None:
    alone, _ = pool.run(train, 1, None)[0]
    for plan in (TWO, COPIES):
        for losses, said in pool.run(train, 2, plan):
            assert losses == pytest.approx(alone, rel=1e-4)
            assert "parameter model.wpe are used in configure_optimizers" in said
