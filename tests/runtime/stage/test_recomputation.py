"""Which layers are computed again, and that compiled ones train alike."""

import os
import pickle
import shutil
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.runtime.stage.boundary import StageBoundary
from lightning_hetero.runtime.stage.microbatch_pass import MicrobatchPass
from lightning_hetero.runtime.stage.recomputation import LayerOptions, Recomputation
from tests.fits import SEED, Case, Outcome, assert_same, fit, outcome_of, train
from tests.plans import pipeline, plan_of, stage
from tests.processes import ProcessPool
from tests.toy import CONTEXT, GPT, VOCABULARY

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("c++") is None,
    reason="torch.compile needs a C++ compiler on CPU",
)


def whole_pass(num_layers: int, recomputation: Recomputation) -> MicrobatchPass:
    """A micro-batch's pass through a stage that has all layers."""
    return MicrobatchPass(
        layers=range(num_layers),
        num_layers=num_layers,
        seed=(1,),
        receive=None,
        wait_unit=lambda index: None,
        recomputation=recomputation,
    )


@pytest.mark.parametrize("num_together", [1, 2])
@pytest.mark.parametrize(
    "also", [Recomputation(layers=range(4)), Recomputation(layers=(0,), selective=range(1, 4))]
)
def test_layers_that_the_model_checkpoints_itself_run_again_once(
    num_together: int, also: Recomputation
) -> None:
    model = GPT(4, 16, tied=False)
    boundary = StageBoundary(list(model.blocks))
    calls: list[int] = []
    for index, block in enumerate(model.blocks):
        block.norm1.register_forward_hook(lambda *_, index=index: calls.append(index))
    parts = [model.blocks[i : i + num_together] for i in range(0, 4, num_together)]

    def step(_: None) -> Tensor:
        hidden = torch.ones(2, CONTEXT, 16, requires_grad=True)
        for part in parts:
            hidden = checkpoint(nn.Sequential(*part), hidden, use_reentrant=False)
        return hidden.sum()

    whole = whole_pass(4, recomputation=also)
    loss = boundary.run_step(whole, step, None)
    boundary.run_backward(whole, [loss], [torch.ones_like(loss)])
    boundary.remove()
    assert sorted(calls) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("value", "whole", "selective"),
    [
        ("none", set(), set()),
        ("full", {1, 2, 3, 4, 5}, set()),
        (1, {1, 2, 3, 4, 5}, set()),
        (2, {2, 4}, set()),
        (3, {3}, set()),
        ("selective", set(), {1, 2, 3, 4, 5}),
    ],
)
def test_every_nth_layer_is_recomputed(value: Any, whole: set[int], selective: set[int]) -> None:
    options = LayerOptions(activation_checkpointing=value)
    assert set(options.recomputed(range(1, 6))) == whole
    assert set(options.selective(range(1, 6))) == selective


@pytest.mark.parametrize(
    ("options", "told"),
    [
        *(
            ({"activation_checkpointing": value}, "activation_checkpointing is")
            for value in ("half", 0, -1, True, None)
        ),
        (
            {"activation_checkpointing": "full", "activation_budget_bytes": 1000},
            r"'full' and activation_budget_bytes is 1000\.",
        ),
        ({"activation_budget_bytes": 0}, "1 or more"),
        (
            {"activation_checkpointing": "selective", "compile_layers": True},
            "a compiler chooses itself what it keeps",
        ),
    ],
)
def test_other_values_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        LayerOptions(**options)


@pytest.mark.filterwarnings("ignore")  # The compiler warns of torch's own code.
def test_compiled_layers_are_pickled_and_may_be_as_many_as_a_model_has() -> None:
    options = LayerOptions(compile_layers=True)
    copy = pickle.loads(pickle.dumps(options.wrap_layer(0, nn.Linear(2, 2).forward)))
    assert copy(torch.zeros(2)).shape == (2,)
    with torch._dynamo.config.patch(recompile_limit=8):
        layers = [nn.Linear(2, 2) for _ in range(12)]
        StageBoundary(layers, wrap_layer=options.wrap_layer).remove()
        assert torch._dynamo.config.recompile_limit >= len(layers)


def train_compiled(rank: int, case: Case, how: str) -> tuple[Outcome, int]:
    """Train a case with layers captured but not translated; returns also how many graphs."""
    torch._dynamo.reset()
    counters.clear()
    L.seed_everything(SEED, verbose=False)
    module = case.module()
    layers = next(item for item in module.modules() if isinstance(item, nn.ModuleList))
    captured_only = partial(torch.compile, backend="eager")
    for index, layer in enumerate(layers):
        if how == "compile":
            layer.compile(backend="eager")
        if how == "torch.compile":
            layers[index] = captured_only(layer)
    with mock.patch.object(torch, "compile", captured_only):
        outcome = outcome_of(train(case, module=module))
    named = {name.replace("_orig_mod.", ""): item for name, item in outcome.weights.items()}
    return replace(outcome, weights=named), counters["stats"]["unique_graphs"]


# Few ranks, layers and lengths: what takes long is to capture each anew.
DEGREES = Case(
    plan=plan_of(pipeline(stage([2, 0], 0, 1), stage(1, 1, 2))),
    world_size=3,
    model="packed",
    num_layers=2,
    batch_size=3,
    num_rows=6,
    num_microbatches=2,
    options={"compile_layers": True, "activation_checkpointing": "full"},
)
# More layers than dynamo compiles one by one. They are recomputed as a whole: a compiler chooses
# itself what it keeps.
MANY = Case(
    plan=plan_of(pipeline(stage(2, 0, 1), stage(0, 1, 12)), pipeline(stage(1, 0, 12))),
    world_size=3,
    num_layers=12,
    num_microbatches=2,
    optimizer="sgd",
    options={"activation_checkpointing": "selective"},
)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "how"), [(DEGREES, "compile_layers"), (MANY, "compile"), (MANY, "torch.compile")]
)
def test_compiled_layers_share_their_code_and_train_alike(
    pool: ProcessPool, case: Case, how: str
) -> None:
    expected = pool.run_alone(fit, case.on_single_device())
    for outcome, num_graphs in pool.run(train_compiled, 3, case, how, timeout_s=280.0):
        assert num_graphs == 1 or (case is DEGREES and num_graphs > 0)
        assert_same(outcome, expected)


@needs_compiler
@pytest.mark.slow
@pytest.mark.skipif(
    "ATEN_CPU_CAPABILITY" in os.environ,
    reason="inductor asks the processor, not ATen, which vectors there are",
)
@pytest.mark.filterwarnings("ignore")  # The compiler warns of torch's own code.
def test_layers_compiled_by_inductor_compute_the_same() -> None:
    torch.manual_seed(0)
    model = GPT(2, 16, tied=False)
    ids = torch.randint(VOCABULARY, (2, CONTEXT))

    def gradients() -> list[Tensor]:
        return list(torch.autograd.grad(model(ids).square().mean(), list(model.parameters())))

    plain = gradients()
    boundary = StageBoundary(
        list(model.blocks), wrap_layer=LayerOptions(compile_layers=True).wrap_layer
    )
    torch._dynamo.reset()
    counters.clear()
    compiled = gradients()
    boundary.remove()
    assert counters["stats"]["unique_graphs"] == 1, "like layers share their code"
    for found, expected in zip(compiled, plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
