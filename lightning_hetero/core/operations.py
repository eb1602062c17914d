"""What every rank issues in one training iteration, as plain data.

An iteration is pull, the 1F1B actions, push and one collective of all ranks (Hydraulis §5.2, the
LNK operators). The runtime issues the same. The lists are what `check_rendezvous` executes under
NCCL's rules and what messages and bytes are counted from. The rules that they rely on:

* operations on one communicator run in the order in which a rank issues them;
* a send ends only with its receive, and a group ends when all its members have, which progress
  together;
* transfers don't hold up the rank that issues them; a compute step or a collective does.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from lightning_hetero.core.actions import Action, ActionKind, schedule_1f1b
from lightning_hetero.core.errors import PlanError
from lightning_hetero.core.plan import ParallelPlan, RankPlace, StagePlan
from lightning_hetero.core.transfers import Message, TransferTable

__all__ = [
    "BACKWARD",
    "CONTROL",
    "EXCHANGE",
    "FORWARD",
    "Operation",
    "OperationKind",
    "Traffic",
    "Transfer",
    "iteration_operations",
    "summarise",
]

FORWARD = "forward"
"""Communicator of activations."""
BACKWARD = "backward"
"""Communicator of gradients between stages."""
EXCHANGE = "exchange"
"""Communicator of pull and push."""
CONTROL = "control"
"""Communicator of what all ranks agree on at the end of an iteration."""


class OperationKind(StrEnum):
    """What an operation does, and so how it ends."""

    COMPUTE = "compute"
    """Ends by itself once it has started; the rank waits for it."""
    TRANSFER = "transfer"
    """One or more sends and receives that progress together; the rank goes on at once."""
    COLLECTIVE = "collective"
    """Ends once every rank of it has started it; the rank waits for it."""


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
    """Members of a TRANSFER."""
    ranks: tuple[int, ...] = ()
    """Global ranks of a COLLECTIVE."""
    num_bytes: int = 0
    """Payload of a COLLECTIVE."""
    waits_for: tuple[int, ...] = ()
    """Positions in the rank's list of earlier operations that must have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Point-to-point messages and bytes of one rank."""

    num_sent: int
    num_received: int
    sent_bytes: int
    received_bytes: int


def iteration_operations(
    plan: ParallelPlan,
    table: TransferTable,
    *,
    world_size: int,
    num_microbatches: Sequence[int],
    activation_bytes: int,
    value_bytes: int = 4,
) -> dict[int, tuple[Operation, ...]]:
    """Return the operations of every rank in the order in which it issues them.

    Args:
        plan: The plan that runs.
        table: What the plan pulls and pushes.
        world_size: Number of ranks, idle ones included.
        num_microbatches: Micro-batches of each pipeline; 0 leaves a pipeline without work.
        activation_bytes: Size of one micro-batch's hidden state and of its gradient.
        value_bytes: Size of one weight or gradient value in an exchange.

    Raises:
        PlanError: The plan needs more ranks, or there isn't one number for each pipeline.
    """
    plan.check_world_size(world_size)
    if len(num_microbatches) != plan.num_pipelines or min(num_microbatches) < 0:
        raise PlanError(
            f"num_microbatches is {list(num_microbatches)}; give each of the {plan.num_pipelines} "
            "pipelines a number of 0 or more."
        )
    operations = {}
    for global_rank in range(world_size):
        program = _Program(global_rank, table, value_bytes)
        pulls = program.exchange("pull", table.pull(global_rank))
        place = plan.place(global_rank)
        if place is not None:
            stages = plan.pipelines[place.pipeline_index].stages
            steps = _Steps(program, stages, place, activation_bytes, pulls)
            for action in schedule_1f1b(
                stage_index=place.stage_index,
                num_stages=len(stages),
                num_microbatches=num_microbatches[place.pipeline_index],
            ):
                steps.run(action)
        program.exchange("push", table.push(global_rank), waits_for=program.last_step)
        program.issue(
            kind=OperationKind.COLLECTIVE,
            label="end of the iteration",
            communicator=CONTROL,
            ranks=tuple(range(world_size)),
            waits_for=tuple(range(len(program.operations))),
        )
        operations[global_rank] = tuple(program.operations)
    return operations


def summarise(operations: Mapping[int, Sequence[Operation]]) -> dict[int, Traffic]:
    """Count each rank's point-to-point messages and bytes over the operations given."""
    traffic = {}
    for global_rank, items in operations.items():
        transfers = [transfer for item in items for transfer in item.transfers]
        sent = [item.num_bytes for item in transfers if item.source == global_rank]
        received = [item.num_bytes for item in transfers if item.destination == global_rank]
        traffic[global_rank] = Traffic(
            num_sent=len(sent),
            num_received=len(received),
            sent_bytes=sum(sent),
            received_bytes=sum(received),
        )
    return traffic


class _Program:
    """The list of one rank while it grows."""

    def __init__(self, global_rank: int, table: TransferTable, value_bytes: int) -> None:
        self.global_rank = global_rank
        self.operations: list[Operation] = []
        self.last_step: tuple[int, ...] = ()
        self._table = table
        self._value_bytes = value_bytes

    def issue(
        self,
        *,
        kind: OperationKind,
        label: str,
        communicator: str = "",
        ranks: tuple[int, ...] = (),
        num_bytes: int = 0,
        waits_for: tuple[int, ...] = (),
    ) -> int:
        """Append a compute step or collective and return its position."""
        self.operations.append(
            Operation(
                kind=kind,
                label=label,
                communicator=communicator,
                ranks=ranks,
                num_bytes=num_bytes,
                waits_for=waits_for,
            )
        )
        self.last_step = (len(self.operations) - 1,)
        return len(self.operations) - 1

    def transfer(
        self,
        label: str,
        communicator: str,
        transfers: tuple[Transfer, ...],
        waits_for: tuple[int, ...] = (),
    ) -> int:
        """Append a transfer and return its position."""
        self.operations.append(
            Operation(
                kind=OperationKind.TRANSFER,
                label=label,
                communicator=communicator,
                transfers=transfers,
                waits_for=waits_for,
            )
        )
        return len(self.operations) - 1

    def exchange(
        self, verb: str, messages: Sequence[Message], waits_for: tuple[int, ...] = ()
    ) -> tuple[int, ...]:
        """Append one group for each unit and return the positions of those that receive."""
        positions = []
        for unit, members in groupby(messages, key=lambda message: message.unit):
            tag = f"{verb} {unit}"
            transfers = tuple(self._as_transfers(members, tag))
            if not transfers:
                continue
            position = self.transfer(f"{verb} of unit {unit}", EXCHANGE, transfers, waits_for)
            if any(item.destination == self.global_rank for item in transfers):
                positions.append(position)
        return tuple(positions)

    def _as_transfers(self, messages: Iterator[Message], tag: str) -> Iterator[Transfer]:
        for message in messages:
            # A message to oneself is a copy, which no communicator sees.
            if message.source != message.destination:
                num_bytes = self._table.numel(message) * self._value_bytes
                yield Transfer(message.source, message.destination, num_bytes, tag)


class _Steps:
    """Append what a stage does for each action: receive, compute, reduce, send."""

    def __init__(
        self,
        program: _Program,
        stages: Sequence[StagePlan],
        place: RankPlace,
        activation_bytes: int,
        pulls: tuple[int, ...],
    ) -> None:
        self._program = program
        self._group = stages[place.stage_index].ranks
        self._tensor = f"tensor {place.pipeline_index}.{place.stage_index}"
        self._bytes = activation_bytes
        self._pulls = pulls
        neighbours = [
            stages[index].ranks[place.tp_rank] if 0 <= index < len(stages) else None
            for index in (place.stage_index - 1, place.stage_index + 1)
        ]
        self._previous, self._next = neighbours

    def run(self, action: Action) -> None:
        """Append one action."""
        program, rank, name = self._program, self._program.global_rank, str(action)
        if action.kind is ActionKind.FORWARD:
            communicator, source, destination = FORWARD, self._previous, self._next
            needs = self._pulls
        else:
            communicator, source, destination = BACKWARD, self._next, self._previous
            needs = ()
        if source is not None:
            received = Transfer(source, rank, self._bytes, name)
            needs = (*needs, program.transfer(f"receive {name}", communicator, (received,)))
        done = program.issue(kind=OperationKind.COMPUTE, label=name, waits_for=needs)
        if len(self._group) > 1:
            done = program.issue(
                kind=OperationKind.COLLECTIVE,
                label=f"reduce {name}",
                communicator=self._tensor,
                ranks=self._group,
                num_bytes=self._bytes,
                waits_for=(done,),
            )
        if destination is not None:
            sent = Transfer(rank, destination, self._bytes, name)
            program.transfer(f"send {name}", communicator, (sent,), (done,))
