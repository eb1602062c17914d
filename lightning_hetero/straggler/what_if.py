"""Explain why a run was slow: how long it would have taken without each possible cause.

The time of a forward or backward is factorised: the typical time of its kind × a factor of its
stage × one of its micro-batch's length × one of its rank × a rest. Each factor is a lower median
over the operations that share it, so that a single slow rank doesn't change other factors. The
times of transfers are factorised by link in the same way. A cause's share of the excess is the mean
of two replays' results: the time saved if only this cause is removed, and the time lost if only
this cause is kept.

In the ideal run every forward takes the mean time of forwards over all stages, and every backward
that of backwards: the same work, perfectly balanced. (With a median the work would be more or
less.) Transfers take their median, since the time that a congested link adds isn't work. `answer`
puts the result into one sentence.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lightning_hetero.core.arrays import BoolArray, FloatArray, IntArray
from lightning_hetero.straggler.replay import BACKWARD, FORWARD, TRANSFERS, Replay
from lightning_hetero.straggler.traces import Layout, OperationTrace, grouped, groups_of, low_median

_MOST_SUSPECTS = 8
"""Number of ranks, and of links, that are tried one by one; the excess of others counts as
"other"."""
_LEAST_SHARE = 0.01
_WORTH_SAYING = 1.02
_SECOND_SHARE = 0.2
_SLOW, _SLOW_LINK = 1.1, 1.3
"""Factors above which a rank (unless by chance) and a link are slow."""
_STANDARD_ERRORS = 5.0
_PAUSE, _PAUSED_GAP = 1.5, 0.25
"""A rest above this factor is a pause, and a gap longer than this share of a forward's time."""
_FEW = 4
"""A pause may have hit all of a rank's operations in a step if there are at most this many."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One reason for the excess."""

    kind: str
    """`rank`, `stage`, `lengths`, `link`, `pauses` or `other`."""
    which: int | str | None
    """The number of the rank or stage, or the name of the link."""
    share: float
    """Share of the excess: the mean of the next two, limited to 0 to 1."""
    removed: float
    """Share of the excess that is saved if only this cause is removed."""
    kept: float
    """Share of the excess that is left if only this cause is kept."""
    factor: float
    """The factor by which its operations take longer than others of their kind."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """How long a run took, how long it could have taken, and why; seconds are means per step."""

    actual_s: float
    ideal_s: float
    """The time if every forward and backward takes the mean of its kind, and transfers their
    median."""
    replayed_s: float
    """The time of a replay with the recorded durations, which shows how good the replay is."""
    causes: tuple[Cause, ...]

    @property
    def slowdown(self) -> float:
        """The actual time divided by the ideal one."""
        return self.actual_s / self.ideal_s if self.ideal_s > 0 else 1.0

    def to_dict(self) -> dict[str, object]:
        """Return the explanation as plain data for JSON."""
        return {"slowdown": self.slowdown, **asdict(self)}


def explain(trace: OperationTrace) -> Explanation:
    """Return why a trace's steps took longer than they could.

    Raises:
        ConfigurationError: The trace's operations contradict each other.
    """
    replay = Replay.build(trace)
    parts = _Parts(replay)

    def time(own_s: FloatArray, gap_s: FloatArray) -> float:
        return float(replay.step_s(own_s, gap_s).mean())

    full_s, least_s = time(replay.own_s, replay.gap_s), time(parts.base_s, parts.usual_gap_s)
    excess_s = max(full_s - least_s, 1e-12)
    causes = []
    for suspect in parts.suspects() if excess_s > 1e-3 * least_s else ():
        factor, own_s, gap_s = suspect.factor, suspect.own_s, suspect.gap_s
        removed_s = time((replay.own_s - own_s) / factor, replay.gap_s - gap_s)
        kept_s = time(parts.base_s * factor + own_s, parts.usual_gap_s + gap_s)
        removed, kept = (full_s - removed_s) / excess_s, (kept_s - least_s) / excess_s
        share = float(np.clip((removed + kept) / 2, 0.0, 1.0))
        if share >= _LEAST_SHARE:
            base_s = parts.base_s[suspect.ops]
            slower = (base_s * factor[suspect.ops]).sum() / max(base_s.sum(), 1e-12)
            cause = Cause(
                kind=suspect.kind,
                which=suspect.which,
                share=share,
                removed=removed,
                kept=kept,
                factor=float(slower),
            )
            causes.append(cause)
    return Explanation(
        actual_s=float(replay.observed_s().mean()),
        ideal_s=time(_even(replay), parts.usual_gap_s),
        replayed_s=full_s,
        causes=tuple(sorted(causes, key=lambda cause: -cause.share)),
    )


def _even(replay: Replay) -> FloatArray:
    """Return own times under a perfect balance: the same computation in total, evenly spread."""
    trace = replay.trace
    kinds = grouped(trace.kind)
    usual_s = low_median(replay.own_s, kinds)
    for number, kind in enumerate(np.unique(trace.kind).tolist()):
        if trace.kinds[kind] in (*FORWARD, *BACKWARD):
            usual_s[number] = replay.own_s[trace.kind == kind].mean()
        elif trace.kinds[kind] == "gc":
            usual_s[number] = 0.0
    own_s: FloatArray = usual_s[kinds]
    return own_s


@dataclass(frozen=True)
class _Suspect:
    """A possible cause: the factors of own times, and what it adds to them and to gaps."""

    kind: str
    which: int | str | None
    ops: BoolArray
    """The operations it slows, as booleans."""
    factor: FloatArray
    own_s: FloatArray | float = 0.0
    gap_s: FloatArray | float = 0.0


class _Parts:
    """The factors of operations and barriers: own time is `base_s` times all of them."""

    def __init__(self, replay: Replay) -> None:
        trace, own = replay.trace, replay.own_s
        self._replay = replay
        self._computes = trace.are(*FORWARD, *BACKWARD)
        ops = np.flatnonzero(self._computes & (own > 0))
        self.base_s, self._stage, self._lengths, self._rank, self._link = np.ones((5, len(own)))
        if len(ops):
            found = _take_apart(trace, ops, own[ops])
            self.base_s[ops], self._stage[ops], self._lengths[ops], self._rank[ops] = found
        self._link_of, self._links = _link_names(trace)
        self._link_of[replay.only_waits] = -1
        others = np.setdiff1d(np.arange(len(own)), ops, assume_unique=True)
        self.base_s[others] = _typical_s(replay, others)
        self._compare_links()
        pauses = np.flatnonzero(trace.are("gc"))
        self._pause_s = np.zeros(len(own))
        self._pause_s[pauses], self.base_s[pauses] = own[pauses], 0.0
        usual_s = self.base_s * self._stage * self._lengths * self._rank * self._link
        self._rest = np.divide(own, usual_s, out=np.ones(len(own)), where=usual_s > 0)
        self._find_slow_steps(ops)
        self._paused = np.zeros(len(own), bool)
        self._paused[ops] = self._rest[ops] > _PAUSE
        place = grouped(trace.kind, trace.stage)
        self.usual_gap_s = low_median(replay.gap_s, place)[place]
        least_s = _PAUSED_GAP * float(np.median(own[ops])) if len(ops) else np.inf
        self._paused_gap = replay.gap_s - self.usual_gap_s > least_s

    def _find_slow_steps(self, ops: IntArray) -> None:
        """Attribute to the rank, not to a pause, what slows all of its operations in a step."""
        trace = self._replay.trace
        group = grouped(trace.step[ops], trace.rank[ops])
        slow = _significant(self._rest[ops], group, np.zeros_like(ops))
        slow[np.bincount(group)[group] <= _FEW] = 1.0
        self._rank[ops] *= slow
        self._rest[ops] /= slow

    def _compare_links(self) -> None:
        """Set the factors of links that are slower than other links."""
        ops = np.flatnonzero((self._link_of >= 0) & (self.base_s > 0))
        if len(ops):
            number = self._link_of[ops]
            ratio = low_median(self._replay.own_s[ops] / self.base_s[ops], number)
            ratio[ratio < _SLOW_LINK] = 1.0
            self._link[ops] = ratio[number]

    def suspects(self) -> Iterator[_Suspect]:
        """Yield everything that may be a cause."""
        replay, computes = self._replay, self._computes
        stage, rank = replay.trace.stage, replay.trace.rank
        weight = np.bincount(stage[computes], (self.base_s * self._stage)[computes], 1)
        heaviest = int(np.argmax(weight / np.maximum(np.bincount(stage[computes]), 1)))
        yield _Suspect("stage", heaviest, computes & (stage == heaviest), self._stage)
        yield _Suspect("lengths", None, computes, self._lengths)
        ranks, by_rank = np.unique(rank, return_inverse=True)
        untried = self._rank * self._link
        # Ranks and links are tried one by one, in the order of the seconds they cost.
        for kind, names, of, factor in (
            ("rank", ranks.tolist(), by_rank, self._rank),
            ("link", self._links, self._link_of, self._link),
        ):
            cost_s = np.bincount(of + 1, (factor - 1.0) * self.base_s, len(names) + 1)[1:]
            for index in np.argsort(-cost_s)[:_MOST_SUSPECTS].tolist():
                if cost_s[index] > 0:
                    ops = of == index
                    untried = np.where(ops, untried / factor, untried)
                    yield _Suspect(kind, names[index], ops, np.where(ops, factor, 1.0))
        everything, extra_s = np.ones(len(rank), bool), replay.gap_s - self.usual_gap_s
        rest = np.maximum(self._rest, 1e-9)
        paused_s = np.bincount(by_rank, np.where(self._paused, replay.own_s, 0.0))
        mostly = paused_s.max() > 0.8 * paused_s.sum() > 0.0
        yield _Suspect(
            "pauses",
            int(ranks[paused_s.argmax()]) if mostly else None,
            everything,
            np.ones(len(rank)),
            # A pause takes as long whatever it interrupts.
            self._pause_s + np.where(self._paused, replay.own_s * (1.0 - 1.0 / rest), 0.0),
            np.where(self._paused_gap, extra_s, 0.0),
        )
        yield _Suspect(
            "other",
            None,
            everything,
            np.where(self._paused, 1.0, rest) * untried,
            gap_s=np.where(self._paused_gap, 0.0, extra_s),
        )


def _take_apart(
    trace: OperationTrace, ops: IntArray, own: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Return base, stage, lengths and rank of forwards and backwards."""
    kind, pipeline = trace.kind[ops], trace.pipeline[ops]
    like = grouped(kind, trace.stage[ops], trace.chunk[ops])
    by_rank = grouped(like, trace.rank[ops])
    microbatch = grouped(trace.step[ops], pipeline, trace.microbatch[ops])
    several_stages = len(np.unique(trace.stage[ops])) > 1
    length, slow = np.ones((2, len(ops)))
    for _ in range(3 if several_stages else 1):
        by_ranks = low_median(own / length, by_rank)
        typical = low_median(by_ranks, groups_of(by_rank, like))
        if several_stages:
            length = low_median(own / (typical[like] * slow), microbatch)[microbatch]
            slow = low_median(own / (typical[like] * length), by_rank)[by_rank]
        else:
            slow = _significant(own / typical[like], by_rank, like)
        slow[slow < _SLOW] = 1.0
    length = low_median(own / (typical[like] * slow), microbatch)[microbatch]
    if not several_stages:
        # What slows the only stage of a pipeline in a step looks like long micro-batches.
        whole_of = grouped(trace.step[ops], pipeline)
        first_of = np.unique(microbatch, return_index=True)[1]
        each, of = length[first_of], whole_of[first_of]
        whole = groups_of(of, _significant(each, of, np.zeros_like(of)))[whole_of]
        length, slow = length / whole, slow * whole
    # A rank is slow in all its operations.
    rank = grouped(trace.rank[ops])
    together = np.bincount(rank, own) / np.bincount(rank, own / slow)
    slow = np.where(together[rank] >= _SLOW, slow, 1.0)
    mean = float(length.mean())
    kinds = groups_of(like, kind)
    per_kind = np.bincount(kinds, typical) / np.maximum(np.bincount(kinds), 1)
    return per_kind[kind] * mean, typical[like] / per_kind[kind], length / mean, slow


def _significant(values: FloatArray, group: IntArray, like: IntArray) -> FloatArray:
    """Return the factor of a group above comparable ones; 1 if it is no exception or by chance."""
    medians = low_median(values, group)
    like_of = groups_of(group, grouped(like))
    ratio = medians / low_median(medians, like_of)[like_of]
    spread = low_median(np.abs(values / medians[group] - 1.0), group) * 1.4826
    error = 1.2533 * spread / np.sqrt(np.bincount(group))
    usual = 1.4826 * low_median(np.abs(ratio - 1.0), like_of)[like_of]
    least = _STANDARD_ERRORS * np.maximum(usual, error * np.sqrt(2.0))
    ratio[(ratio < _SLOW) | (ratio - 1.0 < least)] = 1.0
    return ratio[group]


def _link_names(trace: OperationTrace) -> tuple[IntArray, tuple[str, ...]]:
    """Return the link of every transfer and collective, and the links' names."""
    num_stages = int(trace.stage.max()) + 1
    number = np.full(len(trace), -1)
    for names, hop in (
        (("forward-send", "backward-recv"), 0),
        (("forward-recv", "backward-send"), -1),
    ):
        used = trace.are(*names)
        # Between two stages, the way from the last to the first is the same link.
        lower = (trace.stage[used] + hop) % num_stages if num_stages > 2 else 0
        number[used] = trace.pipeline[used] * num_stages + lower
    first = int(trace.pipeline.max() + 1) * num_stages
    barriers = (kind for kind in trace.kinds if kind.startswith("barrier before "))
    collective = ~trace.are(*FORWARD, *BACKWARD, *TRANSFERS, "gc", "optimizer", *barriers)
    number = np.where(collective, first + trace.kind * num_stages + trace.stage, number)
    labels = []
    for value in np.unique(number[number >= 0]).tolist():
        pipeline, stage = divmod(value, num_stages)
        if value < first:
            labels.append(f"stages {stage} and {(stage + 1) % num_stages} of pipeline {pipeline}")
        else:
            kind = trace.kinds[(value - first) // num_stages]
            labels.append(f"{kind} of stage {stage}")
    used_numbers = np.unique(np.r_[-1, number], return_inverse=True)[1]
    return used_numbers[1:] - 1, tuple(labels)


def _typical_s(replay: Replay, ops: IntArray) -> FloatArray:
    """Return the median own time of transfers and collectives of a kind, and of barriers."""
    trace, transfer = replay.trace, replay.trace.are(*TRANSFERS)[ops]
    kind = grouped(trace.kind[ops])
    # Of transfers, links are comparable; of the others, stages.
    place = grouped(kind, trace.stage[ops], np.where(transfer, trace.pipeline[ops], 0))
    kind_of = groups_of(place, kind)
    typical = low_median(low_median(replay.own_s[ops], place), kind_of)
    return typical[kind_of[place]]


_UNKNOWN = Layout()


def answer(explanation: Explanation, layout: Layout = _UNKNOWN) -> str:
    """Return the slowdown, its main cause and what to do, in one sentence."""
    took = f"{explanation.actual_s:.4g} s a step where {explanation.ideal_s:.4g} s are possible"
    if explanation.slowdown < _WORTH_SAYING or not explanation.causes:
        return f"Not slow: {took}."
    first, *rest = explanation.causes
    said = _say(first, layout)
    text = (
        f"{explanation.slowdown:.2f} × slower than possible ({took}); {first.share:.2f} of the "
        f"excess is {said}"
    )
    second = next((cause for cause in rest if cause.share >= _SECOND_SHARE), None)
    if second is not None:
        text += f"; another {second.share:.2f} is {_say(second, layout)}"
    return f"{text}."


def _say(cause: Cause, layout: Layout) -> str:
    """Return a cause's name and what to do."""
    which: Any = cause.which
    slower = f"{cause.factor:.2f} × slower than comparable ones"
    if cause.kind == "rank":
        last = which + layout.tp_size - 1
        ranks = f"rank {which}" if last == which else f"one of ranks {which} to {last}"
        device = layout.nodes.get(which, "its device")
        return f"{ranks}, {slower}: replace {device} or give it less work"
    if cause.kind == "stage":
        surplus = 1.0 - 1.0 / cause.factor
        moved = f"{surplus:.0%} of its layers' work"
        if which < len(layout.layers):
            count = max(1, round(layout.layers[which] * surplus))
            moved = f"{count} layer{'s' if count > 1 else ''}"
        return (
            f"the split into stages: stage {which} has {cause.factor:.2f} × the mean stage's work: "
            f"move {moved} from stage {which} to the others"
        )
    of_rank = "" if which is None else f" of rank {which}"
    return {
        "link": f"a slow link ({which}), {slower}: check it, or place stages so that less "
        "crosses it",
        "pauses": f"pauses{of_rank}: collect garbage on all ranks at the same step, and look at "
        "data loading",
        "lengths": "micro-batches of unequal cost: pack samples by their predicted cost (Σl² "
        "counts) instead of their tokens",
    }.get(
        cause.kind,
        "spread over all operations, or between them: look at the time between operations "
        "(launches, data loading, logging)",
    )
