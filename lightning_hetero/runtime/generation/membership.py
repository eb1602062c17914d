"""Agree on the members of a run: generations of members, recorded in a store that no member serves.

A *member* is one process, with its own number for the whole run. A *generation* is a set of members
that train together; each has a rank in it. If a member is lost, leaves or joins, the generation
ends, and the remaining members agree on the next one by entries in a log (`log`):

1. A member that has stopped using the old generation's groups records that it is *here*.
2. A member is *gone* once anybody records that: the member itself, its keeper, or a member that
   waits for it and sees no heartbeat (`ranks.heartbeat`).
3. Once every member of the old generation is here or gone, any of them records that the next one
   has *formed*: of those that are here, with the joiners that were called for it.
4. A member that isn't in the new generation ends. It was frozen or cut off. It can't disturb the
   others, because each generation has its own process groups and its own names in the store.

A process that wants to join, a *joiner*, first does alone what it can: it imports everything and
builds its module. It draws a member's number, sends heartbeats under it, compares what it runs with
what the run has stored, and *asks*. Between two steps rank 0 looks for joiners, and *admits* one
that has sent heartbeats between two looks, so is alive. An iteration's agreement tells all ranks
that joiners wait, and all stop after the same step. The first member that is here *calls* the
admitted joiners, which then record that they are here, as members do. A generation that forms
because a rank was lost calls no joiners; the next one does. A joiner that dies before it is called
delays nobody; later, the others wait for it as long as for a lost rank's heartbeat.

Example: of members 0, 1 and 2, the process of 1 is killed. Its keeper records that 1 is gone; 0 and
2 record that they are here, and that {0, 2} has formed, in which member 2 has rank 1.

Because the store decides, the two sides of a network partition never both train: the side that
doesn't reach the store can't form a generation, and its old one lacks ranks. If no member reaches
the store, none trains: all wait, and go on together if it answers again within `patience_s`; else
they end. The store is served by torchrun's agent, if the agent shares its store, or by the keeper
(`keeper`) of rank 0's process. Both outlive every worker. If their node is lost, so is the store,
and the run is restarted.
"""

import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_hetero.core.errors import ConfigurationError, PeerError
from lightning_hetero.core.process import Deadline
from lightning_hetero.runtime.generation.log import Generation, Log, State
from lightning_hetero.runtime.ranks.heartbeat import Heartbeat, Ring

LAYER_CALL = "layer call"
"""Key of the description of a layer's call, which joiners make before they join."""
MOST_SILENT_S = 30.0
"""Seconds without a heartbeat after which a joiner is dropped, and without an answer of the store
after which a joiner gives up."""
_NUMBERS = "numbers"
_LOOK_S = 0.01
"""Seconds between two reads of the log."""
_FACTS = "facts"
"""Key of what the run's members run."""
_FEW = 4
"""While members wait, each of the first 4 checks once in a heartbeat's interval whether others are
silent; a later one, at place `p`, once in `p` / 4 intervals whether the first 4 are, and those that
don't come, so that checks of 1,024 members don't use up the store."""


def begin_numbers(store: Store, num_first: int) -> None:
    """Reserve the numbers of the members of the first start, which are their ranks."""
    store.add(_NUMBERS, num_first)


def draw_number(store: Store) -> int:
    """Return a number for a new member, which no other member gets."""
    return int(store.add(_NUMBERS, 1)) - 1


class Membership:
    """One member's view of the membership.

    ::

        membership = Membership(store, heartbeat, node="0", facts=facts, silence_s=2.0)
        generation = membership.form_first(world_size)  # or `join`
        ...  # a rank is lost
        old, new = membership.form_next()

    The main thread and the heartbeat's thread share one client of the store, so each call must be
    short.

    Args:
        store: A store that no member serves, under a prefix that no other run uses.
        heartbeat: This member's heartbeat, under its number.
        node: Name of this member's node.
        facts: What it runs, by name; joiners must run the same.
        silence_s: Seconds without a heartbeat after which a member counts as gone.
        patience_s: How long a generation may take to form while all awaited members are alive.
    """

    def __init__(
        self,
        store: Store,
        heartbeat: Heartbeat,
        *,
        node: str,
        facts: Mapping[str, str],
        silence_s: float,
        patience_s: float = 60.0,
    ) -> None:
        store.set_timeout(timedelta(seconds=patience_s))
        self._store, self._log = store, Log(store)
        self._heartbeat, self._silence_s = heartbeat, silence_s
        self._node, self._facts = node, dict(facts)
        self._num_news, self._is_asked = -1, False
        self.number = heartbeat.number
        """This member's number."""
        self.patience_s = patience_s
        """How long a generation may take to form while all awaited members are alive."""
        self.generation: Generation | None = None
        """The newest generation that this member is in."""

    @property
    def first_ranks(self) -> tuple[int, ...] | None:
        """For each rank its rank in the first start; None if there are joiners."""
        assert self.generation is not None
        numbers, count = self.generation.numbers, len(self._log.read().first)
        return numbers if max(numbers) < count else None

    def store_of(self, generation: Generation) -> Store:
        """Return the store in which a generation's ranks connect, with a client of its own.

        No other generation uses its prefix. With a shared client, waits would delay heartbeats.
        """
        own = self._store.clone()  # type: ignore[attr-defined]
        return PrefixStore(f"generation/{generation.number}", own)

    def ring_of(self, generation: Generation) -> Ring:
        """Return the ring in which a generation's members watch each other."""
        rank = generation.rank_of(self.number)
        assert rank is not None
        return Ring(
            numbers=generation.numbers,
            rank=rank,
            name=f"ring/{generation.number}",
            patience_s=self.patience_s,
            find_gone=self.find_gone,
        )

    # -- forming --------------------------------------------------------------------------------

    def form_first(self, num_members: int) -> Generation:
        """Form the first generation, of all members that were started.

        Raises:
            PeerError: Not all have come, or the store is gone.
        """
        if self.number == 0:
            self._store.set(_FACTS, json.dumps(self._facts))
        formed = self._form(0, range(num_members))
        if formed.world_size < num_members:
            # With fewer processes the run would train something else than was asked for.
            gone = self._log.read().gone.items()
            lost = [f"rank {number}: {reason}" for number, reason in sorted(gone)]
            raise PeerError(f"Ranks were lost before training began. {' '.join(lost)}")
        return formed

    def form_next(
        self, leaving: Collection[int] = (), *, calls_joiners: bool = True
    ) -> tuple[Generation, Generation]:
        """Agree with the remaining members on the next generation, once this one has ended.

        Silence before this call counts, too: for a rank that has been silent already, the others
        wait only for the rest of `silence_s`.

        Args:
            leaving: Ranks that have agreed to leave.
            calls_joiners: Whether to call waiting joiners for it; the first member's choice counts.

        Returns:
            This generation, and the next one.

        Raises:
            PeerError: The others go on without this member, or the store is gone.
        """
        old = self.generation
        assert old is not None
        expected = [number for rank, number in enumerate(old.numbers) if rank not in leaving]
        return old, self._form(old.number + 1, expected, calls_joiners=calls_joiners)

    def join(self, timeout_s: float) -> Generation:
        """Ask to join the run, wait until a generation calls this process, and enter it.

        Args:
            timeout_s: How long to wait for the call.

        Raises:
            ConfigurationError: It runs something else than the members.
            PeerError: The run has ended; or no generation has called this process, or the one that
                has called it hasn't formed, in time; or the others go on without it.
        """
        deadline = Deadline(timeout_s)
        try:
            self._check_facts(json.loads(self._store.get(_FACTS)))
            state = self._log.note("asking", self.number)
            while self.number not in state.called:
                self._raise_if_turned_away(state)
                if deadline.is_over:
                    raise PeerError(
                        f"Nobody has let this process in for {timeout_s:.0f} s. Runs do between "
                        "two steps, once they have begun to train; if that takes longer, allow "
                        "more: HeteroStrategy(start_timeout=...)."
                    )
                time.sleep(2 * _LOOK_S)
                state = self._log.read()
        except DistError as error:
            raise PeerError(
                f"The run's store is gone, so the run has ended, or lost its first node: {error}"
            ) from error
        number = state.coming
        self._say_here(number)
        if not self._wait_until_formed(number, self.patience_s):
            raise PeerError(
                f"Generation {number}, which had called this process, didn't form within "
                f"{self.patience_s:.0f} s. Look at the other processes."
            )
        return self._enter(number)

    def _check_facts(self, theirs: Mapping[str, str]) -> None:
        ours = self._facts
        names = [name for name in {**theirs, **ours} if ours.get(name) != theirs.get(name)]
        if names:
            differences = ", ".join(
                f"it has {name} {ours.get(name, 'none')}, the run {theirs.get(name, 'none')}"
                for name in names
            )
            raise ConfigurationError(
                f"This process (member {self.number}) may not join: {differences}. Give it the "
                "same code, packages, plan file and options as the run has."
            )

    def _raise_if_turned_away(self, state: State) -> None:
        if state.ended:
            raise PeerError("The run has trained to its end: there is nothing left to join.")
        if self.number in state.gone:
            raise PeerError(f"The run goes on without this process: {state.gone[self.number]}")
        if state.generation is not None and not state.is_anybody_left:
            raise PeerError(
                "Nobody is left of the run: it has failed, or was started anew. Start this again."
            )

    def _form(
        self, number: int, expected: Sequence[int], *, calls_joiners: bool = True
    ) -> Generation:
        with _needs_store():
            self._say_here(number, calls_joiners=calls_joiners)
            self._agree(number, expected)
            return self._enter(number)

    def _say_here(self, coming: int, *, calls_joiners: bool = False) -> None:
        self._log.append(coming, "here", self.number, [self._node, calls_joiners])

    def _agree(self, number: int, expected: Sequence[int]) -> None:
        """Wait for the expected members and the called joiners, until the generation has formed."""
        deadline, checked_s = Deadline(self.patience_s), time.monotonic()
        while (state := self._log.read()).coming == number:
            awaited = [n for n in dict.fromkeys([*expected, *state.called]) if n not in state.gone]
            missing = [other for other in awaited if other not in state.here]
            if not missing:
                self._log.append(number, "formed", self.number)
                continue
            here = [other for other in awaited if other in state.here]
            # The more members there are, the less often the later ones read the log: they are
            # needed only if the first ones are lost.
            place = here.index(self.number) if self.number in here else len(here)
            pause_s = self._heartbeat.interval_s * max(1.0, place / _FEW)
            if time.monotonic() - checked_s >= pause_s:
                checked_s = time.monotonic()
                # A member that is here may freeze while it waits for the others.
                known = here if place < _FEW else here[:_FEW]
                seen = [n for n in known if n != self.number and n not in state.called]
                self._judge(number, [*seen, *missing], missing if deadline.is_over else ())
            time.sleep(min(max(_LOOK_S, 1e-3 * place), 0.5))

    def _judge(self, coming: int, members: Sequence[int], late: Sequence[int]) -> None:
        """Record which members are gone: silent ones, and late ones whose time is over."""
        # Members of the first generation may not have begun to send heartbeats.
        silences_s = self._heartbeat.silences_s(members) if coming else [0.0] * len(members)
        for member, silence_s in zip(members, silences_s, strict=True):
            if silence_s > self._silence_s:
                self.tell_gone(member, "It showed no sign of life.")
            elif member in late:
                self.tell_gone(member, f"It didn't come within {self.patience_s:.0f} s.")

    def _enter(self, number: int) -> Generation:
        state = self._log.read()
        formed = state.generation
        assert formed is not None
        if formed.rank_of(self.number) is None:
            why = state.gone.get(self.number, "It came too late.")
            raise PeerError(
                f"The others go on without this process (member {self.number}, generation "
                f"{number}): {why} It was frozen, or cut off from them; it ends now."
            )
        if formed.rank_of(self.number) == 0:
            self._log.summarize()
        self.generation = formed
        return formed

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
        while not (formed := self._log.read().coming > number) and not deadline.is_over:
            if or_gone and self.find_gone() is not None:
                break
            time.sleep(_LOOK_S)
        return formed

    # -- who comes, and who is gone ---------------------------------------------------------------

    def look_for_joiners(self) -> bool:
        """Admit joiners; return whether some wait. Rank 0 calls it after every step.

        Makes no call of the store while there are no news and nobody asks.
        """
        news = self._heartbeat.num_news
        if news == self._num_news and not self._is_asked:
            return False
        self._num_news = news
        state = self._log.read()
        asking = [*(state.asking.keys() - state.gone.keys())]
        self._is_asked = bool(asking)
        for number, silence_s in zip(asking, self._heartbeat.silences_s(asking), strict=True):
            if silence_s > MOST_SILENT_S:
                self.tell_gone(number, f"It gave no sign of life for {MOST_SILENT_S:.0f} s.")
            elif silence_s == 0.0:  # It has beaten since the last look.
                self._log.note("admitted", number)
        return bool(self._log.read().waiting) if asking else False

    def tell_layer_call(self, description: str) -> None:
        """Tell joiners how a layer is called; see `stage.rehearsal`."""
        self._store.set(LAYER_CALL, description)

    def tell_gone(self, member: int, reason: str) -> None:
        """Record that a member is gone for good; the first reason counts."""
        self._log.note("gone", member, reason)

    def tell_end(self) -> None:
        """Record that training has ended normally."""
        self._log.note("ended", 0)

    def loses_store(self, leaving: Collection[int]) -> bool:
        """Whether the store is lost if some ranks leave; see `State.loses_store`."""
        return self._log.read().loses_store(leaving)

    def find_gone(self) -> tuple[int, str] | None:
        """Return a rank of this generation that is gone, and why; see `Ring`."""
        gone, numbers = self._log.read().gone, self.generation.numbers if self.generation else ()
        for rank, number in enumerate(numbers):
            if number in gone:
                return rank, f"Rank {rank} is gone: {gone[number]}"
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
