"""The stages that one rank runs: usually one, or several chunks of a pipeline."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_hetero.core.plan import ParallelPlan, StagePlan
from lightning_hetero.exchange.neighbours import find_neighbours
from lightning_hetero.runtime.clock import ComputeClock
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.stage.activations import ActivationLink, Mailbox


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One of the stages that a rank runs."""

    index: int
    """The stage's index in its pipeline."""
    stage: StagePlan
    link: ActivationLink

    @property
    def is_last(self) -> bool:
        """Whether it holds the model's last layer."""
        return self.link.following is None


def chunks_of(
    plan: ParallelPlan,
    comms: Communicators,
    *,
    device: torch.device,
    clock: ComputeClock,
    group: dist.ProcessGroup | None,
) -> tuple[Chunk, ...]:
    """Return this rank's stages of a plan, connected with their neighbours; none if it is idle."""
    place = plan.place(comms.global_rank)
    if place is None:
        return ()
    pipeline = plan.pipelines[place.pipeline_index]
    # After each stage whose next stage is on the same rank.
    boxes = {index: Mailbox() for index in place.chunks if index + 1 in place.chunks}
    return tuple(
        Chunk(
            index=index,
            stage=pipeline.stages[index],
            link=ActivationLink(
                previous=before,
                following=after,
                group=group,
                comms=comms,
                device=device,
                clock=clock,
                before=boxes.get(index - 1),
                after=boxes.get(index),
            ),
        )
        for index, (before, after) in find_neighbours(comms.global_rank, pipeline).items()
    )
