"""Find what is slow: suspect ranks and links by the run's own times, then probe the suspects.

Suspects are ranks whose pace has fallen behind their peers' (Greyhound: 1.1 times the median), and
links whose messages are waited for longer than before. Waiting for a slow rank looks the same, so a
link is blamed only if its probe is slow enough to explain the waiting. A slow rank whose probe is
as fast as ever is slow for another reason than its device. If the run doesn't show its ranks' paces
(strategies that don't separate computing from waiting), all ranks and links are suspects.

Point-to-point probes go in rounds of disjoint pairs, so that no probe disturbs another, and in as
many rounds for a thousand ranks as for eight: 2 for an even ring, 3 for an odd one.
"""

import itertools
import math
import statistics
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.straggler.events import Finding, FindingKind, Pair, normalise_pair
from lightning_hetero.straggler.paces import RankReport

__all__ = [
    "Probes",
    "Suspicion",
    "Waiting",
    "are_alike",
    "diagnose",
    "diagnose_links",
    "find_suspects",
    "probe_rounds",
    "ring_rounds",
    "slow_of_their_kind",
    "suspect",
]

_Key = TypeVar("_Key", bound=Hashable)
_LEAST_RATIO = 1.1
_LEAST_LINK_RATIO = 1.5
"""Least ratio of a slow link: message times vary more than those of matrix products."""
_LEAST_HOST_RATIO = 1.25
"""Least ratio of a rank whose slowness its probe doesn't confirm."""
_LEAST_EXCESS = 0.05
"""Least growth of the wait for a peer, as a share of an iteration."""
_ALIKE = 1.3
"""Ratio up to which two findings about the same device or link count as equal."""
_LEAST_EXPLAINED = 0.25
"""Least share of the waiting that a slow link must explain; its ends wait in turns."""
_MOST_PAIRS = 8
_MOST_MEMBERS = 16
"""Most ranks in the ring of probed links, others than suspects being there for comparison."""


def find_suspects(
    times_s: Mapping[_Key, float],
    *,
    expected_s: Mapping[_Key, float] | None = None,
    least_ratio: float = _LEAST_RATIO,
) -> dict[_Key, float]:
    """Return those whose time is `least_ratio` times the others' median or more, slowest first.

    Args:
        times_s: Time of each rank, stage, group or link.
        expected_s: Expected time of each; if given, time/expected is compared.
        least_ratio: Least ratio of a suspect (Greyhound: 1.1).

    Returns:
        The ratio of each suspect to the median of its peers.
    """
    scaled = {k: t / (expected_s[k] if expected_s else 1.0) for k, t in times_s.items()}
    scaled = {k: t for k, t in scaled.items() if math.isfinite(t) and t > 0.0}
    if len(scaled) < 2:
        return {}
    # In order of time, the median of all others is that of the list without one place.
    ordered = sorted(scaled, key=lambda key: scaled[key])
    times = [scaled[key] for key in ordered]
    middle, is_odd = (len(times) - 1) // 2, (len(times) - 1) % 2
    found = {}
    for place, key in enumerate(ordered):
        upper = times[middle + (place <= middle)]
        lower = upper if is_odd else times[middle - 1 + (place < middle)]
        found[key] = times[place] / ((lower + upper) / 2)
    slow = [key for key in reversed(ordered) if found[key] >= least_ratio]
    return {key: found[key] for key in slow}


def ring_rounds(ranks: Sequence[int]) -> tuple[tuple[Pair, ...], ...]:
    """Return rounds of disjoint pairs that cover every edge of a ring once: 2 if even, 3 if odd."""
    size = len(ranks)
    if len(set(ranks)) != size:
        raise ConfigurationError(f"Ranks {list(ranks)} name one twice; probe each rank once.")
    if size < 2:
        return ()
    if size == 2:
        return ((normalise_pair(ranks[0], ranks[1]),),)
    edges = [normalise_pair(ranks[i], ranks[(i + 1) % size]) for i in range(size)]
    if size % 2:
        # The edge that closes an odd ring touches both kinds of edges, so it goes alone.
        return (tuple(edges[0:-1:2]), tuple(edges[1:-1:2]), (edges[-1],))
    return (tuple(edges[0::2]), tuple(edges[1::2]))


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """How much longer than before a rank waits for a peer in an iteration."""

    excess_s: float
    """Seconds longer than before."""
    num_messages: float
    num_bytes: float

    def is_explained(self, slower_s: float, probe_bytes: int) -> bool:
        """Return whether a link can be the cause if its probe takes `slower_s` longer, one way.

        A smaller message is slower by no more than the probe, a larger one in proportion.
        """
        probes = self.num_messages + (self.num_bytes / probe_bytes if probe_bytes else 0.0)
        return slower_s * max(1.0, probes) >= _LEAST_EXPLAINED * self.excess_s


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """The ranks and links that may be the cause."""

    ranks: Mapping[int, float] = field(default_factory=dict)
    """Ranks whose pace has fallen behind, with their ratios."""
    pairs: tuple[Pair, ...] = ()
    """Links whose messages are waited for longer."""
    waiting: Mapping[Pair, Waiting] = field(default_factory=dict)
    """By link, the wait of the end that waits more."""
    is_informed: bool = True
    """Whether the run shows the paces of its ranks; else all are suspects."""


@dataclass(frozen=True, kw_only=True)
class Probes:
    """Measurements of probes."""

    device_s: Mapping[int, float] = field(default_factory=dict)
    """Seconds of a matrix product on each rank."""
    link_s: Mapping[Pair, float] = field(default_factory=dict)
    """Seconds of a message there and back, for each pair."""
    link_bytes: int = 0
    """Bytes of that message, one way."""
    hosts: tuple[str, ...] = ()
    """The machine of each rank."""

    def expected_link_s(self, pairs: Collection[Pair]) -> dict[Pair, float]:
        """Return the expected time of each link: its own, or that of others of its kind."""
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
    """Return the suspects, given the ranks' reports; links known to be slow stay suspects.

    Args:
        reports: One report of each rank.
        iteration_s: Healthy iteration time; NaN if unknown.
        known: The findings of the last look.
    """
    slowness = {r.global_rank: r.slowness for r in reports if math.isfinite(r.slowness)}
    least_s = _LEAST_EXCESS * iteration_s if math.isfinite(iteration_s) else 0.0
    waiting: dict[Pair, Waiting] = {}
    for report in reports:
        for peer, seconds in report.excess_wait_s.items():
            pair = normalise_pair(report.global_rank, peer)
            if seconds > max(least_s, waiting[pair].excess_s if pair in waiting else 0.0):
                assert report.now is not None
                waiting[pair] = Waiting(
                    excess_s=seconds,
                    num_messages=report.now.num_messages.get(peer, 0.0),
                    num_bytes=report.now.num_bytes.get(peer, 0.0),
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

    No rounds if no link is suspected. If a port is known to be slow, all its rank's links are
    probed.
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
    """Add each pair that is in no round to the first round in which both ranks are free."""
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
    """Return the slow devices, hosts, links and ports, the slowest first.

    Args:
        suspicion: The suspects.
        probes: Measurements of now.
        healthy: Measurements from when training began.
    """
    slow_devices = find_suspects(probes.device_s, expected_s=healthy.device_s or None)
    if suspicion.is_informed:
        findings = [
            Finding(
                kind=FindingKind.DEVICE if rank in slow_devices else FindingKind.HOST,
                ranks=(rank,),
                ratio=ratio,
            )
            for rank, ratio in suspicion.ranks.items()
            if rank in slow_devices or ratio >= _LEAST_HOST_RATIO
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
    """Return links' probe times; the expected time for a link that can't explain the waiting."""
    found = {}
    for pair, seconds in probes.link_s.items():
        waiting = suspicion.waiting.get(pair)
        slower_s = (seconds - expected_s[pair]) / 2
        is_cause = waiting is None or waiting.is_explained(slower_s, probes.link_bytes)
        found[pair] = seconds if is_cause else expected_s[pair]
    return found


def diagnose_links(
    link_s: Mapping[Pair, float],
    *,
    expected_link_s: Mapping[Pair, float] | None = None,
    least_ratio: float = _LEAST_RATIO,
) -> tuple[Finding, ...]:
    """Return the links and ports that probes show to be slow, the slowest first.

    Args:
        link_s: Point-to-point probe of each pair (smaller rank first), seconds.
        expected_link_s: Expected time of each link, if links are unequal.
        least_ratio: Least ratio of a slow link.
    """
    links = find_suspects(link_s, expected_s=expected_link_s, least_ratio=least_ratio)
    findings = _links_and_ports(links, link_s)
    return tuple(sorted(findings, key=lambda finding: -finding.ratio))


def _links_and_ports(slow: Mapping[Pair, float], probed: Mapping[Pair, float]) -> list[Finding]:
    """Blame a rank's port if every one of its links (two or more) is slow; else the links."""
    findings = []
    explained: set[Pair] = set()
    for rank in sorted({rank for pair in slow for rank in pair}):
        own = [pair for pair in probed if rank in pair]
        others_fine = any(pair not in slow for pair in probed if rank not in pair)
        if len(own) >= 2 and all(pair in slow for pair in own) and others_fine:
            ratio = statistics.median(slow[pair] for pair in own)
            findings.append(Finding(kind=FindingKind.PORT, ranks=(rank,), ratio=ratio))
            explained.update(own)
    findings += [
        Finding(kind=FindingKind.LINK, ranks=pair, ratio=ratio)
        for pair, ratio in slow.items()
        if pair not in explained
    ]
    return findings


def slow_of_their_kind(
    probes: Sequence[Mapping[int, float]], kinds: Sequence[str], *, least_ratio: float
) -> tuple[Finding, ...]:
    """Return devices that are slower than others of their type, the slowest first.

    Args:
        probes: Seconds by rank, of each kind of probe; a device's worst one counts.
        kinds: The type of each rank's device.
        least_ratio: Least ratio to the median of the others.
    """
    ratios: dict[int, float] = {}
    for kind, times_s in itertools.product(set(kinds), probes):
        like = {rank: seconds for rank, seconds in times_s.items() if kinds[rank] == kind}
        for rank, ratio in find_suspects(like, least_ratio=least_ratio).items():
            ratios[rank] = max(ratio, ratios.get(rank, 0.0))
    ranks = sorted(ratios, key=lambda rank: -ratios[rank])
    return tuple(Finding(kind=FindingKind.DEVICE, ranks=(r,), ratio=ratios[r]) for r in ranks)


def are_alike(found: Sequence[Finding], known: Sequence[Finding]) -> bool:
    """Tell whether a look has found what was known: the same culprits, about as slow."""
    ratios, before = _by_culprit(found), _by_culprit(known)
    return ratios.keys() == before.keys() and all(
        max(ratios[key] / before[key], before[key] / ratios[key]) < _ALIKE for key in ratios
    )


def _by_culprit(findings: Sequence[Finding]) -> dict[tuple[FindingKind, tuple[int, ...]], float]:
    # Whether a slow rank's device or its host is blamed may depend on one probe: it is one culprit.
    kinds = {FindingKind.HOST: FindingKind.DEVICE}
    return {(kinds.get(f.kind, f.kind), f.ranks): f.ratio for f in findings}
