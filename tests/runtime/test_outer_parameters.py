"""Parameters outside the layers are there wherever a step of any kind reads them."""

import pytest

from tests.processes import ProcessPool
from tests.runtime.outer_runs import run_kinds
from tests.runtime.runs import pipeline, plan_of, stage

pytestmark = pytest.mark.dist

TWO = plan_of(pipeline(stage(0, 0, 1), stage(1, 1, 3)))
THREE = plan_of(pipeline(stage(0, 0, 1), stage(1, 1, 2), stage(2, 2, 3)))
KINDS = [
    "mask made early",
    "decoded in validation",
    "decoded in prediction",
    "heads by batch",
    "read in layers",
    "looked at",
    "loss from the second epoch",
]


@pytest.mark.parametrize("fits", [True, False])
def test_what_any_step_reads_is_there(pool: ProcessPool, *, fits: bool) -> None:
    (expected,) = pool.run(run_kinds, 1, KINDS, None, fits)
    for found in pool.run(run_kinds, 2, KINDS, TWO, fits):
        for kind in KINDS:
            for name, value in expected[kind].items():
                assert found[kind][name] == pytest.approx(value, rel=1e-5), (kind, name)


@pytest.mark.parametrize("fits", [True, False])
def test_a_middle_stage_refuses_by_name_what_it_does_not_hold(
    pool: ProcessPool, *, fits: bool
) -> None:
    for kind, name in (("read in layers", "shift"), ("looked at", "embed.weight")):
        refusals = [found[kind] for found in pool.run(run_kinds, 3, [kind], THREE, fits)]
        assert f"ModelError: Layer 1 takes parameter {name}" in refusals[1] or (
            f"item needs parameter {name}" in refusals[1]
        )
        for text in (refusals[0], refusals[2]):
            assert f"parameter {name}" in text


def test_a_use_that_begins_within_an_epoch_is_refused_by_name(pool: ProcessPool) -> None:
    kind = "loss from the second step"
    for found in pool.run(run_kinds, 2, [kind], TWO, True):
        assert "What the step returns needs parameter embed.weight" in found[kind]
