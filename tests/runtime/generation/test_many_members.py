"""Many members agree on a generation, in virtual time: the store answers one after another."""

from functools import partial

from lightning_hetero.runtime.generation import membership, newcomers, vigil
from lightning_hetero.runtime.generation.membership import Membership
from lightning_hetero.runtime.ranks import heartbeat
from tests.runtime.generation.virtual_time import Timeline

MODULES = membership, newcomers, vigil, heartbeat
NODE = 8
"""Members of a node."""
SILENCE_S = 0.5


class Signs:
    """Heartbeats of ranks, of which the first have stopped."""

    def __init__(self, timeline: Timeline, num_frozen: int) -> None:
        self._timeline, self._num_frozen = timeline, num_frozen

    def beats_of(self, global_rank: int) -> int:
        self._timeline.store.add("beats", 0)
        return 0 if global_rank < self._num_frozen else int(self._timeline.now_s * 100)

    def silence_since(self, global_rank: int, beats: int) -> float:
        return 0.0


def members(timeline: Timeline, count: int) -> list[Membership]:
    store = timeline.store
    return [Membership(store, number=n, node=str(n // NODE)) for n in range(count)]


def form_next(timeline: Timeline, everyone: list[Membership], num_frozen: int) -> float:
    """Form the second generation without frozen members; return the virtual seconds it takes."""
    begin_s, signs = timeline.now_s, Signs(timeline, num_frozen)
    left = everyone[num_frozen:]
    pairs = timeline.run([partial(item.form_next, signs, SILENCE_S) for item in left])
    assert {old.without(new) for old, new in pairs} == {tuple(range(num_frozen))}
    return timeline.now_s - begin_s


def test_many_members_agree_within_moments_by_a_few_calls_each() -> None:
    timeline, count = Timeline(), 256
    everyone = members(timeline, count)
    with timeline.used_by(MODULES):
        timeline.run([partial(member.form, range(count)) for member in everyone])
        before = timeline.num_calls
        assert form_next(timeline, everyone, 0) < 0.2
    assert timeline.num_calls - before < 12 * count


def test_many_members_give_a_frozen_node_up_soon_after_the_limit_of_silence() -> None:
    """The first members, whose turns would come most often."""
    timeline, count = Timeline(), 128
    everyone = members(timeline, count)
    with timeline.used_by(MODULES):
        timeline.run([partial(member.form, range(count)) for member in everyone])
        assert form_next(timeline, everyone, NODE) < 1.5 * SILENCE_S


def test_the_others_go_on_if_those_freeze_whose_turns_come_most_often() -> None:
    """They have said that they are here, so the others' places come after theirs."""
    timeline, count = Timeline(), 128
    everyone = members(timeline, count)
    with timeline.used_by(MODULES):
        timeline.run([partial(member.form, range(count)) for member in everyone])
        for frozen in everyone[: NODE // 2]:
            frozen._say_here(1)
        assert form_next(timeline, everyone, NODE) < 3 * SILENCE_S
