"""Where a rank has slices only, shapes are those of the whole and values are refused by name."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.runtime.slices.known_by_shape import with_whole_shapes


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
