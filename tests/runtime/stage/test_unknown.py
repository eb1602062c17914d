"""What a stage can't know has a shape and no values, and nothing goes on with made-up ones."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetero.core.errors import ModelError
from lightning_hetero.runtime.unknown import Origin, Unknown, check_known

CPU = torch.device("cpu")
ORIGIN = Origin("the output of layer 2", "Compute it elsewhere.")


def unknown(*shape: int) -> Unknown:
    return Unknown.of(shape, torch.float32, CPU, ORIGIN)


@pytest.mark.parametrize("inference", [False, True])
def test_what_is_computed_from_unknown_tensors_has_its_form_and_its_origin(
    *, inference: bool
) -> None:
    with torch.inference_mode(mode=inference):
        weight = nn.Parameter(unknown(23, 16))
        x = F.embedding(torch.randint(23, (2, 8)), weight) + torch.ones(8, 16)
        x = F.layer_norm(x, (16,))
        x[:, 0] = 3.0
        x[:, 1] += torch.ones(16)
        first, second = x.chunk(2, dim=-1)
        made = torch.cat([second, first], dim=1).bfloat16()
    assert isinstance(made, Unknown)
    assert (tuple(made.shape), made.dtype, made.device) == ((2, 16, 8), torch.bfloat16, CPU)
    assert repr(made) == ("Unknown(the output of layer 2, shape=(2, 16, 8), dtype=torch.bfloat16)")
    with pytest.raises(ModelError, match=r"Layer 3 takes the output of layer 2\. Compute it else"):
        check_known({"a": [made]}, "Layer 3 takes")


def test_what_takes_only_the_shape_is_known() -> None:
    assert torch.equal(torch.ones_like(unknown(2, 3)), torch.ones(2, 3))
    assert torch.equal(unknown(2, 3).new_zeros(4), torch.zeros(4))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: float(x.sum()),
        lambda x: bool((x > 0).any()),
        lambda x: x.nonzero(),
        lambda x: torch.ones(2, 3)[x > 0],
        lambda x: torch.equal(x, x),
        lambda x: x.unique(),
        lambda x: x.numpy(),
        lambda x: x.tolist(),
        lambda x: f"{x.sum():.3f}",
        lambda x: torch.zeros(2, 3).add_(x),
        lambda x: torch.zeros(2, 3).copy_(x),
        lambda x: torch.zeros(4).__setitem__(0, x.sum()),
        lambda x: torch.poisson(x),
        lambda x: pickle.dumps({"x": x}),
    ],
)
def test_what_needs_values_is_refused_by_name(read: Callable[[Tensor], Any]) -> None:
    with pytest.raises(ModelError, match=r"needs the output of layer 2\. Compute it elsewhere"):
        read(unknown(2, 3))


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: F.dropout(x, 0.3),
        lambda x: torch.rand_like(x),
        lambda x: x.clone().normal_(),
        lambda x: torch.bernoulli(x),
    ],
)
def test_as_many_random_numbers_are_drawn_as_on_values(draw: Callable[[Tensor], Any]) -> None:
    after = []
    for x in (torch.full((4, 5), 0.5), unknown(4, 5)):
        torch.manual_seed(3)
        draw(x)
        after.append(torch.rand(3))
    assert torch.equal(*after)


def test_a_sealed_tensor_may_be_looked_at_and_not_changed() -> None:
    sealed = Unknown.of((2, 3), torch.float32, CPU, ORIGIN, "Nothing between layers.")
    assert (sealed * 2).mean().add_(1).shape == ()
    for change in (F.relu_, lambda x: x[:, 0].add_(1), lambda x: x.view(6).zero_()):
        with pytest.raises(ModelError, match=r"Nothing between layers\."):
            change(sealed)


def test_known_masks_choose_rows() -> None:
    assert unknown(3, 2)[torch.tensor([True, False, True])].shape == (2, 2)
    assert unknown(3, 2)[torch.tensor([True, False, False])].shape == (1, 2)
