"""Measure for how long one rank computes and for how long it waits, action by action.

Inside and between its actions a rank waits for other ranks: for activations and their gradients,
for weights, until gradients have left, for the agreement. A straggler detector needs the time
without these waits (Greyhound §4), and so does the comparison of a plan with its prediction. On
CUDA, events are recorded on the stream and read one iteration later, so that no host waits for its
device. Waits for messages are also recorded by peer: the search for a slow link starts from them.

`lightning_hetero.testing.EmulatedClock` replaces this clock to emulate a slower device or link. It
overrides the methods that begin and end sections, and two methods that do nothing here.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

from lightning_hetero.core.actions import ActionKind


@dataclass(frozen=True, slots=True)
class ActionTime:
    """One forward or backward on this rank."""

    kind: ActionKind
    microbatch_index: int
    compute_s: float
    """Seconds without waits."""
    wait_s: float
    """Seconds of waits inside it."""
    start_s: float = field(default=0.0, compare=False)
    """When it began, seconds since its iteration began."""
    stage_index: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class MessageTime:
    """One message that this rank waited for."""

    peer: int
    """Global rank of the sender."""
    num_bytes: int
    wait_s: float
    """Seconds for which this rank waited because the message hadn't arrived."""
    is_exchange: bool
    """Whether it held weights or gradients of parameters, not an activation or its gradient."""
    num_together: int = 1
    """Number of messages that were waited for at once, of which any may have been late."""
    start_s: float = field(default=0.0, compare=False)
    """When the wait began, seconds since its iteration began."""


class _Work(Protocol):
    """A message under way."""

    def wait(self) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class IterationTimes:
    """How long one iteration took on this rank."""

    actions: tuple[ActionTime, ...]
    """The actions in the order in which they ran; none on an idle rank."""
    wait_s: float
    """Seconds of all waits, inside actions and between them."""
    messages: tuple[MessageTime, ...] = ()
    """The messages that this rank received, in the order in which it waited for them."""
    began_s: float = 0.0
    """When it began, seconds of `time.perf_counter`."""

    def wait_by_peer_s(self) -> dict[int, float]:
        """Return the seconds for which this rank waited for messages of each peer.

        A wait for several messages at once counts in full for each of their senders.
        """
        waits_s: dict[int, float] = defaultdict(float)
        for message in self.messages:
            waits_s[message.peer] += message.wait_s
        return dict(waits_s)

    def exchange_wait_s(self) -> float:
        """Return the seconds of waits for weights and gradients of parameters."""
        return sum(item.wait_s / item.num_together for item in self.messages if item.is_exchange)

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
        self.is_late = self._is_cuda
        """Whether the times in `last` are one iteration old, as on CUDA: those of the iteration
        before the last one."""
        self._last: IterationTimes | None = None
        self._ended: list[_Marks] = []
        """Iterations that haven't been read yet; on CUDA the latest one can't be read yet."""
        self._marks = _Marks()
        self._iteration = _Section(self._begin_iteration, self._end_iteration)
        self._waiting = _Section(self._begin_wait, self._end_wait)
        self._action = _Section(self._begin_action, self._end_action)
        self._depth = 0
        self._in_action = False
        self._now: Callable[[], Any] = self._mark if self._is_cuda else time.perf_counter

    @property
    def last(self) -> IterationTimes | None:
        """The last complete iteration, trained or evaluated; on CUDA the one before it.

        None until there is one.
        """
        if len(self._ended) > self.is_late:
            self._last = self._ended.pop(0).resolve()
        return self._last

    def iteration(self) -> "_Section":
        """Context that times one iteration; one that raises an error isn't kept."""
        return self._iteration

    def action(self, kind: ActionKind, microbatch_index: int, stage_index: int = 0) -> "_Section":
        """Context that times one action."""
        self._marks.action = (kind, microbatch_index, stage_index)
        return self._action

    def waiting(self) -> "_Section":
        """Context whose time counts as waiting; may be nested."""
        return self._waiting

    def probing(self) -> "_Section":
        """Context whose work is treated as an action, so that an emulated device slows it down."""
        return self._action

    def wait_for(
        self, work: _Work, *, peer: int, num_bytes: int, is_exchange: bool = False
    ) -> None:
        """Wait for a message of a peer; counts as waiting. `num_bytes` is 0 for a header."""
        self.wait_together((work,), ((peer, num_bytes),), is_exchange=is_exchange)

    def wait_together(
        self, works: Sequence[_Work], senders: Sequence[tuple[int, int]], *, is_exchange: bool
    ) -> None:
        """Wait for messages of several (peer, bytes) that can't be waited for one by one."""
        marks = self._marks
        self._begin_wait()
        start = marks.wait_start if self._depth == 1 else self._now()
        for work in works:
            work.wait()
        for sender in senders:
            self._delay_message(*sender)
        self._end_wait()
        end = self._now() if self._depth else marks.waits[-1][1]
        for sender in senders:
            marks.messages.append((sender, start, end, (is_exchange, len(senders))))

    def before_send(self) -> None:
        """Called before an action's result is sent; an emulated slower device delays it here."""

    def _delay_message(self, peer: int, num_bytes: int) -> None:
        """Called when a message has arrived; an emulated slower link delays it here."""

    def _mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _begin_iteration(self) -> None:
        self._marks = _Marks()
        self._marks.began_s, self._marks.start = time.perf_counter(), self._now()
        self._depth, self._in_action = 0, False

    def _end_iteration(self) -> None:
        self._ended, self._marks = [*self._ended, self._marks][-1 - self.is_late :], _Marks()

    def _begin_action(self) -> None:
        self._in_action = True
        self._marks.action_start = self._now()
        self._marks.waits_before = len(self._marks.waits)

    def _end_action(self) -> None:
        self.before_send()
        self._in_action = False
        marks = self._marks
        waits = range(marks.waits_before, len(marks.waits))
        marks.actions.append((marks.action, marks.action_start, self._now(), waits))

    def _begin_wait(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._marks.wait_start = self._now()

    def _end_wait(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._marks.waits.append((self._marks.wait_start, self._now()))


class _Section:
    """A reusable context without state; a section that raises an error isn't recorded."""

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
        self.began_s = 0.0
        self.start: Any = None
        self.action: tuple[ActionKind, int, int] = (ActionKind.FORWARD, 0, 0)
        self.action_start: Any = None
        self.wait_start: Any = None
        self.waits_before = 0
        self.waits: list[tuple[Any, Any]] = []
        self.messages: list[tuple[tuple[int, int], Any, Any, tuple[bool, int]]] = []
        self.actions: list[tuple[tuple[ActionKind, int, int], Any, Any, range]] = []

    def resolve(self) -> IterationTimes:
        waits_s = [_seconds(start, end) for start, end in self.waits]
        actions = []
        for (kind, index, stage), start, end, waits in self.actions:
            wait_s = sum(waits_s[waits.start : waits.stop])
            compute_s = _seconds(start, end) - wait_s
            begin_s = _seconds(self.start, start)
            actions.append(ActionTime(kind, index, compute_s, wait_s, begin_s, stage))
        messages = tuple(
            MessageTime(*sender, _seconds(start, end), *rest, _seconds(self.start, start))
            for sender, start, end, rest in self.messages
        )
        return IterationTimes(
            actions=tuple(actions),
            wait_s=sum(waits_s),
            messages=messages,
            began_s=self.began_s,
        )


def _seconds(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


_NOT_TRACED = nullcontext()


def traced(name: object) -> AbstractContextManager[object]:
    """Show the work inside this context as one range of a trace, named `str(name)`."""
    # Without a profiler, ranges would cost as much as a small kernel.
    return record_function(str(name)) if _profiler_enabled() else _NOT_TRACED
