"""Layers that let samples meet are refused, others are left as they were."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetero.core.errors import ModelError
from lightning_hetero.runtime.stage.layer_calls import LayerCall
from lightning_hetero.runtime.stage.layer_trial import LayerTrial
from lightning_hetero.runtime.stage.side_tensors import LayerLeavings
from tests.processes import ProcessPool
from tests.runtime.runs import pipeline, plan_of, stage
from tests.runtime.step_cases import COPIES, STAGES, TinyModule, fit, fit_each

ROWS, TOKENS, WIDTH = 3, 5, 4
Compute = Callable[[Tensor], Tensor]


class Layer(nn.Module):
    """A residual layer that computes what it is made with."""

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return x + self.compute(self.linear(x))


def _with_capacity(x: Tensor) -> Tensor:
    """Let one of two experts compute its tokens, first come first served."""
    tokens = x.flatten(0, 1)
    chosen = tokens[:, 0] > 0
    served = chosen & (chosen.cumsum(0) <= 5 * len(tokens) // 8)
    return torch.where(served[:, None], tokens.tanh(), 0.0).view_as(x)


MEETING: dict[str, Compute] = {
    "centred": lambda x: x - x.mean(0),
    "scaled by what autograd doesn't see": lambda x: x / x.std(0, unbiased=False).detach().add(1),
    "normalised": lambda x: F.batch_norm(x.transpose(1, 2), None, None, training=True).mT,
    "attention over samples": lambda x: torch.softmax(x @ x.mT, 0) @ x,
    "the next sample's": lambda x: x.roll(-1, 0),
    "the first one's": lambda x: torch.cat([x[:1], x[1:] - x[:1]]),
}
APART: dict[str, Compute] = {
    "layer norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "attention": lambda x: torch.softmax(x @ x.mT, -1) @ x,
    "statistics of a sample": lambda x: x - x.mean((1, 2), keepdim=True),
    "dropout": lambda x: F.dropout(x, 0.5),
    "experts": lambda x: torch.where(x[..., :1] > x[..., 1:2], x.tanh(), x.sin()),
    "instance norm": lambda x: F.instance_norm(x.mT).mT,
    "in place": lambda x: x.add_(1),
}


def _try(layer: nn.Module, x: Tensor, microbatch: Any = None, *, is_shared: bool = False) -> Tensor:
    microbatch = torch.zeros(len(x)) if microbatch is None else microbatch
    call = LayerCall(0, layer.forward, (x,), {})
    trial = LayerTrial(microbatch).begin(call, None, is_shared=is_shared)
    output: Tensor = call.run()
    if trial is not None:
        trial.check(layer, LayerLeavings([layer]))
    return output


def _rows(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("compute", MEETING.values(), ids=MEETING)
@pytest.mark.parametrize("num_rows", [ROWS, 1])
def test_samples_that_meet_are_refused(compute: Compute, num_rows: int) -> None:
    torch.manual_seed(0)
    layer = Layer(compute)
    with pytest.raises(ModelError, match=r"Layer 0, a Layer, lets samples meet.*local_buffers"):
        _try(layer, _rows(num_rows, TOKENS, WIDTH))
    with pytest.raises(ModelError, match="lets samples meet"), torch.autocast("cpu"):
        _try(layer, _rows(num_rows, TOKENS, WIDTH))


def test_experts_with_a_capacity_are_refused() -> None:
    layer = Layer(_with_capacity)
    nn.init.eye_(layer.linear.weight)
    nn.init.zeros_(layer.linear.bias)
    x = _rows(ROWS, TOKENS, WIDTH)
    x[-1, :, 0] = x[-1, :, 0].abs()
    with pytest.raises(ModelError, match="lets samples meet"):
        _try(layer, x)


@pytest.mark.parametrize("compute", APART.values(), ids=APART)
@pytest.mark.parametrize("num_rows", [ROWS, 1, TOKENS])
def test_samples_that_keep_apart_are_left_alone(compute: Compute, num_rows: int) -> None:
    torch.manual_seed(0)
    x, layer = _rows(num_rows, TOKENS, WIDTH), Layer(compute)
    expected = LayerCall(0, layer.forward, (x,), {}).run()
    drawn = torch.get_rng_state()
    torch.manual_seed(0)
    Layer(compute)
    found = _try(layer, x.clone())
    assert torch.equal(found, expected)
    assert torch.equal(torch.get_rng_state(), drawn)


def test_samples_are_found_in_the_second_dim() -> None:
    layer = Layer(lambda x: x - x.mean(1, keepdim=True))
    with pytest.raises(ModelError, match="lets samples meet"):
        _try(layer, _rows(TOKENS, ROWS, WIDTH), torch.zeros(ROWS))
    _try(Layer(lambda x: x - x.mean(0)), _rows(TOKENS, ROWS, WIDTH), torch.zeros(ROWS))


@pytest.mark.parametrize("ends", [[0, 2, 3, TOKENS], [0, 4, TOKENS]])
def test_attention_has_to_end_where_packed_samples_end(ends: list[int]) -> None:
    starts = torch.tensor(ends, dtype=torch.int32)
    sample = torch.searchsorted(starts[1:-1], torch.arange(TOKENS), right=True)
    batch = SimpleNamespace(cu_seqlens=starts, num_samples=len(ends) - 1, split=None)

    def attend(x: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    apart = sample[:, None] == sample
    _try(Layer(lambda x: attend(x, apart)), _rows(1, TOKENS, WIDTH), batch)
    everywhere = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    with pytest.raises(ModelError, match="lets samples meet"):
        _try(Layer(lambda x: attend(x, everywhere)), _rows(1, TOKENS, WIDTH), batch)


def test_buffers_are_left_to_those_who_watch_them_and_hooks_see_one_call() -> None:
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(TOKENS))
    seen: list[Any] = []
    layer[0].register_forward_hook(lambda *_: seen.append(1))
    _try(layer, _rows(ROWS, TOKENS, WIDTH))
    assert layer[1].num_batches_tracked == 1
    assert seen == [1]
    assert len(layer[0]._forward_hooks) == 1


def test_a_layer_that_others_compute_too_is_called_as_often_whatever_its_values_are() -> None:
    calls = []

    def compute(x: Tensor) -> Tensor:
        calls.append(x)
        return x - x.mean(0)

    with pytest.raises(ModelError, match="lets samples meet"):
        _try(Layer(compute), _rows(ROWS, TOKENS, WIDTH), is_shared=True)
    assert len(calls) == 7
    _try(Layer(compute), _rows(1, TOKENS, WIDTH), is_shared=True)
    assert len(calls) == 8, "one sample is not doubled there"
    with pytest.raises(ModelError, match="lets samples meet"):
        # Here it has as many tokens as there are samples, elsewhere it may have one less.
        _try(Layer(compute), _rows(ROWS, ROWS, WIDTH), is_shared=True)
    assert len(calls) == 15
    call = LayerCall(0, Layer(compute).forward, (_rows(ROWS, TOKENS, WIDTH),), {})
    trial = LayerTrial(torch.zeros(ROWS), tries_shared=False)
    assert trial.begin(call, None, is_shared=True) is None, "not all of them try it"


def test_what_is_unlike_on_other_values_tells_nothing() -> None:
    layer = Layer(lambda x: x + torch.poisson(x.abs() + 20 * x.mean(0).abs()))
    _try(layer, _rows(ROWS, TOKENS, WIDTH))
    calls: list[Tensor] = []

    def compute(x: Tensor) -> Tensor:
        calls.append(x)
        if len(calls) > 1:
            raise ValueError("once is enough")
        return x - x.mean(0)

    _try(Layer(compute), _rows(ROWS, TOKENS, WIDTH))


def test_a_layer_that_counts_its_calls_elsewhere_is_left_alone() -> None:
    calls: list[Tensor] = []

    def compute(x: Tensor) -> Tensor:
        calls.append(x)
        return x * len(calls)

    _try(Layer(compute), _rows(ROWS, TOKENS, WIDTH))


class CentresInLayer(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.model.layers[1].append(_Centred())


class _Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


@pytest.mark.dist
@pytest.mark.parametrize("plan", [STAGES, COPIES])
def test_runs_refuse_such_layers_on_every_rank_unless_that_is_wanted(
    pool: ProcessPool, plan: dict[str, Any]
) -> None:
    for (message,) in pool.run(fit_each, 2, [CentresInLayer], plan):
        assert "Layer 1, a Sequential, lets samples meet" in message
    for (result,) in pool.run(fit_each, 2, [CentresInLayer], plan, {"local_buffers": True}):
        assert len(result["losses"]) == 4


@pytest.mark.dist
def test_one_micro_batch_is_the_whole_batch(pool: ProcessPool) -> None:
    whole = plan_of(pipeline(stage(0, 0, 2), stage(1, 2, 3), num_microbatches=1))
    expected = fit(0, CentresInLayer, None)["losses"]
    for found in pool.run(fit, 2, CentresInLayer, whole):
        assert found["losses"] == pytest.approx(expected, rel=1e-5)
