"""Tensor-parallel stages compute what one device would, in any mix of degrees."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_hetero.core.errors import ConfigurationError, ModelError
from lightning_hetero.runtime.setup.layout import ModelLayout
from lightning_hetero.runtime.stage.recomputation import LayerCall
from lightning_hetero.runtime.stage.side_tensors import refuse_pieces
from lightning_hetero.runtime.tensor_parallel.cuts import ModelCuts
from tests.fits import Case, check, check_refused, fit
from tests.plans import SHARDED, pipeline, plan_of, stage
from tests.processes import ProcessPool
from tests.runtime.test_parity import recomputation
from tests.runtime.toy_lm import TOY_PLAN, ToyLM

pytestmark = pytest.mark.dist

TOY = {"model": "toy", "optimizer": "sgd", "options": {"tp_plan": TOY_PLAN}}
"""Biases of the toy have gradients that nearly cancel: Adam would blow up their rounding."""
PACKED = {"model": "packed"}
CUT = {"model": "packed", "options": {"sequence_parallel": True}}
"""Packed micro-batches of random lengths: most numbers of tokens are odd."""
MIXED = plan_of(pipeline(stage([0, 2], 0, 3)), pipeline(stage(1, 0, 3)))
SELECTIVE = {"selective_layers": 2}
STAGED = plan_of(pipeline(stage([3, 1], 0, 1), stage([0, 2], 1, 3) | SELECTIVE))
MIXED_STAGED = plan_of(pipeline(stage([2, 0], 0, 3)), pipeline(stage(1, 0, 2), stage(3, 2, 3)))
WIDER = plan_of(pipeline(stage(0, 0, 1), stage([4, 1], 1, 3)), pipeline(stage([3, 2], 0, 3)))
BULGE = plan_of(pipeline(stage(2, 0, 1), stage([3, 0], 1, 2), stage(1, 2, 3)))
NARROWER = plan_of(pipeline(stage([2, 0], 0, 2), stage(1, 2, 3)))
FOUR = plan_of(pipeline(stage([1, 0, 2, 3], 0, 3)))
CASES: list[tuple[dict[str, Any], int, dict[str, Any]]] = [
    (MIXED, 3, {**TOY, "accumulate": 2, "clip_val": 0.1}),
    (MIXED_STAGED, 4, {**PACKED, "tied": False, "num_microbatches": 3}),
    (WIDER, 5, {**TOY, "ownership": "even"}),
    (FOUR, 4, {**PACKED, "clip_val": 0.2}),  # Ranks share its key heads.
    (STAGED, 4, {**CUT, "clip_val": 0.2}),
    (BULGE, 4, {**CUT, "clip_val": 0.2}),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_unequal_degrees_train_as_a_single_device_does(pool: ProcessPool, number: int) -> None:
    plan, world_size, features = CASES[number]
    check(pool, Case(plan=plan, world_size=world_size, **{"tied": True, **features}))


SHAPES = [
    [(2, 2)],
    [(2,), (2,)],
    [(2,), (1, 1)],
    [(2,), (1,)],
    [(2, 1), (1,)],
    [(1,), (1, 2)],
    [(1, 2, 1)],
    [(2, 1, 1)],
    [(4,)],
]
"""Degrees of the stages of each pipeline."""


@st.composite
def sharded_cases(draw: st.DrawFn) -> Case:
    """Up to two pipelines of one to three stages and degrees 1, 2 and 4 on four ranks."""
    ranks = list(draw(st.permutations(range(4))))
    shapes = draw(st.sampled_from(SHAPES))
    kind = TOY if shapes == [(4,)] else draw(st.sampled_from([TOY, PACKED, CUT]))
    pipelines = []
    for degrees in shapes:
        cut = [0, *sorted(draw(st.permutations([1, 2]))[: len(degrees) - 1]), 3]
        stages = []
        for degree, (first, last) in zip(degrees, pairwise(cut), strict=True):
            again = draw(recomputation(last - first, str(kind["model"]), has_budgets=True))
            stages.append(stage([ranks.pop() for _ in range(degree)], first, last) | again)
        pipelines.append(pipeline(*stages))
    return Case(
        plan=plan_of(*pipelines),
        world_size=4,
        tied=draw(st.booleans()),
        batch_size=draw(st.integers(2, 4)),
        num_microbatches=draw(st.sampled_from([None, 1, 3])),
        accumulate=draw(st.integers(1, 2)),
        clip_val=draw(st.sampled_from([None, 0.1])),
        ownership=draw(st.sampled_from(["auto", "holders", "even", "parameter"])),
        **kind,
    )


@given(case=sharded_cases())
@settings(
    max_examples=7,
    derandomize=True,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_any_small_plan_with_degrees_trains_as_a_single_device_does(
    pool: ProcessPool, case: Case
) -> None:
    check(pool, case)


def test_a_rank_holds_its_share_of_what_is_sharded(pool: ProcessPool) -> None:
    outcomes = pool.run(fit, 2, Case(plan=SHARDED, world_size=2, model="packed"))
    whole = sum(value.nbytes for value in outcomes[0].weights.values())
    norms = sum(value.nbytes for name, value in outcomes[0].weights.items() if "norm" in name)
    # Both ranks hold norms, and halves of the vocabulary's 23 rows are a row apart.
    slack = norms + 2 * 16 * 4
    assert all(abs(outcome.parameter_bytes[-1] - whole / 2) <= slack for outcome in outcomes)


GATHERED = {"blocks.*.proj": "rowwise_split_input", "blocks.*.qkv": "colwise_gather_output"}
GATHERED_CUT = {"tp_plan": GATHERED, "sequence_parallel": True}
REFUSED: dict[str, tuple[Case, tuple[str, ...]]] = {
    "degrees that heads cannot take": (
        Case(plan=plan_of(pipeline(stage([2, 0, 1], 0, 3))), world_size=3, model="packed"),
        ("ModelError", "4 heads", "Degrees that work for this model: 1, 2, 4."),
    ),
    "modules without a plan": (Case(plan=SHARDED, world_size=2, model="toy"), ("tp_plan=",)),
    "impossible sequence parallelism": (
        Case(plan=SHARDED, world_size=2, model="toy", options=GATHERED_CUT),
        (
            "sequence_parallel=True isn't possible",
            "norm1.weight is whole inside a sharded region",
        ),
    ),
    "a token beyond a sharded vocabulary": (
        Case(plan=SHARDED, world_size=2, **{**TOY, "model": "unknown id"}),
        ("Index 25 is out of range: there are 23",),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_sharded_is_refused_on_every_rank(pool: ProcessPool, name: str) -> None:
    case, told = REFUSED[name]
    check_refused(pool, case, *told)


@pytest.mark.parametrize(
    ("plan", "error", "message"),
    [
        ({"blocks.*.qkv": "diagonal"}, ConfigurationError, "'diagonal' for 'blocks.*.qkv'"),
        ({"blocks.*.query": "colwise"}, ConfigurationError, "'blocks.*.query' of tp_plan names no"),
        ({"norm": "colwise"}, ModelError, "belongs to a LayerNorm"),
        ({"head": "embedding_rowwise"}, ModelError, "belongs to a Linear"),
        ({"head": "rowwise"}, ModelError, "registered as embed.weight"),
        ({"head": "rowwise", "embed": "vocab"}, ModelError, "sharded along dim"),
    ],
)
def test_plans_that_fit_no_module_are_refused(
    plan: dict[str, str], error: type[Exception], message: str
) -> None:
    model = ToyLM(1, tied=True)
    with pytest.raises(error, match=message):
        ModelCuts.of(model, ModelLayout.of(model), plan)


def test_a_module_s_own_plan_counts_without_a_star_a_plan_of_a_head_alone_does_not() -> None:
    model = ToyLM(1, tied=False)
    model._tp_plan = {"head": "colwise_gather_output"}  # As Hugging Face's heads have it.
    with pytest.raises(ModelError, match="nothing says how ToyLM is sharded"):
        ModelCuts.of(model, ModelLayout.of(model))
    model.tp_plan = {name.removeprefix("blocks.*."): style for name, style in TOY_PLAN.items()}
    layout = ModelLayout.of(model)
    own, given = ModelCuts.of(model, layout), ModelCuts.of(model, layout, TOY_PLAN)
    assert own.layout.specs == given.layout.specs != layout.specs


def test_pieces_of_a_sequence_may_not_be_returned() -> None:
    layer, x = nn.Linear(2, 2), torch.randn(3, 2)
    call = LayerCall(0, layer.forward, (x,), {})
    refuse_pieces(call, (x, x))
    with pytest.raises(ModelError, match=r"Layer 0 returns tensors.*sequence_parallel"):
        refuse_pieces(call, (x, x + 1))
