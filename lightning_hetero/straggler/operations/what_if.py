"""What would a run have taken without this rank, this stage's weight, these lengths?

A trace is replayed with operations of typical duration. A cause's share of the excess is the mean
of two answers: how much is saved by removing only it, and how much is left by keeping only it.

Of the same kind on all stages, forwards and backwards all take their mean in the ideal: a perfect
balance of the work that there was, which a median would make less or more. Transfers take their
median: what a congested link adds is no work. `answer` says all this in one sentence.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from lightning_hetero.core.arrays import BoolArray, FloatArray, IntArray
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.straggler.operations.factors import Factors, low_median
from lightning_hetero.straggler.operations.replay import BACKWARD, FORWARD, TRANSFERS, Replay
from lightning_hetero.straggler.operations.trace import OperationTrace, grouped

__all__ = ["Cause", "Explanation", "Layout", "answer", "explain"]

_MOST_SUSPECTS = 8
"""Ranks, and links, that are tried one by one; the others' excess counts as "other"."""
_LEAST_SHARE = 0.01
_WORTH_SAYING = 1.02
_SECOND_SHARE = 0.2


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One reason for the excess."""

    kind: str
    """`rank`, `stage`, `lengths`, `link`, `pauses` or `other`."""
    which: int | str | None
    """The rank or stage by number, the link by name."""
    share: float
    """Of the excess: the mean of the next two, within 0 and 1."""
    removed: float
    """Share that removing only this cause saves."""
    kept: float
    """Share that is left if only this cause is kept."""
    factor: float
    """How many times longer its operations take than their like."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a run took, what was possible, and why they differ; seconds are means per step."""

    actual_s: float
    ideal_s: float
    """With every forward, and every backward, as long as their mean, transfers as their median."""
    replayed_s: float
    """The replay with all durations as they were: how good the model of the trace is."""
    causes: tuple[Cause, ...]
    by_kind: dict[str, float]
    """Share of the excess saved if only operations of a kind took as long as their like."""

    @property
    def slowdown(self) -> float:
        """The actual time over the ideal one."""
        return self.actual_s / self.ideal_s if self.ideal_s > 0 else 1.0

    def to_dict(self) -> dict[str, object]:
        """Return the explanation as plain data for JSON."""
        return {"slowdown": self.slowdown, **asdict(self)}


@dataclass(frozen=True)
class _Suspect:
    """A possible cause: by what it multiplies own times, and what it adds to them and to gaps."""

    kind: str
    which: int | str | None
    ops: BoolArray
    """The operations it slows, as booleans."""
    factor: Callable[[], FloatArray]
    own_s: Callable[[], FloatArray] | None = None
    gap_s: Callable[[], FloatArray] | None = None


def explain(trace: OperationTrace) -> Explanation:
    """Return why a trace's steps took longer than they could.

    Raises:
        ConfigurationError: The trace's operations contradict each other.
    """
    replay = Replay.build(trace)
    factors = Factors.find(replay)
    typical_gap_s, paused_gap = _gaps(replay)
    suspects = _suspects(replay, factors, typical_gap_s, paused_gap)

    def time(own_s: FloatArray, gap_s: FloatArray) -> float:
        return float(replay.step_s(own_s, gap_s).mean())

    full_s, least_s = time(replay.own_s, replay.gap_s), time(factors.base_s, typical_gap_s)
    excess_s = max(full_s - least_s, 1e-12)
    causes = []
    for suspect in suspects:
        factor = suspect.factor()
        own_s = suspect.own_s() if suspect.own_s else 0.0
        gap_s = suspect.gap_s() if suspect.gap_s else 0.0
        removed_s = time((replay.own_s - own_s) / factor, replay.gap_s - gap_s)
        kept_s = time(factors.base_s * factor + own_s, typical_gap_s + gap_s)
        removed, kept = (full_s - removed_s) / excess_s, (kept_s - least_s) / excess_s
        share = float(np.clip((removed + kept) / 2, 0.0, 1.0))
        if share >= _LEAST_SHARE and excess_s > 1e-3 * least_s:
            of = suspect.ops
            slower = float((factors.base_s * factor)[of].sum() / factors.base_s[of].sum())
            causes.append(
                Cause(
                    kind=suspect.kind,
                    which=suspect.which,
                    share=share,
                    removed=removed,
                    kept=kept,
                    factor=slower if np.isfinite(slower) else 1.0,
                )
            )
    ideal_own_s = _even(replay)
    return Explanation(
        actual_s=float(replay.observed_s().mean()),
        ideal_s=time(ideal_own_s, typical_gap_s),
        replayed_s=full_s,
        causes=tuple(sorted(causes, key=lambda cause: -cause.share)),
        by_kind={
            name: (full_s - time(np.where(of, ideal_own_s, replay.own_s), replay.gap_s)) / excess_s
            for name, of in _kinds(replay).items()
        },
    )


def _kinds(replay: Replay) -> dict[str, BoolArray]:
    """Return which operations each kind has, as booleans; barriers go with collectives."""
    trace = replay.trace
    kinds = {
        name: np.r_[trace.are(*of), np.zeros(len(replay.barriers), bool)]
        for name, of in (("forward", FORWARD), ("backward", BACKWARD), ("transfers", TRANSFERS))
    }
    kinds["collectives and the rest"] = ~np.logical_or.reduce(list(kinds.values()))
    return kinds


def _even(replay: Replay) -> FloatArray:
    """Return own times of a perfect balance: the same compute in all, evenly spread."""
    trace = replay.trace
    own_s = replay.own_s.copy()
    for kind, name in enumerate(trace.kinds):
        ops = np.flatnonzero(trace.kind == kind)
        if name in (*FORWARD, *BACKWARD):
            own_s[ops] = replay.own_s[ops].mean()
        else:
            own_s[ops] = 0.0 if name == "gc" else np.median(replay.own_s[ops])
    return own_s


def _gaps(replay: Replay) -> tuple[FloatArray, BoolArray]:
    """Return the typical gap before each operation, and which gaps are pauses."""
    trace, count = replay.trace, len(replay.own_s)
    typical = np.zeros(count)
    place = grouped(trace.kind, trace.stage)
    typical[: len(trace)] = low_median(replay.gap_s[: len(trace)], place)[place]
    compute = trace.are(*FORWARD, *BACKWARD)
    usual_s = float(np.median(replay.own_s[: len(trace)][compute])) if compute.any() else np.inf
    return typical, replay.gap_s - typical > 0.25 * usual_s


def _suspects(
    replay: Replay, factors: Factors, typical_gap_s: FloatArray, paused_gap: BoolArray
) -> list[_Suspect]:
    trace, added = replay.trace, len(replay.barriers)
    none = np.zeros(added, bool)
    compute = np.r_[trace.are(*FORWARD, *BACKWARD), none]
    weight = (
        np.bincount(trace.stage[compute[: len(trace)]], (factors.base_s * factors.stage)[compute])
        if compute.any()
        else np.zeros(1)
    )
    count = np.bincount(trace.stage[compute[: len(trace)]], minlength=len(weight))
    heaviest = int(np.argmax(weight / np.maximum(count, 1)))
    on_heaviest = compute & np.r_[trace.stage == heaviest, none]
    found = [
        _Suspect("stage", heaviest, on_heaviest, lambda: factors.stage),
        _Suspect("lengths", None, compute, lambda: factors.lengths),
    ]
    # Ranks and links are tried one by one, in the order of the seconds they cost.
    ranks, by_rank = np.unique(np.r_[trace.rank, trace.rank[replay.barriers]], return_inverse=True)
    links = np.r_[factors.link_of, np.full(added, -1)]
    for kind, names, of, factor in (
        ("rank", ranks.tolist(), by_rank, factors.rank),
        ("link", factors.links, links, factors.link),
    ):
        cost_s = np.bincount(of + 1, (factor - 1.0) * factors.base_s, len(names) + 1)[1:]
        for index in np.argsort(-cost_s)[:_MOST_SUSPECTS].tolist():
            if cost_s[index] > 0:
                ops = of == index
                found.append(_Suspect(kind, names[index], ops, _only(factor, ops)))
    everything = np.ones(len(replay.own_s), bool)
    untried = factors.rank * factors.link
    for suspect in found[2:]:
        untried = np.where(suspect.ops, untried / suspect.factor(), untried)
    extra_s = replay.gap_s - typical_gap_s
    pauses = _Suspect(
        "pauses",
        _mostly(by_rank, ranks.tolist(), np.where(factors.paused, replay.own_s, 0.0)),
        everything,
        lambda: np.where(factors.paused, factors.rest, 1.0),
        lambda: factors.pause_s,
        lambda: np.where(paused_gap, extra_s, 0.0),
    )
    other = _Suspect(
        "other",
        None,
        everything,
        lambda: np.where(factors.paused, 1.0, np.maximum(factors.rest, 1e-9)) * untried,
        None,
        lambda: np.where(paused_gap, 0.0, extra_s),
    )
    return [*found, pauses, other]


def _only(factor: FloatArray, ops: BoolArray) -> Callable[[], FloatArray]:
    return lambda: np.where(ops, factor, 1.0)


def _mostly(by_rank: IntArray, ranks: Sequence[int], seconds: FloatArray) -> int | None:
    """Return the rank that has nearly all of the seconds, if one has."""
    cost_s = np.bincount(by_rank, seconds, len(ranks))
    if cost_s.sum() > 0 and cost_s.max() > 0.8 * cost_s.sum():
        return int(ranks[int(cost_s.argmax())])
    return None


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the job was laid out, as far as is known."""

    tp_size: int = 1
    """Devices behind each rank of the trace."""
    layers: tuple[int, ...] = ()
    """Layers of each stage."""
    nodes: Mapping[int, str] = field(default_factory=dict)
    """The node of each rank."""

    @classmethod
    def from_dict(cls, entry: object, trace: OperationTrace) -> "Layout":
        """Read `tp_size`, `layers` and `nodes`, and compare `dp_size` and `pp_size` with a trace.

        Raises:
            ConfigurationError: It isn't a layout, or is that of another job.
        """
        if not isinstance(entry, Mapping):
            raise ConfigurationError("A layout is a mapping such as {dp_size: 4, pp_size: 4}.")
        for name, found in (("dp_size", trace.pipeline), ("pp_size", trace.stage)):
            if name in entry and entry[name] != int(found.max()) + 1:
                raise ConfigurationError(
                    f"The layout says {name} {entry[name]}, but the trace has "
                    f"{int(found.max()) + 1}. Give the layout of the same job."
                )
        try:
            nodes = {int(rank): str(node) for rank, node in dict(entry.get("nodes", {})).items()}
            return cls(
                tp_size=int(entry.get("tp_size", 1)),
                layers=tuple(int(count) for count in entry.get("layers", ())),
                nodes=nodes,
            )
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"The layout has a wrong value: {error}.") from error


def answer(explanation: Explanation, layout: Layout | None = None) -> str:
    """Return the slowdown, its main cause and what to do, in one sentence."""
    took = f"{explanation.actual_s:.4g} s a step where {explanation.ideal_s:.4g} s are possible"
    if explanation.slowdown < _WORTH_SAYING or not explanation.causes:
        return f"Not slow: {took}."
    first, *rest = explanation.causes
    text = (
        f"{explanation.slowdown:.2f} × slower than possible ({took}); {first.share:.2f} of the "
        f"excess is {_name(first, layout or Layout())}: {_remedy(first, layout or Layout())}"
    )
    second = next((cause for cause in rest if cause.share >= _SECOND_SHARE), None)
    if second is not None:
        name, remedy = (say(second, layout or Layout()) for say in (_name, _remedy))
        text += f"; another {second.share:.2f} is {name}: {remedy}"
    return f"{text}."


def _name(cause: Cause, layout: Layout) -> str:
    which: Any = cause.which
    if cause.kind == "rank":
        last = which + layout.tp_size - 1
        ranks = f"rank {which}" if last == which else f"one of ranks {which} to {last}"
        return f"{ranks}, {cause.factor:.2f} × slower than its like"
    if cause.kind == "stage":
        return (
            f"the split into stages: stage {which} has {cause.factor:.2f} × the mean stage's work"
        )
    if cause.kind == "link":
        return f"a slow link ({which}), {cause.factor:.2f} × slower than its like"
    if cause.kind == "pauses":
        return "pauses" if which is None else f"pauses of rank {which}"
    if cause.kind == "lengths":
        return "micro-batches of unequal cost"
    return "spread over all operations, or between them"


def _remedy(cause: Cause, layout: Layout) -> str:
    which: Any = cause.which
    if cause.kind == "rank":
        return f"replace {layout.nodes.get(which, 'its device')} or give it less work"
    if cause.kind == "stage":
        if which < len(layout.layers):
            surplus = layout.layers[which] * (1.0 - 1.0 / cause.factor)
            count = max(1, round(surplus))
            return f"move {count} layer{'s' if count > 1 else ''} from stage {which} to the others"
        return f"move {1.0 - 1.0 / cause.factor:.0%} of its layers' work to the other stages"
    return {
        "link": "check it, or place stages so that less crosses it",
        "pauses": "collect garbage on all ranks at the same step, and look at data loading",
        "lengths": "pack samples by their predicted cost (Σl² counts) instead of their tokens",
    }.get(cause.kind, "look at the time between operations (launches, data loading, logging)")
