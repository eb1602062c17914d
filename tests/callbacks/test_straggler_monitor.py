"""Faults are injected into real runs of four processes; the monitor must find and mend them.

Under a data module it does so in `tests.examples.test_long_run`.
"""

import statistics
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest

from examples.slow_parts import SlowLink, SlowRank
from lightning_hetero.straggler import (
    ActionEvent,
    DecisionKind,
    Finding,
    FindingKind,
    IterationEvent,
    Mitigation,
)
from tests.callbacks.straggler_runs import Drill, Seen, run, step_of
from tests.processes import ProcessPool

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore")]

START, DURATION = 14, 18
SLOW_RANK = SlowRank(start=START, duration=DURATION, global_rank=3, slowdown=1.9)
SLOW_LINK = SlowLink(start=START, duration=DURATION, ranks=(0, 2), bytes_per_s=1e5)


def watch(pool: ProcessPool, drill: Drill, folder: Path) -> Seen:
    folder.mkdir(exist_ok=True)
    return pool.run(run, drill.world_size, drill, str(folder))[0]


def actions(seen: Seen) -> list[tuple[DecisionKind, Mitigation]]:
    done = [event for event in seen.events if isinstance(event, ActionEvent)]
    return [(e.kind, e.mitigation) for e in done if e.kind is not DecisionKind.KEEP]


def middle(seen: Seen, first: int, last: int) -> float:
    return statistics.median(seen.iteration_s[first:last])


def check_losses(pool: ProcessPool, drill: Drill, folder: Path, seen: Seen) -> None:
    expected = watch(pool, drill.on_single_device(), folder / "single")
    assert seen.losses == pytest.approx(expected.losses, rel=1e-5)


@pytest.mark.slow
def test_a_throttled_link_is_named_and_relieved_until_it_recovers(
    pool: ProcessPool, tmp_path: Path
) -> None:
    drill = Drill(faults=(SLOW_LINK,), num_layers=2, num_stages=2, num_microbatches=4)
    seen = watch(pool, drill, tmp_path / "watched")
    found = [event for event in seen.events if isinstance(event, Finding)]
    assert [(event.kind, event.ranks) for event in found] == [(FindingKind.LINK, (0, 2))]
    assert found[0].step <= START + 5
    expected = [(DecisionKind.APPLY, Mitigation.SWAP), (DecisionKind.UNDO, Mitigation.SWAP)]
    assert actions(seen) == expected
    # In virtual time, which no machine's noise changes.
    slow_s = middle(seen, START, found[0].step)
    assert slow_s >= 1.2 * middle(seen, START + DURATION - 8, START + DURATION)
    assert seen.plans[-1] == seen.plans[0]
    check_losses(pool, drill, tmp_path, seen)


def test_a_slow_rank_is_named_and_relieved_until_it_recovers(
    pool: ProcessPool, tmp_path: Path
) -> None:
    drill = Drill(faults=(SLOW_RANK,))
    seen = watch(pool, drill, tmp_path / "watched")
    found = [event for event in seen.events if isinstance(event, Finding)]
    assert [(event.kind, event.ranks) for event in found] == [(FindingKind.DEVICE, (3,))]
    assert found[0].step <= START + 5
    expected = [
        (DecisionKind.APPLY, Mitigation.REBALANCE),
        (DecisionKind.UNDO, Mitigation.REBALANCE),
    ]
    assert actions(seen) == expected
    # 32 micro-batches on speeds 1, 1, 1 and 1/1.9: no split is faster than 9 of them.
    healthy_s = middle(seen, 0, START)
    assert middle(seen, START + DURATION - 8, START + DURATION) <= 1.15 * healthy_s * (9.5 / 8)
    assert seen.plans[-1] == seen.plans[0]
    check_losses(pool, drill, tmp_path, seen)
    named, moved, undone = seen.said
    assert step_of(named) <= START + 5
    assert "pipeline 3 slowed 1.9× (since step 15): rank 3 computes 1.9× slower" in moved
    assert "S2 moved 3 of 32 micro-batches away, iteration 0." in moved
    assert "recovered" in undone
    assert "S2 was undone" in undone


def test_badly_cut_stages_are_cut_anew_and_then_again_around_a_slow_rank(
    pool: ProcessPool, tmp_path: Path
) -> None:
    slow = SlowRank(start=50, duration=16, global_rank=0, slowdown=3.0)
    cut = {"num_layers": 6, "num_stages": 2, "cuts": (5, 1), "world_size": 2}
    drill = Drill(faults=(slow,), num_steps=84, replaces_given_plan=True, **cut)
    seen = watch(pool, drill, tmp_path / "watched")
    assert [cut for cut, _ in groupby(seen.layers)] == [[5, 1], [3, 3], [1, 5], [3, 3]]
    assert actions(seen) == [
        (DecisionKind.APPLY, Mitigation.REPLAN),
        (DecisionKind.APPLY, Mitigation.REPLAN),
        (DecisionKind.UNDO, Mitigation.REPLAN),
    ]
    assert middle(seen, 40, 48) <= 0.75 * middle(seen, 4, 30)
    assert "S2b cut stages to 3+3 layers instead of 5+1" in seen.said[0]
    check_losses(pool, drill, tmp_path, seen)


def test_a_dry_run_names_the_slow_rank_and_says_what_it_would_do(
    pool: ProcessPool, tmp_path: Path
) -> None:
    slow = replace(SLOW_RANK, global_rank=1)
    drill = Drill(faults=(slow,), world_size=2, num_steps=START + 8, dry_run=True)
    seen = watch(pool, drill, tmp_path)
    found = [event for event in seen.events if isinstance(event, Finding)]
    assert [event.ranks for event in found] == [(1,)]
    assert actions(seen) == [(DecisionKind.APPLY, Mitigation.REBALANCE)]
    assert "dry run, nothing changed: S2 moved " in seen.said[-1]
    assert len(set(seen.plans)) == 1


def test_under_ddp_a_slow_rank_is_named_and_nothing_changes(
    pool: ProcessPool, tmp_path: Path
) -> None:
    faults = (SlowRank(start=START, global_rank=1, slowdown=1.5),)
    drill = Drill(faults=faults, strategy="ddp", world_size=2, num_steps=24)
    seen = watch(pool, drill, tmp_path)
    found = [event for event in seen.events if isinstance(event, Finding)]
    # The fault sleeps beside the device, whose probe is as fast as ever.
    assert [(event.kind, event.ranks) for event in found] == [(FindingKind.HOST, (1,))]
    assert found[0].step <= START + 5
    assert actions(seen) == []


def test_a_run_of_one_rank_tells_that_it_slowed(pool: ProcessPool, tmp_path: Path) -> None:
    faults = (SlowRank(start=START, global_rank=0, slowdown=1.5),)
    drill = Drill(faults=faults, strategy="auto", world_size=1, num_steps=24)
    seen = watch(pool, drill, tmp_path)
    assert len([e for e in seen.events if isinstance(e, IterationEvent)]) == drill.num_steps
    assert len(seen.said) == 1
    assert "the run slowed 1.5× (since step 15); no rank and no link stands out" in seen.said[0]
