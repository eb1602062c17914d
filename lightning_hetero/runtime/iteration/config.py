"""The options of an `Engine`, and the keys by which it identifies iterations."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch

from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.reading import Choice
from lightning_hetero.exchange.owners import assign_owners
from lightning_hetero.exchange.slices import Ownership, ParameterSpec, Slice
from lightning_hetero.exchange.transfers import ExchangeKind
from lightning_hetero.runtime.results.counts import LossReduction
from lightning_hetero.runtime.results.iteration_loss import NonfiniteGradients
from lightning_hetero.runtime.stage.recomputation import LayerOptions
from lightning_hetero.schedules import Schedule


class Phase(IntEnum):
    """The loop of Lightning that an iteration belongs to."""

    TRAIN = 0
    VALIDATE = 1
    TEST = 2
    PREDICT = 3


class OwnedDevice(Choice):
    """Where owned slices live: masters, optimizer states and summed gradients."""

    AUTO = "auto"
    """On each rank's device, but on the host for ranks in the first plan's `host_owners`."""
    DEVICE = "device"
    """On the device of each rank."""
    CPU = "cpu"
    """In the memory of each rank's host; the optimizer's step runs there."""

    def is_on_host(self, plan: ParallelPlan, global_rank: int) -> bool:
        """Whether a rank's owned slices live on its host, if `plan` is the first one."""
        return self is OwnedDevice.CPU or (
            self is OwnedDevice.AUTO and global_rank in plan.host_owners
        )


@dataclass(frozen=True, kw_only=True)
class IterationKey:
    """Identifies an iteration; its random numbers depend only on this and the seed."""

    phase: Phase
    epoch: int
    batch_idx: int

    def __str__(self) -> str:
        return f"batch {self.batch_idx} in epoch {self.epoch}"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine runs its plans."""

    num_microbatches: int = 1
    """Micro-batches of a pipeline for which the plan names no number."""
    ownership: Ownership = Ownership.AUTO
    standbys: tuple[int, ...] = ()
    """The standby of each global rank; empty without redundancy."""
    standby_check_steps: int = 100
    """Slices and their copies on standbys are compared after this many optimizer steps; 0 never
    compares them."""
    owned_device: OwnedDevice = OwnedDevice.AUTO
    schedule: Schedule = Schedule.ONE_F_ONE_B
    """The order of a pipeline's passes."""
    exchange: ExchangeKind = ExchangeKind.AUTO
    """How weights and gradients travel between owners and holders."""
    node_of_rank: tuple[int, ...] = ()
    """For each global rank the first rank on its node; used where nodes sum gradients."""
    compute_dtype: torch.dtype = torch.float32
    master_dtype: torch.dtype | None = None
    """Dtype of master slices; None keeps the parameters' own."""
    seed: int = 0
    """Base of the random seeds of micro-batches and of drawn weights; the same on all ranks."""
    layer_options: LayerOptions = field(default_factory=LayerOptions)
    """Activation checkpointing and compilation of the layers."""
    fp32_gradients: bool = True
    """Whether a rank sums its micro-batches' gradients in fp32 if it computes in less."""
    nonfinite_gradients: NonfiniteGradients = NonfiniteGradients.ERROR
    """The answer to gradients that aren't finite."""
    scales_loss: bool = False
    """Whether losses are scaled for fp16. Then overflowing gradients aren't an error: the optimizer
    skips the step."""
    loss_reduction: LossReduction | None = None
    """Whether the loss is a mean or a sum over its batch; None measures it."""
    share_outputs: bool = True
    """Whether every rank gets what steps return and append."""
    allow_mixing: bool = False
    """Whether samples of a micro-batch may affect each other, as in BatchNorm."""

    def gradient_dtype(self, num_microbatches: int) -> torch.dtype:
        """Return the dtype of gradients: at least fp32 if `fp32_gradients`, for several batches."""
        if num_microbatches > 1 and self.fp32_gradients:
            return torch.promote_types(self.compute_dtype, torch.float32)
        return self.compute_dtype

    def owners(
        self, specs: Sequence[ParameterSpec], plan: ParallelPlan, *, world_size: int
    ) -> dict[str, tuple[Slice, ...]]:
        """Return the slices of each parameter with their owners, if `plan` is the first one."""
        ownership = self.ownership
        if ownership is Ownership.AUTO:
            is_idle = len(plan.ranks) < world_size
            ownership = Ownership.EVEN if is_idle else Ownership.HOLDERS
            if plan.owner_shares is not None:
                ownership = Ownership.MEMORY
        return assign_owners(
            specs, plan, world_size=world_size, ownership=ownership, standbys=self.standbys
        )
