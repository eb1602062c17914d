"""With owners that aren't the holders, holders sum first, and a run is the same bit for bit."""

from dataclasses import replace

import pytest

from tests.processes import ProcessPool
from tests.runtime.exchange.test_collectives import TP_PLAN, assert_same_bits, ways_of
from tests.runtime.exchange_runs import run_by
from tests.runtime.runs import Case, pipeline, plan_of, stage

pytestmark = pytest.mark.dist

STAGES = plan_of(pipeline(stage(3, 0, 1), stage(0, 1, 3)), pipeline(stage(1, 0, 1), stage(2, 1, 3)))
CUT_APART = plan_of(
    pipeline(stage(0, 0, 2), stage(3, 2, 4)), pipeline(stage(1, 0, 1), stage(2, 1, 4))
)
IDLE = plan_of(*(pipeline(stage(rank, 0, 3)) for rank in (2, 0)))
PARTS = plan_of(pipeline(stage([0, 3], 0, 3)), pipeline(stage([2, 1], 0, 3)))
EVEN = Case(plan=STAGES, world_size=4, width=32, ownership="even", num_rows=8)

CASES = {
    "stages": EVEN,
    "stages, a tied weight, clipped, a batch in two": replace(
        EVEN, tied=True, clip_val=0.5, num_microbatches=2
    ),
    "unequal stages": replace(EVEN, plan=CUT_APART, num_layers=4),
    "idle ranks": replace(EVEN, plan=IDLE),
    "parts of two pipelines": replace(EVEN, plan=PARTS, options=(("tp_plan", TP_PLAN),)),
    "standbys": replace(EVEN, options=(("redundancy", 1),)),
    "most layers frozen": replace(EVEN, model="adapted"),
}


@pytest.mark.parametrize("name", CASES)
def test_by_proxies_a_run_is_what_it_is_by_messages(pool: ProcessPool, name: str) -> None:
    case = CASES[name]
    found = pool.run(run_by, case.world_size, case, ("messages", "collectives"))
    assert_same_bits(found)
    assert not [way for way in ways_of(found, "messages") if "Prox" in way]
    ways = ways_of(found, "collectives")
    assert ways["ScatteredToProxies collective"] > 0
    assert ways["GatheredFromProxies collective"] > 0 or name == "standbys"
    # Ranks that only own take part between owners and proxies.
    assert ways["PushedRows messages"] > 0 or name == "parts of two pipelines"


def test_in_bf16_proxies_sum_as_holders_that_own_do(pool: ProcessPool) -> None:
    """Each rounds its own gradients for the others' sums, and not for its own."""
    case = replace(EVEN, precision="bf16-mixed", num_microbatches=2)
    by_proxies = pool.run(run_by, case.world_size, case, ("collectives",))
    own = replace(case, ownership="holders")
    by_owners = pool.run(run_by, case.world_size, own, ("collectives",))
    for one, other in zip(by_proxies, by_owners, strict=True):
        assert one["collectives"].outcome.losses == other["collectives"].outcome.losses
    assert ways_of(by_proxies, "collectives")["ScatteredToProxies collective"] > 0


def test_few_holders_reach_owners_themselves_unless_told_otherwise(pool: ProcessPool) -> None:
    found = pool.run(run_by, EVEN.world_size, replace(EVEN, num_rows=4), ("auto",))
    assert not [way for way in ways_of(found, "auto") if "Prox" in way]
