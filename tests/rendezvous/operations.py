"""What ranks issue, as plain data, and the rules of NCCL under which it may block.

* Operations on one communicator run in the order in which a rank issues them;
* a send ends only with its receive, and a group of them when all have; a collective ends
  once all its ranks have started it;
* transfers don't hold up the rank that issues them; a compute step or a collective does.

`find_block` runs the lists of all ranks as ranks would, one event at a time. Which send meets which
receive is fixed by the lists, so what blocks here blocks whatever the timing.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

STAGES = "stages"
"""Begins the names of communicators between stages, one for each sender and receiver."""
EXCHANGE = "exchange"
"""Communicator of pull and push; begins the names of those among some ranks only."""
CONTROL = "control"
"""Communicator of what all ranks agree on at the end of an iteration."""


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


Lists = Mapping[int, Sequence[Operation]]
"""The operations of each rank, in the order in which it issues them."""


def find_block(lists: Lists) -> str:
    """Return what blocks, or meets something else than its like; "" if everything ends."""
    return _Ranks(lists).run()


Member = tuple[int, int]
"""Rank and position of an operation."""


class _Ranks:
    def __init__(self, lists: Lists) -> None:
        self.lists = lists
        self.num_issued = dict.fromkeys(lists, 0)
        self.ended: set[Member] = set()
        self.num_open: dict[Member, int] = {}
        self.sends: defaultdict[tuple[str, int, int], deque[tuple[Member, Transfer]]]
        self.sends, self.receives = defaultdict(deque), defaultdict(deque)
        self.arrivals: defaultdict[str, list[Member]] = defaultdict(list)

    def run(self) -> str:
        moving = True
        while moving:
            before = sum(self.num_issued.values()), len(self.num_open), len(self.ended)
            for rank in self.lists:
                self.issue(rank)
                self.start(rank)
            if different := self.meet_messages() or self.meet_collectives():
                return different
            self.ended |= {member for member, count in self.num_open.items() if count == 0}
            moving = before != (
                sum(self.num_issued.values()),
                len(self.num_open),
                len(self.ended),
            )
        left = [
            next((rank, place) for place in range(len(items)) if (rank, place) not in self.ended)
            for rank, items in self.lists.items()
            if any((rank, place) not in self.ended for place in range(len(items)))
        ]
        return "" if not left else f"These wait for ever: {'; '.join(map(self.name, left))}."

    def issue(self, rank: int) -> None:
        """Go through the list up to the first step or collective that hasn't ended."""
        items = self.lists[rank]
        while self.num_issued[rank] < len(items):
            last = self.num_issued[rank] - 1
            if last >= 0 and items[last].holds_up and (rank, last) not in self.ended:
                break
            self.num_issued[rank] += 1

    def start(self, rank: int) -> None:
        """Start what is issued, first on its communicator and no longer waiting."""
        busy: set[str] = set()
        for position in range(self.num_issued[rank]):
            member, item = (rank, position), self.lists[rank][position]
            if member in self.ended:
                continue
            free = not item.communicator or item.communicator not in busy
            ready = all((rank, needed) in self.ended for needed in item.waits_for)
            if free and ready and member not in self.num_open:
                self.post(member, item)
            busy.add(item.communicator)

    def post(self, member: Member, item: Operation) -> None:
        self.num_open[member] = len(item.transfers)
        for transfer in item.transfers:
            side = self.sends if transfer.source == member[0] else self.receives
            side[item.communicator, transfer.source, transfer.destination].append(
                (member, transfer)
            )
        if item.kind is OperationKind.COLLECTIVE:
            self.arrivals[item.communicator].append(member)
            self.num_open[member] += 1

    def meet_messages(self) -> str:
        for key, sent in self.sends.items():
            received = self.receives[key]
            while sent and received:
                (sender, what), (receiver, expected) = sent.popleft(), received.popleft()
                if what != expected:
                    return (
                        f"{self.name(sender)} sends {what}, {self.name(receiver)} gets {expected}."
                    )
                self.num_open[sender] -= 1
                self.num_open[receiver] -= 1
        return ""

    def meet_collectives(self) -> str:
        for members in self.arrivals.values():
            items = [self.lists[rank][position] for rank, position in members]
            if items and len(items) == len(items[0].ranks):
                if len({(item.label, item.ranks, item.num_bytes) for item in items}) > 1:
                    return f"These differ: {'; '.join(map(self.name, members))}."
                for member in members:
                    self.num_open[member] -= 1
                members.clear()
        return ""

    def name(self, member: Member) -> str:
        rank, position = member
        item = self.lists[rank][position]
        return f"rank {rank} operation {position} ({item.label} on {item.communicator!r})"
