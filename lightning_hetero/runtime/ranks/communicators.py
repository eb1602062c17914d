"""The process groups of one run, one for each kind of traffic, and how they end when a peer fails.

Messages from each rank to each rank of a neighbouring stage have a communicator of their own, and
so have pull and push, so that one kind of traffic never blocks another. Control messages travel on
CPU (gloo) on any device. Checkpoints are saved and recovered beside training without a process
group, through the ranks' store.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Store

from lightning_hetero.core.arrays import FloatArray
from lightning_hetero.core.errors import ConfigurationError, HeteroError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.exchange.neighbours import Edge
from lightning_hetero.runtime.ranks.connections import Connections

MAX_EXCHANGE_GROUPS = 32
"""Largest number of pull and push communicators that a rank is in, besides the one of all ranks.

There is one for each set of ranks that hold the same part of a unit. Stage boundaries and TP
degrees determine these sets: with equal pipelines a rank is in one for each end of its stage, and
in one or two for the parameters outside the layers. NCCL allocates buffers for each.
"""

_T = TypeVar("_T")
_Key = TypeVar("_Key", tuple[int, ...], Edge)


def check_queues(device: torch.device, environment: Mapping[str, str]) -> None:
    """Refuse a device with one hardware queue for all of its streams.

    Raises:
        ConfigurationError: `CUDA_DEVICE_MAX_CONNECTIONS` is 1.
    """
    if device.type == "cuda" and environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise ConfigurationError(
            "CUDA_DEVICE_MAX_CONNECTIONS is 1, so all streams of a device share one hardware queue:"
            " a receive that waits for another rank holds up the computation after it, for which "
            "that rank may wait. Unset it, or set it to 8 or more; only Megatron-LM's overlap of "
            "tensor parallelism wants 1."
        )


def leave_failures_to_ranks(environment: MutableMapping[str, str]) -> None:
    """Keep NCCL's groups from aborting by themselves, or ending the process, if a peer is lost.

    By default, and as torchrun sets it, torch does one or both. Ranks that go on in place abort
    their groups themselves, once they know which step their devices have finished (`StepEnd`).
    """
    environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"


def reduce_over(
    tensor: Tensor, group: dist.ProcessGroup | None, reduce_op: dist.ReduceOp | str | None
) -> Tensor:
    """Return the "mean", "sum" or other `ReduceOp` of a tensor over a group's ranks; collective."""
    is_mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
    operation: Any = dist.ReduceOp.SUM if is_mean else reduce_op
    if isinstance(operation, str):
        operation = getattr(dist.ReduceOp, operation.upper())
    tensor = tensor.clone()
    dist.all_reduce(tensor, op=operation, group=group)
    return tensor / dist.get_world_size(group) if is_mean else tensor


def init_process_group(
    backend: str, store: Store, rank: int, world_size: int, **options: Any
) -> None:
    """Make torch's default group, like torch's function of this name; collective.

    torch names groups by a counter. If an attempt to connect failed, it may have been advanced on
    some ranks only, and ranks would then wait for each other under different names. So it is reset.
    """
    distributed_c10d._world.group_count = 0
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, **options)


def all_gather_single(
    into: Tensor, own: Tensor, group: dist.ProcessGroup | None, *, async_op: bool = False
) -> Any:
    """Gather equal tensors into one, by that function of torch that this version supports."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(into, own, group=group, async_op=async_op)


def reduce_scatter_single(
    into: Tensor, given: Tensor, group: dist.ProcessGroup | None, *, async_op: bool = False
) -> Any:
    """Sum and scatter equal parts, by that function of torch that this version supports."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(into, given, group=group, async_op=async_op)


class Rows:
    """Gathers a small row from each rank on rank 0; all ranks make the same calls.

    ::

        rows = Rows(row, group)  # doesn't wait
        found = rows.share()  # (num_ranks, length), on every rank

    Rows travel over a binomial tree, so no rank has more than log₂ n messages or neighbours: rank
    r, if a multiple of 2ᵏ, gathers the rows [r, r + 2ᵏ) and sends them to rank r - 2ᵏ.

    Args:
        row: This rank's row, (length,), of the same length on all ranks.
        group: A gloo group of all ranks; None if there is only one.
    """

    def __init__(self, row: Tensor, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._rows = row[None]
        self._rank, self._span = 0, 1
        self._received: list[dist.Work | None] = []
        self._sent: dist.Work | None = None
        if group is None:
            return
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        self._rank, self._rows = rank, row.new_empty(size, len(row))
        self._rows[rank] = row
        while self._span < size and not rank & self._span:
            child = rank + self._span
            if child < size:
                part = self._rows[child : child + self._span]
                self._received.append(dist.irecv(part, child, group))
            self._span *= 2
        if not self._received:
            self._send()

    def _send(self) -> None:
        if self._rank:
            own = self._rows[self._rank : self._rank + self._span]
            self._sent = dist.isend(own, self._rank - self._span, self._group)

    def on_rank_0(self) -> Tensor:
        """Wait; return every rank's row on rank 0, something else elsewhere."""
        for work in self._received:
            assert work is not None
            work.wait()
        if self._sent is None:
            self._send()
        if self._sent is not None:
            self._sent.wait()
        return self._rows

    def share(self) -> Tensor:
        """Wait; return every rank's row on every rank."""
        rows = self.on_rank_0()
        if self._group is not None:
            dist.broadcast(rows, 0, self._group)
        return rows


class StepEnd:
    """Tells whether a device had finished a step before communicators were aborted.

    A host runs ahead of its device, and agrees with the others on a step whose sums the device may
    not have received yet. Under NCCL only an abort ends the wait for a dead peer, and then the
    device goes on with whatever is in its buffers. So a step counts as trained only if the device
    had finished it before. Without streams a step is finished at once.
    """

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None
        self._is_cut = False
        self.is_reached = True
        """Whether the last noted step was finished before any abort."""

    def note(self, device: torch.device) -> None:
        """Note that the device has been given all work of a step; called by the main thread."""
        if device.type == "cuda":
            self._event = torch.cuda.current_stream(device).record_event()
            if self._is_cut:  # `cut` may have been called before the event was recorded.
                self.is_reached = False

    def wait(self) -> None:
        """Wait until the device has finished the step."""
        if self._event is not None:
            self._event.synchronize()

    def cut(self) -> None:
        """Note that communicators are about to be aborted; called by any thread, never raises."""
        if self._is_cut:
            return
        self._is_cut = True
        with suppress(RuntimeError):  # Where the device is broken.
            if self._event is None or self._event.query():  # type: ignore[no-untyped-call]
                return
        self.is_reached = False


@dataclass(kw_only=True, eq=False)
class Communicators:
    """The communicators of a run; all of them are None if there is only one rank."""

    global_rank: int
    world_size: int
    exchange: dist.ProcessGroup | None = None
    """Pull and push."""
    values: dist.ProcessGroup | None = None
    """Losses and logged values, on the device."""
    control: dist.ProcessGroup | None = None
    """Reports and objects, on CPU."""
    timeout: timedelta = timedelta(minutes=5)
    """How long an operation may wait, also in groups that are made later."""
    connections: Connections = field(default_factory=Connections, repr=False, compare=False)
    """The connections that the groups have opened."""
    step_end: StepEnd = field(default_factory=StepEnd, repr=False, compare=False)
    """Tells whether the device had finished the last step before an abort."""
    _is_aborted: bool = field(default=False, repr=False, compare=False)
    _edges: dict[Edge, dist.ProcessGroup] = field(default_factory=dict, repr=False, compare=False)
    _groups: dict[tuple[int, ...], dist.ProcessGroup] = field(
        default_factory=dict, repr=False, compare=False
    )
    _exchange_groups: dict[tuple[int, ...], dist.ProcessGroup] = field(
        default_factory=dict, repr=False, compare=False
    )

    @classmethod
    def create(
        cls,
        *,
        device: torch.device,
        timeout: timedelta,
        connections: Connections | None = None,
    ) -> "Communicators":
        """Make the communicators that every run has; collective over all ranks."""
        connections = connections or Connections()
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(global_rank=0, world_size=1)

        group = partial(_group_of_all, connections, timeout)

        def make() -> "Communicators":
            control = group("gloo")
            return cls(
                global_rank=dist.get_rank(),
                world_size=dist.get_world_size(),
                exchange=group(),
                values=control if device.type == "cpu" else group(),
                control=control,
                timeout=timeout,
                connections=connections,
            )

        return connections.open(make)

    def connect(self, edges: Iterable[Edge]) -> None:
        """Make the communicators of edges that have none; collective.

        All ranks give the same edges in the same order.
        """
        self._make(self._edges, {edge: edge[:2] for edge in edges if edge not in self._edges})

    def edge(self, edge: Edge) -> dist.ProcessGroup:
        """Return the communicator of messages from one rank to another; see `connect`."""
        return self._edges[edge]

    def abort(self) -> None:
        """End all waits in the communicators, as far as backends allow, because a peer is dead.

        Without that, NCCL's kernels would wait for it until NCCL's own timeout, even in a teardown.
        """
        self.step_end.cut()
        self._is_aborted = True
        made = (self.exchange, self.values, self.control, *self._edges.values())
        later = (*self._groups.values(), *self._exchange_groups.values())
        for group in (*made, *later, dist.group.WORLD):
            if group is not None:
                with suppress(Exception):
                    group.abort()

    def is_aborted(self) -> bool:
        """Whether they were aborted, because a peer is dead."""
        return self._is_aborted

    def gather_objects(self, value: _T) -> list[_T]:
        """Return every rank's value, by rank; collective over all ranks."""
        if self.world_size == 1:
            return [value]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value, group=self.control)
        return found

    def on_rank_0(self, work: Callable[[], _T]) -> _T:
        """Run `work` on rank 0 only; return its result, or raise its error, on every rank."""
        if self.world_size == 1:
            return work()
        answers: list[Any] = [None]
        if self.global_rank == 0:
            try:
                answers[0] = work()
            except HeteroError as error:
                answers[0] = error
        dist.broadcast_object_list(answers, 0, group=self.control)
        if isinstance(answers[0], HeteroError):
            raise answers[0]
        answer: _T = answers[0]
        return answer

    def to_leader(self, row: Sequence[float]) -> FloatArray:
        """Return every rank's row on rank 0, (num_ranks, length); no rows elsewhere; collective."""
        rows = Rows(torch.tensor(row, dtype=torch.float64), self.control).on_rank_0()
        found: FloatArray = (rows[:0] if self.global_rank else rows).numpy()
        return found

    def from_leader(self, numbers: Sequence[int]) -> list[int]:
        """Return rank 0's numbers; other ranks pass as many, which are ignored; collective."""
        values = torch.tensor(numbers, dtype=torch.int64)
        if self.control is not None:
            dist.broadcast(values, 0, self.control)
        found: list[int] = values.tolist()
        return found

    def tensor_parallel_group(self, plan: ParallelPlan) -> dist.ProcessGroup | None:
        """Return the group of this rank's stage, None for one rank; collective over all ranks.

        A group is made once, by all ranks in the order of the plan, and kept for later plans.
        """
        stages = [stage.ranks for _, _, stage in plan.iter_stages() if stage.tp_degree > 1]
        self._make(self._groups, {ranks: ranks for ranks in stages if ranks not in self._groups})
        own = [self._groups[ranks] for ranks in stages if self.global_rank in ranks]
        return own[0] if own else None

    def _make(
        self,
        known: dict[_Key, dist.ProcessGroup],
        new: Mapping[_Key, tuple[int, ...]],
    ) -> None:
        """Make the groups of some sets of ranks, under some keys; collective over all ranks.

        Every rank calls torch for each of the groups, because torch names them by counting, and
        names must agree. On gloo, a group that this rank isn't in costs that call but no message.
        """

        def make() -> None:
            for key, ranks in new.items():
                self.connections.check()
                known[key] = dist.new_group(list(ranks), timeout=self.timeout)

        if new:
            self.connections.open(make)

    def exchange_group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return the communicator of pull and push among some ranks, ascending; None without one.

        Communicates nothing.
        """
        return self.exchange if len(ranks) == self.world_size else self._exchange_groups.get(ranks)

    def make_exchange_groups(self, wanted: Iterable[tuple[int, ...]]) -> None:
        """Make the communicators of sets of ranks, in order, up to `MAX_EXCHANGE_GROUPS` per rank.

        Collective over all ranks, which pass the same sets in the same order.
        """
        known = self._exchange_groups
        numbers = Counter(chain.from_iterable(known))
        new = {}
        for ranks in wanted:
            is_new = len(ranks) < self.world_size and ranks not in known
            if is_new and all(numbers[rank] < MAX_EXCHANGE_GROUPS for rank in ranks):
                new[ranks] = ranks
                numbers.update(ranks)
        self._make(known, new)


def _group_of_all(
    connections: Connections, timeout: timedelta, backend: str | None = None
) -> dist.ProcessGroup:
    connections.check()  # An abandoned thread mustn't add groups to the next run's count.
    made = dist.new_group(backend=backend, timeout=timeout)
    assert isinstance(made, dist.ProcessGroup)
    return made
