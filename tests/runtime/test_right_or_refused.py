"""Each way of using layers and outer parameters trains as on one device, or is refused by name."""

from dataclasses import replace
from typing import Any

import pytest

from tests.fuzz.judge import EQUAL, REFUSED, judge
from tests.fuzz.recipes import Recipe
from tests.processes import ProcessPool

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    "features",
    [
        {"arguments": "table, hidden", "table": "parameter"},
        {"arguments": "keywords", "returned": "unused"},
        {"returned": "used", "plan": "three stages"},
        {"outer": "mask before layers"},
        {"inside": "changed in place", "plan": "unequal pipelines"},
        {"outer": "later loss"},
        {"outer": "embedding added behind", "arguments": "table, hidden"},
        {"outer": "embedding in layers", "frozen": "embedding"},
        {"outer": "tied", "dropout": True, "plan": "a rank at both ends"},
        {"frozen": "first layer", "plan": "unequal pipelines", "owners": "even"},
        {"buffer": "mean", "num_microbatches": 1, "later_plan": "stages reversed"},
        {"plan": "two ranks before one", "resumed_plan": "one rank before two"},
        {"plan": "one rank before two", "resumed_plan": "data parallel"},
        {"checkpointed": "layers", "dropout": True, "recompute": "full"},
        {"checkpointed": "pairs of layers", "dropout": True, "plan": "unequal pipelines"},
        {"checkpointed": "model", "dropout": True},
        {"checkpointed": "layers, reentrant", "dropout": True, "plan": "data parallel"},
    ],
    ids=str,
)
def test_what_stages_can_know_trains_as_on_one_device(
    pool: ProcessPool, features: dict[str, Any]
) -> None:
    verdict = judge(pool, replace(Recipe(), **features))
    assert verdict.kind == EQUAL, verdict.told


ELSEWHERE = "needs what layer 0 computes"


@pytest.mark.parametrize(
    ("features", "told"),
    [
        ({"checkpointed": "layers, reentrant"}, "use_reentrant=False"),
        ({"between": "relu_"}, "something in place between layer 0 and layer 1"),
        ({"between": "scaled"}, "something between layer 0 and layer 1"),
        ({"collected": "sum of hidden states"}, "returns needs the output of layer 0"),
        ({"collected": "first hidden state"}, "returns needs the output of layer 0"),
        ({"collected": "loss on layers"}, "layer 0 keeps in 'extra_loss'"),
        ({"collected": "gates on layers", "plan": "three stages"}, "layer 0 keeps in 'gates'"),
        ({"collected": "hook"}, f"What the step returns {ELSEWHERE}"),
        ({"collected": "logged hook"}, f"What is logged as 'hooked' {ELSEWHERE}"),
        (
            {"outer": "embedding added behind", "inside": "changed in place"},
            "aren't finite",
        ),
        (
            {"outer": "embedding in layers", "plan": "three stages"},
            "takes parameter model.embed.weight",
        ),
    ],
    ids=str,
)
def test_what_a_stage_can_not_know_is_refused_by_name(
    pool: ProcessPool, features: dict[str, Any], told: str
) -> None:
    verdict = judge(pool, replace(Recipe(), **features))
    assert verdict.kind == REFUSED, verdict.told
    assert told in verdict.told


@pytest.mark.parametrize(
    "features", [{"between": "relu_"}, {"collected": "hook"}, {"returned": "used"}]
)
def test_one_stage_knows_all(pool: ProcessPool, features: dict[str, Any]) -> None:
    verdict = judge(pool, replace(Recipe(), plan="alone", **features))
    assert verdict.kind == EQUAL, verdict.told
