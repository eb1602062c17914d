"""Each rank's memory for weights and states, counted by groups of parameters and one by one."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.autoplan.engine_choices import state_memory
from lightning_hetero.autoplan.facts import NUM_STATES
from lightning_hetero.core.owners import assign_owners
from lightning_hetero.core.slices import Ownership, ParameterSpec, PlanHolders
from lightning_hetero.runtime.iteration.config import OwnedDevice
from tests.core.sample_plans import random_plan, small_model

RULES = st.sampled_from([Ownership.HOLDERS, Ownership.EVEN, Ownership.PARAMETER])


def counted_one_by_one(specs, plan, slices, world_size: int) -> list[tuple[float, float, float]]:
    holders, found = PlanHolders(plan), [[0.0, 0.0, 0.0] for _ in range(world_size)]
    for spec in specs:
        for holding in holders.of(spec).holdings:
            numel = spec.row_numel * sum(stop - start for start, stop in holding.intervals)
            found[holding.global_rank][0] += 2 * numel
            found[holding.global_rank][1] += 4 * numel * spec.requires_grad
        for item in slices[spec.name]:
            numel = spec.row_numel * (item.stop - item.start)
            for rank in item.keepers:
                found[rank][2] += 4 * numel * (NUM_STATES if spec.requires_grad else 1)
    return [tuple(terms) for terms in found]


@given(rng=st.randoms(use_true_random=False), rule=RULES, stood_by=st.booleans())
def test_groups_of_parameters_take_what_their_parameters_take(rng, rule, stood_by) -> None:
    plan, world_size = random_plan(rng)
    specs = small_model(plan.num_layers, tied=False)
    specs.append(ParameterSpec(name="frozen", shape=(5, 3), layer=0, requires_grad=False))
    standbys = [(rank + 1) % world_size for rank in range(world_size)] if stood_by else []
    slices = assign_owners(specs, plan, world_size=world_size, ownership=rule, standbys=standbys)
    facts = SimpleNamespace(
        comms=SimpleNamespace(world_size=world_size),
        compute_bytes=2,
        summed_bytes=4,
        master_bytes=4,
        owned_device=OwnedDevice.DEVICE,
    )
    found = state_memory(plan, facts, specs, slices)
    assert [(terms.weights, terms.gradients, terms.owned) for terms in found] == counted_one_by_one(
        specs, plan, slices, world_size
    )
