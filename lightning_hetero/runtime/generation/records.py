"""The records of a membership: its generations, who is here or gone, and whether it has ended."""

import json
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_hetero.core.process import Deadline

__all__ = [
    "ENDED",
    "LOOK_S",
    "NEWEST",
    "NEWS",
    "Generation",
    "Judge",
    "Member",
    "Turns",
    "forget_members",
    "gone_key",
    "has_ended",
    "has_formed",
    "is_anybody_left",
    "is_gone",
    "loses_store",
    "meeting_name",
    "meeting_of",
    "members_of",
    "newest_generation",
    "pause_s",
    "propose",
    "say_here",
    "tell_gone",
    "who_is_gone",
    "who_is_here",
]

LOOK_S = 0.01
"""Between two looks at who has come, of few members; they ask who is silent a fifth as often."""
_FEW, _MANY = 16, 100
"""Members that take turns often; and members that together make the most short calls."""
_SELDOM = 50.0
"""Times as long as these that any other member waits: 0.5 s for a look, 2.5 s until it asks."""

ENDED, NEWEST, NEWS, _GONE = "ended", "newest", "news", "gone"


class Member(NamedTuple):
    """One process of a run."""

    number: int
    """Its own for the whole run, even after it is lost."""
    node: str
    """Name of its node."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Members that train together."""

    number: int
    members: tuple[Member, ...]
    """By rank."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    def rank_of(self, number: int) -> int | None:
        """Return a member's rank; None if it isn't in this generation."""
        return next((r for r, item in enumerate(self.members) if item.number == number), None)

    def local_rank_of(self, global_rank: int) -> int:
        """Return the place of a rank among those of its node."""
        node = self.members[global_rank].node
        return sum(item.node == node for item in self.members[:global_rank])

    def without(self, other: "Generation") -> tuple[int, ...]:
        """Return the ranks of this generation whose members aren't in the other one."""
        kept = {item.number for item in other.members}
        return tuple(r for r, item in enumerate(self.members) if item.number not in kept)

    def joiners_since(self, old: "Generation") -> tuple[int, ...]:
        """Return the numbers of the members that weren't in the old generation."""
        return tuple(item.number for item in self.members if old.rank_of(item.number) is None)


def say_here(store: Store, number: int, member: Member) -> None:
    """Record that a member is ready for a generation."""
    store.append(_here(number), json.dumps(member) + "\n")  # type: ignore[attr-defined]


def who_is_here(store: Store, number: int) -> dict[int, Member]:
    """Return the members that are ready for a generation, by number; one call of the store."""
    lines = store.get(_here(number)).decode().splitlines() if store.check([_here(number)]) else ()
    found = (Member(*json.loads(line)) for line in lines)
    return {member.number: member for member in found}


def propose(store: Store, number: int, members: Sequence[Member]) -> None:
    """Propose a generation's members; the first proposal counts."""
    store.compare_set(_members(number), "", json.dumps(members))


def has_formed(store: Store, number: int) -> bool:
    """Whether a generation has formed."""
    return bool(store.check([_members(number)]))


def members_of(store: Store, number: int) -> tuple[Member, ...]:
    """Return the members of a generation that has formed; none once they are forgotten."""
    return tuple(Member(*item) for item in json.loads(store.get(_members(number))))


def meeting_of(store: Store, number: int) -> PrefixStore:
    """Return the store in which a generation's ranks meet; no other generation uses its prefix."""
    return PrefixStore(meeting_name(number), store)


def meeting_name(number: int) -> str:
    """Return what all names of a generation begin with, in the membership's store."""
    return f"generation/{number}"


def forget_members(store: Store, number: int) -> None:
    """Forget a generation's members, but not that it has formed: a member may come back to it.

    The first generation's members stay known: they tell where the store is served.
    """
    store.delete_key(_here(number))
    if number > 0:
        store.set(_members(number), "[]")


def newest_generation(store: Store) -> int | None:
    """Return the number of the newest generation, None before the first one has formed."""
    if not store.check([NEWEST]):
        return None
    number = int(store.get(NEWEST))  # Of whoever was the last to enter one, maybe an older one.
    while has_formed(store, number + 1):
        number += 1
    return number


def tell_gone(store: Store, member: int, reason: str) -> None:
    """Record that a member is gone for good; the first reason counts.

    Args:
        store: The membership's store.
        member: The member's number.
        reason: Why it is gone.
    """
    store.compare_set(gone_key(member), "", reason)
    if member not in who_is_gone(store):  # Others may have said so.
        store.append(_GONE, f"{member} ")  # type: ignore[attr-defined]
    store.add(NEWS, 1)


def who_is_gone(store: Store) -> set[int]:
    """Return the numbers of all members that are gone; one call of the store."""
    return set(map(int, store.get(_GONE).split())) if store.check([_GONE]) else set()


def is_gone(store: Store, member: int) -> bool:
    """Whether anybody has said that a member is gone."""
    return bool(store.check([gone_key(member)]))


def is_anybody_left(store: Store) -> bool:
    """Whether any member of the newest generation isn't gone."""
    newest = newest_generation(store)
    members = () if newest is None else members_of(store, newest)
    return not who_is_gone(store).issuperset(member.number for member in members)


def loses_store(store: Store, generation: Generation, leaving: Collection[int]) -> bool:
    """Whether the store goes with ranks that leave: with the first member, or its node's last one.

    Args:
        store: The membership's store.
        generation: The newest generation.
        leaving: Its ranks that leave.
    """
    first = members_of(store, 0)[0]
    there = {rank for rank, member in enumerate(generation.members) if member.node == first.node}
    is_left = there.difference(leaving)
    return bool(there) and (not is_left or generation.rank_of(first.number) in leaving)


def gone_key(member: int) -> str:
    """Return the key of the reason why a member is gone."""
    return f"gone/{member}"


def has_ended(store: Store) -> bool:
    """Whether any member has trained to the end."""
    return bool(store.check([ENDED]))


def _here(number: int) -> str:
    return f"here/{number}"


def _members(number: int) -> str:
    return f"members/{number}"


def pause_s(num_members: int) -> float:
    """Return the seconds between short calls of one of so many members that wait for something."""
    return LOOK_S * max(1.0, num_members / _MANY)


class Turns:
    """One member's turns at what costs the more, the more members there are.

    To look at who has come is to read a line for each member, and to ask who is silent is a call of
    the store for each of them; the store answers one call after another. So the first few of those
    that are here take turns often, and the others, who go on if these are lost, seldom.

    Args:
        every_s: Seconds between two turns of each of few members.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._last_s = -math.inf

    def is_next(self, place: int) -> bool:
        """Whether it is this member's turn, which begins the wait for the next one.

        Args:
            place: The number of members before it.
        """
        longer = 1.0 if place < _FEW else _SELDOM
        is_due = time.monotonic() > self._last_s + self._every_s * longer
        if is_due:
            self._last_s = time.monotonic()
        return is_due


class Judge:
    """Judges members during one wait for them, from its making on.

    Args:
        store: The membership's store.
        is_silent: Tells whether a member has shown no sign of life for too long.
        patience_s: How long members may take to come while they are alive.
    """

    def __init__(
        self, store: Store, is_silent: Callable[[int], bool], *, patience_s: float
    ) -> None:
        self._store, self._is_silent, self._patience_s = store, is_silent, patience_s
        self._deadline = Deadline(patience_s)
        self._asks = Turns(5 * LOOK_S)
        self._asks.is_next(0)  # Most waits are over before anybody needs to ask.

    def look(self, missing: Collection[int], here: Collection[int] = (), *, place: int = 0) -> None:
        """Tell who is gone: silent ones, and `missing` ones once there was enough time to come.

        Members at a later `place` (see `Turns`) ask less often.
        """
        if not self._asks.is_next(place):
            return
        # Once nobody is missing any more, all that are here go on together, frozen ones as well.
        for member in (*here, *missing):
            if self._is_silent(member):
                tell_gone(self._store, member, "It showed no sign of life.")
            elif member in missing and self._deadline.is_over:
                why = f"It didn't come within {self._patience_s:.0f} s."
                tell_gone(self._store, member, why)
