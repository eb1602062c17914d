"""Run operation lists as ranks would, one event at a time: the slow oracle for the checker."""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from tests.rendezvous.operations import Operation, OperationKind, Transfer

Member = tuple[int, int]
"""Rank and position of an operation."""


def runs_through(lists: Mapping[int, Sequence[Operation]]) -> bool:
    """Return whether everything ends and whatever meets is alike."""
    return _Ranks(lists).run()


class _Ranks:
    def __init__(self, lists: Mapping[int, Sequence[Operation]]) -> None:
        self.lists = lists
        self.num_issued = dict.fromkeys(lists, 0)
        self.ended: set[Member] = set()
        self.num_open: dict[Member, int] = {}
        self.sends: defaultdict[tuple[str, int, int], deque[tuple[Member, Transfer]]]
        self.sends, self.receives = defaultdict(deque), defaultdict(deque)
        self.arrivals: defaultdict[str, list[Member]] = defaultdict(list)

    def run(self) -> bool:
        moving = True
        while moving:
            before = sum(self.num_issued.values()), len(self.num_open), len(self.ended)
            for rank in self.lists:
                self.issue(rank)
                self.start(rank)
            if not (self.meet_messages() and self.meet_collectives()):
                return False
            self.ended |= {member for member, count in self.num_open.items() if count == 0}
            moving = before != (
                sum(self.num_issued.values()),
                len(self.num_open),
                len(self.ended),
            )
        return len(self.ended) == sum(len(items) for items in self.lists.values())

    def issue(self, rank: int) -> None:
        """Go through the list up to the first step or collective that hasn't ended."""
        items = self.lists[rank]
        while self.num_issued[rank] < len(items):
            last = self.num_issued[rank] - 1
            holds_up = last >= 0 and items[last].holds_up
            if holds_up and (rank, last) not in self.ended:
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
            key = (item.communicator, transfer.source, transfer.destination)
            side[key].append((member, transfer))
        if item.kind is OperationKind.COLLECTIVE:
            self.arrivals[item.communicator].append(member)
            self.num_open[member] += 1

    def meet_messages(self) -> bool:
        for key, sent in self.sends.items():
            received = self.receives[key]
            while sent and received:
                (sender, what), (receiver, expected) = sent.popleft(), received.popleft()
                if what != expected:
                    return False
                self.num_open[sender] -= 1
                self.num_open[receiver] -= 1
        return True

    def meet_collectives(self) -> bool:
        for members in self.arrivals.values():
            items = [self.lists[rank][position] for rank, position in members]
            if items and len(items) == len(items[0].ranks):
                if len({(item.label, item.ranks, item.num_bytes) for item in items}) > 1:
                    return False
                for member in members:
                    self.num_open[member] -= 1
                members.clear()
        return True
