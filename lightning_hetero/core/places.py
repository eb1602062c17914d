"""Find the place of each rank in a plan, its pipeline and stages; check the ranks that own.

A rank usually runs one stage. It runs several, its *chunks*, if a pipeline names its group several
times: in a loop (Narayanan et al. 2021, "interleaved") or back and forth, as a V (Qi et al. 2024).
Example: a pipeline whose four stages name ranks 0, 1, 1, 0 is a V; rank 0 runs stages 0 and 3. A
group of ranks that runs one or more stages of a pipeline is a *worker*.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from lightning_hetero.core.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """The place of one global rank in a plan."""

    pipeline_index: int
    stage_index: int
    """Its stage, the first one if it has several."""
    tp_rank: int
    chunks: tuple[int, ...]
    """Indices of all its stages, ascending."""


def find_places(groups: Sequence[Sequence[tuple[int, ...]]]) -> dict[int, RankPlace]:
    """Return the place of each rank.

    Args:
        groups: [pipeline][stage] ranks.

    Raises:
        PlanError: A rank has two places.
    """
    places: dict[int, RankPlace] = {}
    for pipeline_index, row in enumerate(groups):
        chunks: dict[tuple[int, ...], tuple[int, ...]] = {}
        for stage_index, ranks in enumerate(row):
            chunks[ranks] = (*chunks.get(ranks, ()), stage_index)
        for stage_index, ranks in enumerate(row):
            own = chunks[ranks]
            for tp_rank, global_rank in enumerate(ranks):
                place = RankPlace(
                    pipeline_index=pipeline_index, stage_index=own[0], tp_rank=tp_rank, chunks=own
                )
                first = places.setdefault(global_rank, place)
                if first != place:
                    raise PlanError(
                        f"Rank {global_rank} is in pipeline {first.pipeline_index} stage "
                        f"{first.stage_index} and in pipeline {pipeline_index} stage "
                        f"{stage_index}. Name each rank once, or the same ranks for several "
                        "stages of one pipeline."
                    )
    return places


def workers_of(groups: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """For each stage of a pipeline return the group that runs it, numbered by first appearance."""
    order = list(dict.fromkeys(groups))
    return tuple(map(order.index, groups))


def stages_by_worker(workers: Sequence[int]) -> list[list[int]]:
    """Return the stages that each worker runs, ascending; `workers` is the worker of each stage."""
    found: list[list[int]] = [[] for _ in {*workers}]
    for stage, worker in enumerate(workers):
        found[worker].append(stage)
    return found


def usual_held(workers: Sequence[int]) -> tuple[int, ...]:
    """Return the largest number of micro-batches that each worker holds at once under 1F1B.

    Without chunks this is the number of stages from its own to the last; with chunks, the number of
    workers. A micro-batch that is held in all chunks of a worker counts once.
    """
    count = len({*workers})
    return tuple(range(count, 0, -1)) if count == len(workers) else (count,) * count


def check_owners(
    shares: Sequence[float] | None, host_owners: Sequence[int], last_rank: int
) -> None:
    """Check a plan's `owner_shares` and `host_owners`.

    Raises:
        PlanError: Not every rank up to the plan's last has a share, none is above 0, or a rank that
            owns on its host is named twice or below 0.
    """
    if len(set(host_owners)) < len(host_owners) or any(rank < 0 for rank in host_owners):
        raise PlanError(
            f"host_owners are ranks {list(host_owners)}; name each once, ranks start at 0."
        )
    if shares is None:
        return
    if not all(0 <= share < inf for share in shares) or not any(shares):
        raise PlanError(f"owner_shares are {list(shares)}; give numbers of 0 or more, one above 0.")
    if len(shares) <= last_rank:
        raise PlanError(
            f"owner_shares has {len(shares)} entries but the plan names rank {last_rank}. Give one "
            "for each rank."
        )


def check_owners_exist(
    shares: Sequence[float] | None, host_owners: Sequence[int], world_size: int
) -> None:
    """Raise PlanError unless a plan's owners are the ranks that run."""
    if shares is not None and len(shares) != world_size:
        raise PlanError(
            f"The plan's owner_shares are for {len(shares)} ranks but {world_size} processes run. "
            "Start as many, or leave owner_shares out."
        )
    if any(rank >= world_size for rank in host_owners):
        raise PlanError(
            f"The plan's host_owners name rank {max(host_owners)} but {world_size} processes run "
            f"(ranks 0 to {world_size - 1}). Leave it out."
        )
