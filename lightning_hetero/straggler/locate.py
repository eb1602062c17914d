"""Decide which device or link is slow, from times per rank, stage, group or link.

Two steps, as in Greyhound: *suspects* are those at 1.1 times the median of their peers or more, in
times the run gives for free; then only suspects are probed, at a step boundary. Point-to-point
probes go in rounds of disjoint pairs, so that no probe disturbs another, and in as many rounds for
a thousand ranks as for eight: 2 for an even ring, 3 for an odd one.
"""

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from lightning_hetero.core.errors import ConfigurationError

__all__ = [
    "Finding",
    "FindingKind",
    "Pair",
    "Suspect",
    "diagnose_links",
    "find_suspects",
    "normalise_pair",
    "ring_rounds",
]

Pair = tuple[int, int]
"""Global ranks at the two ends of a link."""

_Key = TypeVar("_Key", bound=Hashable)
_LEAST_RATIO = 1.1


@dataclass(frozen=True, kw_only=True)
class Suspect(Generic[_Key]):
    """A rank, stage, group or link that is slower than its peers."""

    key: _Key
    ratio: float
    """Its time over the median of its peers' times."""


def find_suspects(
    times_s: Mapping[_Key, float],
    *,
    expected_s: Mapping[_Key, float] | None = None,
    least_ratio: float = _LEAST_RATIO,
) -> tuple[Suspect[_Key], ...]:
    """Return those whose time is `least_ratio` times the others' median or more, slowest first.

    Args:
        times_s: Time of each rank, stage, group or link.
        expected_s: Expected time of each; if given, time/expected is compared.
        least_ratio: Least ratio of a suspect (Greyhound: 1.1).
    """
    scaled = {k: t / (expected_s[k] if expected_s else 1.0) for k, t in times_s.items()}
    scaled = {k: t for k, t in scaled.items() if math.isfinite(t) and t > 0.0}
    if len(scaled) < 2:
        return ()
    # In order of time, the median of all others is that of the list without one place.
    ordered = sorted(scaled, key=lambda key: scaled[key])
    times = [scaled[key] for key in ordered]
    middle, is_odd = (len(times) - 1) // 2, (len(times) - 1) % 2
    found = {}
    for place, key in enumerate(ordered):
        upper = times[middle + (place <= middle)]
        lower = upper if is_odd else times[middle - 1 + (place < middle)]
        found[key] = times[place] / ((lower + upper) / 2)
    suspects = [Suspect(key=k, ratio=found[k]) for k in scaled if found[k] >= least_ratio]
    return tuple(sorted(suspects, key=lambda suspect: -suspect.ratio))


def normalise_pair(rank_a: int, rank_b: int) -> Pair:
    """Return the pair with the smaller rank first."""
    return (rank_a, rank_b) if rank_a < rank_b else (rank_b, rank_a)


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
    findings = _links_and_ports({suspect.key: suspect.ratio for suspect in links}, link_s)
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
