"""The log of a run's members, from which each process reads who is in the run, and who is gone.

The log is in the run's store, one list of entries for each generation that forms. An entry is a
kind, a member's number and a value:

- `here` `[node, calls]`: the member is ready for the next generation. `calls` says whether it calls
  the waiting joiners for it; only the first `here` of a generation counts for that,
- `gone` `reason`: it is gone for good,
- `asking`: it is a joiner,
- `admitted`: a member has seen it alive,
- `formed`: the members that are here and not gone are the next generation, which ends the list,
- `ended`: the run has trained to its end.

The store appends in one order for all, and a state is a pure function of the entries. So all
processes agree without a leader: the first entry of a kind counts for each member, and entries
after the first `formed` don't count.

The lists stay. A process that comes later begins with a *summary* of those that ended before.
"""

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch.distributed.distributed_c10d import Store

from lightning_hetero.runtime.ranks.heartbeat import NEWS

_LASTING = ("gone", "asking", "admitted", "ended")
"""Kinds of entries that count for all later generations, too."""
_SUMMARY = "log/summary"


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

    @property
    def numbers(self) -> tuple[int, ...]:
        """The members' numbers, by rank."""
        return tuple(member.number for member in self.members)

    def rank_of(self, number: int) -> int | None:
        """Return a member's rank; None if it isn't in this generation."""
        return next((r for r, item in enumerate(self.members) if item.number == number), None)

    def local_rank_of(self, global_rank: int) -> int:
        """Return the place of a rank among those of its node."""
        node = self.members[global_rank].node
        return sum(item.node == node for item in self.members[:global_rank])

    def without(self, other: "Generation") -> tuple[int, ...]:
        """Return the ranks of this generation whose members aren't in the other one."""
        return tuple(r for r, n in enumerate(self.numbers) if n not in other.numbers)

    def joiners_since(self, old: "Generation") -> tuple[int, ...]:
        """Return the numbers of the members that weren't in the old generation."""
        return tuple(n for n in self.numbers if n not in old.numbers)


@dataclass(frozen=True, kw_only=True)
class State:
    """What the log says; see the module's docstring for the kinds of entries."""

    generation: Generation | None = None
    """The newest generation; None before the first one has formed."""
    first: tuple[Member, ...] = ()
    """The members of the first generation."""
    called: tuple[int, ...] = ()
    """The joiners that are called for the next generation."""
    here: Mapping[int, Any] = field(default_factory=dict)
    gone: Mapping[int, str] = field(default_factory=dict)
    asking: Mapping[int, Any] = field(default_factory=dict)
    """Without those that were in a generation since."""
    admitted: Mapping[int, str] = field(default_factory=dict)
    ended: Mapping[int, str] = field(default_factory=dict)

    @property
    def coming(self) -> int:
        """Number of the next generation."""
        return 0 if self.generation is None else self.generation.number + 1

    @property
    def waiting(self) -> tuple[int, ...]:
        """The admitted joiners that wait to be called."""
        return tuple(sorted((self.admitted.keys() & self.asking.keys()) - self.gone.keys()))

    @property
    def is_anybody_left(self) -> bool:
        """Whether any member of the newest generation isn't gone."""
        return self.generation is not None and not self.gone.keys() >= {*self.generation.numbers}

    def took_in(self, number: int) -> bool:
        """Whether a process has been in a generation."""
        return number < len(self.first) or number in self.admitted.keys() - self.asking.keys()

    def loses_store(self, leaving: Collection[int]) -> bool:
        """Whether the store is lost if some ranks leave: with member 0, or its node's last one."""
        assert self.generation is not None
        first, members = self.first[0], self.generation.members
        there = {rank for rank, member in enumerate(members) if member.node == first.node}
        is_left = there.difference(leaving)
        return bool(there) and (not is_left or self.generation.rank_of(first.number) in leaving)

    def after(self, entries: Iterable[Any]) -> "State":
        """Return the state after the list of entries that follows, up to its first `formed`."""
        notes: dict[str, Any] = {kind: dict(getattr(self, kind)) for kind in ("here", *_LASTING)}
        called = self.called
        for kind, number, value in entries:
            if kind == "formed":
                return self._formed(notes)
            if kind == "here" and not notes["here"] and self.generation is not None and value[1]:
                called = replace(self, **notes).waiting
            notes[kind].setdefault(number, value)
        return replace(self, called=called, **notes)

    def _formed(self, notes: dict[str, Any]) -> "State":
        """Members keep their order; joiners follow by their numbers."""
        here, old = notes.pop("here"), {} if self.generation is None else self.generation.numbers
        ranks = {number: rank for rank, number in enumerate(old)}
        numbers = here.keys() - notes["gone"].keys()
        ordered = sorted(numbers, key=lambda number: (ranks.get(number, math.inf), number))
        members = tuple(Member(number, here[number][0]) for number in ordered)
        notes["asking"] = {n: facts for n, facts in notes["asking"].items() if n not in numbers}
        formed = Generation(number=self.coming, members=members)
        return State(generation=formed, first=self.first or members, **notes)


class Log:
    """Reads and extends the log; threads may share one.

    Args:
        store: The membership's store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        store.append("log/0", "")  # type: ignore[attr-defined]  # Reads wait for what isn't there.
        self._seen: tuple[int, State, State] | None = None
        """The number of news when the log was last read, the state at the beginning of the newest
        list, and the newest state."""

    def read(self) -> State:
        """Return the newest state; one call of the store unless there are news."""
        num_news, seen = int(self._store.add(NEWS, 0)), self._seen
        if seen is None or num_news != seen[0]:
            base = self._summary() if seen is None else seen[1]
            while (state := base.after(self._entries(base.coming))).coming != base.coming:
                base = state
            self._seen = seen = num_news, base, state
        return seen[2]

    def _entries(self, number: int) -> list[Any]:
        return [json.loads(line) for line in self._store.get(f"log/{number}").splitlines()]

    def _summary(self) -> State:
        if not self._store.check([_SUMMARY]):
            return State()
        number, *told, entries = json.loads(self._store.get(_SUMMARY))
        members, first = (tuple(Member(*item) for item in each) for each in told)
        formed = Generation(number=number, members=members)
        return State(generation=formed, first=first).after(entries)

    def summarize(self) -> None:
        """Store the state at the beginning of the newest list, for processes that come later."""
        assert self._seen is not None
        _, base, _ = self._seen
        assert base.generation is not None
        entries = [[kind, *item] for kind in _LASTING for item in getattr(base, kind).items()]
        told = base.generation.number, base.generation.members, base.first, entries
        self._store.set(_SUMMARY, json.dumps(told))

    def append(self, coming: int, kind: str, member: int, value: object = "") -> None:
        """Append an entry that matters only for the generation `coming`."""
        append = self._store.append  # type: ignore[attr-defined]
        if kind == "formed":
            append(f"log/{coming + 1}", "")
        append(f"log/{coming}", json.dumps([kind, member, value]) + "\n")
        self._store.add(NEWS, 1)  # Afterwards, so that who has read this number has the entry.

    def note(self, kind: str, member: int, value: object = "") -> State:
        """Append an entry, unless there is one of its kind for its member; return the state."""
        while member not in getattr(state := self.read(), kind):
            # If a generation forms at this moment, the entry doesn't count, and is repeated.
            self.append(state.coming, kind, member, value)
        return state
