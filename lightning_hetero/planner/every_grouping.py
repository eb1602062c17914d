"""Every way to put a cluster's devices into pipelines, where there are few ways."""

from collections.abc import Sequence

from lightning_hetero.planner.patterns import enumerate_compositions

__all__ = ["PipelineUnits", "every_grouping"]

PipelineUnits = tuple[int, tuple[int, ...]]
"""TP degree of a pipeline, and its tensor-parallel groups of each device type."""


def every_grouping(
    totals: Sequence[int],
    tp_degrees: Sequence[int],
    *,
    most_stages: int,
    most_pipelines: int,
    most: int,
) -> list[tuple[PipelineUnits, ...]] | None:
    """Return every grouping, with devices left idle or not; None if there are more than `most`.

    Args:
        totals: Devices of each type.
        tp_degrees: Degrees that a pipeline may have.
        most_stages: Most groups of a pipeline.
        most_pipelines: Most pipelines.
        most: Most groupings.
    """
    kinds: list[PipelineUnits] = []
    for tp_degree in tp_degrees:
        units = [total // tp_degree for total in totals]
        if any(units):
            rows = enumerate_compositions(units, min(most_stages, sum(units))).tolist()
            kinds += [(tp_degree, tuple(row)) for row in rows]
        if len(kinds) > most:
            return None
    found: list[tuple[PipelineUnits, ...]] = []
    stack: list[tuple[tuple[PipelineUnits, ...], int, tuple[int, ...]]] = [((), 0, tuple(totals))]
    while stack:
        chosen, start, left = stack.pop()
        if chosen:
            found.append(chosen)
        if len(found) + len(stack) > most:
            return None
        if len(chosen) == most_pipelines:
            continue
        for index in range(start, len(kinds)):
            tp_degree, row = kinds[index]
            rest = tuple([have - tp_degree * need for have, need in zip(left, row, strict=True)])
            if min(rest) >= 0:
                stack.append(((*chosen, kinds[index]), index, rest))
    return found
