"""What can be asked of the planner, and what is refused."""

import pytest

from lightning_hetero.core.errors import PlanningError
from lightning_hetero.planner import Objective, PlanningOptions, Workload

SIZES = {"sequence_length": 64, "global_batch_size": 16, "sequences_per_microbatch": 2}


def test_an_objective_may_be_given_by_its_name():
    assert PlanningOptions(objective="cost").objective is Objective.COST
    with pytest.raises(PlanningError, match="is 'speed'; it must be 'throughput' or 'cost'"):
        PlanningOptions(objective="speed")


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -1, 1.5, 16.0, "64", True, None])
def test_sizes_are_whole_numbers(name, value):
    Workload(**SIZES)
    with pytest.raises(PlanningError, match=rf"{name} is .*; it must be a whole number, 1 or more"):
        Workload(**SIZES | {name: value})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_candidates": 1.5}, r"num_candidates is 1\.5"),
        ({"num_candidates": 0}, "num_candidates is 0"),
        ({"tp_degrees": 2}, "tp_degrees are 2; give one or more"),
        ({"tp_degrees": ()}, r"tp_degrees are \(\); give one or more"),
        ({"tp_degrees": (1, 1.5)}, r"A degree of tp_degrees is 1\.5"),
        ({"tp_degrees": (0,)}, "A degree of tp_degrees is 0"),
    ],
)
def test_options_are_whole_numbers(options, text):
    with pytest.raises(PlanningError, match=text):
        PlanningOptions(**options)
