"""Streams without hardware: which operations could meet in the same memory, and when it is let go.

Kernels of the test accelerator run at once. Here each is noted on the stream on which an
accelerator would have enqueued it, and streams know as much of each other as CUDA's would: by
`wait_stream`, by events, and by works of communications, each on a stream of its own. Told of are

* two uses of the same memory, one of which writes, neither of which waits for the other,
* memory that was let go while another stream than the one it was made on may still use it, when
  that one makes anything next: torch's allocator could give it away again (`record_stream`).
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from lightning_hetero.runtime.exchange import messages
from tests.accelerator import device

COMPUTE = "compute"
Times = dict[str, int]
"""How many operations of each stream are known to be over."""
READING = {"send"}
WRITING = {"recv", "broadcast", "allreduce"}
INTO_FIRST = {"alltoall_base", "_allgather_base", "_reduce_scatter_base", "allgather"}
"""Communications that write to their first argument and read the second one."""
_expired: Any = torch.UntypedStorage._expired  # type: ignore[attr-defined]
"""What `StorageWeakRef.expired` asks, which each allocation does of all memories."""


@dataclass
class Memory:
    """One allocation."""

    stream: str
    """On which it was made."""
    alive: StorageWeakRef
    reads: Times = field(default_factory=dict)
    """The last of each stream."""
    writes: Times = field(default_factory=dict)


class Streams:
    """All streams of a process."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        """What went wrong."""
        self.num_shared = 0
        """Allocations that several streams have used."""
        self._times: dict[str, Times] = {COMPUTE: {}}
        self._memories: dict[int, Memory] = {}
        self._gone: list[Memory] = []
        """Let go, and not given away yet."""
        self._local = threading.local()
        self._num_made = 0

    @property
    def current(self) -> str:
        return getattr(self._local, "current", COMPUTE)

    def new(self, kind: str) -> str:
        self._num_made += 1
        name = f"{kind} {self._num_made}"
        self._times[name] = {}
        return name

    def wait(self, stream: str, times: Times) -> None:
        """Let what a stream is given next run behind what `times` counts."""
        own = self._times[stream]
        for other, time in times.items():
            own[other] = max(own.get(other, 0), time)

    def times(self, stream: str) -> Times:
        return dict(self._times[stream])

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before, self._local.current = self.current, stream
        try:
            yield
        finally:
            self._local.current = before

    def run(self, what: str, reads: Any, writes: Any, *, stream: str | None = None) -> None:
        """Note an operation, of the current stream unless told, on tensors of the device."""
        stream = self.current if stream is None else stream
        own = self._times[stream]
        own[stream] = own.get(stream, 0) + 1
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in filter(device.on_device, tree_leaves(tensors)):
                self._use(what, self._memory_of(tensor, stream), stream, is_write=is_write)

    def _memory_of(self, tensor: Tensor, stream: str) -> Memory:
        storage: Any = tensor.untyped_storage()
        address = storage.data_ptr()
        found = self._memories.get(address)
        if found is None or found.alive.expired():
            for gone in [key for key, item in self._memories.items() if _expired(item.alive.cdata)]:
                self._gone.append(self._memories.pop(gone))
            self._give_away(stream)
            found = self._memories[address] = Memory(stream, StorageWeakRef(storage.memory))
        return found

    def _give_away(self, stream: str) -> None:
        """Take what was let go of a stream's memory for what it makes next."""
        known = self._times[stream]
        for memory in self._gone:
            uses = _beyond(memory.reads, known) | _beyond(memory.writes, known)
            if memory.stream == stream and uses - {stream}:
                kinds = sorted({name.split()[0] for name in uses - {stream}})
                kind = stream.split()[0]
                self.found.add(f"memory of {kind} let go before {kinds} are over")
        self._gone = [memory for memory in self._gone if memory.stream != stream]

    def _use(self, what: str, memory: Memory, stream: str, *, is_write: bool) -> None:
        known = self._times[stream]
        before = _beyond(memory.writes, known)
        if is_write:
            before |= _beyond(memory.reads, known)
        if others := before - {stream}:
            kinds = sorted({name.split()[0] for name in others})
            self.found.add(f"{what} on {stream.split()[0]} doesn't wait for {kinds}")
        was_shared = len({*memory.reads, *memory.writes, memory.stream}) > 1
        (memory.writes if is_write else memory.reads)[stream] = known[stream]
        self.num_shared += not was_shared and stream != memory.stream


def _beyond(uses: Times, known: Times) -> set[str]:
    return {stream for stream, time in uses.items() if time > known.get(stream, 0)}


class _Stream:
    """A `torch.cuda.Stream`, as far as it is used here."""

    def __init__(self, streams: Streams, name: str) -> None:
        self._streams = streams
        self.name = name

    def wait_stream(self, other: "_Stream") -> None:
        self._streams.wait(self.name, self._streams.times(other.name))

    def record_event(self) -> Times:
        return self._streams.times(self.name)

    def wait_event(self, event: Times) -> None:
        self._streams.wait(self.name, event)


class _Work:
    """A communication under way; who waits for it lets its current stream wait."""

    def __init__(self, streams: Streams, work: Any, times: Times) -> None:
        self._streams, self._work, self._times = streams, work, times

    def wait(self, *args: Any) -> Any:
        self._streams.wait(self._streams.current, self._times)
        return self._work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _watched(streams: Streams, name: str) -> Callable[..., Any]:
    original = getattr(dist.ProcessGroup, name)

    def communicate(group: Any, *args: Any, **kwargs: Any) -> Any:
        stream = streams.new("communication")
        streams.wait(stream, streams.times(streams.current))
        reads = args[1] if name in INTO_FIRST else args[0] if name not in WRITING else ()
        writes = () if name in READING else args[0]
        streams.run(name, reads, writes, stream=stream)
        work = original(group, *args, **kwargs)
        return _Work(streams, work, streams.times(stream))

    return communicate


@contextmanager
def watched() -> Iterator[Streams]:
    """Note what streams do in this process inside the context."""
    streams = Streams()

    def make(device: Any = None) -> _Stream:
        return _Stream(streams, streams.new("side"))

    def current(device: Any = None) -> _Stream:
        return _Stream(streams, streams.current)

    def enter(stream: _Stream) -> Any:
        return streams.on(stream.name)

    fakes = {"Stream": make, "current_stream": current, "stream": enter}
    with (
        mock.patch.multiple(torch.cuda, **fakes),
        mock.patch.object(messages, "has_streams", return_value=True),
        mock.patch.object(device, "note_use", streams.run),
        mock.patch.multiple(
            dist.ProcessGroup,
            **{name: _watched(streams, name) for name in READING | WRITING | INTO_FIRST},
        ),
    ):
        yield streams
