"""Tensor-parallel stages compute what one device would, in any mix of degrees."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_hetero.core.errors import ConfigurationError, ModelError
from lightning_hetero.models import HeteroLM, LMConfig
from lightning_hetero.runtime.setup.layout import ModelLayout
from lightning_hetero.runtime.tensor_parallel.cuts import ModelCuts
from tests.processes import ProcessPool
from tests.runtime.runs import Case, Outcome, pipeline, plan_of, stage
from tests.runtime.tensor_parallel_runs import (
    TOY_PLAN,
    ToyLM,
    fit_error,
    predict_sharded,
    read_states,
    train_sharded,
)
from tests.runtime.test_parity import assert_same_training, assert_same_weights, recomputation

pytestmark = pytest.mark.dist

TOY = {"tp_plan": TOY_PLAN}
REFERENCE_PLAN = HeteroLM(LMConfig(vocab_size=8, hidden_size=8, num_layers=1, num_heads=2)).tp_plan
# Some biases of the toy have gradients that nearly cancel: Adam would blow up their rounding.
OPTIMIZERS = {"packed": "adamw", "toy": "sgd"}
MIXED = plan_of(pipeline(stage([0, 2], 0, 3)), pipeline(stage(1, 0, 3)))
SELECTIVE = {"selective_layers": 2}
STAGED = plan_of(pipeline(stage([3, 1], 0, 1), stage([0, 2], 1, 3) | SELECTIVE))
MIXED_STAGED = plan_of(pipeline(stage([2, 0], 0, 3)), pipeline(stage(1, 0, 2), stage(3, 2, 3)))
WIDER = plan_of(pipeline(stage(0, 0, 1), stage([4, 1], 1, 3)), pipeline(stage([3, 2], 0, 3)))
BULGE = plan_of(pipeline(stage(2, 0, 1), stage([3, 0], 1, 2), stage(1, 2, 3)))
NARROWER = plan_of(pipeline(stage([2, 0], 0, 2), stage(1, 2, 3)))
FOUR = plan_of(pipeline(stage([1, 0, 2, 3], 0, 3)))


def check(pool: ProcessPool, case: Case, options: dict[str, Any] | None = None) -> list[Outcome]:
    options = options or ({} if case.model == "packed" else TOY)
    expected = pool.run_alone(train_sharded, case.on_single_device(), {})
    assert len(set(expected.losses)) == len(expected.losses) > 0, "the oracle doesn't train"
    outcomes = pool.run(train_sharded, case.world_size, case, options)
    for outcome in outcomes:
        assert_same_training(outcome, expected)
    return outcomes


@pytest.mark.parametrize(
    ("plan", "world_size", "model", "features"),
    [
        (MIXED, 3, "packed", {"tied": True, "accumulate": 2, "clip_val": 0.1}),
        (MIXED, 3, "toy", {"tied": True, "accumulate": 2, "clip_val": 0.1}),
        (STAGED, 4, "toy", {"tied": True, "clip_val": 0.3}),
        (MIXED_STAGED, 4, "packed", {"num_microbatches": 3}),
        (WIDER, 5, "toy", {"ownership": "even", "tied": True}),
        (BULGE, 4, "packed", {"tied": True, "num_microbatches": 4}),
    ],
    ids=["mixed", "mixed toy", "staged", "mixed and staged", "wider", "bulge"],
)
def test_unequal_degrees_train_as_a_single_device_does(
    pool: ProcessPool, plan: dict[str, Any], world_size: int, model: str, features: dict[str, Any]
) -> None:
    case = Case(plan=plan, world_size=world_size, model=model, **features)
    check(pool, replace(case, optimizer=OPTIMIZERS[model]))


def test_four_ranks_share_each_layer_of_a_toy(pool: ProcessPool) -> None:
    check(pool, Case(plan=FOUR, world_size=4, model="toy", optimizer="sgd", clip_val=0.2))


@pytest.mark.parametrize(
    ("plan", "world_size"),
    [(MIXED, 3), (STAGED, 4), (BULGE, 4), (NARROWER, 3)],
    ids=["mixed", "staged", "bulge", "narrower"],
)
def test_sequence_parallelism_changes_nothing_but_rounding(
    pool: ProcessPool, plan: dict[str, Any], world_size: int
) -> None:
    # Packed micro-batches of random lengths: most numbers of tokens are odd.
    case = Case(plan=plan, world_size=world_size, model="packed", tied=True, clip_val=0.2)
    check(pool, case, {"sequence_parallel": True})


@st.composite
def sharded_cases(draw: st.DrawFn) -> tuple[Case, dict[str, Any]]:
    """Up to two pipelines of one to three stages and degrees 1, 2 and 4 on four ranks."""
    ranks = list(draw(st.permutations(range(4))))
    shapes = draw(
        st.sampled_from(
            [
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
        )
    )
    model = "toy" if shapes == [(4,)] else draw(st.sampled_from(["toy", "packed"]))
    pipelines = []
    for degrees in shapes:
        cut = [0, *sorted(draw(st.permutations([1, 2]))[: len(degrees) - 1]), 3]
        stages = []
        for degree, (first, last) in zip(degrees, pairwise(cut), strict=True):
            again = draw(recomputation(last - first, model))
            stages.append(stage([ranks.pop() for _ in range(degree)], first, last) | again)
        pipelines.append(pipeline(*stages))
    case = Case(
        plan=plan_of(*pipelines),
        world_size=4,
        model=model,
        tied=draw(st.booleans()),
        optimizer=OPTIMIZERS[model],
        batch_size=draw(st.integers(2, 4)),
        num_microbatches=draw(st.sampled_from([None, 1, 3])),
        accumulate=draw(st.integers(1, 2)),
        clip_val=draw(st.sampled_from([None, 0.1])),
        ownership=draw(st.sampled_from(["auto", "holders", "even", "parameter"])),
    )
    if model == "toy":
        return case, TOY
    return case, {"sequence_parallel": draw(st.booleans())}


@given(drawn=sharded_cases())
@settings(
    max_examples=7,
    derandomize=True,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_any_small_plan_with_degrees_trains_as_a_single_device_does(
    pool: ProcessPool, drawn: tuple[Case, dict[str, Any]]
) -> None:
    check(pool, *drawn)


def test_a_rank_holds_its_share_of_what_is_sharded(pool: ProcessPool) -> None:
    case = Case(plan=plan_of(pipeline(stage([0, 1], 0, 3))), world_size=2, model="packed")
    outcomes = pool.run(train_sharded, 2, case, {})
    whole = sum(value.nbytes for value in outcomes[0].weights.values())
    norms = sum(value.nbytes for name, value in outcomes[0].weights.items() if "norm" in name)
    # Both ranks hold norms, and halves of the vocabulary's 23 rows are a row apart.
    slack = norms + 2 * 16 * 4
    assert all(abs(outcome.parameter_bytes[-1] - whole / 2) <= slack for outcome in outcomes)


@pytest.mark.parametrize("first_degree", [1, 2])
@pytest.mark.slow
def test_a_checkpoint_of_one_degree_resumes_under_another(
    pool: ProcessPool, tmp_path: Path, first_degree: int
) -> None:
    case = Case(plan=STAGED, world_size=4, model="toy", num_rows=16, batch_size=4, tied=True)
    other = replace(case, plan=NARROWER, world_size=3)
    first, later = (other, case) if first_degree == 1 else (case, other)
    path = str(tmp_path / "half.ckpt")
    whole = pool.run(train_sharded, first.world_size, first, TOY, 2, path)[0]
    resumed = pool.run(train_sharded, later.world_size, later, TOY, 0, "", path)[0]
    assert len(whole.losses) > 2
    np.testing.assert_allclose(resumed.losses, whole.losses[2:], rtol=1e-5)
    assert_same_weights(resumed.weights, whole.weights)
    shapes = pool.run(read_states, 1, path)[0]
    assert {(48, 16), (16, 32), (23, 16)} <= set(shapes.values())


def test_predictions_are_whole_logits(pool: ProcessPool) -> None:
    case = Case(plan=STAGED, world_size=4, model="toy")
    for differences in pool.run(predict_sharded, 4, case, TOY):
        assert len(differences) == 2
        assert max(differences) < 1e-5


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_degrees_that_heads_cannot_take_are_refused_with_those_they_can(
    pool: ProcessPool, order: list[int]
) -> None:
    case = Case(plan=plan_of(pipeline(stage(order, 0, 3))), world_size=3, model="packed")
    for message in pool.run(fit_error, 3, case, {}):
        assert "ModelError" in message
        assert "4 heads" in message
        assert "Degrees that work for this model: 1, 2, 4." in message


def test_the_reference_model_shares_key_heads(pool: ProcessPool) -> None:
    check(pool, Case(plan=FOUR, world_size=4, model="packed", tied=True, clip_val=0.2))


def test_modules_without_a_plan_and_impossible_sequence_parallelism_are_refused(
    pool: ProcessPool,
) -> None:
    case = Case(plan=plan_of(pipeline(stage([0, 1], 0, 3))), world_size=2, model="toy")
    assert "tp_plan=" in pool.run(fit_error, 2, case, {})[0]
    pair = {"blocks.*.proj": "rowwise_split_input", "blocks.*.qkv": "colwise_gather_output"}
    message = pool.run(fit_error, 2, case, {"tp_plan": pair, "sequence_parallel": True})[0]
    assert "sequence_parallel=True isn't possible" in message
    assert "norm1.weight is whole inside a sharded region" in message


def test_a_token_beyond_a_sharded_vocabulary_is_refused_on_every_rank(pool: ProcessPool) -> None:
    case = Case(plan=plan_of(pipeline(stage([0, 1], 0, 3))), world_size=2, model="unknown id")
    for error in pool.run(fit_error, 2, case, {"tp_plan": TOY_PLAN}):
        assert "Index 25 is out of range: there are 23" in error


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


def test_fused_projections_are_cut_block_by_block() -> None:
    model = ToyLM(1, tied=False)
    specs = ModelCuts.of(model, ModelLayout.of(model), TOY_PLAN).layout.specs
    cuts = {spec.name: spec for spec in specs}
    assert cuts["blocks.0.qkv.weight"].rows_of(1, 2) == ((8, 16), (24, 32), (40, 48))
    assert (cuts["blocks.0.proj.weight"].tp_dim, cuts["blocks.0.proj.bias"].tp_dim) == (1, None)
    assert cuts["blocks.0.norm_head.weight"].tp_partial
    assert cuts["head.weight"].rows_of(1, 2) == ((12, 23),)
    assert cuts["blocks.0.norm1.weight"].tp_dim is None


def test_embeddings_that_need_their_whole_weight_are_refused() -> None:
    model = ToyLM(1, tied=False)
    model.embed = nn.Embedding(23, 16, max_norm=1.0)
    with pytest.raises(ModelError, match="max_norm"):
        ModelCuts.of(model, ModelLayout.of(model), {"embed": "vocab"})
