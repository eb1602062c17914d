"""The events of a watched run: typed, written to a log (`core.event_log`), and read back.

A line is `{"event": "iteration", "at_s": 1732180000.25, "step": 412, ...}`; the other keys are the
fields of that event's dataclass. Other kinds of events in the same log are skipped; lines that are
incomplete because of a crash are skipped with a warning; anything else is an error that gives the
line's number.
"""

from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Any

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.event_log import read_entries
from lightning_hetero.core.reading import build, readable
from lightning_hetero.core.texts import show

Pair = tuple[int, int]
"""Global ranks at the two ends of a link."""


def normalise_pair(rank_a: int, rank_b: int) -> Pair:
    """Return the pair with the smaller rank first."""
    return (rank_a, rank_b) if rank_a < rank_b else (rank_b, rank_a)


class ChangeKind(StrEnum):
    """Meanings of a change of the level."""

    SLOWDOWN = "slowdown"
    """The level rose."""
    RECOVERY = "recovery"
    """The level fell after a slowdown: the cause ended or eased."""
    IMPROVEMENT = "improvement"
    """The level fell below the healthy one: nothing needs to be done."""


class FindingKind(StrEnum):
    """Kinds of slow parts."""

    DEVICE = "device"
    """A rank's device: its matmul probe is slow."""
    HOST = "host"
    """A slow rank whose device is as fast as before: something else slows it down."""
    LINK = "link"
    """The link between two ranks."""


class Mitigation(StrEnum):
    """The steps against a straggler, cheapest first: Greyhound's S1 to S4, and S2b."""

    IGNORE = "S1"
    """Do nothing."""
    REBALANCE = "S2"
    """Give slow pipelines fewer micro-batches."""
    REPLAN = "S2b"
    """Divide pipelines into stages anew, by the costs that were observed."""
    SWAP = "S3"
    """Swap places in the plan."""
    RESTART = "S4"
    """Restart from a checkpoint without the bad node."""


class DecisionKind(StrEnum):
    """What the ranks have to do about a mitigation."""

    KEEP = "keep"
    """Nothing changes."""
    APPLY = "apply"
    """Take the step now, between two iterations."""
    UNDO = "undo"
    """Return to the plan from before the fault."""


@readable
class IterationEvent:
    """An iteration ended."""

    step: int
    iteration_s: float
    predicted_s: float | None = None
    """Predicted seconds, if anything was predicted."""


@readable
class ChangeEvent:
    """The level of a series of values changed."""

    step: int
    """The step whose value completed the change."""
    onset_step: int
    """The step of the first value of the new level."""
    kind: ChangeKind
    before: float
    """Median of the values before, in the unit of the series."""
    after: float
    """Median of the values since the onset."""
    where: str = "the run"
    """The series: "the run" (time divided by what its work should take), "rank 3" (seconds per unit
    of work), "the job" (seconds of an iteration of any job); or, once located, "pipeline 1"."""

    @property
    def ratio(self) -> float:
        """The level after the change divided by that before."""
        return self.after / self.before

    def __str__(self) -> str:
        if self.kind is ChangeKind.SLOWDOWN:
            verb = f"slowed {_times(self.ratio)}"
        else:
            verb = "recovered," if self.kind is ChangeKind.RECOVERY else "became"
            verb += f" {_times(1.0 / self.ratio)} faster"
        return f"{self.where} {verb} (since step {self.onset_step})"


@readable
class Finding:
    """A device, host or link was found slow."""

    kind: FindingKind
    ranks: tuple[int, ...]
    """The rank, or the two ranks of a link."""
    ratio: float
    """Its time divided by the median of its peers; a link's, divided by its expected time."""
    step: int = 0
    """The step after which it was found."""

    def __str__(self) -> str:
        if self.kind is FindingKind.DEVICE:
            return f"rank {self.ranks[0]} computes {self.ratio:.1f}× slower than its peers"
        if self.kind is FindingKind.HOST:
            return (
                f"rank {self.ranks[0]} takes {self.ratio:.1f}× longer than its peers, although its "
                "device is as fast as ever"
            )
        ends = " and ".join(str(rank) for rank in self.ranks)
        return f"the link between ranks {ends} is {self.ratio:.1f}× slower than it should be"


@readable
class ActionEvent:
    """A mitigation was applied or undone, or would have been; or it was decided to wait."""

    step: int
    kind: DecisionKind
    mitigation: Mitigation
    reason: str
    effect: str = ""
    """What it changed: "moved 5 of 32 micro-batches away"."""
    before_s: float | None = None
    """Iteration time before it, seconds."""
    after_s: float | None = None
    """Iteration time after it, seconds; predicted in a dry run."""
    cost_s: float | None = None
    """Seconds that taking it cost."""
    dry_run: bool = False
    """Whether it was only reported."""

    def __str__(self) -> str:
        done = "was undone" if self.kind is DecisionKind.UNDO else self.effect or self.reason
        text = f"{self.mitigation.value} {done}"
        if self.dry_run:
            text = f"dry run, nothing changed: {text}"
        if self.before_s is not None and self.after_s is not None:
            text += f", iteration {self.before_s:.2f} s → {self.after_s:.2f} s"
        return text


Event = IterationEvent | ChangeEvent | Finding | ActionEvent
_NAMES: dict[str, type[Event]] = {
    "iteration": IterationEvent,
    "change": ChangeEvent,
    "finding": Finding,
    "action": ActionEvent,
}


def to_entry(event: Event) -> dict[str, Any]:
    """Return an event's name and fields as a line of the log has them (`append_event`)."""
    name = next(name for name, kind in _NAMES.items() if isinstance(event, kind))
    known = {key: value for key, value in asdict(event).items() if value is not None}
    return {"event": name, **known}


def read_events(path: str | Path) -> tuple[Event, ...]:
    """Return the events of a log in order: a log of `StragglerMonitor` or of `RunLog`.

    Raises:
        ConfigurationError: The file can't be read, or a line isn't an event; the message names it.
    """
    try:
        lines = list(read_entries(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"Can't read the event log {path}: {error}.") from error
    found = []
    for number, entry in lines:
        where = f"{path}, line {number}"
        if not isinstance(entry, dict) or "event" not in entry:
            raise ConfigurationError(f"{where}: {show(entry)} is no mapping with the key 'event'.")
        kind = _NAMES.get(str(entry["event"]))
        known = {k: v for k, v in entry.items() if k not in ("event", "at_s") and v is not None}
        if kind is not None:
            try:
                found.append(build(kind, known, "event", ConfigurationError))
            except ConfigurationError as error:
                raise ConfigurationError(f"{where}: {error}") from None
    return tuple(found)


def format_message(
    change: ChangeEvent, findings: Sequence[Finding] = (), action: ActionEvent | None = None
) -> str:
    """Return the one line for users about a change, its cause and what was done.

    `step 412: pipeline 1 slowed 1.8× (since step 405): rank 3 computes 1.9× slower than its peers;
    S2 moved 5 of 32 micro-batches away, iteration 1.80 s → 1.14 s`
    """
    text = f"step {change.step}: {change}"
    if findings:
        text += ": " + ", ".join(map(str, findings))
    return text if action is None else f"{text}; {action}"


def _times(ratio: float) -> str:
    return f"{ratio:.1f}×" if ratio >= 1.2 else f"{ratio:.2f}×"
