"""Let a process join a run that trains.

1. The process, the *joiner*, does alone what it can: it imports everything and builds its module.
   It draws a member's number, writes into the store what it runs, and sends heartbeats under that
   number (`ranks.heartbeat`), as all processes do.
2. Rank 0 looks for joiners between two steps. It *refuses* a joiner that runs something else, and
   says why; no other rank notices. It *admits* a joiner that has sent heartbeats between two looks,
   so is alive.
3. In an iteration's agreement all ranks learn that joiners wait, and all stop after the same step.
   The first member that comes to form the next generation *calls* the admitted joiners; if several
   do, the first call counts (`compare_set`). A generation that forms because a rank was lost calls
   no joiners; the next one does.
4. A joiner that was called writes that it is here, as all members do, and becomes part of the
   proposed generation. If it sends no heartbeats it counts as gone, as a member would.

If a joiner dies before it is called, it delays nobody. If it dies later, the others wait for it as
long as for the heartbeat of a lost rank.
"""

import json
import logging
import time
from collections.abc import Mapping

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from lightning_hetero.core.errors import ConfigurationError, PeerError
from lightning_hetero.core.process import Deadline
from lightning_hetero.runtime.generation.records import (
    ENDED,
    LOOK_S,
    NEWS,
    is_anybody_left,
    newest_generation,
    reason_of,
    tell_gone,
)
from lightning_hetero.runtime.ranks.heartbeat import Heartbeat

__all__ = [
    "MOST_SILENT_S",
    "Admission",
    "Joiner",
    "begin_numbers",
    "call",
    "draw_number",
    "has_never_entered",
    "note_entered",
    "num_first",
]

_log = logging.getLogger(__name__)

_NUMBERS, _FIRST, _ADMITTED = "numbers", "first joiner", "admitted"
MOST_SILENT_S = 30.0
"""Seconds without a heartbeat after which a joiner is dropped, and without an answer of the store
after which a joiner gives up."""


def begin_numbers(store: Store, num_first: int) -> None:
    """Record how many members the first start has; their numbers are their ranks."""
    store.set(_FIRST, str(num_first))
    store.add(_NUMBERS, num_first)


def num_first(store: Store) -> int:
    """Return the number of members of the first start."""
    return int(store.get(_FIRST))


def draw_number(store: Store) -> int:
    """Return a number for a new member, which no other member gets."""
    return int(store.add(_NUMBERS, 1)) - 1


class Joiner:
    """A process that wants to join a run.

    Args:
        store: The membership's store.
        heartbeat: This process's heartbeat, under the number that it has drawn.
        facts: What it runs, by name; all members must run the same.
    """

    def __init__(self, store: Store, heartbeat: Heartbeat, facts: Mapping[str, str]) -> None:
        self._store = store
        self._heartbeat = heartbeat
        self.number = heartbeat.number
        """Its number as a member."""
        store.set(f"facts/{self.number}", json.dumps(dict(facts)))
        store.add(NEWS, 1)

    def wait_for_call(self, timeout_s: float) -> int:
        """Wait until a generation calls this process; return the generation's number.

        Raises:
            ConfigurationError: It is refused: it runs something else than the members.
            PeerError: The run has ended, or no generation has called this process in time, or the
                members count it as gone.
        """
        deadline = Deadline(timeout_s)
        try:
            while not deadline.is_over:
                newest = newest_generation(self._store)
                self._raise_if_turned_away(newest)
                coming = 0 if newest is None else newest + 1
                if self.number in _numbers(self._store, f"call/{coming}"):
                    return coming
                time.sleep(2 * LOOK_S)
        except DistError as error:
            raise PeerError(
                f"The run's store is gone, so the run has ended, or lost its first node: {error}"
            ) from error
        raise PeerError(
            f"Nobody has let this process in for {timeout_s:.0f} s. Runs do between two steps, "
            "once they have begun to train; if that takes longer, allow more: "
            "HeteroStrategy(start_timeout=...)."
        )

    def _raise_if_turned_away(self, newest: int | None) -> None:
        store, refused = self._store, f"refused/{self.number}"
        if store.check([refused]):
            raise ConfigurationError(store.get(refused).decode())
        if store.check([ENDED]):
            raise PeerError("The run has trained to its end: there is nothing left to join.")
        if (reason := reason_of(store, self.number)) is not None:
            raise PeerError(f"The run goes on without this process: {reason}")
        if newest is not None and not is_anybody_left(store):
            raise PeerError(
                "Nobody is left of the run: it has failed, or was started anew. Start this again."
            )


class Admission:
    """What members do with joiners: rank 0 admits or refuses them, any member may call them.

    Args:
        store: The membership's store.
        heartbeat: This process's heartbeat, which can read those of others.
        facts: What the members run, by name; see `Joiner`.
    """

    def __init__(self, store: Store, heartbeat: Heartbeat, facts: Mapping[str, str]) -> None:
        self._store = store
        self._heartbeat = heartbeat
        self._facts = dict(facts)
        self._next = 0
        self._waiting: dict[int, int] = {}
        """For each waiting joiner, by number, its count of heartbeats when it was first seen."""
        self._news = -1

    def look(self, num_news: int) -> bool:
        """Admit or refuse joiners; return whether admitted ones wait to be called.

        Makes no call of the store while the membership is unchanged and nobody waits.

        Args:
            num_news: A number that each change of the membership increases.
        """
        if num_news == self._news and not self._waiting:
            return False
        self._news = num_news
        total = int(self._store.add(_NUMBERS, 0))
        # Lower numbers are those of members of the first start.
        self._next = self._next or num_first(self._store)
        for number in range(self._next, total):
            self._waiting[number] = self._heartbeat.beats_of(number)
        self._next = total
        for number in [*self._waiting]:
            if not self._waits_on(number):
                del self._waiting[number]
        return not self._waiting.keys().isdisjoint(_numbers(self._store, _ADMITTED))

    def _waits_on(self, number: int) -> bool:
        """Admit or refuse a joiner; return whether it still waits."""
        store, facts, refused = self._store, f"facts/{number}", f"refused/{number}"
        is_known = any(store.check([key]) for key in (f"entered/{number}", refused))
        if is_known or reason_of(store, number) is not None:
            return False
        if self._heartbeat.silence_s(number) > MOST_SILENT_S:
            tell_gone(store, number, f"It gave no sign of life for {MOST_SILENT_S:.0f} s.")
            return False
        if not store.check([facts]):
            return True
        differences = _differences(self._facts, json.loads(store.get(facts)))
        if differences:
            text = (
                f"This process (member {number}) may not join: {differences}. Give it the same "
                "code, packages, plan file and options as the run has."
            )
            store.set(refused, text)
            _log.warning("Refused a joiner. %s", text)
            return False
        admitted = _numbers(store, _ADMITTED)
        lives = self._heartbeat.beats_of(number) > self._waiting[number]
        if lives and number not in admitted:
            # An admitted joiner that no longer waits has joined, was refused, or is gone.
            waiting = [other for other in admitted if other in self._waiting]
            store.set(_ADMITTED, json.dumps([*waiting, number]))
        return True


def call(store: Store, generation: int, *, anybody: bool = True) -> list[int]:
    """Call admitted joiners for a generation; return their numbers, equal for every caller.

    Args:
        store: The membership's store.
        generation: The generation's number.
        anybody: Whether to call any at all; only the first caller's choice counts.
    """
    waiting = [
        number
        for number in sorted(_numbers(store, _ADMITTED))
        if anybody and reason_of(store, number) is None and not store.check([f"entered/{number}"])
    ]
    return list(json.loads(store.compare_set(f"call/{generation}", "", json.dumps(waiting))))


def note_entered(store: Store, number: int) -> None:
    """Record that a joiner becomes a member; called before it is in a generation."""
    store.set(f"entered/{number}", "")


def has_never_entered(store: Store, number: int) -> bool:
    """Whether a process asked to join, but was never in a generation."""
    return bool(store.check([f"facts/{number}"])) and not store.check([f"entered/{number}"])


def _differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return ", ".join(
        f"it has {name} {theirs.get(name, 'none')}, the run {ours.get(name, 'none')}"
        for name in names
    )


def _numbers(store: Store, key: str) -> list[int]:
    return list(json.loads(store.get(key))) if store.check([key]) else []
