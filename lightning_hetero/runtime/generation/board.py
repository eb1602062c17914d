"""Lay values open to the other members of a generation, in the membership's store."""

import json
from collections.abc import Callable, Iterator

from lightning_hetero.runtime.generation.membership import Membership
from lightning_hetero.runtime.generation.vigil import SignsOfLife

__all__ = ["MembersBoard"]

_ENTRIES = "laid open"


class MembersBoard:
    """A `Board` of one generation: its newest one when this is made.

    Args:
        membership: This member's part in the membership.
        signs: Returns signs of life of this generation's ranks.
        silence_s: How late a sign of life may be.
    """

    def __init__(
        self, membership: Membership, signs: Callable[[], SignsOfLife], silence_s: float
    ) -> None:
        generation = membership.generation
        assert generation is not None
        self._membership, self._generation = membership, generation
        self._signs, self._silence_s = signs, silence_s
        self._store = membership.names_of(generation)

    def lay_open(self, number: int, values: str) -> None:
        """Show the others a number and values; only the first member with a number shows these."""
        if not self._store.check([_key(number)]):
            self._store.set(_key(number), values)
        entry = json.dumps([self._membership.number, number])
        self._store.append(_ENTRIES, f"{entry}\n")  # type: ignore[attr-defined]

    def await_others(self) -> Iterator[tuple[int, str]]:
        """Yield what the others showed, once all have done so that aren't gone.

        Waits no longer than they would to form the next generation.
        """
        others = {member.number for member in self._generation.members}
        others.discard(self._membership.number)
        shown: dict[int, int] = {}

        def missing() -> set[int]:
            shown.update(self._shown())
            return others.difference(shown)

        self._membership.await_members(missing, self._signs(), self._silence_s)
        for number in {shown[other] for other in others.intersection(shown)}:
            yield number, self._store.get(_key(number)).decode()

    def _shown(self) -> dict[int, int]:
        """Return the number of what each member showed, by member."""
        lines = self._store.get(_ENTRIES).splitlines() if self._store.check([_ENTRIES]) else ()
        return dict(map(json.loads, lines))


def _key(number: int) -> str:
    return f"{_ENTRIES}/{number}"
