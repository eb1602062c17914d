"""The records of a membership: generations, who is ready or gone, whether training has ended."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch.distributed.distributed_c10d import PrefixStore, Store

__all__ = [
    "ENDED",
    "LAYER_CALL",
    "LOOK_S",
    "NEWEST",
    "NEWS",
    "Generation",
    "Member",
    "has_formed",
    "is_anybody_left",
    "loses_store",
    "meeting_of",
    "members_of",
    "newest_generation",
    "propose",
    "reason_of",
    "say_here",
    "tell_gone",
    "who_is_gone",
    "who_is_here",
]

LOOK_S = 0.01
"""Seconds between two reads of who is ready."""

ENDED, NEWEST, NEWS, _GONE = "ended", "newest", "news", "gone"
LAYER_CALL = "layer call"
"""Key of the description of a layer's call, which joiners make before they join."""


class Member(NamedTuple):
    """One process of a run."""

    number: int
    """Its number in the whole run, which no other member ever gets."""
    node: str
    """Name of its node."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Members that train together."""

    number: int
    members: tuple[Member, ...]
    """The members, by rank."""

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
    store.append(f"here/{number}", json.dumps(member) + "\n")  # type: ignore[attr-defined]


def who_is_here(store: Store, number: int) -> dict[int, Member]:
    """Return the members that are ready for a generation, by number."""
    key = f"here/{number}"
    lines = store.get(key).decode().splitlines() if store.check([key]) else ()
    found = (Member(*json.loads(line)) for line in lines)
    return {member.number: member for member in found}


def propose(store: Store, number: int, members: Sequence[Member]) -> None:
    """Propose a generation's members; the first proposal counts."""
    store.compare_set(f"members/{number}", "", json.dumps(members))


def has_formed(store: Store, number: int) -> bool:
    """Whether a generation has formed."""
    return bool(store.check([f"members/{number}"]))


def members_of(store: Store, number: int) -> tuple[Member, ...]:
    """Return the members of a generation that has formed."""
    return tuple(Member(*item) for item in json.loads(store.get(f"members/{number}")))


def meeting_of(store: Store, number: int) -> PrefixStore:
    """Return the store in which a generation's ranks meet; no other generation uses its prefix."""
    return PrefixStore(f"generation/{number}", store)


def newest_generation(store: Store) -> int | None:
    """Return the number of the newest generation, None before the first one has formed."""
    if not store.check([NEWEST]):
        return None
    number = int(store.get(NEWEST))  # A slow member may have written an older number last.
    while has_formed(store, number + 1):
        number += 1
    return number


def tell_gone(store: Store, member: int, reason: str) -> None:
    """Record that a member is gone for good; the first reason counts."""
    store.compare_set(f"gone/{member}", "", reason)
    if member not in who_is_gone(store):  # Others may have said so.
        store.append(_GONE, f"{member} ")  # type: ignore[attr-defined]
    store.add(NEWS, 1)


def who_is_gone(store: Store) -> set[int]:
    """Return the numbers of all members that are gone."""
    return set(map(int, store.get(_GONE).split())) if store.check([_GONE]) else set()


def reason_of(store: Store, member: int) -> str | None:
    """Return why a member is gone, None if it isn't."""
    key = f"gone/{member}"
    return store.get(key).decode() if store.check([key]) else None


def is_anybody_left(store: Store) -> bool:
    """Whether any member of the newest generation isn't gone."""
    newest = newest_generation(store)
    members = () if newest is None else members_of(store, newest)
    return not who_is_gone(store).issuperset(member.number for member in members)


def loses_store(store: Store, generation: Generation, leaving: Collection[int]) -> bool:
    """Whether the store is lost if some ranks leave: if member 0 leaves, or its node's last member.

    Args:
        store: The membership's store.
        generation: The newest generation.
        leaving: Its ranks that leave.
    """
    first = members_of(store, 0)[0]
    there = {rank for rank, member in enumerate(generation.members) if member.node == first.node}
    is_left = there.difference(leaving)
    return bool(there) and (not is_left or generation.rank_of(first.number) in leaving)
