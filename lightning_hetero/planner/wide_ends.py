"""Pipelines whose first and last stages have twice the TP degree of the others.

What comes before and after the layers may take as long, or as much memory, as several layers: the
head of a model with a large vocabulary, and the first stage's activations. A wider stage there
leaves the others their layers. Local search finds such pipelines only in steps that each must help.
"""

from collections.abc import Iterator, Sequence

from lightning_hetero.planner.arrangement import Group
from lightning_hetero.planner.estimating.stage_times import DeviceTypes

__all__ = ["is_head_heavy", "with_wide_ends"]


def is_head_heavy(types: DeviceTypes, degree: int) -> bool:
    """Return whether on some device type the head takes at least as long as a layer."""
    times = types.estimator.stage_times_s

    def layer_s(node: int, *, last: bool) -> float:
        return float(sum(seconds[1] for seconds in times(node, degree, first=False, last=last)))

    nodes = [node for node, units in zip(types.nodes, types.units(degree), strict=True) if units]
    return any(layer_s(node, last=True) >= 2 * layer_s(node, last=False) for node in nodes)


def with_wide_ends(groups: Sequence[Group]) -> Iterator[list[Group]]:
    """Yield groups with the first two stages made one, the last two, and both.

    Only two that have the same devices; and short pipelines stay as they are.
    """
    for ends in ((0, -2), (0,), (-2,)):
        yield [_widened(group, ends) for group in groups]


def _widened(group: Group, ends: Sequence[int]) -> Group:
    """Return a group with each two stages that begin at one of some places made one."""
    stages = [*zip(group.tp_degrees, group.devices, strict=True)]
    for end in ends:
        first = end % len(stages)
        if len(stages) > 2 and stages[first] == stages[first + 1]:
            degree, device = stages[first]
            stages[first : first + 2] = [(2 * degree, device)]
    degrees, devices = zip(*stages, strict=True)
    return Group(degrees, devices)
