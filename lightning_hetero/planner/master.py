"""The master: how often each pipeline runs, by column generation and HiGHS.

For at most D pipelines and M micro-batches, with bottleneck t_p, fill f_p and needs a_p of column
p, it finds the least T at which

    maximise    Σ_p x_p·(T - f_p)/t_p
    subject to  Σ_p x_p·a_p ≤ limits of the nodes,  Σ_p x_p ≤ D,
                Σ_p x_p·room_p + room of idle devices ≥ parameters   (ownership by room)

reaches M. The value is convex in T, so Newton steps from above never pass that T: T ← (M + Σ
x_p·f_p/t_p)/(Σ x_p/t_p). Columns that `Pricing` finds for the duals are added until none is worth
more than it costs. The best are also added with layers moved between stages, because balanced
stages aren't the best ones if fills are long or links slow. Whole x_p are then chosen among the
columns of least reduced cost; pipelines that run few micro-batches are valued by whole ones.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from lightning_hetero.core.arrays import FloatArray, IntArray
from lightning_hetero.planner.columns import FEW_MICROBATCHES, Column, ColumnTimes, Pool, Rate
from lightning_hetero.planner.linear_program import LinearProgram, Solution
from lightning_hetero.planner.pace import deal
from lightning_hetero.planner.pricing import Duals, Pricing, even_options
from lightning_hetero.planner.splitting import best_layers, cut_stages, turned_stages

_ROUNDS = 8
"""Largest number of rounds of pricing; masters end after 3 to 8."""
_EVEN = 1_000
"""Largest number of even pipelines in the first pool; three classes with four degrees make 750."""
_ADDED = 24
"""Largest number of columns added in a round: about half of the levels that are priced."""
_LACKING = 30.0
"""Penalty for lacking all room to own, in iterations: more than any pipeline is worth."""
_ROUNDING = 1e-7
"""Share of all parameters that may lack room by rounding."""
_NEWTON_STEPS, _WHOLE_STEPS = 8, 3
"""Most Newton steps, with fractions and with whole numbers; they end after 2 to 4."""
_FINE = 4e-3
"""Precision, as a share of T, of the search for a time with whole micro-batches."""
_CLOSE = 2e-4
"""Share of all micro-batches that a column must be worth, and of T that a Newton step must gain."""
_PROMISING = 80
"""Number of columns of least reduced cost that a master passes on to the next one."""
_WHOLE = 200
"""Number of columns of least reduced cost from which the integer programme chooses."""
_NODES = 60
"""Largest number of nodes of its branch and bound, which takes half a second."""
_MOVED = 6
"""Number of columns of least reduced cost whose layers are moved between stages."""
_WAITING = 0.02
"""Share of a pipeline's seconds that it isn't computing from which its stages are also cut: prices
know little of messages and exchange."""
_ALIKE = 3
"""Number of mixes of a single column that are added to those of branch and bound."""
_FEW = 24
"""Number of micro-batches up to which a pipeline is valued by whole ones, each 4 % or more."""


@dataclass(frozen=True)
class Mix:
    """Columns, and how often each runs."""

    columns: tuple[tuple[Column, int], ...]
    """Columns that run, and how many pipelines of each."""
    time_s: float
    """Seconds of an iteration with whole micro-batches, by the columns' rates."""


class _Solved(NamedTuple):
    """A solution of the linear programme."""

    pool: Pool
    x: FloatArray
    """How often columns run."""
    duals: Duals
    time_s: float

    def likeliest(self, number: int) -> IntArray:
        """Return the columns that run, and others of least reduced cost, as indices."""
        pool, duals = self.pool, self.duals
        needs = pool.uses @ duals.rows + duals.pipeline - duals.room * pool.room
        loss = needs - pool.value(self.time_s) - 1e9 * (self.x > 1e-9)
        return np.argsort(loss, kind="stable")[:number]


class Master:
    """The programme of one number of pipelines, ownership and order of placement."""

    def __init__(self, times: Sequence[ColumnTimes]) -> None:
        self.times = {item.stages.workload.sequences_per_microbatch: item for item in times}
        self.ownership, self.stages = times[0].ownership, times[0].stages
        self.pricing = [Pricing(item) for item in times]
        self.total = self.stages.workload.global_batch_size
        self.most = min(self.ownership.num_pipelines, self.total)
        self.pool: dict[Column, Rate] = {}
        self.time_s = np.inf
        self.is_lacking = False
        self._last: _Solved | None = None
        self._moved = cache(self._find_moved)
        self._prepare_room()

    def _prepare_room(self) -> None:
        """Find how much devices that run nothing own, if owners follow room."""
        self.by_room = self.ownership.by_room
        cost, rows = self.stages.cost, self.stages.rows
        idle = [0.0] * len(rows)
        if self.by_room:
            for index, (kind, degree, _) in enumerate(rows):
                if degree == 1:
                    node = self.stages.node_of_class[kind]
                    idle[index] = self.stages.idle_room(node, self.ownership.num_pipelines)
        self.idle_room = np.array(idle)
        self.needed_room = cost.model.num_params - float(self.idle_room @ self.stages.limits)

    def add(self, columns: Sequence[Column]) -> int:
        """Add columns that fit; return how many were new."""
        before = len(self.pool)
        for size, times in self.times.items():
            new = [c for c in columns if c.size == size and c not in self.pool]
            for column, rate in zip(new, times.rates(new), strict=True):
                if rate is not None and (rate.uses <= self.stages.limits).all():
                    self.pool[column] = rate
        return len(self.pool) - before

    def solve(self, upper_s: float = np.inf) -> float:
        """Generate columns; return the least T of fractional pipelines, infinite if none fit.

        Args:
            upper_s: A solution above these seconds isn't needed.
        """
        smallest = [column for pricing in self.pricing if (column := pricing.smallest())]
        devices = [sum(option.tp_degree for option in column.options) for column in smallest]
        if self.most * min(devices, default=np.inf) > sum(self.stages.devices.values()):
            return np.inf
        self.add(smallest)
        self._begin()
        if not self.pool:
            return np.inf
        least = _CLOSE * self.total
        alone = min(
            rate.fill_s + rate.slope_s * self.total / column.size
            for column, rate in self.pool.items()
        )
        self.time_s = min(alone, upper_s * 4)
        for _ in range(_ROUNDS):
            before_s = self.time_s
            duals = self._newton()
            if duals is None:
                self.time_s = np.inf
                return np.inf
            found = self._price(self.time_s, duals, least)
            added = self.add([column for _, column in found[:_ADDED]])
            if not added and self.time_s > before_s * (1 - _CLOSE):
                break
        if self.is_lacking:
            self._last, self.time_s = None, np.inf
        return self.time_s

    def _price(
        self, time_s: float, duals: Duals, least: float, *, is_wide: bool = False
    ) -> list[tuple[float, Column]]:
        found = [p.columns(time_s, duals, least, is_wide=is_wide) for p in self.pricing]
        return sorted(itertools.chain.from_iterable(found), key=lambda pair: -pair[0])

    def _guess(self) -> tuple[float, Duals]:
        """Return T and duals as if every device worked all the time at its best speed."""
        stages = self.stages
        inner = next(iter(self.times.values())).table.total_s[0]
        sizes = np.arange(1, stages.num_layers + 1)
        size = stages.workload.sequences_per_microbatch
        rates = size * (sizes / inner[..., 1:]).max(axis=(1, 2))
        speed = dict.fromkeys(stages.devices, 0.0)
        for option, rate in zip(stages.options, rates.tolist(), strict=True):
            speed[option.node_class] = max(speed[option.node_class], rate / option.tp_degree)
        power = sum(speed[kind] * count for kind, count in stages.devices.items())
        if not power:
            return 1e9, Duals(rows=np.zeros(len(stages.rows)))
        time_s = 1.3 * self.total * stages.num_layers / power
        rows = [
            speed[kind] * time_s / stages.num_layers * degree for kind, degree, _ in stages.rows
        ]
        of_devices = [degree == 1 for _, degree, _ in stages.rows]
        return time_s, Duals(rows=np.where(of_devices, rows, 0.0))

    def _begin(self) -> None:
        """Fill the pool with even columns and, if it had few before, those for guessed prices."""
        is_first = len(self.pool) < _ADDED
        for times in self.times.values():
            size = times.stages.workload.sequences_per_microbatch
            every = itertools.islice(even_options(self.stages, self.most, is_wide=is_first), _EVEN)
            rows = [(options, times.balance(options)) for options in every]
            self.add([Column(options, layers, size) for options, layers in rows if layers])
        if is_first:
            found = self._price(*self._guess(), -np.inf, is_wide=True)
            self.add([column for _, column in found])

    def _newton(self) -> Duals | None:
        """Step T down to where the pool's columns just finish; return the duals there."""
        pool, duals = Pool.of(self.pool), None
        for _ in range(_NEWTON_STEPS):
            solution = self._programme(pool, pool.value(self.time_s)).minimize()
            if not len(solution.values):
                break
            x = solution.values[: len(pool.columns)]
            self.is_lacking = bool((solution.values[len(x) :] > _ROUNDING).any())
            duals, before_s = self._duals(solution), self.time_s
            finish_s = pool.finish_s(x, self.total)
            if not finish_s:
                break
            self.time_s = finish_s
            self._last = _Solved(pool, x, duals, finish_s)
            if abs(finish_s / before_s - 1) < _CLOSE:
                break
        return duals

    def _programme(
        self, pool: Pool, value: FloatArray, whole_up_to: FloatArray | None = None
    ) -> LinearProgram:
        program = LinearProgram()
        upper = np.full(len(value), np.inf) if whole_up_to is None else whole_up_to
        x = program.add_variables(upper=upper, cost=-value, integral=whole_up_to is not None)
        for column, limit in zip(pool.uses.T, self.stages.limits, strict=True):
            program.add_row(x, column, upper=limit)
        program.add_row(x, 1.0, upper=self.most)
        if self.by_room:
            unit = self.stages.cost.model.num_params
            room = pool.room - pool.uses @ self.idle_room
            # Room that is lacking costs more than any pipeline is worth.
            lacking = program.add_variables(upper=np.inf, cost=_LACKING * self.total)
            if whole_up_to is None:
                x, room = np.append(x, lacking), np.append(room, unit)
            program.add_row(x, room / unit, lower=self.needed_room / unit)
        return program

    def _duals(self, solution: Solution) -> Duals:
        num = len(self.stages.rows)
        rows = np.maximum(-solution.row_duals[:num], 0.0)
        pipeline = max(0.0, -float(solution.row_duals[num]))
        room = 0.0
        if self.by_room:
            room = max(0.0, float(solution.row_duals[num + 1])) / self.stages.cost.model.num_params
            rows = rows + room * self.idle_room
        return Duals(rows=rows, pipeline=pipeline, room=room)

    def best_columns(self) -> list[tuple[Column, float]]:
        """Return the columns that run in the last solution, and how often."""
        if self._last is None:
            return []
        columns, x = self._last.pool.columns, self._last.x
        return [(columns[i], float(x[i])) for i in np.flatnonzero(x > 1e-9).tolist()]

    def promising(self, number: int = _PROMISING) -> list[Column]:
        """Return the columns that a master like this one begins with: of least reduced cost."""
        if self._last is None:
            return list(self.pool)[:number]
        return [self._last.pool.columns[i] for i in self._last.likeliest(number).tolist()]

    def mixes(self) -> list[Mix]:
        """Return whole numbers of pipelines, from the best columns of the last `solve`."""
        if self._last is None:
            return []
        rates = {column: self.pool[column] for column in self.promising(_WHOLE)}
        kept = Pool.of(rates).value(self.time_s) > 0.5
        rates = dict(itertools.compress(rates.items(), kept))
        found = [*self._whole(Pool.of(rates)), *self._alike(rates)] if rates else []
        return list({mix.columns: mix for mix in found}.values())

    def _alike(self, rates: Mapping[Column, Rate]) -> list[Mix]:
        """Return the best mixes of one column: their exchange is the simplest."""
        found = []
        for column, rate in rates.items():
            used = rate.uses > 0
            number = min(self.most, int((self.stages.limits[used] // rate.uses[used]).min()))
            if number and not (self.by_room and number * rate.room < self.needed_room):
                found.append(self._mix({column: number}))
        return sorted(filter(None, found), key=lambda mix: mix.time_s)[:_ALIKE]

    def add_moved(self) -> None:
        """Add the columns of least reduced cost with layers moved between stages; solve again."""
        number = max(1.0, sum(count for _, count in self.best_columns()))
        moved = []
        for column in self.promising(_MOVED):
            share = self.total / (column.size * number)
            # If micro-batches are few, some pipelines run one more or less than others.
            more = (0, 1, 2) if share <= FEW_MICROBATCHES else (0,)
            moved += [self._moved(column, max(1, int(share) + n)) for n in more]
        if self.add(moved):
            self._newton()

    def with_layers_moved(self, mix: Mix) -> Mix:
        """Return a mix with layers moved between stages as long as its pipelines end sooner."""
        share = self.total / sum(n * column.size for column, n in mix.columns)
        counts: Counter[Column] = Counter()
        for column, number in mix.columns:
            counts[self._moved(column, max(1, round(share)))] += number
        if counts == dict(mix.columns):
            return mix
        self.add(list(counts))
        return self._mix(counts) or mix

    def _mix(self, counts: Mapping[Column, int]) -> Mix | None:
        """Return so many pipelines of columns, timed; None if one has no micro-batch to run."""
        pairs = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
        columns = [column for column, number in pairs for _ in range(number)]
        rates = [self.pool[column] for column in columns]
        dealt = deal(rates, [column.size for column in columns], self.total)
        if dealt is None:
            return None
        ends_s = {rate.ends_s(count) for rate, count in {*zip(rates, dealt, strict=True)}}
        return Mix(tuple(pairs), max(ends_s))

    def _find_moved(self, column: Column, count: int) -> Column:
        """Return the column with the order of stages and the layers that end `count` soonest."""
        times, found = self.times[column.size], [column]
        every, (rate,) = turned_stages(column.options), times.rates(found)
        own_s = times.stage_s(column.options)[np.arange(len(column.layers)), column.layers]
        computes_s = float(own_s.sum() + (count - 1) * own_s.max())
        if rate is not None and rate.ends_s(count) > computes_s * (1 + _WAITING):
            known, limits = times.stages.index.keys(), times.stages.limits
            cut = [row for row in cut_stages(column.options) if known >= {*row}]
            every += [row for row in cut if (times.uses(row) <= limits).all()]
        bare = [(Column(options, (), column.size), count) for options in every]
        for options, layers in zip(every, best_layers(times, bare), strict=True):
            if layers:
                found.append(column._replace(options=options, layers=layers))
        ends_s = [rate.ends_s(count) if rate else np.inf for rate in times.rates(found)]
        return found[ends_s.index(min(ends_s))]

    def _whole(self, pool: Pool) -> list[Mix]:
        """Return mixes that HiGHS finds, with whole micro-batches where pipelines run few."""
        with np.errstate(divide="ignore"):
            most = self.stages.limits // pool.uses
        upper = np.minimum(most.min(axis=1), self.most)

        def choose(value: FloatArray) -> IntArray:
            program = self._programme(pool, value, whole_up_to=upper)
            solution = program.minimize(max_nodes=_NODES, gap=1e-3)
            nothing = np.zeros(len(value), dtype=np.int64)
            return solution.integers[: len(value)] if len(solution.values) else nothing

        found: list[Mix | None] = []
        time_s = self.time_s
        for _ in range(_WHOLE_STEPS):
            x = choose(np.maximum(pool.value(time_s), 0.0))
            if not x.any():
                break
            before_s, time_s = time_s, pool.finish_s(x, self.total)
            found.append(self._mix(_counts(pool, x)))
            if time_s <= before_s * (1 + _CLOSE):
                break
        if not found or self.total > _FEW * x.sum():
            return [*filter(None, found)]
        sizes = np.array([column.size for column in pool.columns])
        low_s, high_s = self.time_s, 1.5 * time_s
        while high_s > low_s * (1 + _FINE):
            middle_s = (low_s + high_s) / 2
            value = np.maximum(pool.value(middle_s) / sizes + 1e-9, 0.0) // 1 * sizes
            x = choose(value)
            if x @ value < self.total:
                low_s = middle_s
            else:
                high_s = middle_s
                found.append(self._mix(_counts(pool, x * (value > 0))))
        return [*filter(None, found)]


def _counts(pool: Pool, x: IntArray) -> dict[Column, int]:
    return {pool.columns[i]: int(x[i]) for i in np.flatnonzero(x).tolist()}
