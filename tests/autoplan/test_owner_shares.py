"""Shares of ownership follow room, and what has none is refused with the bytes and the remedy."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_hetero.autoplan.engine_choices import (
    check_room_for_states,
    find_standbys_of_run,
    with_owner_shares,
)
from lightning_hetero.autoplan.facts import BatchSizes, RunFacts, RunPlans
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.slices import Ownership
from lightning_hetero.models import HeteroLM, LMConfig
from lightning_hetero.runtime.iteration.config import EngineConfig, OwnedDevice
from lightning_hetero.runtime.setup.layout import ModelLayout

WHOLE, HALVES = {"ranks": [0], "layers": [0, 4]}, ([1, 2], [2, 1])
FIRST, LATER = (
    ParallelPlan.from_dict(
        {
            "pipelines": [
                {"stages": [WHOLE]},
                {
                    "stages": [
                        {"ranks": [ranks[0]], "layers": [0, 1]},
                        {"ranks": [ranks[1]], "layers": [1, 4]},
                    ]
                },
            ]
        }
    )
    for ranks in HALVES
)
LAYOUT = ModelLayout.of(
    model := HeteroLM(
        LMConfig(vocab_size=50, hidden_size=32, num_layers=4, num_heads=4, num_kv_heads=2)
    )
)
NUM_PARAMS = sum(spec.numel for spec in LAYOUT.specs)
HELD_BYTES = 8
"""Of a parameter: its weight and its gradient. An owner keeps twice as much of it."""


@dataclass(frozen=True, kw_only=True)
class Facts(RunFacts):
    """Of a run on devices with so much memory to use."""

    room: tuple[float, float, float]

    def detect_seats(self) -> Any:
        devices = [SimpleNamespace(name="one kind", memory_bytes=n / 0.9) for n in self.room]
        return [SimpleNamespace(node="one", device=device) for device in devices]


def facts_of(*shares: float, **changes: Any) -> Facts:
    """Return the facts of ranks with room for so many parameters' weights and gradients each."""
    comms: Any = SimpleNamespace(world_size=3, gather_objects=lambda own: [own] * 3)
    first, second, third = (share * NUM_PARAMS * HELD_BYTES for share in shares)
    facts = Facts(
        module=model,
        layout=LAYOUT,
        comms=comms,
        device=torch.device("cpu"),
        sizes=lambda: BatchSizes(samples=6, sequence_length=128),
        room=(first, second, third),
    )
    return replace(facts, **changes)


@pytest.mark.parametrize("redundancy", [0, 1])
def test_ranks_compare_redundancy_and_shares_at_once(redundancy: int) -> None:
    told: list[dict[str, str]] = []
    facts = facts_of(9.0, 9.0, 9.0, redundancy=redundancy)
    comms: Any = SimpleNamespace(
        world_size=3, gather_objects=lambda own: told.append(own) or [own] * 3
    )
    facts = replace(facts, comms=comms)
    plan = replace(FIRST, owner_shares=(1.0, 1.0, 1.0))
    standbys = find_standbys_of_run(facts, RunPlans(first=plan, candidates=(plan,)))
    check(plan, facts, ownership=Ownership.MEMORY, standbys=standbys)
    assert [name for name in ("redundancy", "owner_shares") if name in told[0]] == (
        ["redundancy", "owner_shares"] if redundancy else ["owner_shares"]
    )
    assert len(told) == 1


def check(plan: ParallelPlan, facts: RunFacts, **config: Any) -> None:
    later = replace(LATER, owner_shares=plan.owner_shares, host_owners=plan.host_owners)
    plans = RunPlans(first=plan, candidates=(plan, later))
    check_room_for_states(facts, plans, EngineConfig(**config), LAYOUT.specs)


def test_shares_by_room_fit_wherever_all_states_have_room() -> None:
    # Beside the weights of one copy and of a half, at most, there are 2.2 states of 2.
    facts = facts_of(1.2, 1.8, 1.8)
    plans = RunPlans(first=FIRST, candidates=(FIRST, LATER))
    found = with_owner_shares(plans, facts)
    assert all(plan.owner_shares == found.first.owner_shares for plan in found.candidates)
    for plan in found.candidates:
        check(plan, facts, ownership=Ownership.MEMORY)
    with pytest.raises(ConfigurationError, match="Rank 0 has"):
        check(replace(FIRST, owner_shares=(1, 1, 1)), facts)


def test_states_without_room_are_refused_with_the_bytes_and_the_remedy() -> None:
    plans = RunPlans(first=FIRST, candidates=(FIRST,))
    with pytest.raises(ConfigurationError, match=r"Rank 0 has .* GiB less than weights .*fewer"):
        with_owner_shares(plans, facts_of(0.9, 5, 5))
    tight = facts_of(1.1, 1.1, 1.1)
    with pytest.raises(ConfigurationError, match=r"states take .* all ranks together .*Add"):
        with_owner_shares(plans, tight)
    with_owner_shares(plans, replace(tight, owned_device=OwnedDevice.CPU))


def test_shares_that_exceed_a_device_are_refused_with_the_bytes_and_the_remedy() -> None:
    shared = replace(FIRST, owner_shares=(0.0, 1.0, 9.0))
    roomy, tight = facts_of(2, 4, 4), facts_of(2, 4, 2)
    check(shared, roomy)
    own = r"GiB are its own slices, 90\.0% by the plan's owner_shares\. Use a smaller share"
    with pytest.raises(ConfigurationError, match=f"Rank 2 has .* activations aside: .* {own}"):
        check(shared, tight)
    check(shared, replace(tight, owned_device=OwnedDevice.CPU))
    check(replace(shared, host_owners=(2,)), tight)
    both = r"and those of ranks \[2\], for which it stands by\. Use .*, redundancy=0, more devices"
    with pytest.raises(ConfigurationError, match=both):
        check(shared, tight, standbys=(1, 2, 0))
