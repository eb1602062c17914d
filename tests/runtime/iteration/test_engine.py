"""Laws of an engine: determinism, and what a rank holds."""

import weakref
from typing import Any
from unittest import mock

import pytest

from lightning_hetero.runtime.iteration.running_plan import PlanSwitch
from tests.fits import Case, Outcome, assert_same_bits, fit
from tests.plans import CHAIN, UNEQUAL, pipeline, plan_of, stage
from tests.processes import ProcessPool

pytestmark = pytest.mark.dist

THREE_PIPELINES = plan_of(
    pipeline(stage(0, 0, 3), num_microbatches=2),
    pipeline(stage(3, 0, 1), stage(1, 1, 3), num_microbatches=3),
    pipeline(stage(2, 0, 3), num_microbatches=1),
)


@pytest.mark.parametrize("model", ["packed", "masking"])
def test_two_runs_of_a_plan_are_equal_bit_for_bit(pool: ProcessPool, model: str) -> None:
    case = Case(
        plan=THREE_PIPELINES, world_size=4, model=model, tied=True, num_rows=18, clip_val=0.1
    )
    first, second = (pool.run(fit, 4, case) for _ in range(2))
    assert len(first[0].losses) > 2
    assert_same_bits(first, second)
    assert_same_bits(first, [first[0]] * 4)


def total_bytes(outcome: Outcome, names: list[str]) -> int:
    return sum(outcome.weights[name].nbytes for name in names)


def layer_of(name: str) -> int | None:
    _, _, rest = name.partition("blocks.")
    return int(rest.split(".")[0]) if rest else None


def names_of_stage(outcome: Outcome, first: int, last: int, num_layers: int) -> set[str]:
    """What a stage of an untied GPT needs: layers, embeddings if first, head if last."""
    names = {n for n in outcome.weights if (i := layer_of(n)) is not None and first <= i < last}
    if first == 0:
        names |= {"model.wte.weight", "model.wpe"}
    if last == num_layers:
        names |= {"model.ln_f.weight", "model.ln_f.bias", "model.head.weight"}
    return names


@pytest.mark.parametrize("ownership", ["holders", "even"])
def test_a_rank_holds_its_stage_and_its_slices_and_no_more(
    pool: ProcessPool, ownership: str
) -> None:
    case = Case(plan=UNEQUAL, world_size=3, ownership=ownership, num_rows=16)
    outcomes = pool.run(fit, 3, case)
    stages = [(0, 3), (0, 1), (1, 3)]
    for outcome, (first, last) in zip(outcomes, stages, strict=True):
        needed = names_of_stage(outcome, first, last, 3)
        assert set(outcome.held) == needed
        stage_bytes = total_bytes(outcome, sorted(needed))
        slice_bytes = sum(outcome.own_bytes.values())
        # Slices of what a rank holds are views of it. A slice elsewhere takes memory of its own.
        foreign = sum(own for name, own in outcome.own_bytes.items() if name not in needed)
        assert outcome.parameter_bytes[-1] == stage_bytes + foreign
        assert outcome.parameter_bytes[-1] <= stage_bytes + slice_bytes
    whole = total_bytes(outcomes[0], list(outcomes[0].weights))
    assert sum(sum(outcome.own_bytes.values()) for outcome in outcomes) == whole
    assert all(outcome.parameter_bytes[-1] < whole for outcome in outcomes[1:])


def test_outer_weights_leave_the_stages_that_do_not_use_them_after_one_iteration(
    pool: ProcessPool,
) -> None:
    outcomes = pool.run(fit, 3, Case(plan=CHAIN))
    for outcome, index in zip(outcomes, range(3), strict=True):
        assert set(outcome.held) == names_of_stage(outcome, index, index + 1, 3)
        assert outcome.parameter_bytes[-1] <= outcome.parameter_bytes[0]
    tied = pool.run(fit, 3, Case(plan=CHAIN, tied=True))
    holders = [index for index, item in enumerate(tied) if "model.wte.weight" in item.held]
    assert holders == [0, 2]


def test_an_idle_rank_holds_slices_only(pool: ProcessPool) -> None:
    plan = plan_of(pipeline(stage(2, 0, 2), stage(0, 2, 3)))
    idle = pool.run(fit, 3, Case(plan=plan))[1]
    assert idle.held == []
    assert idle.parameter_bytes[-1] == sum(idle.own_bytes.values()) > 0


@pytest.mark.parametrize("num_microbatches", [2, 6])
def test_1f1b_holds_the_activations_of_num_stages_minus_stage_index_microbatches(
    pool: ProcessPool, num_microbatches: int
) -> None:
    case = Case(plan=CHAIN, num_microbatches=num_microbatches, batch_size=6)
    for index, outcome in enumerate(pool.run(fit, 3, case)):
        assert outcome.peak_in_flight == min(3 - index, num_microbatches)


def alive_when_others_are_made(rank: int, case: Case) -> list[int]:
    """Return how many plans were alive whenever an iteration made another one ready."""
    made: list[weakref.ref[Any]] = []
    alive: list[int] = []
    make_ready = PlanSwitch._make_ready

    def make(self: PlanSwitch, plan: Any, *, shares_memory: bool) -> Any:
        alive.append(sum(item() is not None for item in made))
        running = make_ready(self, plan, shares_memory=shares_memory)
        made.extend([weakref.ref(running), weakref.ref(running.weights)])
        return running

    with mock.patch.object(PlanSwitch, "_make_ready", make):
        fit(rank, case)
    return alive


def test_weights_of_two_plans_are_never_held_at_once(pool: ProcessPool) -> None:
    for alive in pool.run(alive_when_others_are_made, 3, Case(plan=CHAIN)):
        assert len(alive) > 1, "the first iteration shows where outer weights are used"
        assert not any(alive)
