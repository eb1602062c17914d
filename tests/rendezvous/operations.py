"""What ranks issue, as plain data, and a model of one training iteration at any scale.

An iteration is pull, the actions of 1F1B or of a solved order, push and one collective of all ranks
(Hydraulis §5.2, the LNK operators). `test_recorded` shows that the runtime issues the same; the
model says it of more ranks than can run here. `check_rendezvous` executes the lists under NCCL's
rules:

* operations on one communicator run in the order in which a rank issues them;
* a send ends only with its receive, and a group ends when all its members have, which progress
  together;
* transfers don't hold up the rank that issues them; a compute step or a collective does.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from random import Random

from lightning_hetero.core.actions import Action, ActionKind, most_held
from lightning_hetero.core.errors import PlanError
from lightning_hetero.core.places import RankPlace
from lightning_hetero.core.plan import ParallelPlan, PipelinePlan
from lightning_hetero.exchange.neighbours import Neighbour, SentPiece, find_neighbours
from lightning_hetero.exchange.transfers import TransferTable, Unit
from lightning_hetero.runtime.stage.messages import HEADER_BYTES
from lightning_hetero.schedules import Edge, ScheduleProblem, as_actions, usual_actions
from lightning_hetero.schedules.problem import Dispatch, Rule

__all__ = [
    "CONTROL",
    "EXCHANGE",
    "HEADERS",
    "STAGES",
    "Iteration",
    "Operation",
    "OperationKind",
    "Transfer",
    "edge_name",
    "iteration_operations",
    "random_orders",
]

STAGES = "stages"
"""Begins the names of communicators between stages, one for each sender and receiver."""
EXCHANGE = "exchange"
"""Communicator of pull and push."""
CONTROL = "control"
"""Communicator of what all ranks agree on at the end of an iteration."""
HEADERS = "headers"
"""Begins the names of queues of headers that announce activations on accelerators.

They are on the CPU, where each sender and receiver have a queue.
"""


Orders = Sequence[Sequence[Action]]
"""The actions of each worker of a pipeline."""


def random_orders(rng: Random) -> Callable[[tuple[int, ...], int], Orders]:
    """Return a function that returns orders of the solver's dispatch, by random priorities."""
    edge = Edge(latency_s=rng.choice([0.0, rng.uniform(0.0, 3.0)]), transfer_s=rng.random())
    room, patience = rng.choice([1.0, 1.5, 2.0]), rng.random()

    @cache
    def orders_of(workers: tuple[int, ...], num_microbatches: int) -> Orders:
        num_stages, num_workers = len(workers), max(workers) + 1
        unit_s = [rng.uniform(0.5, 2.0) for _ in range(num_stages)]
        problem = ScheduleProblem.equal(
            forward_s=unit_s,
            input_s=unit_s,
            weight_s=unit_s,
            num_microbatches=num_microbatches,
            most_held=[room * num_workers] * num_workers,
            edges=[edge] * (num_stages - 1),
            workers=workers,
        )
        forwards, inputs = (
            [[rng.random() for _ in range(num_microbatches)] for _ in unit_s] for _ in "FI"
        )
        _, orders = Dispatch(problem, Rule((forwards, inputs), patience)).run()
        return as_actions(orders)

    return orders_of


def edge_name(what: str, sender: int, receiver: int, channel: int = 0) -> str:
    """Return the name of a queue from one rank to another."""
    return f"{what} {sender}>{receiver}" + (f".{channel}" if channel else "")


class OperationKind(StrEnum):
    """What an operation does, and so how it ends."""

    COMPUTE = "compute"
    """Ends by itself once it has started; the rank waits for it."""
    TRANSFER = "transfer"
    """One or more sends and receives that progress together; the rank goes on at once."""
    COLLECTIVE = "collective"
    """Ends once every rank of it has started it; the rank waits for it unless it is async."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One end of a point-to-point message; both ends are written alike."""

    source: int
    destination: int
    num_bytes: int
    tag: str
    """What travels, such as `F3` or `pull 7`; both ends must mean the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One thing that a rank issues."""

    kind: OperationKind
    label: str
    """What a person reads in an error."""
    communicator: str = ""
    """Name of the queue it joins; empty for compute steps."""
    transfers: tuple[Transfer, ...] = ()
    """Members of a TRANSFER; in a COLLECTIVE what each rank sends to each, where that differs."""
    ranks: tuple[int, ...] = ()
    """Global ranks of a COLLECTIVE."""
    num_bytes: int = 0
    """Payload of a COLLECTIVE that is of one size on all ranks."""
    waits_for: tuple[int, ...] = ()
    """Positions in the rank's list of earlier operations that must have ended."""
    is_async: bool = False
    """Whether the rank goes on at once from a COLLECTIVE, too."""

    @property
    def holds_up(self) -> bool:
        """Whether the rank waits for its end before it issues more."""
        return self.kind is not OperationKind.TRANSFER and not self.is_async


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """What one iteration runs through a plan."""

    world_size: int
    """Number of ranks, idle ones included."""
    num_microbatches: tuple[int, ...]
    """Micro-batches of each pipeline; 0 leaves a pipeline without work."""
    activation_bytes: int
    """Size of one micro-batch's hidden state and of its gradient."""
    value_bytes: int = 4
    """Size of one weight or gradient value in an exchange."""
    orders_of: Callable[[tuple[int, ...], int], Orders] = usual_actions
    """Returns the actions of a pipeline's workers for so many micro-batches."""
    collective_of: Callable[[tuple[int, ...]], str] = lambda _: ""
    """Name of the communicator by which some ranks exchange a unit together; empty for messages."""
    headers_apart: bool = True
    """Whether headers travel by themselves, as on accelerators, or within activations."""


def iteration_operations(
    plan: ParallelPlan, table: TransferTable, iteration: Iteration
) -> dict[int, tuple[Operation, ...]]:
    """Return the operations of every rank in the order in which it issues them.

    Where the runtime waits less, the lists wait more, so what doesn't block here doesn't block
    there: a step waits for all of the rank's pull, not only for the units it computes with, and a
    unit's push follows the last backward instead of starting once that has passed the unit.

    Raises:
        PlanError: The plan needs more ranks, or there isn't one number for each pipeline.
    """
    plan.check_world_size(iteration.world_size)
    counts = iteration.num_microbatches
    if len(counts) != plan.num_pipelines or min(counts) < 0:
        raise PlanError(
            f"num_microbatches is {list(counts)}; give each of the {plan.num_pipelines} pipelines "
            "a number of 0 or more."
        )
    operations = {}
    for global_rank in range(iteration.world_size):
        program = _Program(global_rank, iteration)
        pulls = program.exchange("pull", table.units)
        place = plan.place(global_rank)
        if place is not None:
            pipeline = plan.pipelines[place.pipeline_index]
            orders = iteration.orders_of(pipeline.workers, counts[place.pipeline_index])
            steps = {
                index: _Steps(program, pipeline, place, index, iteration, pulls, orders)
                for index in place.chunks
            }
            for action in orders[pipeline.workers[place.stage_index]]:
                steps[action.stage_index].run(action)
        units = tuple(reversed(table.trainable_units))
        program.exchange("push", units, waits_for=program.last_step)
        program.append(
            Operation(
                kind=OperationKind.COLLECTIVE,
                label="end of the iteration",
                communicator=CONTROL,
                ranks=tuple(range(iteration.world_size)),
                waits_for=tuple(range(len(program.operations))),
            )
        )
        operations[global_rank] = tuple(program.operations)
    return operations


class _Program:
    """The list of one rank while it grows."""

    def __init__(self, global_rank: int, iteration: Iteration) -> None:
        self.global_rank = global_rank
        self.operations: list[Operation] = []
        self.last_step: tuple[int, ...] = ()
        self._iteration = iteration

    def append(self, operation: Operation) -> int:
        """Issue an operation and return its position."""
        position = len(self.operations)
        self.operations.append(operation)
        if operation.holds_up:
            self.last_step = (position,)
        return position

    def exchange(
        self, verb: str, units: Sequence[Unit], waits_for: tuple[int, ...] = ()
    ) -> tuple[int, ...]:
        """Append one group of messages or one collective for each unit; returns their positions."""
        positions = []
        for unit in units:
            if self.global_rank not in unit.kind.members:
                continue
            tag, label = f"{verb} {unit.index}", f"{verb} of unit {unit.index}"
            together = self._iteration.collective_of(unit.kind.members)
            transfers = () if together else tuple(self._transfers(unit, tag, push=verb == "push"))
            if together:
                found = Operation(
                    kind=OperationKind.COLLECTIVE,
                    label=label,
                    communicator=together,
                    ranks=unit.kind.members,
                    is_async=True,
                    waits_for=waits_for,
                )
            elif transfers:
                found = Operation(
                    kind=OperationKind.TRANSFER,
                    label=label,
                    communicator=EXCHANGE,
                    transfers=transfers,
                    waits_for=waits_for,
                )
            else:
                continue
            positions.append(self.append(found))
        return tuple(positions)

    def _transfers(self, unit: Unit, tag: str, *, push: bool) -> Iterator[Transfer]:
        for move in unit.kind.moves(self.global_rank, push=push):
            # A message to oneself is a copy, which no communicator sees.
            if move.source != move.destination:
                num_bytes = unit.kind.numel(move) * self._iteration.value_bytes
                yield Transfer(move.source, move.destination, num_bytes, tag)


class _Steps:
    """Append what a stage does for each action: receive, compute, reduce, send."""

    def __init__(
        self,
        program: _Program,
        pipeline: PipelinePlan,
        place: RankPlace,
        index: int,
        iteration: Iteration,
        pulls: tuple[int, ...],
        orders: Orders,
    ) -> None:
        self._program = program
        self._group = pipeline.stages[index].ranks
        self._index = index
        self._tensor = f"tensor {place.pipeline_index}.{place.stage_index}"
        self._iteration = iteration
        self._pulls = pulls
        self._num_microbatches = iteration.num_microbatches[place.pipeline_index]
        self._receives: dict[Action, int] = {}
        self._headers: dict[Action, int] = {}
        self._sends: dict[ActionKind, deque[list[int]]] = defaultdict(deque)
        neighbours = find_neighbours(program.global_rank, pipeline)[index]
        # What a rank hands to itself is no message.
        self._previous, self._next = (
            None if found is None or found.received.is_local else found for found in neighbours
        )
        held = {stage: most for order in orders for stage, most in most_held(order).items()}
        self._most_sent, self._most_expected = held.get(index, 0), held.get(index - 1, 0)
        self._gradients = {
            action.microbatch_index: action
            for action in orders[pipeline.workers[index]]
            if action.kind in (ActionKind.BACKWARD, ActionKind.INPUT)
            and action.stage_index == index
        }
        self._expect(-1)

    def run(self, action: Action) -> None:
        """Append an action of the stage."""
        is_forward = action.kind is ActionKind.FORWARD
        if is_forward:
            self._receive(action)
        self._compute_and_send(action)
        if is_forward:
            self._expect(action.microbatch_index)
            # The hidden state that was sent says how large the gradient will be.
            self._receive(self._gradients[action.microbatch_index])

    def _expect(self, done: int) -> None:
        """Begin to receive what comes first of the forwards after one, as far as is known."""
        source = self._previous
        stop = min(done + 1 + self._most_expected, self._num_microbatches)
        for index in range(done + 1, stop) if source is not None else ():
            action = Action(ActionKind.FORWARD, self._index, index)
            if action in self._receives or action in self._headers:
                continue
            if self._is_apart(source.received):
                self._headers[action] = self._header("receive header of", action, source.received)
            else:
                self._receives[action] = self._transfer("receive", action, source.received)

    def _receive(self, action: Action) -> None:
        if action in self._headers:
            # Only the header says what to receive, so the rank waits for it.
            self._wait(f"read header of {action}", self._headers[action])
        source = self._source(action)
        if source is not None and action not in self._receives:
            self._receives[action] = self._transfer("receive", action, source.received)

    def _wait(self, label: str, position: int) -> None:
        self._program.append(
            Operation(kind=OperationKind.COMPUTE, label=label, waits_for=(position,))
        )

    def _header(self, verb: str, action: Action, piece: SentPiece, *waits_for: int) -> int:
        transfer = Transfer(piece.sender, piece.receiver, HEADER_BYTES, f"header {action}")
        return self._program.append(
            Operation(
                kind=OperationKind.TRANSFER,
                label=f"{verb} {action}",
                communicator=edge_name(HEADERS, *piece.edge),
                transfers=(transfer,),
                waits_for=waits_for,
            )
        )

    def _is_apart(self, piece: SentPiece) -> bool:
        return self._iteration.headers_apart or piece.count > 1

    def _transfer(self, verb: str, action: Action, piece: SentPiece, *waits_for: int) -> int:
        start, stop = piece.bounds(self._iteration.activation_bytes)
        num_bytes = stop - start
        if action.kind is ActionKind.FORWARD and not self._is_apart(piece):
            num_bytes += HEADER_BYTES
        transfer = Transfer(piece.sender, piece.receiver, num_bytes, str(action))
        return self._program.append(
            Operation(
                kind=OperationKind.TRANSFER,
                label=f"{verb} {action}",
                communicator=edge_name(STAGES, *piece.edge),
                transfers=(transfer,),
                waits_for=waits_for,
            )
        )

    def _compute_and_send(self, action: Action) -> None:
        forward = action.kind is ActionKind.FORWARD
        needs = self._pulls if forward else ()
        if action in self._receives:
            needs = (*needs, self._arrival(action))
        done = self._program.append(
            Operation(kind=OperationKind.COMPUTE, label=str(action), waits_for=needs)
        )
        if len(self._group) > 1:
            done = self._program.append(
                Operation(
                    kind=OperationKind.COLLECTIVE,
                    label=f"reduce {action}",
                    communicator=self._tensor,
                    ranks=self._group,
                    num_bytes=self._iteration.activation_bytes,
                    waits_for=(done,),
                )
            )
        if action.kind is ActionKind.WEIGHT:
            return
        destination = self._next if forward else self._previous
        if destination is not None and destination.sent:
            self._send(action, destination.sent, done)

    def _source(self, action: Action) -> Neighbour | None:
        return self._previous if action.kind is ActionKind.FORWARD else self._next

    def _arrival(self, action: Action) -> int:
        """Return the operation after which the whole message is there."""
        source, position = self._source(action), self._receives[action]
        assert source is not None
        if source.received.count == 1:
            return position
        return self._program.append(
            Operation(
                kind=OperationKind.COLLECTIVE,
                label=f"gather {action}",
                communicator=self._tensor,
                ranks=self._group,
                num_bytes=-(-self._iteration.activation_bytes // source.received.count),
                waits_for=(position,),
            )
        )

    def _send(self, action: Action, pieces: Sequence[SentPiece], done: int) -> None:
        kept = self._sends[action.kind]
        is_forward = action.kind is ActionKind.FORWARD
        if len(kept) == (self._most_sent if is_forward else self._most_expected):
            for position in kept.popleft():
                self._wait(f"let go before {action}", position)
        positions = []
        for piece in pieces:
            if action.kind is ActionKind.FORWARD and self._is_apart(piece):
                self._header("announce", action, piece, done)
            positions.append(self._transfer("send", action, piece, done))
        kept.append(positions)
