"""Input and result of planning for the ranks of a run; `planning` does it.

`AutoPlan` has the user's facts, `RunFacts` and `DataFacts` those of the strategy, `RunPlans` and
`AutoPlanned` the result. The size of an iteration must be known before there is a batch. It is
looked for in attributes of the loader, its dataset, the data module and the module (and of their
`hparams`), then in the first sample of a dataset that can be indexed.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_hetero.assign import PipelineCost
from lightning_hetero.assign.pipeline_cost import typical_length
from lightning_hetero.core.arrays import IntArray
from lightning_hetero.core.cluster import Cluster
from lightning_hetero.core.devices import Arithmetic
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.profile import Profile
from lightning_hetero.core.reading import check_numbers
from lightning_hetero.data.module import HeteroDataModule
from lightning_hetero.models.batches import sample_tokens
from lightning_hetero.planner import CandidatePlans
from lightning_hetero.planner.contingency import PlanBasis, Task
from lightning_hetero.runtime.clock import ComputeClock
from lightning_hetero.runtime.iteration.config import OwnedDevice
from lightning_hetero.runtime.random_state import PreservedRandomState
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.setup.detect import Seat, detect_seats
from lightning_hetero.runtime.setup.layout import ModelLayout
from lightning_hetero.runtime.setup.profile_cache import CorrectionFile
from lightning_hetero.runtime.stage.recomputation import LayerOptions
from lightning_hetero.schedules import Schedule
from lightning_hetero.simulator import Simulation, StateLayout

_BATCH_NAMES = ("batch_size", "train_batch_size", "per_device_train_batch_size")
_LENGTH_NAMES = (
    "context_length",
    "sequence_length",
    "seq_length",
    "seq_len",
    "max_seq_length",
    "max_length",
    "block_size",
)


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """What a data module knows of its samples."""

    lengths: IntArray
    """Tokens of each sample, or of each one in a representative part of the data."""
    tokens_per_step: int
    """Tokens of an iteration, of all pipelines together."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return int(self.lengths.max())

    @property
    def typical(self) -> int:
        """Typical length of a sample, weighted by tokens; see `typical_length`."""
        return typical_length(self.lengths)


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """Sizes that were found; None if they weren't."""

    samples: int | None
    """Samples of a loader's batch."""
    sequence_length: int | None
    """Tokens of a sample."""


def find_batch_sizes(sources: Sequence[object]) -> BatchSizes:
    """Return batch size and sequence length from loaders, data modules and modules.

    Args:
        sources: Where to look, most likely first; a loader's dataset is also looked at.
    """
    names = ("batch_sampler", "dataset", "hparams", "config")
    every = [[source, *(getattr(source, name, None) for name in names)] for source in sources]
    expanded = [item for row in every for item in row if item is not None]
    return BatchSizes(
        samples=_first_number(expanded, _BATCH_NAMES),
        sequence_length=_first_number(expanded, _LENGTH_NAMES) or _sample_length(expanded),
    )


def _first_number(sources: Sequence[object], names: Sequence[str]) -> int | None:
    values = (getattr(source, name, None) for source in sources for name in names)
    return next((v for v in values if type(v) is int and v > 0), None)


def _sample_length(sources: Sequence[object]) -> int | None:
    for source in sources:
        dataset: Any = getattr(source, "dataset", None)
        if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
            # An error while guessing mustn't end the run.
            with suppress(Exception):
                if (length := sample_tokens(dataset[0])) is not None:
                    return length
    return None


def find_data(trainer: pl.Trainer) -> Callable[[], DataFacts] | None:
    """Return a function for the facts of a `HeteroDataModule`'s samples; None without one."""
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(datamodule, HeteroDataModule):
        return None
    return lambda: DataFacts(
        lengths=datamodule.sample_lengths(), tokens_per_step=datamodule.tokens_per_step
    )


def find_sizes(trainer: pl.Trainer) -> BatchSizes:
    """Return the sizes of the training loader's batches, as far as they can be found."""
    # Nothing public holds the loader before the first epoch.
    loader = getattr(getattr(trainer.fit_loop, "_data_source", None), "instance", None)
    datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
    with PreservedRandomState():
        return find_batch_sizes([loader, datamodule, trainer.lightning_module])


NUM_STATES = 4
"""Number of values that Adam stores for each owned parameter: master, summed gradient, two
moments."""


@dataclass(frozen=True, kw_only=True)
class AutoPlan:
    """Facts that `plan="auto"` needs but can't always detect; `"auto"` stands for all defaults.

    ::

        HeteroStrategy(plan=AutoPlan(sequence_length=4096, batch_size=8, tp_degrees=(1, 2)))

    Raises:
        ConfigurationError: A number is below 1.
    """

    sequence_length: int | None = None
    """Tokens of a sample; None looks at loader, data module, module and a first sample, and assumes
    512 if it isn't found."""
    batch_size: int | None = None
    """Samples of an iteration per rank, as under DDP; None takes the loader's, or 8 if not
    found."""
    microbatch_sizes: tuple[int, ...] | None = None
    """Candidate numbers of samples in a micro-batch; None tries the batch, its half, third,
    quarter, and 1."""
    tp_degrees: tuple[int, ...] = (1,)
    """Tensor-parallel degrees to consider; for others than 1 the module needs a `tp_plan`."""
    cluster: Cluster | str | Path | None = None
    """The cluster, or its YAML file; None detects it."""
    profile: Profile | str | Path | None = None
    """A measured profile, or its JSON file; None measures unknown devices and caches the result."""
    max_profile_age_days: float = 90.0
    """Age from which a profile is refused."""

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("sequence_length", "batch_size")}
        check_numbers(ConfigurationError, "AutoPlan", 1, **sizes)
        for name in ("microbatch_sizes", "tp_degrees"):
            values = getattr(self, name)
            if values is not None and (not values or min(values) < 1):
                raise ConfigurationError(
                    f"AutoPlan has {name} {values}; give one or more numbers, 1 or more."
                )


@dataclass(frozen=True, kw_only=True)
class Emulation:
    """Which device a rank emulates, other than its own; without arguments it emulates none."""

    slowdown: float = 1.0
    """Factor by which its computations are slower than on the real device."""
    memory_bytes: int | None = None
    """Memory that an automatic plan may use; None asks the device."""
    live_bytes: Callable[[], int] | None = None
    """Returns the bytes allocated now, including a failed allocation; None asks the device."""
    node: str | None = None
    """Name of its node; ranks of a node are lost together. None asks the machine."""
    make_clock: Callable[[torch.device], ComputeClock] = ComputeClock
    """Makes the clock that times its actions."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What each rank knows about the run to plan."""

    module: nn.Module
    layout: ModelLayout
    comms: Communicators
    device: torch.device
    sizes: Callable[[], BatchSizes]
    """Returns the loader's sizes; called on rank 0 only."""
    emulation: Emulation = field(default_factory=Emulation)
    """The device that this rank emulates."""
    arithmetic: Arithmetic | None = None
    """The format of matrix products; None is bf16 or fp32, according to `compute_bytes`."""
    compute_bytes: int = 4
    """Bytes of a value in the compute dtype, in which weights and gradients are sent."""
    summed_bytes: int = 4
    """Bytes of a value of gradients summed over micro-batches."""
    master_bytes: int = 4
    """Bytes of a value of masters and optimizer states."""
    redundancy: int = 0
    """Number of standbys of each slice."""
    owned_device: OwnedDevice = OwnedDevice.AUTO
    """Where owned slices are stored."""
    layer_options: LayerOptions = field(default_factory=LayerOptions)
    """How layers run where the plan says nothing."""
    schedule: Schedule = Schedule.ONE_F_ONE_B
    """The order of a pipeline's passes, by which plans are judged."""
    data: Callable[[], DataFacts] | None = None
    """Returns facts about samples of different lengths, if a data module assigns them to plans;
    called on rank 0 only. None for other data."""

    num_batches: int | None = None
    """Batches of the loader in an iteration; None takes as many as there are ranks."""
    first_ranks: tuple[int, ...] | None = None
    """Each rank's rank in the run's first start, after ranks were lost; None if none was lost, or
    if there are joiners."""

    def detect_seats(self) -> Sequence[Seat]:
        """Return every rank's device, by global rank; collective the first time."""
        return self._seats

    @cached_property
    def _seats(self) -> Sequence[Seat]:
        played = self.emulation
        return detect_seats(
            self.comms,
            self.device,
            slowdown=played.slowdown,
            memory_bytes=played.memory_bytes,
            node=played.node,
            correction_of=lambda name: self.correction_file(name).read(),
        )

    def correction_file(self, device_name: str) -> CorrectionFile:
        """Return this machine's file of memory corrections for this model on a device type."""
        return CorrectionFile.of(self.layout.specs, self.compute_bytes, device_name)

    def state_layout(self) -> StateLayout:
        """Return the bytes of weights, gradients and states of parameters that train."""
        return StateLayout(
            arithmetic=self.arithmetic,
            weight_bytes=self.compute_bytes,
            gradient_bytes=self.compute_bytes,
            summed_bytes=self.summed_bytes,
            master_bytes=self.master_bytes,
            owned_bytes=NUM_STATES * self.master_bytes,
            redundancy=self.redundancy,
            selective=not self.layer_options.compile_layers,
            host_owned=self.owned_device is OwnedDevice.CPU,
        )


@dataclass(frozen=True, kw_only=True)
class AutoPlanned:
    """An automatic plan and what it is based on; the same on every rank."""

    plan: ParallelPlan
    summary: str
    """Lines for people: what was planned for, iteration time and bound."""
    warning: str | None = None
    """Why nothing could be planned, for people; None if something was."""
    simulation: Simulation | None = None
    """A simulated iteration under the plan; None if nothing was simulated."""
    lower_bound_s: float | None = None
    """Seconds below which no plan can be, with the same costs; None if nothing was simulated."""
    basis: PlanBasis | None = None
    """The basis of the prediction; None if nothing was simulated."""
    candidates: CandidatePlans | None = None
    """Plans for data that is assigned, and their costs; None for other data."""
    foreseen: tuple[Task[object], ...] = ()
    """Searches that this rank would have to do if other ranks were lost."""

    @property
    def predicted_s(self) -> float | None:
        """Predicted seconds of an iteration; None if nothing was simulated."""
        return None if self.simulation is None else self.simulation.iteration_time_s


@dataclass(frozen=True, kw_only=True)
class RunPlans:
    """The plans of a run; the same on every rank."""

    first: ParallelPlan
    """The plan that runs first."""
    candidates: tuple[ParallelPlan, ...]
    """Plans among which a data module may choose."""
    costs: tuple[tuple[PipelineCost, ...], ...] | None = None
    """Costs of the candidates' pipelines; None if they weren't measured."""
    auto: AutoPlanned | None = None
    """The automatic plan and its basis; None if a plan was given."""

    @property
    def may_use_tensor_parallelism(self) -> bool:
        """Whether a stage of any of them has several ranks."""
        return any(plan.has_tensor_parallelism for plan in self.candidates)
