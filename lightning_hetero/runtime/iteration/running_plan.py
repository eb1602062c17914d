"""All that one rank needs to run one plan: its place, weights, transfers and neighbours.

Making it communicates nothing and moves no optimizer state, which is why a plan can change from one
iteration to the next.
"""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_hetero.core.actions import Action, schedule_1f1b, schedule_forward
from lightning_hetero.core.errors import StepError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.slices import ParameterSpec
from lightning_hetero.core.transfers import TransferTable, unit_of
from lightning_hetero.runtime.clock import ComputeClock
from lightning_hetero.runtime.exchange.messages import ExchangeOptions
from lightning_hetero.runtime.exchange.pull import Pull
from lightning_hetero.runtime.exchange.push import Push
from lightning_hetero.runtime.exchange.side_stream import SideStream
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.slices.weights import ComputeWeights, SliceStore
from lightning_hetero.runtime.stage.activations import ActivationLink

__all__ = ["GradientCounter", "RunningPlan"]


class RunningPlan:
    """One plan, made ready on one rank.

    Args:
        plan: The plan.
        specs: The parameters, with the roles of outer ones as far as they are known.
        store: The rank's slices.
        comms: The communicators.
        clock: Times the waits.
        dtype: Propagation dtype.
        share_memory: See `ComputeWeights`.
    """

    def __init__(  # noqa: PLR0913 - what a run consists of
        self,
        plan: ParallelPlan,
        specs: Sequence[ParameterSpec],
        store: SliceStore,
        comms: Communicators,
        *,
        clock: ComputeClock,
        dtype: torch.dtype,
        share_memory: bool,
    ) -> None:
        self.plan = plan
        self.is_watched = False
        """Whether to see which parameters outside the layers each stage uses."""
        self.share_memory = share_memory
        self.place = plan.place(comms.global_rank)
        self.table = TransferTable(specs, store.slices, plan)
        self.weights = ComputeWeights(store, self.table, dtype=dtype, share_memory=share_memory)
        options = ExchangeOptions(
            group=comms.exchange, dtype=dtype, clock=clock, side_stream=SideStream(store.device)
        )
        self.pull = Pull(store, self.weights, options)
        self.push = Push(store, self.weights, options)
        self.gradient_counter = GradientCounter(specs, self.weights, self.push, plan)
        self.link = self._make_link(comms, store.device, clock)

    def _make_link(
        self, comms: Communicators, device: torch.device, clock: ComputeClock
    ) -> ActivationLink:
        previous = following = None
        if self.place is not None:
            stages = self.plan.pipelines[self.place.pipeline_index].stages
            index, tp_rank = self.place.stage_index, self.place.tp_rank
            if index > 0:
                previous = stages[index - 1].ranks[tp_rank]
            if index + 1 < len(stages):
                following = stages[index + 1].ranks[tp_rank]
        return ActivationLink(
            previous=previous,
            following=following,
            comms=comms,
            device=device,
            clock=clock,
        )

    @property
    def layers(self) -> range:
        """Layers of this rank's stage; none if it is idle."""
        if self.place is None:
            return range(0)
        stages = self.plan.pipelines[self.place.pipeline_index].stages
        return stages[self.place.stage_index].layers

    def schedule(self, num_microbatches: int, *, training: bool) -> tuple[Action, ...]:
        """Return the actions of this rank's stage for so many micro-batches."""
        if self.place is None:
            return ()
        index = self.place.stage_index
        if not training:
            return schedule_forward(stage_index=index, num_microbatches=num_microbatches)
        num_stages = self.plan.pipelines[self.place.pipeline_index].num_stages
        return schedule_1f1b(
            stage_index=index, num_stages=num_stages, num_microbatches=num_microbatches
        )


class GradientCounter:
    """Tells the push when the gradients of a unit are final, during the last backward."""

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        weights: ComputeWeights,
        push: Push,
        plan: ParallelPlan,
    ) -> None:
        self._push = push
        self._active = False
        self._left: dict[int, set[str]] = {}
        for spec in specs:
            shard = weights.shards.get(spec.name)
            unit = unit_of(spec, plan.num_layers)
            if shard is not None and spec.name in push.sent_by_unit.get(unit, ()):
                shard.register_post_accumulate_grad_hook(self._hook(unit, spec.name))  # type: ignore[no-untyped-call]

    def _hook(self, unit: int, name: str) -> Callable[[Tensor], None]:
        # Weakly: a hook that holds what holds its own tensor is a cycle that torch never collects.
        counter = weakref.ref(self)

        def arrived(_: Tensor) -> None:
            alive = counter()
            if alive is not None:
                alive._count(unit, name)

        return arrived

    def _count(self, unit: int, name: str) -> None:
        if self._active:
            if not self._left[unit]:
                raise StepError(
                    f"The gradient of {name} comes in several parts and was sent after the first, "
                    "as under torch.utils.checkpoint with use_reentrant=True. Use "
                    "use_reentrant=False."
                )
            self._left[unit].discard(name)
            if not self._left[unit]:
                self._push.unit_ready(unit)

    def counting(self, *, is_last: bool) -> "GradientCounter":
        """Count inside this context if the iteration's last backward runs in it."""
        self._active = is_last
        self._left = {unit: set(names) for unit, names in self._push.sent_by_unit.items()}
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self._active = False
