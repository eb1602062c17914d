"""Members die, freeze, join and leave at any moment, in virtual time: one generation is left."""

import math
import random
from functools import partial
from typing import Any, NamedTuple

import pytest

from lightning_hetero.core.errors import PeerError
from lightning_hetero.runtime.generation.log import Generation, Log
from lightning_hetero.runtime.generation.membership import (
    Membership,
    begin_numbers,
    draw_number,
)
from lightning_hetero.runtime.ranks.heartbeat import NEWS, Heartbeat, interval_s
from tests.runtime.generation.virtual_time import Timeline

SILENCE_S, END_S, LAST_EVENT_S = 2.0, 40.0, 25.0


class Died(Exception):
    """Ends a member at whatever it does."""


class Fault(NamedTuple):
    begin_s: float
    end_s: float = math.inf
    """When it goes on; never if it died."""


class Run(Timeline):
    """A run of which some members have faults; the store is on another node."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(way_s=0.002)
        self.draw = draw
        self.num_first, num_joiners = draw.randint(2, 7), draw.randint(0, 4)
        self.everyone = range(self.num_first + num_joiners)
        self.faults = {number: fault for number in self.everyone[1:] if (fault := self._fault())}
        self.leavers = {
            number: draw.uniform(2.0, LAST_EVENT_S)
            for number in self.everyone[1:]
            if draw.random() < 0.2
        }
        self.agreed: dict[int, frozenset[int] | None] = {}
        """How each generation ends: who leaves; None if one was found silent."""
        self.formed: dict[int, Generation] = {}
        self._beats: dict[int, int] = {}
        begin_numbers(self.store, self.num_first)

    def _fault(self) -> Fault | None:
        kind, begin_s = self.draw.random(), self.draw.uniform(1.0, LAST_EVENT_S)
        if kind < 0.3:
            return Fault(begin_s)
        return Fault(begin_s, begin_s + self.draw.choice([0.5, 3.0, 8.0])) if kind < 0.5 else None

    def be(self, number: int) -> Membership:
        """Let the present thread be a member."""
        self._own.number = number
        options = {"silence_s": SILENCE_S, "patience_s": 20.0}
        return Membership(self.store, Signs(self, number), node="a", facts={}, **options)

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        fault = self.faults.get(getattr(self._own, "number", -1))
        if fault is not None and fault.begin_s <= self.now_s < fault.end_s:
            if fault.end_s == math.inf:
                raise Died
            super().sleep(fault.end_s - self.now_s)

    def beats_of(self, number: int) -> int:
        begin_s, end_s = self.faults.get(number, Fault(math.inf))
        if not begin_s <= self.now_s < end_s:
            self._beats[number] = int(100 * self.now_s)
        return self._beats.get(number, 0)

    def enter(self, member: Membership, generation: Generation) -> None:
        """Compare a generation with what its other members have entered."""
        assert self.formed.setdefault(generation.number, generation) == generation
        assert member.number in generation.numbers


class Signs(Heartbeat):
    """A heartbeat that stops with its member."""

    def __init__(self, run: Run, number: int) -> None:
        super().__init__(run.store, number=number, interval_s=interval_s(SILENCE_S))
        self._run_of = run

    def _look_at(self, number: int, beats: int) -> float:
        return super()._look_at(number, self._run_of.beats_of(number))


def live(run: Run, number: int) -> Any:
    """Be a member or a joiner; return its last generation, or None if it has left."""
    if number < run.num_first:
        member = run.be(number)
        run.enter(member, member.form_first(run.num_first))
    else:
        run.sleep(run.draw.uniform(1.0, 20.0))
        member = run.be(draw_number(run.store))
        run.enter(member, member.join(30.0))
    while run.now_s < END_S:
        run.sleep(run.draw.uniform(0.02, 0.1))
        if not train(run, member):
            return None
    return member.generation


def train(run: Run, member: Membership) -> bool:
    """Make a step, or a change of generation; return whether the member stays."""
    now = member.generation
    assert now is not None
    others = [other for other in now.numbers if other != member.number]
    silent = max(member._heartbeat.silences_s(others), default=0.0) > SILENCE_S
    if member.find_gone() is not None or silent:
        run.agreed.setdefault(now.number, None)
        run.enter(member, member.form_next(calls_joiners=False)[1])
        return True
    if now.rank_of(member.number) == 0 and now.number not in run.agreed:
        member._heartbeat.num_news = int(run.store.add(NEWS, 0))
        joins = member.look_for_joiners()
        due = {other for other in now.numbers if run.leavers.get(other, math.inf) <= run.now_s}
        if joins or due:
            run.agreed.setdefault(now.number, frozenset(due))
        return True
    if now.number in run.agreed:
        run.sleep(run.draw.uniform(0.0, 0.05))
        leaving = run.agreed[now.number]
        if leaving is not None and member.number in leaving:
            member.wait_for_next(30.0)
            return False
        ranks = [rank for n in leaving or () if (rank := now.rank_of(n)) is not None]
        run.enter(member, member.form_next(ranks, calls_joiners=leaving is not None)[1])
    return True


def keep(run: Run, number: int) -> None:
    """Be a member's keeper, which tells of its death, unless its node was lost, too."""
    fault = run.faults.get(number)
    if fault is not None and fault.end_s == math.inf and run.draw.random() < 0.7:
        run.sleep(fault.begin_s + run.draw.uniform(0.0, 0.3))
        Log(run.store).note("gone", number, "Its process ended.")


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_when_all_who_live_end_in_one_generation(seed: int) -> None:
    """Only who was frozen is left out, or a joiner to which nobody came back in time."""
    run = Run(random.Random(seed))
    works = [partial(live, run, number) for number in run.everyone]
    works += [partial(keep, run, number) for number in range(run.num_first)]
    with run.in_use():
        ends = run.run(works)[: len(run.everyone)]
    last = run.formed[max(run.formed)]
    stayed = [end for end in ends if isinstance(end, Generation)]
    assert stayed
    assert set(stayed) == {last}
    assert len(stayed) == last.world_size
    cut_off = sum(isinstance(end, PeerError) for end in ends)
    assert cut_off <= sum(fault.end_s < math.inf for fault in run.faults.values())
    ended = sum(end is None or isinstance(end, Died) for end in ends)
    assert len(stayed) + cut_off + ended == len(ends)
