"""What a drill has shown: were all steps trained as undisturbed, and what did the faults cost."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from lightning_hetero.callbacks import read_log

Event = dict[str, Any]

PAUSE_S = 1.0
"""A gap between two steps that is longer counts as time without training."""
NOTICE_S = 3.0
"""How long a run that is told to go still trains."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that was done to the run."""

    kind: str
    moment: str
    """What the run did then."""
    at_s: float
    """Seconds since the epoch."""


@dataclass
class Cost:
    """What faults of a kind have cost."""

    faults: int = 0
    recoveries: int = 0
    steps_again: int = 0
    pauses_s: tuple[float, ...] = ()


def compare(events: Sequence[Event], undisturbed: Path) -> float:
    """Return the largest difference of a step's loss, however often it was trained.

    Raises:
        SystemExit: A step is missing.
    """
    expected = {e["step"]: e["loss"] for e in read_log(undisturbed) if e["event"] == "trained"}
    trained = [event for event in events if event["event"] == "trained"]
    missing = sorted(expected.keys() - {event["step"] for event in trained})
    if missing:
        raise SystemExit(f"steps {missing[:20]} were never trained")
    return max(abs(event["loss"] - expected[event["step"]]) for event in trained)


def tell(faults: Sequence[Fault], events: Sequence[Event]) -> str:
    """Return a table: by kind of fault how many, recoveries, and seconds without training."""
    costs = {fault.kind: Cost() for fault in sorted(faults, key=lambda fault: fault.kind)}
    for fault in faults:
        costs[fault.kind].faults += 1
    trained, started = (
        [event for event in events if event["event"] == kind] for kind in ("trained", "started")
    )
    pairs = list(pairwise(trained))
    usual_s = median(after["at_s"] - before["at_s"] for before, after in pairs)
    for before, after in pairs:
        pause_s = after["at_s"] - before["at_s"] - usual_s
        starts = [event for event in started if _between(event, before, after)]
        fault = _cause(faults, before["at_s"], after["at_s"])
        if fault is None or not (starts or pause_s > PAUSE_S):
            continue
        cost = costs[fault.kind]
        cost.recoveries += len(starts)
        cost.steps_again += max(0, before["step"] + 1 - after["step"])
        cost.pauses_s += (pause_s,)
    rows = [_row(kind, cost) for kind, cost in costs.items()]
    rows.append(_row("all", _sum(list(costs.values()))))
    head = ("fault", "faults", "recoveries", "steps again", "s without training", "each", "longest")
    moments = Counter(fault.moment for fault in faults)
    when = ", ".join(f"{count} in {moment}" for moment, count in sorted(moments.items()))
    return "\n".join([*(_format(row) for row in (head, *rows)), f"faults came: {when}"])


def _between(event: Event, before: Event, after: Event) -> bool:
    return bool(before["at_s"] < event["at_s"] <= after["at_s"])


def _cause(faults: Sequence[Fault], start_s: float, end_s: float) -> Fault | None:
    """Return the first fault in a pause, or the last one before it."""
    inside = [fault for fault in faults if start_s < fault.at_s <= end_s]
    earlier = [fault for fault in faults if fault.at_s <= start_s]
    if earlier and "told to go" in earlier[-1].kind and start_s - earlier[-1].at_s < NOTICE_S:
        return earlier[-1]
    return inside[0] if inside else earlier[-1] if earlier else None


def _sum(costs: Sequence[Cost]) -> Cost:
    return Cost(
        faults=sum(cost.faults for cost in costs),
        recoveries=sum(cost.recoveries for cost in costs),
        steps_again=sum(cost.steps_again for cost in costs),
        pauses_s=tuple(pause for cost in costs for pause in cost.pauses_s),
    )


def _row(kind: str, cost: Cost) -> tuple[str, ...]:
    total_s = sum(cost.pauses_s)
    return (
        kind,
        str(cost.faults),
        str(cost.recoveries),
        str(cost.steps_again),
        f"{total_s:.1f}",
        f"{total_s / cost.faults:.1f}",
        f"{max(cost.pauses_s, default=0.0):.1f}",
    )


def _format(row: Sequence[str]) -> str:
    first, *others = row
    return f"{first:20}" + "".join(f"{word:>{max(12, len(word) + 2)}}" for word in others)
