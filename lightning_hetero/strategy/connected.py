"""Lightning's strategy hooks about processes: devices, ranks and collectives."""

import os
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import ParallelStrategy
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from torch.distributed import ReduceOp
from typing_extensions import override

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.runtime.generation.entering import GenerationEnvironment
from lightning_hetero.runtime.random_state import GlobalSeed
from lightning_hetero.runtime.results.step_logs import ALREADY_REDUCED

if TYPE_CHECKING:
    from lightning_hetero.strategy.processes import Processes, StartMethod

_T = TypeVar("_T")
_COPIES = (
    "A number logged with reduce_fx='sum' and sync_dist=True is the same on every rank, and the "
    "sum counts it once for each. What steps return, log, or append to lists of the module is "
    "already that of all ranks: log it without sync_dist."
)


class ConnectedStrategy(ParallelStrategy):
    """Passes Lightning's calls about processes on to `Processes`.

    Args:
        processes: Connects this process with the others.
        start_method: How processes are started; see `HeteroStrategy`.
        **options: Lightning's own arguments of every strategy.
    """

    def __init__(
        self, processes: "Processes", *, start_method: "StartMethod", **options: Any
    ) -> None:
        super().__init__(**options)
        self._accelerator_of_trainer: Accelerator | None = None
        self.processes = processes
        """This process's connections to the others of the run."""
        self._start_method = start_method
        self._num_nodes, self._seeds = 1, GlobalSeed()

    @property
    def awaits_recovery(self) -> bool:
        """Whether the slices' values still have to be recovered, after a rank was lost."""
        return False

    @property
    @override
    def accelerator(self) -> Accelerator | None:
        return self._accelerator or self._accelerator_of_trainer

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator) -> None:
        # Not kept in `_accelerator`: if that is set, a second Trainer raises an error about two
        # strategies.
        if self._accelerator_of_trainer is not None:
            raise ConfigurationError(
                "This HeteroStrategy belongs to another Trainer, whose processes and slices it "
                "keeps. Make one for each: Trainer(strategy=HeteroStrategy(...))."
            )
        self._accelerator_of_trainer = accelerator

    is_distributed = True
    """Lightning reads it when it injects samplers and reduces logged values."""

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        environment, index = self.cluster_environment, self.local_rank
        if isinstance(environment, GenerationEnvironment):
            index = environment.device_index
        return _device_of(self.parallel_devices, index)

    @property
    def num_nodes(self) -> int:
        """Number of nodes: torchrun's if it started this process, else the Trainer's."""
        return int(os.environ.get("GROUP_WORLD_SIZE", self._num_nodes))

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Number of processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    def set_world_ranks(self) -> None:
        """Tell Lightning's own environment and `rank_zero_only` their ranks."""
        if (environment := self.cluster_environment) is None:
            return
        # Environments that know their ranks, such as torchrun's, ignore these calls.
        environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        self._seeds.put_back(again=self.awaits_recovery)
        assert self.cluster_environment is not None
        self.cluster_environment = self.processes.meet(
            self.cluster_environment, self.root_device, self._lightning_module
        )
        self.set_world_ranks()

    @override
    def reduce(
        self, tensor: Any, group: Any = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Any:
        found = self.processes.reduce(tensor, group, reduce_op)
        is_sum = reduce_op == "sum" and self.processes.are_several and group != ALREADY_REDUCED
        # Logged numbers are floats; Lightning also adds up lengths of loaders.
        if is_sum and isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            self._warn_of_copies(tensor, group)
        return found

    def _warn_of_copies(self, tensor: torch.Tensor, group: Any) -> None:
        """Warn if a sum that a hook logs adds one number again for each rank; collective."""
        most = self.processes.reduce(torch.stack([tensor, -tensor]), group, "max")
        if bool((most != 0).any()) and torch.allclose(most[0], -most[1], rtol=1e-4, atol=0.0):
            rank_zero_warn(_COPIES)

    @override
    def barrier(self, name: str | None = None) -> None:
        if self.processes.are_several and dist.is_initialized():
            with self.processes.watching():
                dist.barrier(group=self.processes.control)

    @override
    def broadcast(self, obj: _T, src: int = 0) -> _T:
        if not self.processes.are_several or not dist.is_initialized():
            return obj
        objects = [obj]
        with self.processes.watching():
            dist.broadcast_object_list(objects, src, group=self.processes.control)
        return objects[0]


def _device_of(devices: list[torch.device], local_rank: int) -> torch.device:
    """Return a process's device."""
    if len(devices) > local_rank:
        return devices[local_rank]
    # More processes run on this node than `devices=` says: trust the launcher.
    device = devices[0]
    return device if device.type == "cpu" else torch.device(device.type, local_rank)
