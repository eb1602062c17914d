"""The processes of a run: how they start, meet, talk, and find out that one of them failed.

World size and ranks come from the cluster environment, so nodes may run different numbers of
processes. Every wait for another rank can end in `PeerError`, which names the rank and why.
"""

import os
import uuid
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import PrefixStore, Store
from typing_extensions import override

from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.ranks.failure import FailureDetector
from lightning_hetero.runtime.ranks.meeting import connect_store
from lightning_hetero.runtime.results.hook_logs import HookLogs
from lightning_hetero.runtime.results.step_logs import ALREADY_REDUCED, SAME_EVERYWHERE

__all__ = ["ProcessesStrategy"]

_T = TypeVar("_T")


class ProcessesStrategy(ParallelStrategy):
    """Starts processes, connects them and reduces over them; what they train is a subclass's.

    Args:
        timeout: How long a rank waits for another before it gives up.
        start_method: How processes are started; see `HeteroStrategy`.
        process_group_backend: "nccl", "gloo", …; None takes what fits the device.
        **options: What Lightning hands to every strategy.
    """

    def __init__(
        self,
        *,
        timeout: timedelta,
        start_method: Literal["popen", "spawn", "fork", "forkserver"],
        process_group_backend: str | None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._timeout = timeout
        self._start_method = start_method
        self._process_group_backend = process_group_backend
        self._num_nodes = 1
        self._store: Store | None = None
        self._communicators: Communicators | None = None
        self._detector: FailureDetector | None = None
        self._hook_logs: HookLogs | None = None

    is_distributed = True
    """Lightning reads it before it injects samplers and reduces logged values."""

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        if len(self.parallel_devices) > self.local_rank:
            return self.parallel_devices[self.local_rank]
        # More processes run on this node than `devices=` says: the launcher knows better.
        device = self.parallel_devices[0]
        return device if device.type == "cpu" else torch.device(device.type, self.local_rank)

    @property
    def num_nodes(self) -> int:
        """Number of nodes: torchrun's if it started this process, else what the Trainer was given.

        The world size comes from the cluster environment either way.
        """
        return int(os.environ.get("GROUP_WORLD_SIZE", self._num_nodes))

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Number of processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def process_group_backend(self) -> str | None:
        """Backend of the device's communicators."""
        return self._process_group_backend

    def set_world_ranks(self) -> None:
        """Take ranks from the environment; only Lightning's own has to be told them."""
        environment = self.cluster_environment
        if environment is None:
            return
        # Environments that know their ranks, such as torchrun's, ignore what they are told here.
        environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    @override
    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        assert environment is not None
        if self._start_method != "popen":
            self._launcher = _MultiProcessingLauncher(self, start_method=self._start_method)
        elif not environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(
                environment, self.num_processes, self.num_nodes
            )

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        reset_seed()
        if self.world_size > 1:
            self._start_detector()
        if not dist.is_initialized():
            self._init_process_group()
        if self._communicators is None:
            self._communicators = Communicators.create(
                device=self.root_device, timeout=self._timeout
            )
        if self._detector is not None:
            self._detector.abort = self._communicators.abort

    def _start_detector(self) -> None:
        """Watch the other ranks from the first moment in which this one may wait for them."""
        if self._detector is None:
            self._detector = FailureDetector(
                self._connect_store(),
                global_rank=self.global_rank,
                world_size=self.world_size,
                timeout=self._timeout,
            )
        self._detector.start()

    def _compare_hooks(self) -> None:
        """Compare from now on what hooks log; collective."""
        if self.world_size > 1:
            # A name of its own, since another Trainer of these processes may have used the store.
            store = PrefixStore(
                f"hook logs {self.broadcast(uuid.uuid4().hex)}", self._connect_store()
            )
            self._hook_logs = HookLogs(store, global_rank=self.global_rank, timeout=self._timeout)

    def _connect_store(self) -> Store:
        if self._store is None:
            environment = self.cluster_environment
            assert environment is not None
            self._store = connect_store(
                environment.main_address,
                environment.main_port,
                global_rank=self.global_rank,
                world_size=self.world_size,
                timeout=self._timeout,
            )
        return self._store

    def _init_process_group(self) -> None:
        device = self.root_device
        default = "gloo" if device.type == "cpu" else dist.get_default_backend_for_device(device)
        self._process_group_backend = self._process_group_backend or default
        dist.init_process_group(
            self._process_group_backend,
            store=self._connect_store(),
            rank=self.global_rank,
            world_size=self.world_size,
            timeout=self._timeout,
            device_id=None if device.type == "cpu" else device,
        )

    # -- collectives ----------------------------------------------------------------------------

    def stop_watching(self) -> None:
        """Miss no rank from now on; called by every rank where all are about to end."""
        if self._detector is not None:
            self._detector.stop()

    def _watching(self) -> AbstractContextManager[None]:
        """Turn another rank's failure into `PeerError`, and tell the others of one's own."""
        return nullcontext() if self._detector is None else self._detector.watching()

    @property
    def _control(self) -> dist.ProcessGroup | None:
        return None if self._communicators is None else self._communicators.control

    @override
    def reduce(
        self,
        tensor: Any,
        group: Any = None,
        reduce_op: ReduceOp | str | None = "mean",
    ) -> Any:
        """Reduce a tensor over all ranks; `mean`, `sum` and other names of `ReduceOp`."""
        if self.world_size == 1 or not isinstance(tensor, Tensor) or group == ALREADY_REDUCED:
            return tensor
        if isinstance(group, str) and self._hook_logs is not None:
            logged = group.removeprefix(SAME_EVERYWHERE)
            with self._watching():
                return torch.full_like(tensor, self._hook_logs.compare(logged, float(tensor)))
        name = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
        is_mean = name in ("mean", "avg")
        operation = (
            ReduceOp.SUM
            if is_mean
            else getattr(ReduceOp, name.upper())
            if isinstance(name, str)
            else name
        )
        tensor = tensor.clone()
        with self._watching():
            dist.all_reduce(tensor, op=operation, group=group)
        return tensor / self.world_size if is_mean else tensor

    @override
    def barrier(self, name: str | None = None) -> None:
        if self.world_size > 1 and dist.is_initialized():
            with self._watching():
                dist.barrier(group=self._control)

    @override
    def broadcast(self, obj: _T, src: int = 0) -> _T:
        if self.world_size == 1 or not dist.is_initialized():
            return obj
        objects = [obj]
        with self._watching():
            dist.broadcast_object_list(objects, src, group=self._control)
        return objects[0]
