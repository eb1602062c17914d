"""Layers may hand on, return, keep and read whatever they do on one device, or are refused."""

from functools import partial
from typing import Any

import pytest

from tests.fits import Make, attempt, check, each, refused
from tests.plans import COPIES, SHARDED, STAGES, THREE, TURNED, pipeline, plan_of, stage
from tests.processes import ProcessPool
from tests.runtime.steps.layer_modules import (
    Catches,
    Free,
    HandsOn,
    Keeps,
    Outer,
    Penalised,
    Router,
)

pytestmark = pytest.mark.dist

SHARED = plan_of(pipeline(stage([0, 1], 0, 1), stage([2, 3], 1, 3)))
IN_TURN = (TURNED, STAGES) * 3
PAIR = {"num_microbatches": 1}
MIXING = {"allow_mixing": True}
"""Losses of layers and routers are of a micro-batch."""


def of(module: Any, *kinds: Any) -> list[Make]:
    return [partial(module, kind) for kind in kinds]


def test_layers_may_change_shape_and_dtype_of_the_hidden_state(pool: ProcessPool) -> None:
    how: dict[str, Any] = {"parts": 2, "options": MIXING}
    kinds = of(HandsOn, "pool", "width", "ragged", "returned", "handed on")
    check(pool, *each(kinds, STAGES, THREE, **how))
    check(pool, *each(of(HandsOn, "dtype"), STAGES, THREE, **how), rtol=1e-2)
    check(pool, *each(of(Catches, "plain"), STAGES, **how))
    check(pool, *each(of(HandsOn, "cached"), STAGES, later=IN_TURN, **how))


UNFIT = {
    "named": "Layer 0 returns dict",
    "nested": "enable_nested_tensor=False",
    "listed": "Layer 0 keeps tensors with gradients in 'kept'",
    "looked into": "hooks inside it see unknown tensors",
    "shown": "logged as 'shown' needs what layer 0 keeps in 'shown'",
    "number": "logged as 'shown' needs what layer 0 keeps in 'shown'",
    "made in forward": "needs what layer 0 keeps in 'shown'",
    "overwritten": "aren't finite",
}


def test_layers_that_stages_can_not_carry_are_refused(pool: ProcessPool) -> None:
    refused(pool, {partial(HandsOn, kind): told for kind, told in UNFIT.items()}, STAGES)


def test_routers_logits_of_all_layers_reach_the_loss(pool: ProcessPool) -> None:
    how: dict[str, Any] = {"parts": 2, "options": MIXING}
    check(pool, *each(of(Router, "mixtral"), SHARED, **how))
    check(pool, *each(of(Router, "qwen3_moe"), THREE, **how))


FREE = of(Free, "reused", "each twice", "chosen", "first dropped", "last dropped", "none")
FREE += of(Free, "nested", "by hand", "two passes")


def test_layers_that_are_no_chain_train_in_plans_with_one_stage_only(pool: ProcessPool) -> None:
    check(pool, *each(FREE, COPIES, options={"num_microbatches": 2}))
    kinds = of(Free, "reused", "chosen", "first dropped", "last dropped", "nested")
    refused(pool, dict.fromkeys(kinds, "a plan whose pipelines have one stage"), STAGES)


EARLY = of(Outer, "mask made early", "decoded in validation", "decoded in prediction")
LATE = of(Outer, "heads by batch", "read in layers", "looked at", "loss from the second epoch")


@pytest.mark.parametrize("evaluates", [False, True])
def test_parameters_outside_the_layers_are_there_wherever_a_step_reads_them(
    pool: ProcessPool, *, evaluates: bool
) -> None:
    check(pool, *each(EARLY + LATE, STAGES, evaluates=evaluates))
    # Only the stage in the middle lacks it, and every rank is told so.
    kinds = {"read in layers": "Layer 1 takes parameter shift"}
    kinds["looked at"] = "item needs parameter embed.weight"
    told = {partial(Outer, kind): text for kind, text in kinds.items()}
    refused(pool, told, THREE, evaluates=evaluates)


def test_a_use_that_begins_within_an_epoch_is_refused_by_name(pool: ProcessPool) -> None:
    (kind,) = of(Outer, "loss from the second step")
    refused(pool, {kind: "What the step returns needs parameter embed.weight"}, STAGES)


def test_steps_may_compute_with_parameters_that_a_rank_has_whole(pool: ProcessPool) -> None:
    parts = (pipeline(stage(r, 0, 3), num_microbatches=2 - r) for r in range(2))
    copies = plan_of(*parts)
    for ownership in ("even", "holders"):
        how: dict[str, Any] = {"options": {"ownership": ownership}}
        check(pool, *each(of(Penalised, "before", "behind"), copies, **how))
    check(pool, *each(of(Penalised, 2), STAGES))
    first, second, third = of(Penalised, "before", "behind", 0)
    refused(pool, dict.fromkeys((first, second, third), "needs parameter model."), STAGES)
    cut = {"tp_plan": {"layers.*.0": "colwise_gather_output"}}
    told = dict.fromkeys(
        (first, second, third), "uses parameter model.layers.0 … outside of its module"
    )
    refused(pool, told, SHARDED, options=cut)


def test_buffers_are_those_of_a_single_device_whoever_computes_their_layer(
    pool: ProcessPool,
) -> None:
    kinds = of(Keeps, "counts", "unversioned", "mean", "norms", "cache")
    check(pool, *each(kinds, STAGES, options=PAIR))
    check(pool, *each(kinds, STAGES, options=PAIR, later=IN_TURN))
    check(pool, *each(of(Keeps, "counts", "unversioned", "cache"), COPIES, options=PAIR))
    check(pool, *each(of(Keeps, "cache"), STAGES))


def test_buffers_that_follow_what_a_micro_batch_holds_are_refused_unless_that_is_wanted(
    pool: ProcessPool,
) -> None:
    told = "allow_mixing=True"
    kinds = of(Keeps, "counts", "norms", "scratch counts", "frequencies")
    refused(pool, dict.fromkeys(kinds, told), STAGES)
    for kind, text in {"mean": told, "frequencies": told, "norms": told}.items():
        refused(pool, dict.fromkeys(of(Keeps, kind), text), COPIES, options=PAIR)
    cases = each(of(Keeps, "norms"), COPIES, options={**PAIR, **MIXING})
    (first,), (second,) = pool.run(attempt, 2, *cases)
    assert first.seen == second.seen
    assert first.logged == second.logged
