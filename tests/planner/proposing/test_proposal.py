import itertools

import numpy as np
import pytest

from lightning_hetero.assign import assign_iteration
from lightning_hetero.core.errors import PlanningError
from lightning_hetero.planner.proposing.proposal import (
    ProposalOptions,
    Scheme,
    draw_iteration,
    propose,
)
from lightning_hetero.planner.proposing.quick_estimates import estimate_plans
from lightning_hetero.planner.proposing.relaxation import AverageWork, fractional_plan
from tests.assign.cases import cost

QUICK = ProposalOptions(num_iterations=8, num_rounds=2, num_longest=3)


def schemes(device: str = "gpu", speed: float = 1.0) -> list[Scheme]:
    """Return schemes: the more devices one takes, the longer its limit, the less efficient."""
    rows = [(1, 3e-4, 2048, 1), (2, 1.8e-4, 8192, 1), (4, 1.2e-4, 32768, 1), (4, 5.5e-5, 8192, 2)]
    return [
        Scheme(
            cost=cost(
                a=2e-9 / n / speed, b=b / speed, c=0.03 / speed, max_len=limit, num_stages=stages
            ),
            devices=((device, n),),
        )
        for n, b, limit, stages in rows
    ]


def long_tail(count: int = 4000) -> np.ndarray:
    """Return lengths most of which are short and a few long."""
    draws = np.random.default_rng(0).lognormal(7, 1.1, count)
    return np.clip(draws, 16, 16384).astype(np.int64)


def dynamic_programme_s(work: AverageWork, num_devices: int, steps: int) -> float:
    """Solve the paper's Eq. 4 on a grid of 1/steps of a device, by looking at every transition."""
    num_intervals, num_schemes = work.work_s.shape
    sums_s = np.concatenate([np.zeros((1, num_schemes)), np.cumsum(work.work_s, axis=0)])
    units = num_devices * steps
    table = np.full((units + 1, num_intervals + 1), np.inf)
    table[:, 0] = 0.0
    for n, high in itertools.product(range(1, units + 1), range(1, num_intervals + 1)):
        best = table[n - 1, high]
        for k, low, used in itertools.product(range(num_schemes), range(high), range(1, n + 1)):
            if work.fits[high - 1, k]:
                pipelines = used / steps / work.devices[k, 0]
                work_s = (sums_s[high, k] - sums_s[low, k]) / pipelines
                best = min(best, max(table[n - used, low], work_s))
        table[n, high] = best
    return float(table[units, num_intervals])


def small_work() -> AverageWork:
    work_s = np.array([[4.0, 3.0, 5.0], [3.0, 2.0, 2.5], [2.0, 1.5, 1.2], [1.0, 0.9, 0.5]])
    fits = np.array([[1, 1, 1], [1, 1, 1], [0, 1, 1], [0, 0, 1]], dtype=bool)
    return AverageWork(
        work_s=work_s,
        alone_s=work_s / 10,
        fits=fits,
        lost_s=np.array([0.1, 0.1, 0.3]),
        devices=np.array([[1.0], [2.0], [4.0]]),
        available=np.array([4.0]),
    )


def test_the_linear_programme_is_the_limit_of_the_papers_dynamic_programme() -> None:
    work = small_work()
    limit_s = fractional_plan(work, with_bubbles=False).latency_s
    coarse_s, fine_s = (dynamic_programme_s(work, 4, steps) for steps in (2, 8))
    assert limit_s <= fine_s * (1 + 1e-9) <= coarse_s * (1 + 1e-9)
    assert fine_s <= limit_s * 1.1


def test_bubbles_only_add_time_and_plans_stay_within_the_devices() -> None:
    work = small_work()
    without = fractional_plan(work, with_bubbles=False)
    bubbles = fractional_plan(work, with_bubbles=True)
    assert bubbles.latency_s >= without.latency_s
    for plan in (without, bubbles):
        assert (plan.counts @ work.devices <= work.available + 1e-6).all()


def test_an_estimate_is_near_the_assignment() -> None:
    options = schemes()
    counts = np.array([[4, 2, 2, 0], [0, 0, 2, 2], [0, 4, 2, 0]])
    generator = np.random.default_rng(1)
    iterations = [draw_iteration(long_tail(), 60_000, generator) for _ in range(4)]
    estimates = estimate_plans(iterations, counts, [scheme.cost for scheme in options])
    for row, plan in zip(estimates, counts, strict=True):
        pipelines = [s.cost for s, n in zip(options, plan, strict=True) for _ in range(n)]
        for estimate_s, lengths in zip(row, iterations, strict=True):
            assert estimate_s == pytest.approx(
                assign_iteration(lengths, [pipelines]).latency_s, rel=0.15
            )


def test_a_plan_that_cant_hold_a_sequence_is_estimated_infinite() -> None:
    values = estimate_plans(
        [np.array([9000, 100]), np.array([100])],
        np.array([[2, 0, 0, 0], [0, 0, 1, 0]]),
        [scheme.cost for scheme in schemes()],
    )
    assert np.isinf(values[0, 0])
    assert np.isfinite(values[0, 1])
    assert np.isfinite(values[1]).all()


@pytest.mark.parametrize("num_candidate_plans", [1, 4])
def test_proposals_fit_the_devices_and_the_first_one_any_sequence(num_candidate_plans) -> None:
    options = schemes("fast") + schemes("slow", 0.5)
    found = propose(
        long_tail(),
        options,
        {"fast": 8, "slow": 8},
        tokens_per_iteration=60_000,
        options=ProposalOptions(
            num_candidate_plans=num_candidate_plans, num_iterations=8, num_rounds=2
        ),
    )
    assert 1 <= len(found) <= num_candidate_plans
    for proposal in found:
        for device in ("fast", "slow"):
            used = sum(
                dict(scheme.devices).get(device, 0) * count
                for scheme, count in zip(options, proposal.counts, strict=True)
            )
            assert used <= 8
    assert max(p.max_len for p in found[0].pipelines(options)) >= long_tail().max()


def test_the_same_seed_gives_the_same_proposals() -> None:
    arguments = (long_tail(), schemes(), {"gpu": 16})
    first = propose(*arguments, tokens_per_iteration=60_000, options=QUICK)
    assert propose(*arguments, tokens_per_iteration=60_000, options=QUICK) == first


def test_a_proposal_is_near_the_best_of_all_plans() -> None:
    options = schemes()
    found = propose(
        long_tail(),
        options,
        {"gpu": 8},
        tokens_per_iteration=40_000,
        options=ProposalOptions(num_candidate_plans=1),
    )
    everything = np.array(
        [
            plan
            for plan in itertools.product(range(9), range(5), range(3), range(3))
            if 0 < plan[0] + 2 * plan[1] + 4 * plan[2] + 4 * plan[3] <= 8
        ]
    )
    generator = np.random.default_rng(9)
    iterations = [draw_iteration(long_tail(), 40_000, generator) for _ in range(16)]
    costs = [scheme.cost for scheme in options]
    best_s = estimate_plans(iterations, everything, costs).mean(axis=1).min()
    mine_s = estimate_plans(iterations, np.array([found[0].counts]), costs).mean()
    assert mine_s <= best_s * 1.05


def test_no_scheme_for_the_longest_sequence_says_what_is_missing() -> None:
    with pytest.raises(PlanningError, match=r"16384 tokens but the roomiest .* takes 8192"):
        propose(long_tail(), schemes(), {"gpu": 3}, tokens_per_iteration=60_000)


def test_an_iteration_stays_below_its_tokens_but_has_a_sample() -> None:
    generator = np.random.default_rng(0)
    for _ in range(20):
        assert draw_iteration(long_tail(), 60_000, generator).sum() <= 60_000
    assert len(draw_iteration(np.array([5000, 6000]), 100, generator)) == 1
