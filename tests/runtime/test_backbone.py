"""`BackboneFinetuning` unfreezes the base of a model with adapters as on one device."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.processes import ProcessPool
from tests.runtime.backbone_runs import NUM_EPOCHS, UNFREEZES, BackboneCase, Outcome, train
from tests.runtime.test_adapters import PLANS

pytest.importorskip("peft")

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore")]
slow = pytest.mark.slow

ADAPTED = ["q_proj", "up_proj"]


def case_of(plan: str, *, whole: bool) -> BackboneCase:
    found, world_size = PLANS[plan]
    return BackboneCase(
        plan=found,
        world_size=world_size,
        batch_size=4 // len(found["pipelines"]),
        adapters={"target_modules": ADAPTED},
        whole=whole,
    )


def check(found: Outcome, expected: Outcome) -> None:
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)
    assert found.rates == expected.rates
    assert found.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        scale = max(np.abs(weight).max(), 1e-3)
        assert np.abs(found.weights[name] - weight).max() <= 1e-5 * scale, name


@pytest.mark.parametrize(
    ("plan", "whole"),
    [
        ("stages", False),
        ("beside a copy", True),
        pytest.param("stages", True, marks=slow),
        pytest.param("beside a copy", False, marks=slow),
    ],
)
def test_the_base_trains_from_the_epoch_that_unfreezes_it(
    pool: ProcessPool, plan: str, *, whole: bool
) -> None:
    case = case_of(plan, whole=whole)
    expected = pool.run_alone(train, case.on_single_device())
    results = pool.run(train, case.world_size, case)
    for found in results:
        check(found, expected)
    owned = np.sum([found.owned for found in results], axis=0)
    trained = [w.size for n, w in expected.weights.items() if any(p in n for p in ADAPTED)]
    assert owned[0] < owned[UNFREEZES] == owned[-1]
    assert whole or owned[-1] == sum(trained)


@pytest.mark.parametrize(
    ("until", "whole"),
    [
        (UNFREEZES, False),
        (UNFREEZES + 1, True),
        pytest.param(UNFREEZES, True, marks=slow),
        pytest.param(UNFREEZES + 1, False, marks=slow),
        pytest.param(NUM_EPOCHS - 1, False, marks=slow),
    ],
)
def test_it_trains_on_from_a_file_as_plain_lightning_does(
    pool: ProcessPool, tmp_path: Path, until: int, *, whole: bool
) -> None:
    """Whose files don't say what was unfrozen: past that epoch the base stays as it is."""
    case = case_of("stages", whole=whole)
    alone = case.on_single_device()
    for file, size, each in ((tmp_path / "one", 1, alone), (tmp_path / "many", 2, case)):
        pool.run(train, size, each, until, file)
    expected = pool.run(train, 1, alone, NUM_EPOCHS, tmp_path / "one")[0]
    for found in pool.run(train, 2, case, NUM_EPOCHS, tmp_path / "many"):
        check(found, expected)
    # A file of many ranks goes on in one, and the other way round, under another plan.
    check(pool.run(train, 1, alone, NUM_EPOCHS, tmp_path / "many")[0], expected)
    other = case_of("beside a copy", whole=whole)
    for found in pool.run(train, 3, other, NUM_EPOCHS, tmp_path / "one"):
        check(found, expected)


@pytest.mark.parametrize("until", [pytest.param(UNFREEZES, marks=slow), UNFREEZES + 1])
def test_it_trains_on_from_layers_as_if_nothing_had_happened(
    pool: ProcessPool, tmp_path: Path, until: int
) -> None:
    case, other = (case_of(plan, whole=False) for plan in ("stages", "beside a copy"))
    alone = case.on_single_device()
    expected = pool.run_alone(train, alone)
    for first, then in ((case, other), (alone, alone), (other, alone)):
        folder = tmp_path / f"{first.world_size}-{then.world_size}"
        pool.run(train, first.world_size, first, until, None, folder)
        for found in pool.run(train, then.world_size, then, NUM_EPOCHS, None, folder):
            assert found.rates == expected.rates[until:]
            losses = expected.losses[: 2 * until] + found.losses
            check(replace(found, losses=losses, rates=expected.rates), expected)
