"""Which parts of a cluster are worth a search, by a glance at what their devices could do.

A glance estimates a few arrangements (`starting_points.glance_at`). First come all devices of some
types, where the others hold everybody up; they say of which types fewer devices are worth a glance.
"""

import itertools
import math
from collections.abc import Callable, Hashable, Sequence

from lightning_hetero.core.cluster import Cluster
from lightning_hetero.planner.allowances import smaller_allowances
from lightning_hetero.planner.arrangement import classify_nodes

__all__ = [
    "WORTH_SIMULATING",
    "LikelyParts",
    "Part",
    "of_some_types",
    "without_a_node",
    "without_another",
]

Part = tuple[int, ...]
"""Devices of each node that may be used."""
WORTH_SIMULATING = 1.05
"""An estimate may be so much above the best simulated plan."""
_WORTH_A_SEARCH = 1.1
"""A part at a glance may be so much above the best one."""
_FAR_AHEAD = 0.9
"""Types whose glance is so much below that of all devices are searched before these."""
_SEARCHED = 3
"""Parts that are searched after a glance at all."""
_SEARCHED_TYPES = 2
"""The most of them that are all devices of some types, where devices are many."""
_FEW_DEVICES = 64
"""Up to here searches are short, so that parts that look no better than all of them have one, too.
"""
_LEAST_OVERHEAD = 1.02
"""Bubbles and exchange make an iteration at least so much longer than its work."""
_MOST_TYPES = 4
"""Most types of which any may be left out together."""
_ESTIMATED_STAGES = 60_000
"""Arrangements that are estimated, times their devices: of whole types, and of others."""


class LikelyParts:
    """The parts of a cluster, as far as they have been looked at.

    Args:
        cluster: The cluster.
        burden: See `smaller_allowances`.
        least: Returns about the least score of plans on a part, by its work alone.
        glance: Returns the score of a part at a glance, infinite if it isn't below a number, and
            how many arrangements that has taken.
        progress: Told the share of `likeliest` that is done.
    """

    def __init__(
        self,
        cluster: Cluster,
        burden: Sequence[float],
        *,
        least: Callable[[Part], float],
        glance: Callable[[Part, float], tuple[float, int]],
        progress: Callable[[float], None] = lambda _share: None,
    ) -> None:
        self._cluster = cluster
        self._least, self._glance, self._progress = least, glance, progress
        self._parts = smaller_allowances(cluster, burden)
        self._types = {part: self._types_of(part) for part in self._parts}
        self._of_types = [part for part in self._parts if self._has_whole_types(part)]
        self._whole = tuple(node.count for node in cluster.nodes)
        self.whole_score = glance(self._whole, math.inf)[0]
        """Of all devices at a glance."""
        self._scores: dict[Part, float] = {}
        self._taken: Part | None = None
        """What `far_ahead` has returned."""

    def far_ahead(self, below: float) -> Part | None:
        """Return the types that look far better than all devices together, if some do."""
        best = min(self.whole_score, below)
        self._look_at(self._of_types, best, best * WORTH_SIMULATING)
        scores = self._scores
        part = min(scores, key=scores.__getitem__, default=None)
        if part is None or scores[part] >= self.whole_score * _FAR_AHEAD:
            return None
        self._taken = part
        return part

    def likeliest(self, best: float) -> list[Part]:
        """Return the parts that look best, of those whose devices could do better than the best.

        A part is worth a search if it would be better with what searches gained on a glance. Of
        many devices those of some types come first, as `far_ahead` saw them, and others have to
        look better than all.
        """
        glance = min([self.whole_score, *self._scores.values()])
        worst = WORTH_SIMULATING * (max(best, glance) if glance < math.inf else best)
        types = self._promising(self._of_types, best, worst)
        if sum(self._whole) > _FEW_DEVICES:
            worst = min(worst, self.whole_score)
        self._look_at(self._fewer(), best, worst, self._progress)
        found = self._promising(self._parts, best, worst)
        if sum(self._whole) > _FEW_DEVICES:
            found = [*dict.fromkeys([*types[:_SEARCHED_TYPES], *found])]
        return found[:_SEARCHED]

    def _promising(self, parts: Sequence[Part], best: float, worst: float) -> list[Part]:
        """Return parts below `worst` that could do better than the best, the best first."""
        # Devices that a glance leaves idle make no part another one.
        smallest: dict[float, Part] = {}
        known = self.whole_score if sum(self._whole) > _FEW_DEVICES else None
        for part in parts:
            score = self._scores.get(part, math.inf)
            can_win = score < worst and self._least(part) * _LEAST_OVERHEAD < best
            if can_win and part != self._taken and score != known:
                smallest.setdefault(score, part)
        return [smallest[score] for score in sorted(smallest)]

    def _fewer(self) -> list[Part]:
        """Return the parts with some devices of a type only, those of the best types first."""
        known = {self._types[part]: score for part, score in self._scores.items()}
        known[self._types_of(self._whole)] = self.whole_score
        fewer: dict[frozenset[str], list[Part]] = {}
        whole_types = set(self._of_types)
        for part in self._parts:
            if part not in whole_types:
                fewer.setdefault(self._types[part], []).append(part)
        ordered = sorted(fewer, key=lambda types: known.get(types, math.inf))
        return [part for types in ordered for part in _from_both_ends(fewer[types])]

    def _look_at(
        self,
        parts: Sequence[Part],
        best: float,
        worst: float,
        progress: Callable[[float], None] = lambda _share: None,
    ) -> None:
        """Glance at parts while there is time; later ones have to come near those before."""
        left = _ESTIMATED_STAGES
        for number, part in enumerate(parts):
            progress(number / len(parts))
            if left <= 0 or self._least(part) * _LEAST_OVERHEAD >= best:
                continue
            score, num_estimated = self._glance(part, worst)
            left -= num_estimated * sum(part)
            if score < worst:
                self._scores[part] = score
                best, worst = min(best, score), min(worst, score * _WORTH_A_SEARCH)

    def _types_of(self, part: Part) -> frozenset[str]:
        pairs = zip(self._cluster.nodes, part, strict=True)
        return frozenset(node.device for node, count in pairs if count)

    def _has_whole_types(self, part: Part) -> bool:
        """Return whether a part has all devices of its types."""
        pairs = zip(self._cluster.nodes, part, strict=True)
        types = self._types[part]
        return all(count == node.count for node, count in pairs if node.device in types)


def without_a_node(cluster: Cluster) -> list[Part]:
    """Return the parts that lack one node: one part for each class of equal nodes."""
    counts = tuple(node.count for node in cluster.nodes)
    last = {key: index for index, key in enumerate(_classes(cluster))}
    parts = [_without(counts, index) for index in last.values()]
    return [part for part in parts if any(part)]


def of_some_types(cluster: Cluster) -> list[Part]:
    """Return the parts with all devices of some types, but not of all: those of any such types.

    Of many types, these are the parts that lack one type.
    """
    types = list(dict.fromkeys(node.device for node in cluster.nodes))
    least = 1 if len(types) <= _MOST_TYPES else len(types) - 1
    chosen = (c for n in range(least, len(types)) for c in itertools.combinations(types, n))
    return [
        tuple([node.count if node.device in some else 0 for node in cluster.nodes])
        for some in chosen
    ]


def without_another(cluster: Cluster, part: Part) -> Part | None:
    """Return the part without another node that equals one it lacks; None if it has none."""
    classes = _classes(cluster)
    lacked = {key for key, count in zip(classes, part, strict=True) if not count}
    left = [i for i, key in enumerate(classes) if part[i] and key in lacked]
    smaller = _without(part, left[-1]) if left else part
    return smaller if left and any(smaller) else None


def _classes(cluster: Cluster) -> list[Hashable]:
    """Return a key for each node; nodes with one key are equal, also in what they cost."""
    pairs = zip(classify_nodes(cluster), cluster.nodes, strict=True)
    return [(kind, node.count, node.price_per_hour) for kind, node in pairs]


def _without(part: Part, node: int) -> Part:
    return (*part[:node], 0, *part[node + 1 :])


def _from_both_ends(parts: Sequence[Part]) -> list[Part]:
    """Return the last, the first, the last but one, the second, and so on.

    Almost all devices are better where the network is fast, few where it is slow.
    """
    return [parts[-1 - i // 2] if i % 2 == 0 else parts[i // 2] for i in range(len(parts))]
