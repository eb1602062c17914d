"""Hugging Face models train under any plan, of any degrees, as they do on a single device."""

from dataclasses import replace
from typing import Any

import pytest

from tests.fits import assert_same, check, fit
from tests.plans import Plan, pipeline, plan_of, stage
from tests.processes import ProcessPool
from tests.runtime.huggingface_runs import CONFIGS, UNPLANNED_CONFIGS, HuggingFaceCase

pytestmark = pytest.mark.dist

TWO_AND_ONE = plan_of(pipeline(stage(0, 0, 1), stage(2, 1, 4)), pipeline(stage(1, 0, 4)))
THREE = plan_of(pipeline(stage(1, 0, 1), stage(0, 1, 2), stage(2, 2, 3), stage(1, 3, 4)))
MIXED = plan_of(pipeline(stage([2, 0], 0, 4)), pipeline(stage(1, 0, 4)))
STAGED = plan_of(pipeline(stage([3, 1], 0, 1), stage([0, 2], 1, 3), stage([3, 1], 3, 4)))
WIDER = plan_of(pipeline(stage(2, 0, 1), stage([1, 0], 1, 4)), pipeline(stage(3, 0, 4)))
NARROWER = plan_of(pipeline(stage([2, 0], 0, 2), stage(1, 2, 4)))
SEQUENCE_PARALLEL = {"sequence_parallel": True}
ALL = [*CONFIGS, *UNPLANNED_CONFIGS]
slow = pytest.mark.slow
OFTEN = {("llama", number) for number in range(6)} | {("gpt2", 0), ("gpt2", 2), ("mixtral", 3)}
"""Models and numbers of plans of the fast suite; the others are tried in the whole one."""
PLANS: list[tuple[Plan, list[str], dict[str, Any]]] = [
    (TWO_AND_ONE, ALL, {}),
    (THREE, ALL, {}),
    (STAGED, list(CONFIGS), {}),
    (WIDER, list(CONFIGS), {}),
    # Both ends are of degree 2 beside 1, which differ in what models tie and share.
    (MIXED, ["llama", "qwen3", "bert"], {}),
    # Plans for models whose regions end in what they add: BERT normalises after the addition.
    (NARROWER, [name for name in CONFIGS if name not in ("bert", "gpt2")], SEQUENCE_PARALLEL),
]
INSIDE = (THREE, STAGED)
"""Plans under which the loss is made inside the model, of padded rows."""


def case_of(model: str, plan: dict[str, Any], num_steps: int = 3, **more: Any) -> HuggingFaceCase:
    """Return a case of some iterations, of four rows of each pipeline."""
    rows = 4 * num_steps * len(plan["pipelines"])
    return HuggingFaceCase(model=model, plan=plan, **{"num_rows": rows, **more})


@pytest.mark.parametrize(
    ("model", "number"),
    [
        pytest.param(model, number, marks=[] if (model, number) in OFTEN else [slow])
        for number, (_, models, _) in enumerate(PLANS)
        for model in models
    ],
)
def test_a_plan_trains_a_hugging_face_model_as_one_device_does(
    pool: ProcessPool, model: str, number: int
) -> None:
    plan, _, options = PLANS[number]
    inside = plan in INSIDE
    loss = "inside" if inside else "outside"
    check(pool, case_of(model, plan, loss=loss, padded=inside, options=options))


def test_bf16_on_unequal_degrees_stays_near_fp32(pool: ProcessPool) -> None:
    check(pool, case_of("llama", MIXED, precision="bf16-mixed"), rtol=1e-2)


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_models_are_checkpointed_despite_their_caches(pool: ProcessPool, model: str) -> None:
    check(pool, case_of(model, TWO_AND_ONE, options={"activation_checkpointing": "full"}))


def test_a_models_own_checkpointing_works_in_stages(pool: ProcessPool) -> None:
    check(pool, case_of("llama", THREE, own_checkpointing=True))


@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=slow), True])
def test_a_models_own_checkpointing_draws_the_same_under_degrees(
    pool: ProcessPool, *, sequence_parallel: bool
) -> None:
    plan = plan_of(pipeline(stage([0, 1], 0, 1), stage([2, 3], 1, 4)))
    options = {"sequence_parallel": sequence_parallel}
    case = case_of("llama", plan, config={"attention_dropout": 0.3}, options=options)
    again = pool.run(fit, 4, replace(case, own_checkpointing=True))
    for found, plain in zip(again, pool.run(fit, 4, case), strict=True):
        assert_same(found, plain, 1e-6)


SIZES = {1: (8, 16), 2: (8, 16), 3: (24, 48)}
"""By number of key heads: query heads and hidden size."""


def with_heads(model: str, num_heads: int, plan: dict[str, Any], **more: Any) -> HuggingFaceCase:
    query, hidden = SIZES[num_heads]
    changes = {
        "num_attention_heads": query,
        "num_key_value_heads": num_heads,
        "hidden_size": hidden,
        "num_hidden_layers": 2,
        "head_dim": 2 if model != "phi3" else hidden // query,
        **({"layer_types": ["sliding_attention", "full_attention"]} if "gemma" in model else {}),
    }
    batch = 4 // len(plan["pipelines"])
    case = case_of(model, plan, config=changes, **more)
    return replace(case, batch_size=batch, num_rows=8)


DEGREES: list[Any] = [("llama", 4, 3), ("qwen3", 4, 2), ("gemma3_text", 2, 1)]
DEGREES += [
    pytest.param(*case, marks=slow) for case in (("llama", 4, 1), ("llama", 8, 2), ("phi3", 4, 3))
]


@pytest.mark.parametrize(("model", "degree", "num_heads"), DEGREES)
def test_key_heads_are_shared_out_to_groups_of_any_degree(
    pool: ProcessPool, model: str, degree: int, num_heads: int
) -> None:
    plan = plan_of(pipeline(stage(list(range(degree)), 0, 2)))
    check(pool, with_heads(model, num_heads, plan))


UNEQUAL_DEGREES = plan_of(
    pipeline(stage([2, 0, 4, 3], 0, 2)), pipeline(stage(1, 0, 1), stage(5, 1, 2))
)
EQUAL_DEGREES = plan_of(pipeline(stage([2, 0], 0, 2)), pipeline(stage([1, 3], 0, 2)))
GROUP = plan_of(pipeline(stage([2, 0, 1, 3], 0, 2)))


COPIED: list[Any] = [
    ("qwen3", EQUAL_DEGREES, 1, ("exchange", "collectives")),
    ("qwen3", GROUP, 3, ("sequence_parallel", True)),
    ("llama", UNEQUAL_DEGREES, 3, ("ownership", "holders")),
    ("llama", UNEQUAL_DEGREES, 1, ("exchange", "reduce-scatter")),
]
COPIED += [
    pytest.param(*case, marks=slow)
    for case in (
        ("qwen3", EQUAL_DEGREES, 1, ("exchange", "reduce-scatter")),
        ("llama", UNEQUAL_DEGREES, 3, ("ownership", "parameter")),
        ("llama", UNEQUAL_DEGREES, 3, ("redundancy", 1)),
        ("llama", UNEQUAL_DEGREES, 1, ("ownership", "even")),
    )
]


@pytest.mark.parametrize(("model", "plan", "num_heads", "option"), COPIED)
def test_copies_of_key_heads_are_summed_however_weights_are_owned_and_travel(
    pool: ProcessPool, model: str, plan: Any, num_heads: int, option: tuple[str, Any]
) -> None:
    check(pool, with_heads(model, num_heads, plan, options=dict([option])))
