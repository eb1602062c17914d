"""Look for the cause of a slowdown: who is suspected by what the run shows, and what probes say.

Suspects are ranks whose pace has fallen behind their peers' (Greyhound: 1.1 times the median) and
links whose messages are waited for longer than before; waiting for a slow rank looks like that too,
so links are believed only when their probe is slow. A rank whose probe is as fast as ever is slow
all the same, but not because of its device. Where the run shows nothing of its ranks (strategies
that don't tell computing from waiting), all are suspects.
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

__all__ = ["Probes", "Suspicion", "are_alike", "conclude", "probe_rounds", "suspect"]

_LEAST_LINK_RATIO = 1.5
"""A message between two ranks varies more than a matrix product does."""
_LEAST_HOST_RATIO = 1.25
"""What no probe confirms must be clearer."""
_LEAST_EXCESS = 0.05
"""Share of an iteration by which waiting for a peer must have grown."""
_ALIKE = 1.3
"""Ratio up to which two findings about the same device or link are the same."""
_MOST_PAIRS = 8
_MOST_MEMBERS = 16
"""Ranks whose links are probed beside a suspect's, so that there is something to compare with."""


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """Who might be the cause."""

    ranks: tuple[Suspect[int], ...] = ()
    """Ranks whose pace has fallen behind."""
    pairs: tuple[Pair, ...] = ()
    """Links whose messages are waited for longer."""
    is_informed: bool = True
    """Whether the run shows the paces of its ranks; else all are suspects."""


@dataclass(frozen=True, kw_only=True)
class Probes:
    """What probes measured, seconds."""

    device_s: Mapping[int, float] = field(default_factory=dict)
    """A matrix product of each rank."""
    link_s: Mapping[Pair, float] = field(default_factory=dict)
    """A message to and fro of each pair."""
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
    excess_s: dict[Pair, float] = {}
    for report in reports:
        for peer, seconds in report.excess_wait_s.items():
            pair = normalise_pair(report.global_rank, peer)
            excess_s[pair] = max(seconds, excess_s.get(pair, 0.0))
    least_s = _LEAST_EXCESS * iteration_s if math.isfinite(iteration_s) else 0.0
    waited = sorted((p for p in excess_s if excess_s[p] > least_s), key=lambda p: -excess_s[p])
    before = [normalise_pair(*f.ranks) for f in known if f.kind is FindingKind.LINK]
    return Suspicion(
        ranks=find_suspects(slowness),
        pairs=tuple(dict.fromkeys([*before, *waited[:_MOST_PAIRS]])),
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


def conclude(suspicion: Suspicion, probes: Probes, healthy: Probes) -> tuple[Finding, ...]:
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
    findings += [
        finding
        for finding in diagnose_links(
            probes.link_s,
            expected_link_s=healthy.expected_link_s(probes.link_s),
            least_ratio=_LEAST_LINK_RATIO,
        )
        if not suspicion.is_informed
        or any(set(finding.ranks) <= set(pair) for pair in suspicion.pairs)
    ]
    return tuple(sorted(findings, key=lambda finding: -finding.ratio))


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
