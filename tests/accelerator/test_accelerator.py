"""Whole runs on a device that isn't the CPU: results are the CPU's, and no host waits for it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.accelerator import device
from tests.accelerator.runs import Found, Job, train, train_on_streams
from tests.plans import COPIES, STAGES
from tests.processes import MOST_TRAVEL_ALONE, ProcessPool

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(not device.IS_SUPPORTED, reason=device.WHY_NOT),
]


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPool]:
    """Processes of their own: the device stays in them."""
    made = ProcessPool(MOST_TRAVEL_ALONE)
    yield made
    made.close()


def check(processes: ProcessPool, job: Job, *, skips: bool = False) -> list[Found]:
    """Run on the accelerator and on the CPU, and compare; losses may be no numbers if it skips."""
    found = processes.run(train, job.world_size, job)
    expected = processes.run(train, job.world_size, replace(job, on_accelerator=False))
    for one, other in zip(found, expected, strict=True):
        assert one.losses == pytest.approx(other.losses, rel=1e-6, nan_ok=skips)
        assert one.weights.keys() == other.weights.keys()
        for name, values in one.weights.items():
            assert values == pytest.approx(other.weights[name], rel=1e-5, abs=1e-7), name
    assert found[0].weights
    return found


@pytest.mark.parametrize("plan", [COPIES, STAGES], ids=["equal", "stages"])
@pytest.mark.slow
def test_no_host_waits_for_its_device_in_a_steady_iteration(processes, plan):
    found = check(processes, Job(plans=(plan,)))
    assert [item.waits for item in found] == [{}, {}]


def test_a_value_that_a_step_reads_is_found_as_a_wait(processes):
    found = processes.run(train, 2, Job(plans=(COPIES,), reads_loss=True))
    for item in found:
        assert any(
            what == "read a value" and "accelerator/runs.py" in where for what, where in item.waits
        )


@pytest.mark.slow
def test_plans_change_and_a_run_resumes_on_a_device(processes, tmp_path: Path):
    check(processes, Job(plans=(COPIES, STAGES)))
    check(processes, Job(plans=(STAGES,), folder=str(tmp_path)))


@pytest.mark.slow
def test_gradients_that_are_not_finite_are_told_of_an_iteration_later(processes):
    job = Job(plans=(COPIES,), breaks_at=2)
    for on_accelerator, num_losses, since in [
        (True, 3, "took zeros in their place"),
        (False, 2, "Nothing was changed by them"),
    ]:
        found = processes.run(train, 2, replace(job, on_accelerator=on_accelerator))
        for item in found:
            assert "batch 2 in epoch 0" in item.told
            assert since in item.told
            assert len(item.losses) == num_losses
    skipping = (("nonfinite_gradients", "skip"),)
    check(processes, replace(job, options=skipping), skips=True)


@pytest.mark.parametrize(("exchange", "redundancy"), [("messages", 0), ("collectives", 1)])
@pytest.mark.slow
def test_slices_on_the_host_are_stepped_there(
    processes, exchange: str, redundancy: int, tmp_path: Path
):
    """Standbys, too, which are compared with their slices after each step."""
    options = (
        ("owned_device", "cpu"),
        ("exchange", exchange),
        ("redundancy", redundancy),
        ("standby_check_steps", 1),
    )
    # On a CPU the fused one rounds the end of a tensor otherwise, which standbys don't allow.
    optimizer = "adamw" if redundancy else "fused adamw"
    changing = Job(plans=(COPIES, STAGES), options=options, clip=0.3, optimizer=optimizer)
    resuming = Job(plans=(COPIES,), options=options, folder=str(tmp_path), optimizer=optimizer)
    for job in (changing, resuming):
        assert [item.owned_on for item in check(processes, job)] == [{"cpu"}] * 2


def test_a_plan_says_which_ranks_own_on_their_host(processes):
    found = check(processes, Job(plans=(STAGES | {"host_owners": [1]},), clip=0.3))
    assert [item.owned_on for item in found] == [{device.NAME}, {"cpu"}]


@pytest.mark.parametrize("exchange", ["messages", "collectives"])
@pytest.mark.slow
def test_streams_share_no_memory_without_waiting_for_each_other(processes, exchange: str):
    """Nor is any let go that another stream may still use, although nothing is recorded on it."""
    job = Job(plans=(COPIES, STAGES), options=(("exchange", exchange),))
    for item in processes.run(train_on_streams, 2, job):
        assert item.clashes == frozenset()
        assert item.num_shared > 100


def test_waits_between_streams_that_are_missing_are_found(processes):
    job = Job(plans=(COPIES,), options=(("exchange", "messages"),), leaves_out_waits=True)
    for item in processes.run(train_on_streams, 2, job):
        told = " ".join(item.clashes)
        assert "on side doesn't wait for ['compute']" in told
        assert "let go before ['communication'] are over" in told
