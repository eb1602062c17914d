"""Weights' gradients that wait are those of a whole backward, bit for bit."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_hetero.runtime.stage.split_layers import LayerSplitter

WIDTH = 8


class Experts(nn.Module):
    """Matrices of several experts in one parameter, as Hugging Face's mixtures have them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 2 * WIDTH, WIDTH))
        self.down = nn.Parameter(torch.randn(WIDTH, 3 * 2 * WIDTH))

    def forward(self, rows: Tensor) -> Tensor:
        parts = []
        for expert, part in enumerate(rows.split(4)):
            made = F.gelu(F.linear(part, self.up[expert]))
            columns = self.down[:, expert * 2 * WIDTH : (expert + 1) * 2 * WIDTH]
            parts.append(part + F.linear(made, columns) + F.linear(part, self.up[0, :WIDTH]))
        return torch.cat(parts)


class Model(nn.Module):
    """An embedding, two linear layers of which one is used twice, experts and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, WIDTH, padding_idx=-3)
        self.rare = nn.Embedding(20, WIDTH, scale_grad_by_freq=True)
        self.bound = nn.Embedding(20, WIDTH, max_norm=0.5)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.experts = Experts()

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.words(ids) + self.rare(ids) + self.bound(ids)
        rows = self.second(F.gelu(self.first(self.second(rows))))
        return F.linear(self.experts(rows), self.words.weight)


def train(*, is_16_bit: bool, is_split: bool) -> dict[str, Tensor]:
    """Return the gradients of three micro-batches."""
    torch.manual_seed(2)
    model = Model()
    names = {parameter: name for name, parameter in model.named_parameters()}
    splitter = LayerSplitter(names)
    with splitter.active() if is_split else nullcontext():
        for microbatch in range(3):
            before = {n: None if p.grad is None else p.grad.clone() for p, n in names.items()}
            key = 0, microbatch
            with splitter.collecting(key):
                with torch.autocast("cpu", torch.bfloat16, enabled=is_16_bit):
                    loss = model(torch.randint(0, 20, (12,))).float().square().mean()
                loss.backward()
            waiting = splitter.names_waiting(key)
            assert waiting == (set(before) - {"bound.weight"} if is_split else set())
            for name in waiting:
                grad, old = model.get_parameter(name).grad, before[name]
                assert grad is old or torch.equal(grad, old)
            splitter.run_weights(key)
    return {name: parameter.grad for parameter, name in names.items()}


@pytest.mark.parametrize("is_16_bit", [False, True])
def test_weights_that_wait_get_the_gradients_of_autograd(*, is_16_bit: bool) -> None:
    found, expected = (train(is_16_bit=is_16_bit, is_split=item) for item in (True, False))
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name
