"""Read what a run's log says: a line for each event, phases and their speed, and compare two runs.

Everything here is read from `RunLog`'s files; see `examples/long_run.py` for who writes them::

    python examples/long_run_timeline.py outputs/long_run
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_hetero import ParallelPlan
from lightning_hetero.callbacks import read_log

Event = dict[str, Any]
_STYLES = {
    "faults": "red", "killed": "red", "notice": "red",
    "failed": "yellow", "finding": "yellow",
    "action": "green", "recovered": "green", "leaving": "green",
    "generation": "green",
}  # fmt: skip


class Timeline:
    """Puts a run's events into words, one after the other."""

    def __init__(self) -> None:
        self._start_s: float | None = None
        self._nodes: Sequence[str] = ()
        self._plans: list[Any] = []
        self._shown: set[int] = set()
        self._fault: Event | None = None

    def line(self, event: Event) -> Text | None:
        """Return the line of an event; None if it isn't worth one."""
        if self._start_s is None:
            self._start_s = event["at_s"]
        say = getattr(self, f"_{event['event']}", None)
        words = "" if say is None else say(event)
        if not words:
            return None
        text = Text(f"{event['at_s'] - self._start_s:7.1f} s  step {event['step']:>4}  ")
        return text.append(words, style=_STYLES.get(event["event"], ""))

    def _since(self, event: Event) -> str:
        if self._fault is None:
            return ""
        steps, fault = event["step"] - self._fault["step"], self._fault
        return f", {steps} steps and {event['at_s'] - fault['at_s']:.1f} s after it began"

    def _started(self, event: Event) -> str:
        self._nodes, self._plans, self._fault = event["nodes"], [*event["plans"]], None
        self._shown = set()
        number = len(event["plans"])
        return (
            f"{len(self._nodes)} nodes train: {' '.join(self._nodes)}; {number} plan"
            f"{'s' if number > 1 else ''} to choose from"
        )

    def _plan(self, event: Event) -> str:
        if "plan" in event:
            self._plans.append(event["plan"])
        number = event["number"]
        if number in self._shown:
            return ""
        self._shown.add(number)
        return f"plan {len(self._shown)}: {in_short(self._plans[number], self._nodes)}"

    def _faults(self, event: Event) -> str:
        if not event["faults"]:
            self._fault = None
            return "FAULT ends"
        self._fault = event
        return "FAULT " + ", ".join(_fault(fault, self._nodes) for fault in event["faults"])

    def _killed(self, event: Event) -> str:
        self._fault = event
        return f"FAULT node {event['node']} is killed, its memory and disk are lost"

    def _notice(self, event: Event) -> str:
        self._fault = event
        return f"FAULT node {event['node']} gets a spot notice"

    def _joined(self, event: Event) -> str:
        return f"node {event['node']} is started again, empty"

    def _failed(self, event: Event) -> str:
        error = " ".join(event["error"].split())[:80]
        if self._fault is None:
            return f"node {event['node']} stops: {error}"
        return f"detected by node {event['node']}{self._since(event)}: {error}"

    def _finding(self, event: Event) -> str:
        named = " and ".join(self._nodes[rank] for rank in event["ranks"])
        return (
            f"detected: {event['kind']} of {named} {event['ratio']:.1f}x slower{self._since(event)}"
        )

    def _action(self, event: Event) -> str:
        if event["kind"] == "keep":
            return ""
        done = "undone" if event["kind"] == "undo" else event["effect"]
        before_s, after_s = event.get("before_s"), event.get("after_s")
        times = f", iteration {before_s:.2f} s -> {after_s:.2f} s" if before_s and after_s else ""
        return f"mitigated: {event['mitigation']} {done}{times}"

    def _generation(self, event: Event) -> str:
        again = f", {event['steps_again']} steps again" if event["steps_again"] else ""
        return (
            f"generation {event['generation']}: {event['ranks']} ranks go on in place, "
            f"{event['idle_s']:.2f} s without a step{again}"
        )

    def _leaving(self, event: Event) -> str:
        how = event["error"] or f"checkpoint safe after {event['drain_s']:.2f} s"
        if self._fault is None:
            return f"drained: all start again with who has come, {how}"
        nodes = " and ".join(self._nodes[rank] for rank in event["ranks"])
        return f"drained: {nodes} leaves{self._since(event)}, {how}"

    def _recovered(self, event: Event) -> str:
        sources = ", ".join(
            f"{count / 1e6:.2f} MB from {source.replace('_', ' ')}"
            for source, count in sorted(event["bytes_by_source"].items())
            if count
        )
        seconds = event["seconds"]
        phases = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
        return (
            f"recovered: {sources}; {event['lost_steps']} steps lost; "
            f"{sum(seconds.values()):.1f} s without a step ({phases})"
        )

    def _validated(self, event: Event) -> str:
        return f"validation loss {event['metrics']['val_loss']:.6f}"

    def _ended(self, event: Event) -> str:
        return "the run ends"


def in_short(plan: Any, nodes: Sequence[str]) -> str:
    """Return a plan on one line: stages with their layers, pipelines apart."""
    return " | ".join(
        " > ".join(f"{nodes[s.ranks[0]]} {len(s.layers)}" for s in pipeline.stages)
        for pipeline in ParallelPlan.from_dict(plan).pipelines
    )


def _fault(fault: Event, nodes: Sequence[str]) -> str:
    if "slowdown" in fault:
        return f"node {nodes[fault['global_rank']]} computes {fault['slowdown']:g}x slower"
    a, b = (nodes[rank] for rank in fault["ranks"])
    return f"link {a}-{b} carries {fault['bytes_per_s'] / 1e3:g} kB/s"


@dataclass(kw_only=True)
class Phase:
    """A time in which nothing new happened to the run."""

    name: str
    start_s: float
    speed: float
    """Of the devices that were there, faults included; 1 is a device that isn't slowed."""
    end_s: float = 0.0
    steps: tuple[int, int] = (0, 0)
    """First and last step; trained again where they were lost."""
    iterations_s: float = 0.0
    num_tokens: float = 0.0
    num_changes: int = 0
    """Of the plan."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of iterations."""
        return self.num_tokens / self.iterations_s if self.iterations_s else 0.0


class _Phases:
    """Cuts a run where something happens to it or is done about it."""

    def __init__(self, slowdowns: Mapping[str, float]) -> None:
        self.found: list[Phase] = []
        self._slowdowns = slowdowns
        self._nodes: Sequence[str] = ()
        self._present: list[str] = []
        self._noticed: list[str] = []
        self._faults: list[Event] = []
        self._words: list[str] = []

    def add(self, event: Event) -> None:
        kind = event["event"]
        if self.found:
            self.found[-1].end_s = event["at_s"]
        if kind == "started":
            self._nodes, self._present, self._faults = event["nodes"], [*event["nodes"]], []
            self._cut(event)
        elif kind == "faults" and event["faults"] != self._faults:
            self._faults = event["faults"]
            self._cut(event)
        elif kind == "action" and event["kind"] != "keep":
            self._cut(event, *([event["mitigation"]] if event["kind"] == "apply" else []))
        elif kind == "killed":
            self._present.remove(event["node"])
            self._cut(event, "restart")
        elif kind == "leaving":
            self._present = [name for name in self._present if name not in self._noticed]
            self._cut(event, "restart")
        elif kind == "notice":
            self._noticed.append(event["node"])
        elif kind == "plan":
            self.found[-1].num_changes += 1
        elif kind == "metrics":
            self._count(event)

    def _cut(self, event: Event, *words: str) -> None:
        slowdowns = {name: self._slowdowns[name] for name in self._present}
        for fault in self._faults:
            if "slowdown" in fault:
                slowdowns[self._nodes[fault["global_rank"]]] *= fault["slowdown"]
        named = [_fault(fault, self._nodes) for fault in self._faults]
        self.found.append(
            Phase(
                name=", ".join([f"{len(self._present)} nodes", *named, *words]),
                start_s=event["at_s"],
                speed=sum(1 / slowdown for slowdown in slowdowns.values()),
            )
        )

    def _count(self, event: Event) -> None:
        phase, scalars = self.found[-1], event["scalars"]
        phase.steps = (phase.steps[0] or event["step"], event["step"])
        phase.iterations_s += scalars["run/iteration_s"]
        phase.num_tokens += scalars["run/iteration_s"] * scalars["run/tokens_per_s"]


def find_phases(events: Iterable[Event], slowdowns: Mapping[str, float]) -> list[Phase]:
    """Return the phases of a run on devices that are so slow."""
    phases = _Phases(slowdowns)
    for event in events:
        phases.add(event)
    return phases.found


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Whether two runs have trained the same, and what it took."""

    val_loss: tuple[float, float]
    """Of the run and of the undisturbed one, after the last step."""
    num_steps: int
    max_loss_difference: float
    """Of any step's training loss."""
    num_samples: int
    """Samples of all steps of the undisturbed run, with repetition."""
    num_other_samples: int
    """Those of them that the run trained in another step, more often or never."""
    num_lost_steps: int
    """Steps that were trained again after a restart."""
    tokens_per_cpu_s: float
    """What the undisturbed process trains a second that it computes."""


def compare(run: Sequence[Event], undisturbed: Sequence[Event]) -> Comparison:
    """Compare what two runs noted of their steps; of a step trained twice the last time counts."""
    trained = [event for event in run if event["event"] == "trained"]
    ours = {event["step"]: event for event in trained}
    theirs = {event["step"]: event for event in undisturbed if event["event"] == "trained"}
    other = 0
    for step in ours.keys() | theirs.keys():
        samples = [Counter(steps[step]["samples"]) if step in steps else Counter[int]()
                   for steps in (ours, theirs)]  # fmt: skip
        other += max((samples[0] - samples[1]).total(), (samples[1] - samples[0]).total())
    differences = [
        abs(ours[step]["loss"] - theirs[step]["loss"]) for step in ours if step in theirs
    ]
    warm = [event for step, event in theirs.items() if step > 1]
    return Comparison(
        val_loss=(_val_loss(run), _val_loss(undisturbed)),
        num_steps=len(theirs),
        max_loss_difference=max(differences),
        num_samples=sum(len(event["samples"]) for event in theirs.values()),
        num_other_samples=other,
        num_lost_steps=len(trained) - len(ours),
        tokens_per_cpu_s=sum(e["num_tokens"] for e in warm) / sum(e["cpu_s"] for e in warm),
    )


def _val_loss(events: Sequence[Event]) -> float:
    return float([e for e in events if e["event"] == "validated"][-1]["metrics"]["val_loss"])


def show(
    run: Sequence[Event], undisturbed: Sequence[Event], slowdowns: Mapping[str, float]
) -> None:
    """Print the phases of a run, and how it compares with the undisturbed one."""
    same = compare(run, undisturbed)
    phases = find_phases(run, slowdowns)
    table = Table(title="phases", title_justify="left", show_footer=True)
    table.add_column("what there was", footer="all in all, restarts included")
    num_tokens = sum(e["num_tokens"] for e in undisturbed if e["event"] == "trained")
    whole_s = phases[-1].end_s - phases[0].start_s
    ideal = sum((p.end_s - p.start_s) * p.speed for p in phases) * same.tokens_per_cpu_s
    for title, footer in (
        ("steps", f"1-{same.num_steps}"),
        ("s", f"{whole_s:.1f}"),
        ("plan changes", str(sum(phase.num_changes for phase in phases))),
        ("tokens/s", f"{num_tokens / whole_s:,.0f}"),
        ("ideal", f"{ideal / whole_s:,.0f}"),
        ("share", f"{num_tokens / ideal:.0%}"),
    ):
        table.add_column(title, footer=footer, justify="right")
    for phase in phases:
        ideal = phase.speed * same.tokens_per_cpu_s
        trained = phase.num_tokens > 0
        table.add_row(
            phase.name,
            f"{phase.steps[0]}-{phase.steps[1]}" if trained else "",
            f"{phase.end_s - phase.start_s:.1f}",
            str(phase.num_changes) if trained else "",
            f"{phase.tokens_per_s:,.0f}" if trained else "",
            f"{ideal:,.0f}" if trained else "",
            f"{phase.tokens_per_s / ideal:.0%}" if trained else "",
        )
    console = Console()
    console.print(table)
    console.print(
        f"ideal: {same.tokens_per_cpu_s:,.0f} tokens per second of computing, as the undisturbed "
        "process had,\ntimes the speeds of the devices that are there, slow ones as slow as they "
        "are.\n"
    )
    ours, theirs = same.val_loss
    console.print(f"validation loss   {ours:.6f}, undisturbed {theirs:.6f}: {ours - theirs:+.1e}")
    console.print(
        f"training loss     differs by {same.max_loss_difference:.1e} at most over "
        f"{same.num_steps} steps"
    )
    console.print(
        f"samples           {same.num_samples:,}, of which {same.num_other_samples} were trained "
        f"in other steps than undisturbed; {same.num_lost_steps} steps were lost and trained again"
    )


def main() -> None:
    """Show a run again."""
    folder = Path(sys.argv[1])
    run, undisturbed = (
        list(read_log(folder / name / "events.jsonl")) for name in ("run", "undisturbed")
    )
    timeline, console = Timeline(), Console()
    for event in run:
        if line := timeline.line(event):
            console.print(line)
    show(run, undisturbed, json.loads((folder / "slowdowns.json").read_text()))


if __name__ == "__main__":
    main()
