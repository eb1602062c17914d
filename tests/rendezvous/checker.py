"""Execute operation lists under NCCL's rules, without processes, and say what would block.

Which send meets which receive is fixed by the lists: messages between two ranks on a communicator
match in the order issued, and so do collectives. What remains is a graph. Every operation has a
start and an end, and

* starts behind the end of its predecessor on its communicator, of what it waits for, and of the
  rank's last operation that the rank itself waits for (a compute step or a collective);
* ends behind its own start and, with every member at once, behind the start of its counterparts.

The lists run through if and only if this graph has no circle, whatever the timing.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

from lightning_hetero.core.errors import PlanError
from tests.rendezvous.operations import Operation, OperationKind, Transfer

__all__ = ["RendezvousError", "check_rendezvous"]


class RendezvousError(PlanError):
    """Operation lists that block, or whose sends and receives don't match."""


def check_rendezvous(operations: Mapping[int, Sequence[Operation]]) -> None:
    """Execute the lists of all ranks.

    Raises:
        RendezvousError: A message or collective without a counterpart or with another size, or
            ranks that wait for each other; names ranks, operations and communicators.
    """
    run = _Run(operations)
    run.order_by_rank(operations)
    run.match_transfers()
    run.match_collectives()
    run.execute()


class _Run:
    """The graph of all starts and ends: node 2i is operation i's start, 2i + 1 its end."""

    def __init__(self, operations: Mapping[int, Sequence[Operation]]) -> None:
        self._operations = [item for items in operations.values() for item in items]
        self._places = [
            (rank, position) for rank, items in operations.items() for position in range(len(items))
        ]
        self._after: list[list[int]] = [[] for _ in range(2 * len(self._operations))]

    def _edge(self, first: int, then: int) -> None:
        self._after[first].append(then)

    def order_by_rank(self, operations: Mapping[int, Sequence[Operation]]) -> None:
        """Order each rank's operations by communicator, by `waits_for` and by its own waiting."""
        first = 0
        for items in operations.values():
            held_up_by: int | None = None
            last_on: dict[str, int] = {}
            for index, item in enumerate(items, start=first):
                start, end = 2 * index, 2 * index + 1
                self._edge(start, end)
                for position in item.waits_for:
                    if not 0 <= position < index - first:
                        raise RendezvousError(
                            f"{self._name(index)} waits for operation {position}, which isn't "
                            "before it. Name earlier positions of the rank's own list."
                        )
                    self._edge(2 * (first + position) + 1, start)
                if held_up_by is not None:
                    self._edge(2 * held_up_by + 1, start)
                if item.communicator:
                    if item.communicator in last_on:
                        self._edge(2 * last_on[item.communicator] + 1, start)
                    last_on[item.communicator] = index
                if item.holds_up:
                    held_up_by = index
            first += len(items)

    def match_transfers(self) -> None:
        """Pair sends with receives, first with first; both ends need both operations started."""
        sends: dict[tuple[str, int, int], list[tuple[int, Transfer]]] = defaultdict(list)
        receives: dict[tuple[str, int, int], list[tuple[int, Transfer]]] = defaultdict(list)
        for index, item in enumerate(self._operations):
            rank = self._places[index][0]
            for transfer in item.transfers:
                if (transfer.source == rank) == (transfer.destination == rank):
                    raise RendezvousError(
                        f"{self._name(index)} holds a message from rank {transfer.source} to rank "
                        f"{transfer.destination}; exactly one end must be rank {rank}."
                    )
                side = sends if transfer.source == rank else receives
                key = (item.communicator, transfer.source, transfer.destination)
                side[key].append((index, transfer))
        for key in sends.keys() | receives.keys():
            for sent, received in zip_longest(sends.get(key, ()), receives.get(key, ())):
                if sent is None or received is None:
                    self._fail_unmatched(sent, received)
                elif sent[1] != received[1]:
                    self._fail_different(sent, received)
                else:
                    self._edge(2 * sent[0], 2 * received[0] + 1)
                    self._edge(2 * received[0], 2 * sent[0] + 1)

    def _fail_unmatched(
        self, sent: tuple[int, Transfer] | None, received: tuple[int, Transfer] | None
    ) -> None:
        if sent is not None:
            index, transfer = sent
            raise RendezvousError(
                f"{self._name(index)} sends {_what(transfer)} to rank {transfer.destination}, "
                f"which has no receive for it. Add the receive to rank {transfer.destination}."
            )
        if received is not None:
            index, transfer = received
            raise RendezvousError(
                f"{self._name(index)} receives {_what(transfer)} from rank {transfer.source}, "
                f"which never sends it. Add the send to rank {transfer.source}."
            )

    def _fail_different(self, sent: tuple[int, Transfer], received: tuple[int, Transfer]) -> None:
        raise RendezvousError(
            f"{self._name(sent[0])} sends {_what(sent[1])} but {self._name(received[0])} expects "
            f"{_what(received[1])}. Issue the messages in the same order and size on both ranks."
        )

    def match_collectives(self) -> None:
        """Gather the n-th collective of every rank of a communicator; all must have started."""
        queues: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for index, item in enumerate(self._operations):
            if item.kind is OperationKind.COLLECTIVE:
                queues[item.communicator][self._places[index][0]].append(index)
        for queue in queues.values():
            for members in zip_longest(*queue.values()):
                known = [index for index in members if index is not None]
                self._check_collective(known)
                # One node for the meeting keeps the number of edges linear in the ranks.
                meeting = len(self._after)
                self._after.append([2 * index + 1 for index in known])
                for index in known:
                    self._edge(2 * index, meeting)

    def _check_collective(self, members: Sequence[int]) -> None:
        first = self._operations[members[0]]
        for index in members:
            item = self._operations[index]
            if (item.ranks, item.num_bytes, item.label) != (
                first.ranks,
                first.num_bytes,
                first.label,
            ):
                raise RendezvousError(
                    f"{self._name(members[0])} of ranks {list(first.ranks)} and {first.num_bytes} "
                    f"bytes meets {self._name(index)} of ranks {list(item.ranks)} and "
                    f"{item.num_bytes} bytes. Issue the same collectives in the same order."
                )
        present = {self._places[index][0] for index in members}
        if present != set(first.ranks):
            raise RendezvousError(
                f"{self._name(members[0])} is for ranks {sorted(first.ranks)} but ranks "
                f"{sorted(present)} issue it. Let each of its ranks issue it, and no other."
            )

    def execute(self) -> None:
        """Let everything happen that can; RendezvousError if something never can."""
        missing = [0] * len(self._after)
        for targets in self._after:
            for node in targets:
                missing[node] += 1
        ready = deque(node for node, count in enumerate(missing) if count == 0)
        num_done = 0
        while ready:
            num_done += 1
            for node in self._after[ready.popleft()]:
                missing[node] -= 1
                if missing[node] == 0:
                    ready.append(node)
        if num_done < len(self._after):
            circle = self._find_circle({node for node, count in enumerate(missing) if count > 0})
            raise RendezvousError(self._describe(circle))

    def _find_circle(self, blocked: set[int]) -> list[int]:
        """Walk from a blocked node to something it waits for until the walk meets itself."""
        waits_for: dict[int, int] = {}
        for node in sorted(blocked):
            for later in self._after[node]:
                waits_for.setdefault(later, node)
        walk: list[int] = []
        seen: dict[int, int] = {}
        node = min(blocked)
        while node not in seen:
            seen[node] = len(walk)
            walk.append(node)
            node = waits_for[node]
        return walk[seen[node] :]

    def _describe(self, circle: Iterable[int]) -> str:
        num_nodes = 2 * len(self._operations)
        indices = list(dict.fromkeys(node // 2 for node in circle if node < num_nodes))
        ranks = sorted({self._places[index][0] for index in indices})
        names = ", which waits for ".join(self._name(index) for index in (*indices, indices[0]))
        return (
            f"Deadlock: ranks {ranks} wait for each other. {names}. Issue the operations of both "
            "ends in the same order, or group the sends and receives that belong together."
        )

    def _name(self, index: int) -> str:
        rank, position = self._places[index]
        item = self._operations[index]
        queue = f" on {item.communicator!r}" if item.communicator else ""
        return f"rank {rank} operation {position} ({item.label}{queue})"


def _what(transfer: Transfer) -> str:
    return f"{transfer.tag!r} of {transfer.num_bytes} bytes"
