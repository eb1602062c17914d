import json

import pytest

from lightning_hetero.core.actions import Assignment
from lightning_hetero.core.errors import AssignmentError


def assignment(microbatches: tuple = (((0, 2), (1,)), ())) -> Assignment:
    return Assignment(plan_index=1, microbatches=microbatches, latency_s=2.5)


def test_an_assignment_survives_json() -> None:
    assert Assignment.from_dict(json.loads(json.dumps(assignment().to_dict()))) == assignment()
    assert assignment().num_samples == 3


def test_a_sample_assigned_twice_is_named() -> None:
    with pytest.raises(AssignmentError, match="Sample 2 is assigned twice"):
        assignment((((0, 2),), ((2,),)))


def test_an_empty_microbatch_is_refused() -> None:
    with pytest.raises(AssignmentError, match="Micro-batch 1 of pipeline 0 is empty"):
        assignment((((0,), ()),))


@pytest.mark.parametrize("data", [[], {}, {"plan_index": 0, "microbatches": 3}])
def test_what_is_no_assignment_is_refused(data) -> None:
    with pytest.raises(AssignmentError):
        Assignment.from_dict(data)
