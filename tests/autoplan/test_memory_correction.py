"""Running out of memory teaches enough that the plan that failed is never taken again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.autoplan.out_of_memory import OutOfMemory
from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.errors import ProfileError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.simulator import (
    MemoryCorrection,
    MemoryTerms,
    RooflineCost,
    StageShape,
    StateLayout,
    usable_bytes,
)

BYTES = st.integers(1, 10**12)


@given(
    terms=st.tuples(*[BYTES] * 8),
    live=BYTES,
    requested=st.integers(0, 10**11),
    states=st.floats(0, 1),
    memory=BYTES,
    in_flight=st.floats(0.01, 1),
    known=st.floats(1, 3),
)
def test_what_failed_exceeds_the_device_as_it_is_corrected(
    terms, live, requested, states, memory, in_flight, known
):
    predicted = MemoryTerms(*map(float, terms))
    found = OutOfMemory(
        predicted=predicted,
        live_bytes=live,
        requested_bytes=requested,
        state_bytes=int(states * live),
        usable_bytes=usable_bytes(memory),
        in_flight=in_flight,
    ).correct(MemoryCorrection(activation_factor=known))
    factor = found.activation_factor / known
    passing = sum(predicted[3:7])
    corrected = predicted.states + max(predicted.total - predicted.states, factor * passing)
    assert factor >= 1
    assert corrected > usable_bytes(found.corrected_bytes(memory))
    assert found.usable_bytes is None or found.usable_bytes <= live


def test_activations_twice_as_large_are_known_as_such_with_half_of_them_in_flight():
    predicted = MemoryTerms(weights=10, gradients=20, owned=30, activations=100)
    failure = OutOfMemory(
        predicted=predicted,
        live_bytes=150,
        requested_bytes=10,
        state_bytes=60,
        usable_bytes=155,
        in_flight=0.5,
    )
    found = failure.correct(MemoryCorrection())
    assert found == MemoryCorrection(activation_factor=2.0)


@pytest.mark.parametrize("recomputed", [0, 2, 4])
def test_costs_count_with_it(recomputed):
    cluster = Cluster(nodes=(Node(device="A100-80GB", count=2),))
    model = ModelSpec.load("llama-7b")
    plain, corrected = (
        RooflineCost(cluster, model, layout=StateLayout(activation_factor=factor))
        for factor in (1.0, 1.5)
    )
    shape = StageShape("A100-80GB", 1, 4, has_head=True, recomputed_layers=recomputed)
    batches = [(4096,)] * 3
    before, after = (cost.stage_memory(shape, 2, batches, 2) for cost in (plain, corrected))
    assert after[:3] == before[:3], "states are what they are"
    for name in ("activations", "recomputed", "head", "messages"):
        assert getattr(after, name) == pytest.approx(1.5 * getattr(before, name)), name
    assert corrected.layer_bytes(shape) == pytest.approx(
        [1.5 * n for n in plain.layer_bytes(shape)]
    )


def test_what_cannot_be_is_refused():
    for wrong in ({"activation_factor": 0.5}, {"usable_bytes": -1}):
        with pytest.raises(ProfileError, match="Delete its file"):
            MemoryCorrection(**wrong)
