"""The main law: a plan gives what one big device would, for losses and weights."""

import copy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fits import Case, assert_same_bits, check, check_refused, fit
from tests.plans import pipeline, plan_of, stage
from tests.processes import ProcessPool

pytestmark = pytest.mark.dist

LEAST_BUDGETS = {"gpt": 70_000, "packed": 400_000, "toy": 200_000}
"""Bytes that hold any stage's micro-batches in flight, recomputed, and one of its layers."""

# Each example trains twice, and one that fails costs new processes: shrinking would take minutes.
_options = {
    "deadline": None,
    "phases": [Phase.explicit, Phase.reuse, Phase.generate],
    "suppress_health_check": list(HealthCheck),
}


@st.composite
def pipelines_of(draw: st.DrawFn, num_layers: int, ranks: list[int], model: str) -> dict[str, Any]:
    # Some ranks run several stages.
    chunks = st.lists(st.sampled_from(ranks), max_size=num_layers - len(ranks))
    row = [*ranks, *draw(st.just([]) | chunks)]
    cuts = draw(
        st.lists(
            st.integers(1, num_layers - 1) if num_layers > 1 else st.nothing(),
            min_size=len(row) - 1,
            max_size=len(row) - 1,
            unique=True,
        )
        if len(row) > 1
        else st.just([])
    )
    ends = [0, *sorted(cuts), num_layers]
    stages = [
        stage(r, ends[i], ends[i + 1])
        | draw(recomputation(ends[i + 1] - ends[i], model, has_budgets=len(row) == len(ranks)))
        for i, r in enumerate(row)
    ]
    size = draw(st.sampled_from([None, None, 1, 2, 3]))
    return pipeline(
        *stages,
        num_microbatches=draw(st.sampled_from([None, 1, 2, 3, 4, 0])),
        **({} if size is None else {"microbatch_size": size}),
    )


@st.composite
def recomputation(
    draw: st.DrawFn, num_layers: int, model: str, *, has_budgets: bool
) -> dict[str, int]:
    """What a stage says of recomputation: nothing, numbers of layers, or a budget of bytes."""
    what = draw(st.sampled_from(["nothing", "layers", *["budget"] * has_budgets]))
    if what == "layers":
        whole = draw(st.integers(0, num_layers))
        selective = draw(st.integers(0, num_layers - whole))
        return {"recomputed_layers": whole, "selective_layers": selective}
    if what == "budget":
        return {"activation_budget_bytes": LEAST_BUDGETS[model] * draw(st.integers(1, 4))}
    return {}


@st.composite
def cases(draw: st.DrawFn, *, model: str = "gpt") -> Case:
    num_layers = draw(st.integers(1, 4))
    world_size = draw(st.sampled_from([2, 3, 4, 4, 3, 1]))
    ranks = draw(st.permutations(range(world_size)))
    num_idle = draw(st.sampled_from([0, 0, 0, 1])) if world_size > 1 else 0
    active = list(ranks[: world_size - num_idle])
    pipelines: list[dict[str, Any]] = []
    while active and len(pipelines) < 3:
        size = draw(st.integers(1, min(len(active), num_layers)))
        if len(pipelines) == 2:
            size = min(len(active), num_layers)
        pipelines.append(draw(pipelines_of(num_layers, active[:size], model)))
        active = active[size:]
    if all(item.get("num_microbatches") == 0 for item in pipelines):
        pipelines[0]["num_microbatches"] = 3
    plan = plan_of(*pipelines)
    share = st.integers(0, 3)
    shares = st.lists(share, min_size=world_size, max_size=world_size).filter(any)
    if (drawn := draw(st.none() | shares)) is not None:
        plan["owner_shares"] = drawn
    if on_hosts := draw(st.sets(st.integers(0, world_size - 1))):
        plan["host_owners"] = sorted(on_hosts)
    return Case(
        plan=plan,
        world_size=world_size,
        model=model,
        num_layers=num_layers,
        tied=draw(st.booleans()),
        optimizer=draw(st.sampled_from(["adamw", "sgd"])),
        batch_size=draw(st.integers(1, 5)),
        num_rows=draw(st.integers(4, 14)),
        num_microbatches=draw(st.sampled_from([None, 1, 2, 3])),
        accumulate=draw(st.integers(1, 3)),
        clip_val=draw(st.sampled_from([None, 0.05, 0.4])),
        clip_algorithm=draw(st.sampled_from(["norm", "value"])),
        ownership=draw(st.sampled_from(["auto", "auto", "holders", "even", "parameter", "memory"])),
        options={"exchange": draw(st.sampled_from(["messages", "collectives"]))},
    )


@given(case=cases())
@settings(max_examples=18, derandomize=True, **_options)
def test_any_plan_trains_as_a_single_device_does(pool: ProcessPool, case: Case) -> None:
    check(pool, case)


@given(case=cases(model="packed"))
@settings(max_examples=7, derandomize=True, **_options)
def test_any_plan_trains_the_reference_model_on_packed_samples_alike(
    pool: ProcessPool, case: Case
) -> None:
    """And recomputation, however much of it, changes no bit."""
    (outcomes,) = check(pool, case)
    kept = keeping_all(case)
    if kept.plan != case.plan:
        assert_same_bits(outcomes, pool.run(fit, case.size, kept))


def keeping_all(case: Case) -> Case:
    """Return the case with a plan that says nothing of recomputation."""
    plan = copy.deepcopy(case.plan)
    assert plan is not None
    for item in plan["pipelines"]:
        for part in item["stages"]:
            for name in ("recomputed_layers", "selective_layers", "activation_budget_bytes"):
                part.pop(name, None)
    return replace(case, plan=plan)


@pytest.mark.slow
@pytest.mark.timeout(900)
@given(case=st.sampled_from(["gpt", "packed"]).flatmap(lambda model: cases(model=model)))
@settings(max_examples=8, derandomize=True, **_options)
def test_many_plans_train_as_a_single_device_does(pool: ProcessPool, case: Case) -> None:
    check(pool, case)


def test_muon_trains_whole_matrices_or_is_refused(pool: ProcessPool) -> None:
    plan = plan_of(pipeline(stage(2, 0, 2), stage(0, 2, 3)), pipeline(stage(1, 0, 3)))
    case = Case(plan=plan, world_size=3, optimizer="muon", batch_size=3, num_rows=24)
    check(pool, replace(case, ownership="parameter"))
    check_refused(pool, case, "Muon needs whole matrices", 'ownership="parameter"')
