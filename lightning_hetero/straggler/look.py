"""Look for the cause of a slowdown: who is suspected by what the run shows, and what probes say.

Suspects are ranks whose pace has fallen behind their peers' (Greyhound: 1.1 times the median) and
links whose messages are waited for longer than before; waiting for a slow rank looks like that too,
so links are believed only when their probe is slow, and so slow that it explains the waiting. A
rank whose probe is as fast as ever is slow all the same, but not because of its device. Where the
run shows nothing of its ranks (strategies that don't tell computing from waiting), all are
suspects.
"""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_hetero.straggler.history import RankReport
from lightning_hetero.straggler.locate import (
    Finding,
    FindingKind,
    Pair,
    Suspect,
    diagnose_links,
    find_suspects,
    normalise_pair,
    ring_rounds,
)

__all__ = ["Probes", "Suspicion", "Waiting", "are_alike", "diagnose", "probe_rounds", "suspect"]

_LEAST_LINK_RATIO = 1.5
"""A message between two ranks varies more than a matrix product does."""
_LEAST_HOST_RATIO = 1.25
"""A slowness that no probe confirms must be clearer."""
_LEAST_EXCESS = 0.05
"""Share of an iteration by which waiting for a peer must have grown."""
_ALIKE = 1.3
"""Ratio up to which two findings about the same device or link are the same."""
_LEAST_EXPLAINED = 0.25
"""Share of the waiting that a slow link must explain; ends wait for each other in turns."""
_MOST_PAIRS = 8
_MOST_MEMBERS = 16
"""Ranks whose links are probed beside a suspect's, so that there is something to compare with."""


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """How a rank waits for a peer in an iteration."""

    excess_s: float
    """Seconds longer than before."""
    num_messages: float
    num_bytes: float

    def is_explained(self, slower_s: float, probe_bytes: int) -> bool:
        """Return whether a link whose probe takes `slower_s` longer, one way, can be the cause.

        A smaller message is slower by no more than the probe, a larger one in proportion.
        """
        probes = self.num_messages + (self.num_bytes / probe_bytes if probe_bytes else 0.0)
        return slower_s * max(1.0, probes) >= _LEAST_EXPLAINED * self.excess_s


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """Who might be the cause."""

    ranks: tuple[Suspect[int], ...] = ()
    """Ranks whose pace has fallen behind."""
    pairs: tuple[Pair, ...] = ()
    """Links whose messages are waited for longer."""
    waiting: Mapping[Pair, Waiting] = field(default_factory=dict)
    """By link, of the end that waits more."""
    is_informed: bool = True
    """Whether the run shows the paces of its ranks; else all are suspects."""


@dataclass(frozen=True, kw_only=True)
class Probes:
    """Measurements of probes, seconds."""

    device_s: Mapping[int, float] = field(default_factory=dict)
    """A matrix product of each rank."""
    link_s: Mapping[Pair, float] = field(default_factory=dict)
    """A message there and back of each pair."""
    link_bytes: int = 0
    """Bytes of that message, one way."""
    hosts: tuple[str, ...] = ()
    """The machine of each rank."""

    def expected_link_s(self, pairs: Collection[Pair]) -> dict[Pair, float]:
        """Return what links should take: what they took, or what others of their kind took."""
        by_kind: dict[bool, list[float]] = {True: [], False: []}
        for pair, seconds in self.link_s.items():
            by_kind[self._is_inside(pair)].append(seconds)
        usual = {kind: statistics.median(times) for kind, times in by_kind.items() if times}
        fallback = statistics.median(usual.values()) if usual else 1.0
        return {
            pair: self.link_s.get(pair, usual.get(self._is_inside(pair), fallback))
            for pair in pairs
        }

    def _is_inside(self, pair: Pair) -> bool:
        return self.hosts[pair[0]] == self.hosts[pair[1]] if self.hosts else True


def suspect(
    reports: Sequence[RankReport], *, iteration_s: float, known: Sequence[Finding] = ()
) -> Suspicion:
    """Return who is suspected by what the ranks report; links known to be slow stay suspects.

    Args:
        reports: One of each rank.
        iteration_s: Healthy iteration time; NaN if unknown.
        known: What was found before.
    """
    slowness = {r.global_rank: r.slowness for r in reports if math.isfinite(r.slowness)}
    least_s = _LEAST_EXCESS * iteration_s if math.isfinite(iteration_s) else 0.0
    waiting: dict[Pair, Waiting] = {}
    for report in reports:
        for peer, seconds in report.excess_wait_s.items():
            pair = normalise_pair(report.global_rank, peer)
            if seconds > max(least_s, waiting[pair].excess_s if pair in waiting else 0.0):
                waiting[pair] = Waiting(
                    excess_s=seconds,
                    num_messages=report.num_messages[peer],
                    num_bytes=report.num_bytes[peer],
                )
    waited = sorted(waiting, key=lambda pair: -waiting[pair].excess_s)
    before = [normalise_pair(*f.ranks) for f in known if f.kind is FindingKind.LINK]
    return Suspicion(
        ranks=find_suspects(slowness),
        pairs=tuple(dict.fromkeys([*before, *waited[:_MOST_PAIRS]])),
        waiting=waiting,
        is_informed=bool(slowness),
    )


def probe_rounds(
    suspicion: Suspicion, world_size: int, known: Sequence[Finding] = ()
) -> tuple[tuple[Pair, ...], ...]:
    """Return rounds of disjoint pairs: suspected links, and a ring to compare them with.

    Nothing is probed if no link is suspected. After a port was found, all its rank's links are.
    """
    if not suspicion.pairs and suspicion.is_informed:
        return ()
    suspected = {rank for pair in suspicion.pairs for rank in pair}
    others = [rank for rank in range(world_size) if rank not in suspected]
    members = sorted([*suspected, *others[: max(2, _MOST_MEMBERS - len(suspected))]])
    if not suspicion.is_informed:
        members = list(range(world_size))
    ports = [f.ranks[0] for f in known if f.kind is FindingKind.PORT]
    wanted = [*suspicion.pairs]
    wanted += [normalise_pair(port, rank) for port in ports for rank in members if rank != port]
    return _with_pairs([list(pairs) for pairs in ring_rounds(members)], wanted)


def _with_pairs(rounds: list[list[Pair]], wanted: Sequence[Pair]) -> tuple[tuple[Pair, ...], ...]:
    """Put pairs that no round has into the first one in which both ranks are free."""
    for pair in wanted:
        if any(pair in pairs for pairs in rounds):
            continue
        free = (
            pairs for pairs in rounds if not any(rank in other for other in pairs for rank in pair)
        )
        pairs = next(free, None)
        if pairs is None:
            rounds.append([pair])
        else:
            pairs.append(pair)
    return tuple(tuple(pairs) for pairs in rounds)


def diagnose(suspicion: Suspicion, probes: Probes, healthy: Probes) -> tuple[Finding, ...]:
    """Return what is slow, the slowest first.

    Args:
        suspicion: Who is suspected.
        probes: What probes measured now.
        healthy: What they measured when training began.
    """
    slow_devices = {
        s.key: s.ratio for s in find_suspects(probes.device_s, expected_s=healthy.device_s or None)
    }
    if suspicion.is_informed:
        findings = [
            Finding(
                kind=FindingKind.DEVICE if s.key in slow_devices else FindingKind.HOST,
                ranks=(s.key,),
                ratio=s.ratio,
            )
            for s in suspicion.ranks
            if s.key in slow_devices or s.ratio >= _LEAST_HOST_RATIO
        ]
    else:
        findings = [
            Finding(kind=FindingKind.DEVICE, ranks=(rank,), ratio=ratio)
            for rank, ratio in slow_devices.items()
        ]
    expected_s = healthy.expected_link_s(probes.link_s)
    findings += [
        finding
        for finding in diagnose_links(
            _explaining(suspicion, probes, expected_s),
            expected_link_s=expected_s,
            least_ratio=_LEAST_LINK_RATIO,
        )
        if not suspicion.is_informed
        or any(set(finding.ranks) <= set(pair) for pair in suspicion.pairs)
    ]
    return tuple(sorted(findings, key=lambda finding: -finding.ratio))


def _explaining(
    suspicion: Suspicion, probes: Probes, expected_s: Mapping[Pair, float]
) -> dict[Pair, float]:
    """Return the probes of links, those as expected that can't be why their messages are late."""
    found = {}
    for pair, seconds in probes.link_s.items():
        waiting = suspicion.waiting.get(pair)
        slower_s = (seconds - expected_s[pair]) / 2
        is_cause = waiting is None or waiting.is_explained(slower_s, probes.link_bytes)
        found[pair] = seconds if is_cause else expected_s[pair]
    return found


def are_alike(found: Sequence[Finding], known: Sequence[Finding]) -> bool:
    """Tell whether a look found what was known: the same culprits, about as slow."""
    ratios, before = _by_culprit(found), _by_culprit(known)
    return ratios.keys() == before.keys() and all(
        max(ratios[key] / before[key], before[key] / ratios[key]) < _ALIKE for key in ratios
    )


def _by_culprit(findings: Sequence[Finding]) -> dict[tuple[FindingKind, tuple[int, ...]], float]:
    # One probe more or less tells whether it is a slow rank's device: the culprit is the same.
    kinds = {FindingKind.HOST: FindingKind.DEVICE}
    return {(kinds.get(f.kind, f.kind), f.ranks): f.ratio for f in findings}
