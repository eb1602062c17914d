"""The events of a watched run: typed, written to a log (`core.event_log`), and read back.

A line is `{"event": "iteration", "at_s": 1732180000.25, "step": 412, ...}`; the other keys are the
fields of that event's dataclass. Other kinds of events in the same log are skipped; lines torn by a
crash are left out, with a warning; anything else is an error that gives its line number.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.event_log import append_event, read_entries
from lightning_hetero.core.reading import build, readable
from lightning_hetero.core.texts import show
from lightning_hetero.straggler.bocd import ChangeKind, ChangePoint

__all__ = [
    "ActionEvent",
    "ChangeEvent",
    "DecisionKind",
    "Event",
    "EventLog",
    "Finding",
    "FindingEvent",
    "FindingKind",
    "GenerationEvent",
    "IterationEvent",
    "Mitigation",
    "Pair",
    "format_message",
    "normalise_pair",
    "read_events",
    "to_entry",
]


Pair = tuple[int, int]
"""Global ranks at the two ends of a link."""


def normalise_pair(rank_a: int, rank_b: int) -> Pair:
    """Return the pair with the smaller rank first."""
    return (rank_a, rank_b) if rank_a < rank_b else (rank_b, rank_a)


class FindingKind(StrEnum):
    """Kinds of slow parts."""

    DEVICE = "device"
    """A rank's device: its matmul probe is slow."""
    HOST = "host"
    """A slow rank whose device is as fast as ever: something else keeps it from computing."""
    LINK = "link"
    """The link between two ranks."""
    PORT = "port"
    """All links of a rank, so its network port rather than one link."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A device, link or port found slow."""

    kind: FindingKind
    ranks: tuple[int, ...]
    """The rank, or the two ranks of a link."""
    ratio: float
    """Its time over the median of its peers."""

    def __str__(self) -> str:
        if self.kind is FindingKind.DEVICE:
            return f"rank {self.ranks[0]} computes {self.ratio:.1f}× slower than its peers"
        if self.kind is FindingKind.HOST:
            return (
                f"rank {self.ranks[0]} takes {self.ratio:.1f}× longer than its peers, although its "
                "device is as fast as ever"
            )
        if self.kind is FindingKind.PORT:
            return f"every link of rank {self.ranks[0]} is {self.ratio:.1f}× slower than its peers"
        ends = " and ".join(str(rank) for rank in self.ranks)
        return f"the link between ranks {ends} is {self.ratio:.1f}× slower than its peers"


class Mitigation(StrEnum):
    """Greyhound's four steps, cheapest first."""

    IGNORE = "S1"
    """Do nothing."""
    REBALANCE = "S2"
    """Give slow pipelines fewer micro-batches."""
    SWAP = "S3"
    """Swap places in the plan."""
    RESTART = "S4"
    """Restart from a checkpoint without the bad node."""


class DecisionKind(StrEnum):
    """What the caller is to do."""

    KEEP = "keep"
    """Nothing changes."""
    APPLY = "apply"
    """Take the step now, at this iteration boundary."""
    UNDO = "undo"
    """Return to the plan without a mitigation."""


@readable
class IterationEvent:
    """An iteration ended."""

    step: int
    iteration_s: float
    predicted_s: float | None = None
    """Predicted seconds, if anything was predicted."""


@readable
class ChangeEvent:
    """The level of a stream changed."""

    step: int
    onset_step: int
    kind: ChangeKind
    ratio: float
    before: float
    """Level before, in the unit of the stream."""
    after: float
    confidence: float
    where: str = "the run"
    """The stream: "the run" (time over what its work should take), "rank 3" (seconds per unit of
    work), "the job" (seconds of an iteration of any job); or, once it is located, "pipeline 1"."""

    @classmethod
    def from_change(
        cls, change: ChangePoint, *, step: int, onset_step: int, where: str = "the run"
    ) -> Self:
        """Return the event of a change point, with the steps of the run instead of indices."""
        return cls(
            step=step,
            onset_step=onset_step,
            kind=change.kind,
            ratio=change.ratio,
            before=change.before,
            after=change.after,
            confidence=change.confidence,
            where=where,
        )


@readable
class FindingEvent:
    """A device, link or port was found slow."""

    step: int
    kind: FindingKind
    ranks: tuple[int, ...]
    ratio: float

    @classmethod
    def from_finding(cls, finding: Finding, *, step: int) -> Self:
        """Return the event of a finding."""
        return cls(step=step, kind=finding.kind, ranks=finding.ranks, ratio=finding.ratio)

    @property
    def finding(self) -> Finding:
        """The finding that was logged."""
        return Finding(kind=self.kind, ranks=self.ranks, ratio=self.ratio)


@readable
class ActionEvent:
    """A mitigation was applied or undone, or would have been in a dry run."""

    step: int
    kind: DecisionKind
    mitigation: Mitigation
    reason: str
    effect: str = ""
    """What it changed: "moved 5 of 32 micro-batches away"."""
    before_s: float | None = None
    """Iteration time before it, seconds."""
    after_s: float | None = None
    """Iteration time after it, seconds (in a dry run: predicted)."""
    cost_s: float | None = None
    """Seconds that taking it cost."""
    dry_run: bool = False


@readable
class GenerationEvent:
    """Ranks were lost, or have joined, and the others went on in place; written by `RunLog`."""

    step: int
    """The first step of the generation."""
    generation: int
    """Its number."""
    ranks: int
    """Number of ranks that train in it."""
    idle_s: float
    """Seconds from the end of the last step before it to the end of this one."""
    steps_again: int
    """Steps that are trained again."""
    lost: tuple[int, ...] = ()
    """Numbers of the ranks that were lost, or have left, since the last step."""
    joined: tuple[int, ...] = ()
    """Numbers of the ranks that have joined."""

    def __str__(self) -> str:
        who = [f"without {list(self.lost)}"] if self.lost else []
        who += [f"with {list(self.joined)}"] if self.joined else []
        again = f", {self.steps_again} steps again" if self.steps_again else ""
        return (
            f"{self.ranks} ranks go on {' and '.join(who)}: {self.idle_s:.1f} s without a step"
            f"{again}"
        )


Event = IterationEvent | ChangeEvent | FindingEvent | ActionEvent | GenerationEvent
_NAMES: dict[str, type[Event]] = {
    "iteration": IterationEvent,
    "change": ChangeEvent,
    "finding": FindingEvent,
    "action": ActionEvent,
    "generation": GenerationEvent,
}


class EventLog:
    """Appends events to a file.

    Args:
        path: The file; a relative path is resolved now, against the working directory.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path).absolute()

    def write(self, event: Event) -> None:
        """Append an event as one line, at once."""
        append_event(self._path, **to_entry(event))


def to_entry(event: Event) -> dict[str, Any]:
    """Return an event's name and fields as a log's line holds them."""
    name = next(name for name, kind in _NAMES.items() if isinstance(event, kind))
    known = {key: value for key, value in asdict(event).items() if value is not None}
    return {"event": name, **known}


def read_events(path: str | Path) -> tuple[Event, ...]:
    """Return the events of a log in order: of `StragglerMonitor`'s own or of a `RunLog`.

    Raises:
        ConfigurationError: The file can't be read, or a line isn't an event; the message names it.
    """
    try:
        lines = list(read_entries(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"Can't read the event log {path}: {error}.") from error
    found = (_parse(entry, f"{path}, line {number}") for number, entry in lines)
    return tuple(event for event in found if event is not None)


def _parse(entry: Any, where: str) -> Event | None:
    """Return the event of a line; None if it is of a kind that tells nothing of stragglers."""
    if not isinstance(entry, dict) or "event" not in entry:
        raise ConfigurationError(f"{where}: {show(entry)} is no mapping with the key 'event'.")
    kind = _NAMES.get(str(entry["event"]))
    if kind is None:
        return None
    known = {k: v for k, v in entry.items() if k not in ("event", "at_s") and v is not None}
    try:
        return build(kind, known, "event", ConfigurationError)
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from None


def format_message(
    change: ChangeEvent, findings: Sequence[Finding] = (), action: ActionEvent | None = None
) -> str:
    """Return the one line a user reads about a change, its cause and what was done.

    `step 412: pipeline 1 slowed 1.8× (since step 405): rank 3 computes 1.9× slower than its peers;
    S2 moved 5 of 32 micro-batches away, iteration 1.80 s → 1.14 s`
    """
    if change.kind is ChangeKind.SLOWDOWN:
        verb = f"slowed {_times(change.ratio)}"
    elif change.kind is ChangeKind.RECOVERY:
        verb = f"recovered, {_times(1.0 / change.ratio)} faster"
    else:
        verb = f"became {_times(1.0 / change.ratio)} faster"
    text = f"step {change.step}: {change.where} {verb} "
    text += f"(since step {change.onset_step})"
    if findings:
        text += ": " + ", ".join(str(finding) for finding in findings)
    if action is not None and action.kind is not DecisionKind.KEEP:
        text += "; " + _describe(action)
    return text


def _times(ratio: float) -> str:
    return f"{ratio:.1f}×" if ratio >= 1.2 else f"{ratio:.2f}×"


def _describe(action: ActionEvent) -> str:
    done = "was undone" if action.kind is DecisionKind.UNDO else action.effect or "was applied"
    text = f"{action.mitigation.value} {done}"
    if action.dry_run:
        text = f"dry run, nothing changed: {text}"
    if action.before_s is not None and action.after_s is not None:
        text += f", iteration {action.before_s:.2f} s → {action.after_s:.2f} s"
    return text
