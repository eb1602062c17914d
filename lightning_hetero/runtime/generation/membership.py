"""Agree on the members of a run: generations of members, recorded in a store that no member serves.

A *member* is one process, with its own number for the whole run. A *generation* is a set of members
that train together; each has a rank in it. If a member is lost, leaves or joins, the generation
ends, and the remaining members agree on the next one:

1. A member that has stopped using the old generation's groups records that it is *here*.
2. A member is *gone* once anybody records that: the member itself, its keeper, or a member that
   waits for it and sees no heartbeat.
3. Once every member of the old generation is here or gone, any of them proposes the next
   generation: those that are here, and the joiners that were called for it (`joiners`). The first
   proposal counts (`compare_set`), so all remaining members get the same generation.
4. A member that isn't in the new generation ends. It was frozen or cut off. It can't disturb the
   others, because each generation has its own process groups and its own names in the store.

Example: of members 0, 1 and 2, the process of 1 is killed. Its keeper records that 1 is gone; 0 and
2 record that they are here, and propose {0, 2}, in which member 2 has rank 1.

Because the store decides, the two sides of a network partition never both train: the side that
doesn't reach the store can't form a generation, and its old one lacks ranks. If no member reaches
the store, none trains: all wait, and go on together if it answers again within `patience_s`; else
they end. The store is served by torchrun's agent, if the agent shares its store, or by the keeper
(`keeper`) of rank 0's process. Both outlive every worker. If their node is lost, so is the store,
and the run is restarted.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from lightning_hetero.core.errors import PeerError
from lightning_hetero.core.process import Deadline
from lightning_hetero.runtime.generation import joiners, records
from lightning_hetero.runtime.generation.records import Generation, Member
from lightning_hetero.runtime.ranks.heartbeat import Heartbeat, Ring

__all__ = ["Membership"]

_FEW, _LOOKS_OF_FEW, _LOOKS_OF_OTHERS = 8, 5, 50
"""While members wait, the first 8 check in every 5th read whether others are silent, the rest in
every 50th: a check takes one call for each member, and most waits end before it is needed."""


class Membership:
    """One member's view of the membership.

    ::

        membership = Membership(store, number=rank, node="0")
        generation = membership.form(range(world_size), lambda _: False)
        ...  # a rank is lost
        generation = membership.form(members, is_silent)

    It is also the `Bulletin` of the generation's heartbeats. The main thread and the heartbeat's
    thread share one client of the store, so each call must be short.

    Args:
        store: A store that no member serves, under a prefix that no other run uses.
        number: This member's number.
        node: Name of this member's node.
        admission: Admits joiners; None if no process may join.
        patience_s: How long a generation may take to form while all awaited members are alive.
    """

    def __init__(
        self,
        store: Store,
        *,
        number: int,
        node: str,
        admission: joiners.Admission | None = None,
        patience_s: float = 60.0,
    ) -> None:
        store.set_timeout(timedelta(seconds=patience_s))
        self._store = store
        self._own = Member(number, node)
        self._admission = admission
        self._news_heard = 0
        self.patience_s = patience_s
        """How long a generation may take to form while all awaited members are alive."""
        self.generation: Generation | None = None
        """The newest generation that this member is in."""

    @property
    def number(self) -> int:
        """This member's number."""
        return self._own.number

    @property
    def first_ranks(self) -> tuple[int, ...] | None:
        """For each rank its rank in the first start; None if there are joiners."""
        members = () if self.generation is None else self.generation.members
        count = joiners.num_first(self._store)
        numbers = tuple(member.number for member in members)
        return numbers if max(numbers, default=0) < count else None

    def store_of(self, generation: Generation) -> Store:
        """Return the store in which a generation's ranks connect, with a client of its own.

        Otherwise waits in it would delay heartbeats.
        """
        return records.meeting_of(self._store.clone(), generation.number)  # type: ignore[attr-defined]

    def ring_of(self, generation: Generation) -> Ring:
        """Return the ring in which a generation's members watch each other."""
        rank = generation.rank_of(self.number)
        assert rank is not None
        return Ring(
            numbers=tuple(member.number for member in generation.members),
            rank=rank,
            name=f"ring/{generation.number}",
            bulletin=self,
        )

    # -- forming --------------------------------------------------------------------------------

    def form(
        self,
        expected: Sequence[int],
        is_silent: Callable[[int], bool] = lambda _: False,
        *,
        calls_joiners: bool = True,
    ) -> Generation:
        """Agree with the others on the next generation; called when the last one has ended.

        Args:
            expected: Numbers of the members that may be in it; called joiners needn't be listed.
            is_silent: Returns whether a member, or a called joiner, has shown no sign of life for
                too long; called repeatedly.
            calls_joiners: Whether to call waiting joiners for it; the first member's choice counts.

        Raises:
            PeerError: The others go on without this member; or not all members have come to the
                first generation; or the store is gone.
        """
        number = 0 if self.generation is None else self.generation.number + 1
        with _needs_store():
            records.say_here(self._store, number, self._own)
            called = joiners.call(self._store, number, anybody=calls_joiners) if number else []
            self._agree(number, list(dict.fromkeys([*expected, *called])), called, is_silent)
            formed = self._enter(number)
            if number == 0 and formed.world_size < len(expected):
                # With fewer processes the run would train something else than was asked for.
                left = {member.number for member in formed.members}
                lost = [f"rank {n}: {self.reason_of(n)}" for n in expected if n not in left]
                raise PeerError(f"Ranks were lost before training began. {' '.join(lost)}")
        return formed

    def _agree(
        self,
        number: int,
        expected: Sequence[int],
        called: Sequence[int],
        is_silent: Callable[[int], bool],
    ) -> None:
        """Wait for the expected members, until a proposal of the generation counts."""
        deadline, num_looks = Deadline(self.patience_s), 0
        while not records.has_formed(self._store, number):
            come, gone = records.who_is_here(self._store, number), records.who_is_gone(self._store)
            awaited = [other for other in expected if other not in gone]
            here = [other for other in awaited if other in come]
            missing = [other for other in awaited if other not in come]
            # The more members there are, the less often the later ones read the store: they are
            # needed only if the first ones are lost.
            place = here.index(self.number) if self.number in here else len(here)
            num_looks += 1
            if num_looks % (_LOOKS_OF_FEW if place < _FEW else _LOOKS_OF_OTHERS) == 0:
                # A member that is here may freeze while it waits for the others.
                known = [n for n in here if n != self.number and n not in called]
                self._judge([*known, *missing], missing if deadline.is_over else (), is_silent)
            if not missing:
                records.propose(self._store, number, [come[other] for other in here])
                return
            time.sleep(min(max(records.LOOK_S, 1e-3 * place), 0.5))

    def _judge(
        self, members: Sequence[int], late: Sequence[int], is_silent: Callable[[int], bool]
    ) -> None:
        """Record which members are gone: silent ones, and those that had enough time to come."""
        for member in members:
            if is_silent(member):
                self.tell_gone(member, "It showed no sign of life.")
            elif member in late:
                self.tell_gone(member, f"It didn't come within {self.patience_s:.0f} s.")

    def form_next(
        self,
        signs: Heartbeat,
        silence_s: float,
        leaving: Collection[int] = (),
        *,
        calls_joiners: bool = True,
    ) -> tuple[Generation, Generation]:
        """Agree with this generation's remaining members on the next one; see `form`.

        Silence before this call counts, too: for a rank that has been silent already, the others
        wait only for the rest of `silence_s`.

        Args:
            signs: This process's heartbeat.
            silence_s: Seconds without a heartbeat after which a rank counts as gone.
            leaving: Ranks that have agreed to leave.
            calls_joiners: See `form`.

        Returns:
            This generation, and the next one.
        """
        old = self.generation
        assert old is not None
        expected = [item.number for rank, item in enumerate(old.members) if rank not in leaving]

        def is_silent(number: int) -> bool:
            return signs.silence_s(number) > silence_s

        return old, self.form(expected, is_silent, calls_joiners=calls_joiners)

    def enter_called(self, number: int) -> Generation:
        """Enter the generation that has called this joiner.

        Raises:
            PeerError: The others go on without it, or don't agree in time.
        """
        joiners.note_entered(self._store, self.number)
        records.say_here(self._store, number, self._own)
        if not self._wait_until_formed(number, self.patience_s):
            raise PeerError(
                f"Generation {number}, which had called this process, didn't form within "
                f"{self.patience_s:.0f} s. Look at the other processes."
            )
        return self._enter(number)

    def wait_for_next(self, timeout_s: float) -> None:
        """For a member that leaves: wait until the others have formed the next generation.

        By then they have stopped using the old generation's groups. Waits for at most `timeout_s`:
        if a rank is lost meanwhile, the others may not know that this member leaves, and wait for
        it.
        """
        assert self.generation is not None
        self._wait_until_formed(self.generation.number + 1, timeout_s, or_gone=True)
        if self.find_gone() is not None:
            self.tell_gone(self.number, "It was told to leave.")

    def _wait_until_formed(self, number: int, timeout_s: float, *, or_gone: bool = False) -> bool:
        deadline = Deadline(timeout_s)
        while not (formed := records.has_formed(self._store, number)) and not deadline.is_over:
            if or_gone and self.find_gone() is not None:
                break
            time.sleep(records.LOOK_S)
        return formed

    def _enter(self, number: int) -> Generation:
        formed = Generation(number=number, members=records.members_of(self._store, number))
        if formed.rank_of(self.number) is None:
            why = self.reason_of(self.number) or "It came too late."
            raise PeerError(
                f"The others go on without this process (member {self.number}, generation "
                f"{number}): {why} It was frozen, or cut off from them; it ends now."
            )
        self._store.set(records.NEWEST, str(number))
        self.generation = formed
        return formed

    # -- who comes, and who is gone ---------------------------------------------------------------

    def look_for_joiners(self) -> bool:
        """Admit or refuse joiners; return whether some wait. Rank 0 calls it after every step."""
        return self._admission is not None and self._admission.look(self._news_heard)

    def tell_layer_call(self, description: str) -> None:
        """Tell joiners how a layer is called; see `stage.rehearsal`."""
        self._store.set(records.LAYER_CALL, description)

    def tell_gone(self, member: int, reason: str) -> None:
        """Record that a member is gone for good; the first reason counts."""
        records.tell_gone(self._store, member, reason)

    def reason_of(self, member: int) -> str | None:
        """Return why a member is gone, None if it isn't."""
        return records.reason_of(self._store, member)

    def loses_store(self, leaving: Collection[int]) -> bool:
        """Whether the store is lost if some ranks leave; see `records.loses_store`."""
        assert self.generation is not None
        return records.loses_store(self._store, self.generation, leaving)

    def tell_end(self) -> None:
        """Record that training has ended normally."""
        self._store.set(records.ENDED, "")

    def num_news(self) -> int:
        """Return how often members were recorded as gone; see `Bulletin`."""
        self._news_heard = int(self._store.add(records.NEWS, 0))
        return self._news_heard

    def find_gone(self) -> tuple[int, str] | None:
        """Return a rank of this generation that is gone, and why; see `Bulletin`."""
        members = () if self.generation is None else self.generation.members
        gone = records.who_is_gone(self._store)
        for rank, member in enumerate(members):
            if member.number in gone:
                return rank, f"Rank {rank} is gone: {self.reason_of(member.number)}"
        return None


@contextmanager
def _needs_store() -> Iterator[None]:
    """In this context, an error that the loss of the store causes is explained."""
    try:
        yield
    except DistError as error:
        raise PeerError(
            "The store of the membership is gone, so nobody can agree on who goes on: the node "
            "that serves it is lost, or this process is cut off from it. It ends; start the run "
            f"again, and it goes on from its newest checkpoint. ({error})"
        ) from error
