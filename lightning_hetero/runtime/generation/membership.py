"""Agree on the members of a run: generations of members, recorded in a store that no member serves.

A *member* is one process, with its own number for the whole run. A *generation* is a set of members
that train together, and in it each has a rank. If a member is lost, leaves or joins, the generation
ends, and the remaining members agree on the next one:

1. every member that has stopped using the old generation's groups says that it is *here*,
2. a member is *gone* if anybody says so: itself, its keeper, or a member that waits for it and gets
   no heartbeat,
3. as soon as each member of the old generation is here or gone, any of them proposes those that are
   here, together with the joiners that were called for it (`joiners`). The first proposal
   counts (`compare_set`), so there is one next generation or none,
4. a member that isn't in it ends. It was frozen or cut off, and nobody uses its generation's groups
   and names any more: each generation has a prefix of its own.

The store decides, so two sides of a partition never both train: the side without it can't form a
generation, and its old one lacks ranks. If nobody reaches it, as when the whole network fails,
nobody trains: all wait, then go on together if it comes back within `patience_s`, or else end. It
is served:

- by torchrun's agent, if that shares its store, or by the keeper (`keeper`) of rank 0's process.
  Both outlive every worker. If that node is lost, so is the store, and the run is restarted.
- torchft's Lighthouse was considered: it needs a server of its own, has quorums for replicas of
  equal shape, and is one process on one node, too. c10d's and etcd's rendezvous restart all workers
  on a change of members, and the agent always takes part. A store needs no other package, is there
  already, and only has to compare and set.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from lightning_hetero.core.errors import PeerError
from lightning_hetero.core.process import Deadline
from lightning_hetero.runtime.generation import joiners
from lightning_hetero.runtime.generation.records import (
    ENDED,
    LOOK_S,
    NEWEST,
    NEWS,
    Generation,
    Judge,
    Member,
    Turns,
    forget_members,
    gone_key,
    has_formed,
    loses_store,
    meeting_name,
    meeting_of,
    members_of,
    pause_s,
    propose,
    say_here,
    tell_gone,
    who_is_gone,
    who_is_here,
)
from lightning_hetero.runtime.ranks.heartbeat import Heartbeat, Ring

__all__ = ["Membership"]


class Membership:
    """One member's part in the membership.

    ::

        membership = Membership(store, number=rank, node="0")
        generation = membership.form(range(world_size), lambda _: False)
        ...  # a rank is lost
        generation = membership.form(members, is_silent)

    It is the `Bulletin` of this generation's heartbeats. The store's client is used by the main
    thread and by theirs, and each call is short.

    Args:
        store: Served by no member, under a prefix of this run's own.
        number: This member's number.
        node: Name of this member's node.
        admission: Where this member sees joiners; None if none are let in.
        patience_s: How long a generation may take to form, while the members waited for are alive.
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
        self._patience_s = patience_s
        self.generation: Generation | None = None
        """The newest generation that this member is in."""
        self._tidying: threading.Thread | None = None

    @property
    def number(self) -> int:
        """This member's number."""
        return self._own.number

    @property
    def patience_s(self) -> float:
        """How long a generation may take to form, while those that are waited for beat."""
        return self._patience_s

    @property
    def first_ranks(self) -> tuple[int, ...] | None:
        """Each rank's rank in the first start; None if there are joiners."""
        members = () if self.generation is None else self.generation.members
        count = joiners.num_first(self._store)
        numbers = tuple(member.number for member in members)
        return numbers if max(numbers, default=0) < count else None

    def store_of(self, generation: Generation) -> Store:
        """Return the store in which a generation's ranks meet, over a client of its own.

        So waits in it don't delay heartbeats.
        """
        return meeting_of(self._store.clone(), generation.number)  # type: ignore[attr-defined]

    def ring_of(self, generation: Generation) -> Ring:
        """Return a generation as those see it that watch each other in it."""
        rank = generation.rank_of(self.number)
        assert rank is not None
        return Ring(
            numbers=tuple(member.number for member in generation.members),
            rank=rank,
            name=f"{meeting_name(generation.number)}/ring",
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
            expected: Numbers of the members that may be in it; joiners that are called besides
                need not be named.
            is_silent: Tells whether a member, or a called joiner, has shown no sign of life for
                too long; called repeatedly.
            calls_joiners: Whether waiting joiners are called for it; the member that comes first
                decides.

        Raises:
            PeerError: The others go on without this member; not all have come to the first
                generation; or the store is gone.
        """
        number = 0 if self.generation is None else self.generation.number + 1
        with _needs_store():
            self._say_here(number)
            called = joiners.call(self._store, number, anybody=calls_joiners) if number else []
            self._agree(number, list(dict.fromkeys([*expected, *called])), called, is_silent)
            formed = self._enter(number)
            if number == 0 and formed.world_size < len(expected):
                # A run that begins with fewer would train something else than was asked for.
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
        judge = Judge(self._store, is_silent, patience_s=self._patience_s)
        turns, place = Turns(LOOK_S), 0
        while not has_formed(self._store, number):
            if turns.is_next(place):
                here, missing = self._look(number, expected)
                numbers = [member.number for member in here]
                place = numbers.index(self.number) if self.number in numbers else len(numbers)
                # Who is here may freeze, too, while others are waited for.
                judge.look(missing, set(numbers).difference([self.number], called), place=place)
                if not missing:
                    propose(self._store, number, here)
                    continue
            time.sleep(pause_s(len(expected)))

    def form_next(
        self,
        signs: Heartbeat,
        silence_s: float,
        leaving: Collection[int] = (),
        *,
        calls_joiners: bool = True,
    ) -> tuple[Generation, Generation]:
        """Agree with this generation's remaining members on the next one; see `form`.

        Silence that was seen before this call counts: a rank that has been silent since then is
        waited for only for the rest of `silence_s`.

        Args:
            signs: This process's heartbeat.
            silence_s: How late a sign of life may be.
            leaving: Ranks that don't go on, by agreement.
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
            PeerError: The others go on without it, or don't come to agree.
        """
        joiners.note_entered(self._store, self.number)
        self._say_here(number)
        deadline = Deadline(self._patience_s)
        while not has_formed(self._store, number):
            if deadline.is_over:
                raise PeerError(
                    f"Generation {number}, which had called this process, didn't form within "
                    f"{self._patience_s:.0f} s. Look at the other processes."
                )
            time.sleep(pause_s(1))
        return self._enter(number)

    def wait_for_next(self, timeout_s: float) -> None:
        """As a member that leaves, wait until the others have formed the next generation.

        Then they have stopped using the old one's groups. Waits for `timeout_s` at most: if a rank
        is lost meanwhile, others may not know that this member leaves, and wait for it.
        """
        assert self.generation is not None
        deadline = Deadline(timeout_s)
        number = self.generation.number + 1
        while not has_formed(self._store, number) and not deadline.is_over:
            if self.find_gone() is not None:
                self.tell_gone(self.number, "It was told to leave.")
                return
            time.sleep(pause_s(self.generation.world_size))

    def _say_here(self, number: int) -> None:
        say_here(self._store, number, self._own)

    def _look(self, number: int, expected: Sequence[int]) -> tuple[list[Member], list[int]]:
        """Return the members that are here and not gone, and numbers of those that are neither."""
        here, gone = who_is_here(self._store, number), who_is_gone(self._store)
        waited_for = [other for other in expected if other not in gone]
        missing = [other for other in waited_for if other not in here]
        return [here[other] for other in waited_for if other in here], missing

    def _enter(self, number: int) -> Generation:
        formed = Generation(number=number, members=members_of(self._store, number))
        if formed.rank_of(self.number) is None:
            why = self.reason_of(self.number) or "It came too late."
            raise PeerError(
                f"The others go on without this process (member {self.number}, generation "
                f"{number}): {why} It was frozen, or cut off from them; it ends now."
            )
        self._store.set(NEWEST, str(number))
        self.generation = formed
        if number > 1 and formed.rank_of(self.number) == 0:
            # Beside training: it is one short call for each key.
            work, old = self._delete_names, (number - 2,)
            if self._tidying is not None:
                self._tidying.join(1.0)  # Had ended long ago, unless the store is slow.
            self._tidying = threading.Thread(target=work, args=old, name="tidying", daemon=True)
            self._tidying.start()
        return formed

    def _delete_names(self, number: int) -> None:
        """Delete the names of a generation whose members have left it.

        What stays, for a member that comes back, is that it has formed, and the first generation's
        members. So a store holds the names of two generations, and a short entry for each other.
        """
        met = meeting_of(self._store, number)
        with suppress(RuntimeError, AttributeError):  # The run ends, or torch has no such call.
            for name in met.list_keys():
                met.delete_key(name)
        with suppress(RuntimeError, AttributeError):
            self._store.delete_key(joiners.call_key(number))
            forget_members(self._store, number)

    # -- who comes ------------------------------------------------------------------------------

    def look_for_joiners(self, layer_call: str | None = None) -> bool:
        """Judge joiners, and return whether some wait; called by rank 0 at every step."""
        return self._admission is not None and self._admission.look(self._news_heard, layer_call)

    # -- who is gone ----------------------------------------------------------------------------

    def tell_gone(self, member: int, reason: str) -> None:
        """Say that a member is gone and won't be back; the first reason counts."""
        tell_gone(self._store, member, reason)

    def reason_of(self, member: int) -> str | None:
        """Return why a member is gone, None if it isn't."""
        key = gone_key(member)
        return self._store.get(key).decode() if self._store.check([key]) else None

    def loses_store(self, leaving: Collection[int]) -> bool:
        """Whether the store goes with ranks that leave; see `records.loses_store`."""
        assert self.generation is not None
        return loses_store(self._store, self.generation, leaving)

    def tell_end(self) -> None:
        """Say that training has ended as it should."""
        self._store.set(ENDED, "")

    def num_news(self) -> int:
        """Return how many times members were said to be gone; see `Bulletin`."""
        self._news_heard = int(self._store.add(NEWS, 0))
        return self._news_heard

    def find_gone(self) -> tuple[int, str] | None:
        """Return a rank of this generation that is gone, and why; see `Bulletin`."""
        members = () if self.generation is None else self.generation.members
        gone = who_is_gone(self._store)
        for rank, member in enumerate(members):
            if member.number in gone:
                return rank, f"Rank {rank} is gone: {self.reason_of(member.number)}"
        return None


@contextmanager
def _needs_store() -> Iterator[None]:
    """In this context, turn the loss of the store into an error that explains it."""
    try:
        yield
    except DistError as error:
        raise PeerError(
            "The store of the membership is gone, so nobody can agree on who goes on: the node "
            "that serves it is lost, or this process is cut off from it. It ends; start the run "
            f"again, and it goes on from its newest checkpoint. ({error})"
        ) from error
