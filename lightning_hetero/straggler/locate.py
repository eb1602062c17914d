"""Find what is slow: suspect ranks and links because of the run's own times, then probe them.

Suspects are ranks that have become slower than their peers (Greyhound: 1.1 times the median), and
links for whose messages ranks wait longer than before. A wait for a slow rank looks the same, so a
link counts as slow only if its probe is slow, too (and slow enough, see `prediction.true_causes`).
If the probe of a slow rank is as fast as before, something other than its device makes the rank
slow.

Point-to-point probes run in rounds of disjoint pairs, so that no probe disturbs another. A thousand
ranks take as many rounds as eight: 2 for a ring of even length, 3 for an odd one.
"""

import math
import statistics
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from lightning_hetero.straggler.events import Finding, FindingKind, Pair, normalise_pair
from lightning_hetero.straggler.paces import RankReport

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
_MOST_PAIRS = 8
_MOST_MEMBERS = 16
"""Largest number of ranks in the ring of probed links, which compares suspects with other links."""


def find_suspects(
    times_s: Mapping[_Key, float],
    *,
    expected_s: Mapping[_Key, float] | None = None,
    least_ratio: float = _LEAST_RATIO,
) -> dict[_Key, float]:
    """Return those whose time is `least_ratio` times the median or more, slowest first.

    Args:
        times_s: Time of each rank, stage, group or link.
        expected_s: Expected time of each; if given, time/expected is compared.
        least_ratio: Least ratio of a suspect (Greyhound: 1.1).
    """
    scaled = {k: t / (expected_s[k] if expected_s else 1.0) for k, t in times_s.items()}
    scaled = {k: t for k, t in scaled.items() if math.isfinite(t) and t > 0.0}
    if not scaled:
        return {}
    usual = statistics.median_low(scaled.values())
    slow = {key: time / usual for key, time in scaled.items() if time >= least_ratio * usual}
    return dict(sorted(slow.items(), key=lambda entry: -entry[1]))


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """The ranks and links that may be the cause."""

    ranks: Mapping[int, float] = field(default_factory=dict)
    """Ranks whose pace has fallen behind, with their ratios."""
    pairs: tuple[Pair, ...] = ()
    """Links whose messages are waited for longer than before, or that are known to be slow."""


@dataclass(frozen=True, kw_only=True)
class Probes:
    """Measurements of probes."""

    device_s: Mapping[int, float] = field(default_factory=dict)
    """Seconds of a matrix product on each rank."""
    link_s: Mapping[Pair, float] = field(default_factory=dict)
    """Seconds of a message back and forth, for each pair."""
    link_bytes: int = 0
    """Bytes of that message, one way."""
    hosts: tuple[str, ...] = ()
    """The machine of each rank."""

    def expected_link_s(self, pairs: Collection[Pair]) -> dict[Pair, float]:
        """Return the expected time of each link: its earlier one, or that of links of its kind."""
        expected_s = {}
        for pair in pairs:
            like = [s for p, s in self.link_s.items() if self.is_inside(p) == self.is_inside(pair)]
            usual_s = statistics.median(like or [*self.link_s.values()] or [1.0])
            expected_s[pair] = self.link_s.get(pair) or usual_s
        return expected_s

    def is_inside(self, pair: Pair) -> bool:
        """Return whether both ends of a link are on one machine."""
        return self.hosts[pair[0]] == self.hosts[pair[1]] if self.hosts else True


def suspect(
    reports: Sequence[RankReport], *, iteration_s: float, known: Sequence[Finding] = ()
) -> Suspicion:
    """Return the suspects, given the ranks' reports; links known to be slow stay suspects.

    Args:
        reports: One report of each rank.
        iteration_s: Healthy iteration time; NaN if unknown.
        known: The findings of the last diagnosis.
    """
    least_s = _LEAST_EXCESS * iteration_s if math.isfinite(iteration_s) else 0.0
    excess_s: dict[Pair, float] = {}
    for report in reports:
        for peer, seconds in report.excess_wait_s.items():
            pair = normalise_pair(report.global_rank, peer)
            excess_s[pair] = max(seconds, excess_s.get(pair, least_s))
    waited = [pair for pair, seconds in excess_s.items() if seconds > least_s]
    waited.sort(key=lambda pair: -excess_s[pair])
    before = [normalise_pair(*f.ranks) for f in known if f.kind is FindingKind.LINK]
    return Suspicion(
        ranks=find_suspects({report.global_rank: report.slowness for report in reports}),
        pairs=tuple(dict.fromkeys([*before, *waited[:_MOST_PAIRS]])),
    )


def ring_of(ranks: Sequence[int]) -> list[Pair]:
    """Return the links of a ring of ranks."""
    pairs = zip(ranks, (*ranks[1:], *ranks[:1]), strict=True)
    return [*dict.fromkeys(normalise_pair(*pair) for pair in pairs if pair[0] != pair[1])]


def rounds_of(pairs: Iterable[Pair]) -> tuple[tuple[Pair, ...], ...]:
    """Return rounds of disjoint pairs, each pair in the first round that has both ranks free."""
    rounds: list[dict[int, Pair]] = []
    for pair in pairs:
        free = next((chosen for chosen in rounds if not chosen.keys() & {*pair}), None)
        if free is None:
            rounds.append(free := {})
        free.update(dict.fromkeys(pair, pair))
    return tuple(tuple(dict.fromkeys(chosen.values())) for chosen in rounds)


def probe_rounds(suspicion: Suspicion, world_size: int) -> tuple[tuple[Pair, ...], ...]:
    """Return rounds of disjoint pairs: suspected links, and a ring to compare them with.

    No rounds if no link is suspected.
    """
    if not suspicion.pairs:
        return ()
    suspected = {rank for pair in suspicion.pairs for rank in pair}
    others = [rank for rank in range(world_size) if rank not in suspected]
    members = sorted([*suspected, *others[: max(2, _MOST_MEMBERS - len(suspected))]])
    return rounds_of(dict.fromkeys([*ring_of(members), *suspicion.pairs]))


def diagnose(suspicion: Suspicion, probes: Probes, healthy: Probes) -> tuple[Finding, ...]:
    """Return the slow devices, hosts and links, the slowest first.

    Args:
        suspicion: The suspects.
        probes: The present measurements.
        healthy: The measurements from the beginning of training.
    """
    slow_devices = find_suspects(probes.device_s, expected_s=healthy.device_s or None)
    expected_s = healthy.expected_link_s(probes.link_s)
    links = find_suspects(probes.link_s, expected_s=expected_s, least_ratio=_LEAST_LINK_RATIO)
    findings = [
        Finding(
            kind=FindingKind.DEVICE if rank in slow_devices else FindingKind.HOST,
            ranks=(rank,),
            ratio=ratio,
        )
        for rank, ratio in suspicion.ranks.items()
        if rank in slow_devices or ratio >= _LEAST_HOST_RATIO
    ]
    findings += [
        # Compared with the rank's own earlier probe; on a busy machine all probes are slower.
        Finding(kind=FindingKind.LINK, ranks=pair, ratio=probes.link_s[pair] / expected_s[pair])
        for pair in links
        if pair in suspicion.pairs
    ]
    return tuple(sorted(findings, key=lambda finding: -finding.ratio))


def slow_of_their_kind(
    copies_s: Mapping[int, float], probes: Probes, types: Sequence[str], *, least_ratio: float
) -> tuple[Finding, ...]:
    """Return devices and links that are slower than others of their type, the slowest first.

    Args:
        copies_s: Seconds of a copy in each rank's memory; the worse of a device's probes counts.
        probes: Measurements of products of matrices, and of links inside and between machines.
        types: The type of each rank's device.
        least_ratio: Least ratio of a device to the median of its type; a link's is 1.5 or more.
    """
    ratios: dict[tuple[int, ...], float] = {}
    for times_s in (copies_s, probes.device_s):
        for kind in set(types):
            like = {(rank,): seconds for rank, seconds in times_s.items() if types[rank] == kind}
            for ranks, ratio in find_suspects(like, least_ratio=least_ratio).items():
                ratios[ranks] = max(ratio, ratios.get(ranks, 0.0))
    for inside in (True, False):
        links: dict[tuple[int, ...], float] = {
            pair: s for pair, s in probes.link_s.items() if probes.is_inside(pair) == inside
        }
        ratios.update(find_suspects(links, least_ratio=max(least_ratio, _LEAST_LINK_RATIO)))
    kinds = FindingKind.DEVICE, FindingKind.LINK
    found = [Finding(kind=kinds[len(r) - 1], ranks=r, ratio=ratio) for r, ratio in ratios.items()]
    return tuple(sorted(found, key=lambda finding: -finding.ratio))


def are_alike(found: Sequence[Finding], known: Sequence[Finding]) -> bool:
    """Whether findings are those known before: the same slow parts, by about the same factors."""
    # Whether a slow rank's device or its host is found may depend on one probe: both count as
    # equal.
    ratios, before = ({f.ranks: f.ratio for f in findings} for findings in (found, known))
    return ratios.keys() == before.keys() and all(
        max(ratios[ranks] / before[ranks], before[ranks] / ratios[ranks]) < _ALIKE
        for ranks in ratios
    )
