"""Tell computing apart from waiting, action by action, on one rank.

A stage's iteration is a list of forwards and backwards, and inside and between them the rank waits
for other ranks: for hidden states and their gradients, for weights, for gradients to leave, for the
agreement. What a straggler detector needs is the time without those waits (Greyhound §4), and so
does whoever compares a plan with its prediction. Reading a clock costs about a microsecond an
action on a CPU; on CUDA, events are recorded on the stream and read after the iteration.

Waits for messages are also kept by peer, which is where the search for a slow link begins.

The clock can also stretch an action by sleeping, so that a fast device plays a slow one (see
`lightning_hetero.testing.EmulatedDevices`), and let messages of a peer arrive late.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lightning_hetero.core.actions import ActionKind
from lightning_hetero.core.errors import ConfigurationError

__all__ = ["ActionTime", "ComputeClock", "IterationTimes", "LinkDelay", "MessageTime"]


@dataclass(frozen=True, slots=True)
class ActionTime:
    """One forward or backward on this rank."""

    kind: ActionKind
    microbatch_index: int
    compute_s: float
    """Seconds without waits."""
    wait_s: float
    """Seconds of waits inside it."""


@dataclass(frozen=True, slots=True)
class MessageTime:
    """One message that this rank waited for."""

    peer: int
    """Global rank of the sender."""
    num_bytes: int
    wait_s: float
    """Seconds for which this rank stood still because the message wasn't there."""
    is_exchange: bool
    """Whether it held weights or gradients of parameters, not a hidden state or its gradient."""


@dataclass(frozen=True, kw_only=True)
class LinkDelay:
    """How much later than it does a message should arrive.

    Raises:
        ConfigurationError: A value is out of range.
    """

    bytes_per_s: float = math.inf
    """Bandwidth, above 0."""
    latency_s: float = 0.0
    """Seconds of each message, 0 or more."""

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or not 0 <= self.latency_s < math.inf:
            raise ConfigurationError(
                f"A link has latency_s {self.latency_s} and bytes_per_s {self.bytes_per_s}; the "
                "first must be 0 or more, the second above 0."
            )


class _Work(Protocol):
    """A message under way."""

    def wait(self) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class IterationTimes:
    """What one iteration took on this rank."""

    actions: tuple[ActionTime, ...]
    """The actions in the order in which they ran; none on an idle rank."""
    wait_s: float
    """Seconds of all waits, inside actions and between them."""
    messages: tuple[MessageTime, ...] = ()
    """The messages that this rank received, in the order in which it waited for them."""

    def wait_by_peer_s(self) -> dict[int, float]:
        """Return for how many seconds this rank waited for messages of each peer."""
        waits_s: dict[int, float] = defaultdict(float)
        for message in self.messages:
            waits_s[message.peer] += message.wait_s
        return dict(waits_s)

    def compute_s(self, kind: ActionKind | None = None) -> float:
        """Return the seconds without waits of all actions, or of one kind."""
        return sum(action.compute_s for action in self.actions if kind in (None, action.kind))

    def num_actions(self, kind: ActionKind) -> int:
        """Return how many actions of a kind ran."""
        return sum(action.kind is kind for action in self.actions)


class ComputeClock:
    """Times the actions of one rank.

    Used as `with clock.iteration():` around an iteration, `with clock.action(kind, index):` around
    an action and `with clock.waiting():` around whatever waits for another rank.

    Args:
        device: The rank's device; only CUDA has a stream of its own to time.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._slowdown = 1.0
        self._delays: dict[int, LinkDelay] = {}
        self._last: IterationTimes | None = None
        self._pending: _Marks | None = None
        self._marks = _Marks()
        self._iteration = _Section(self._begin_iteration, self._end_iteration)
        self._waiting = _Section(self._begin_wait, self._end_wait)
        self._action = _Section(self._begin_action, self._end_action)
        self._depth = 0
        self._in_action = False
        self._wall_start = self._cpu_start = 0.0
        self._wall_wait = self._cpu_wait = 0.0

    @property
    def slowdown(self) -> float:
        """How many times its CPU time an action takes, 1 or more; 1 doesn't stretch it.

        The CPU time is that of the thread, so that other processes of the machine don't count.
        """
        return self._slowdown

    @slowdown.setter
    def slowdown(self, slowdown: float) -> None:
        if not slowdown >= 1:
            raise ConfigurationError(
                f"slowdown is {slowdown}; it must be 1 or more, because sleeping makes nothing "
                "faster. Scale all factors so that the fastest rank has 1."
            )
        if slowdown > 1 and self._is_cuda:
            raise ConfigurationError(
                f"slowdown is {slowdown} on a CUDA device; only CPU ranks can be slowed down. Use "
                'Trainer(accelerator="cpu").'
            )
        self._slowdown = slowdown

    @property
    def delays(self) -> Mapping[int, LinkDelay]:
        """By global rank of the sender, how late messages arrive; those of other ranks don't."""
        return self._delays

    @delays.setter
    def delays(self, delays: Mapping[int, LinkDelay]) -> None:
        if delays and self._is_cuda:
            raise ConfigurationError(
                f"Messages of ranks {sorted(delays)} are to be delayed on a CUDA device; only CPU "
                'ranks can wait longer. Use Trainer(accelerator="cpu").'
            )
        self._delays = dict(delays)

    @property
    def last(self) -> IterationTimes | None:
        """The last complete iteration, trained or evaluated; on CUDA this waits for it to end."""
        if self._pending is not None:
            self._last = self._pending.resolve()
            self._pending = None
        return self._last

    def iteration(self) -> "_Section":
        """Time one iteration inside this context; one that raises isn't kept."""
        return self._iteration

    def action(self, kind: ActionKind, microbatch_index: int) -> "_Section":
        """Time one action inside this context, and stretch it at its end."""
        self._marks.action = (kind, microbatch_index)
        return self._action

    def waiting(self) -> "_Section":
        """Count the time inside this context as waiting; it may stand inside itself."""
        return self._waiting

    def stretching(self) -> "_Section":
        """Stretch what runs inside this context as an action, without keeping its time: probes."""
        return self._action

    def wait_for(
        self, work: _Work, *, peer: int, num_bytes: int, is_exchange: bool = False
    ) -> None:
        """Wait for a message of a peer; counts as waiting, and is delayed if the peer's are.

        The header of a message counts 0 bytes, and isn't delayed beside it.
        """
        self._begin_wait()
        start = self._now()
        work.wait()
        delay = self._delays.get(peer)
        if delay is not None and num_bytes:
            time.sleep(delay.latency_s + num_bytes / delay.bytes_per_s)
        self._marks.messages.append((peer, num_bytes, start, self._now(), is_exchange))
        self._end_wait()

    def stretch(self) -> None:
        """Sleep until the running action has taken as long as the slowdown asks.

        Called before a result leaves the rank, which a slow device would have later.
        """
        if self._slowdown == 1 or not self._in_action or self._depth:
            return
        cpu_s = time.thread_time() - self._cpu_start - self._cpu_wait
        due = self._wall_start + self._wall_wait + cpu_s * self._slowdown
        missing_s = due - time.perf_counter()
        if missing_s > 0:
            time.sleep(missing_s)

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _begin_iteration(self) -> None:
        self._marks = _Marks()
        self._depth, self._in_action = 0, False

    def _end_iteration(self) -> None:
        self._pending, self._marks = self._marks, _Marks()

    def _begin_action(self) -> None:
        self._in_action = True
        if self._slowdown > 1:
            self._wall_start, self._cpu_start = time.perf_counter(), time.thread_time()
            self._wall_wait = self._cpu_wait = 0.0
        self._marks.action_start = self._now()
        self._marks.waits_before = len(self._marks.waits)

    def _end_action(self) -> None:
        self.stretch()
        self._in_action = False
        self._marks.end_action(self._now())

    def _begin_wait(self) -> None:
        self._depth += 1
        if self._depth == 1:
            if self._slowdown > 1:
                self._wall_wait -= time.perf_counter()
                self._cpu_wait -= time.thread_time()
            self._marks.wait_start = self._now()

    def _end_wait(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._marks.waits.append((self._marks.wait_start, self._now()))
            if self._slowdown > 1:
                self._wall_wait += time.perf_counter()
                self._cpu_wait += time.thread_time()


class _Section:
    """A reusable context without state of its own; what raises inside it is not recorded."""

    __slots__ = ("_begin", "_end")

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._begin = begin
        self._end = end

    def __enter__(self) -> None:
        self._begin()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._end()


class _Marks:
    """The points in time of one iteration: seconds on a CPU, events on CUDA."""

    def __init__(self) -> None:
        self.action: tuple[ActionKind, int] = (ActionKind.FORWARD, 0)
        self.action_start: Any = None
        self.wait_start: Any = None
        self.waits_before = 0
        self.waits: list[tuple[Any, Any]] = []
        self.messages: list[tuple[int, int, Any, Any, bool]] = []
        self._actions: list[tuple[tuple[ActionKind, int], Any, Any, range]] = []

    def end_action(self, now: Any) -> None:
        waits = range(self.waits_before, len(self.waits))
        self._actions.append((self.action, self.action_start, now, waits))

    def resolve(self) -> IterationTimes:
        waits_s = [_seconds(start, end) for start, end in self.waits]
        actions = []
        for (kind, index), start, end, waits in self._actions:
            wait_s = sum(waits_s[waits.start : waits.stop])
            actions.append(ActionTime(kind, index, _seconds(start, end) - wait_s, wait_s))
        messages = tuple(
            MessageTime(peer, num_bytes, _seconds(start, end), is_exchange)
            for peer, num_bytes, start, end, is_exchange in self.messages
        )
        return IterationTimes(actions=tuple(actions), wait_s=sum(waits_s), messages=messages)


def _seconds(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
