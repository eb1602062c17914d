"""Price new columns: the best pipelines for given dual prices, by a shortest path.

Let each stage of a pipeline take w seconds for a micro-batch, and the slowest t. The first
micro-batch passes all stages; each further one ends t later. So by time T the pipeline finishes
about (T - Σw)/t + 1 micro-batches. The master's dual prices say what the pipeline must be worth: π
for each row of the nodes (devices, or groups of a TP degree), μ for being one of D pipelines, and
ρ for each parameter that a stage has room to own, which counts in its favour. So the reduced value
of a column is

    T/t + 1 - μ - Σ_stages (w/t + π·uses - ρ·room),    w ≤ t for every stage.

For a fixed level t, the best column has the least sum. It is a shortest path from (0 stages, 0
layers) to (s stages, all layers), whose steps add one stage each, the last stage of the pipeline
first. The number of stages behind a stage is then known, and with it how many micro-batches the
stage holds, its memory and its recomputation. Levels are the exact seconds of all numbers of layers
on all stage options; about `_LEVELS` of them are priced.

Over slow links, stages wait for each other in cycles (`pace.steady_round_s`), which a sum over
stages can't express. So paths are found with half of a link's seconds added to w in `w ≤ t`, and
`ColumnTimes.rates` then says what the columns found are worth.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lightning_hetero.core.arrays import FloatArray
from lightning_hetero.planner.columns import Column, ColumnTimes
from lightning_hetero.planner.placement import Option
from lightning_hetero.planner.stages import Stages

_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of stages of the even pipelines on one class of nodes in the first pool."""

_LEVELS = 64
"""How many levels of the bottleneck are priced at once."""
_OF_LENGTH = 3
"""How many pipelines of each number of stages are added to the first pool."""
_WAIT = 0.5
"""Share of its links' seconds that a stage is assumed to wait for. In the slowest cycle of n
stages each waits for (n - 1)/n of them, elsewhere for none."""
_STALE = 3
"""Longer pipelines aren't tried after this many lengths in a row that were no better."""


@dataclass(frozen=True, kw_only=True)
class Duals:
    """Dual prices of what columns use, in sequences."""

    rows: FloatArray
    """[rows] for each row of the nodes."""
    pipeline: float = 0.0
    """For a pipeline."""
    room: float = 0.0
    """For room to own one parameter."""


class Pricing:
    """Finds columns for one number of pipelines and order of placement."""

    def __init__(self, times: ColumnTimes) -> None:
        self.times, self.stages = times, times.stages
        self.num_layers = self.stages.num_layers
        options = self.stages.options
        # Where a node has room for several stages, only some messages leave it.
        leaving = [min(1.0, o.tp_degree * times.num_together / self._width(o)) for o in options]
        self.hops_s = np.array(
            [
                share * sum(times.hop_s(o, o, False)) + (1 - share) * sum(times.hop_s(o, o, True))
                for o, share in zip(options, leaving, strict=True)
            ]
        )
        self.first_s = np.stack([times.first_s(option) for option in options])

    def _width(self, option: Option) -> int:
        return max(self.stages.counts_of_class[option.node_class])

    @cached_property
    def levels(self) -> FloatArray:
        """All seconds that a stage may take for a micro-batch, with its share of links."""
        every = self.times.table.total_s + _WAIT * self.hops_s[:, None, None]
        every[3] -= _WAIT * self.hops_s[:, None, None]  # A lone stage sends nothing.
        found: FloatArray = np.unique(np.round(every[np.isfinite(every)], 12))
        return found

    def columns(
        self, time_s: float, duals: Duals, least: float, *, is_wide: bool = False
    ) -> list[tuple[float, Column]]:
        """Return columns that the nodes can run with a reduced value above `least`, best first.

        Prices and values are in sequences, so for each micro-batch they are divided by its size.

        Args:
            time_s: Seconds of an iteration.
            duals: Dual prices.
            least: Reduced value that columns must exceed.
            is_wide: Whether to find the best pipelines of every number of stages, too.
        """
        size = self.stages.workload.sequences_per_microbatch
        own = Duals(rows=duals.rows / size, pipeline=duals.pipeline / size, room=duals.room / size)
        levels = self.levels[self.levels <= time_s]
        step = max(1, len(levels) // _LEVELS)
        prices = np.asarray(own.rows @ self.stages.uses.T, dtype=np.float64)
        priced = self._price(levels[step // 2 :: step], time_s, own, prices, is_wide=is_wide)
        found = self._values(list(dict.fromkeys(priced)), time_s, own)
        ranked = sorted(found.items(), key=lambda item: -item[1])
        return [(value * size, column) for column, value in ranked if value * size > least]

    def _values(self, columns: list[Column], time_s: float, duals: Duals) -> dict[Column, float]:
        """Return the reduced values of columns, and of the same stages with balanced layers.

        Those are left out that take more devices than there are.
        """
        limits = self.stages.limits
        columns = [c for c in columns if (self.times.uses(c.options) <= limits).all()]
        balanced = [self.times.balance(column.options) for column in columns]
        pairs = zip(columns, balanced, strict=True)
        every = [*columns, *(column._replace(layers=n) for column, n in pairs if n)]
        found = {}
        for column, rate in zip(every, self.times.rates(every), strict=True):
            if rate is not None:
                needs = float(rate.uses @ duals.rows) + duals.pipeline - duals.room * rate.room
                found[column] = (time_s - rate.fill_s) / rate.slope_s - needs
        return found

    def smallest(self) -> Column | None:
        """Return the pipeline that takes about the fewest devices; None if no pipeline fits."""
        if not len(self.levels):
            return None
        level_s = float(self.levels[-1])
        degrees = np.array(1e3 * self.stages.degrees, dtype=np.float64)
        nothing = Duals(rows=np.zeros(len(self.stages.rows)))
        found = self._price(np.array([level_s]), level_s, nothing, degrees)
        return found[0] if found else None

    def _price(
        self,
        levels: FloatArray,
        time_s: float,
        duals: Duals,
        prices: FloatArray,
        *,
        is_wide: bool = False,
    ) -> list[Column]:
        """Return the best column of each level and, for a wide search, of each length.

        Args:
            levels: Bottlenecks.
            time_s: Seconds of an iteration.
            duals: Prices of a pipeline and of room.
            prices: [options] of each stage.
            is_wide: Whether the search is wide.
        """
        count, size = len(levels), self.num_layers + 1
        best = np.full(count, -np.inf)
        reached = np.full((1, count, size), np.inf)
        reached[0, :, 0] = 0.0
        paths, edges, closing, values = [reached[0]], [], [], []
        at = np.zeros(count, dtype=np.int64)
        stale = 0
        worth = time_s / levels + 1 - duals.pipeline
        for position in range(self.stages.max_stages):
            edge = self._edge(2, position, levels, prices, duals)
            total = paths[-1][:, ::-1] + edge.min(axis=1)
            value = worth - total.min(axis=1)
            better = value > best + 1e-12
            best = np.where(better, value, best)
            # As long as none fits, more stages may help.
            stale = 0 if better.any() or np.isinf(best).all() else stale + 1
            at[better] = position
            closing.append(edge)
            values.append(value)
            if stale > _STALE or position + 1 >= self.stages.max_stages:
                break
            edge = self._edge(0, position, levels, prices, duals)
            edges.append(edge)
            paths.append(_joined(paths[-1], edge.min(axis=1)))
            if not np.isfinite(paths[-1]).any():
                break
        chosen = [(level, int(at[level])) for level in np.flatnonzero(np.isfinite(best)).tolist()]
        for position, row in enumerate(values if is_wide else ()):
            every = np.argsort(-row, kind="stable")[:_OF_LENGTH].tolist()
            chosen += [(level, position) for level in every if np.isfinite(row[level])]
        return self._columns(paths, edges, closing, list(dict.fromkeys(chosen)))

    def _edge(
        self,
        end: int,
        position: int,
        levels: FloatArray,
        prices: FloatArray,
        duals: Duals,
    ) -> FloatArray:
        """Return [levels, options, layers] costs of a stage, a first one if `end` is 2."""
        table, index = self.times.table, (end + (position == 0), slice(None), position)
        seconds, is_lone = table.total_s[index], end and not position
        links_s = self.hops_s[:, None] * (not is_lone)
        end_s = seconds + links_s + self.first_s * bool(end)
        cost = (
            end_s[None] / levels[:, None, None] + prices[:, None] - duals.room * table.room[index]
        )
        busy = seconds + _WAIT * links_s
        cost = np.where(busy[None] <= levels[:, None, None] * (1 + 1e-9), cost, np.inf)
        cost[..., 0] = np.inf
        return cost

    def _columns(
        self,
        paths: list[FloatArray],
        edges: list[FloatArray],
        closing: list[FloatArray],
        chosen: Sequence[tuple[int, int]],
    ) -> list[Column]:
        """Return the paths of levels to first stages at positions, walked back from those."""
        levels, positions = np.array(chosen, dtype=np.int64).reshape(-1, 2).T
        places, left = np.arange(self.num_layers + 1), np.full(len(chosen), self.num_layers)
        options: list[list[Option]] = [[] for _ in chosen]
        layers: list[list[int]] = [[] for _ in chosen]
        for position in range(positions.max(initial=-1), -1, -1):
            for edge, is_here in (
                (closing[position], positions == position),
                (edges[position] if position < len(edges) else None, positions > position),
            ):
                rows = np.flatnonzero(is_here)
                if edge is None or not len(rows):
                    continue
                cost, before = edge[levels[rows]], left[rows, None] - places
                path = paths[position][levels[rows, None], np.maximum(before, 0)]
                path[before < 0] = np.inf
                taken = (path + cost.min(axis=1)).argmin(axis=1)
                option = cost[np.arange(len(rows)), :, taken].argmin(axis=1)
                left[rows] -= taken
                for row, index, count in zip(rows.tolist(), option, taken.tolist(), strict=True):
                    options[row].append(self.stages.options[index])
                    layers[row].append(count)
        size = self.stages.workload.sequences_per_microbatch
        pairs = zip(options, layers, strict=True)
        return [Column(tuple(row), tuple(counts), size) for row, counts in pairs]


def _joined(reached: FloatArray, edge: FloatArray) -> FloatArray:
    """Return the least costs after one more stage, [levels, layers placed]."""
    size = reached.shape[1]
    most = int(np.flatnonzero(np.isfinite(edge).any(axis=0)).max(initial=0)) + 1
    before = np.pad(reached, ((0, 0), (most - 1, 0)), constant_values=np.inf)
    # [levels, layers placed, layers of the stage] from the most to none.
    windows = np.lib.stride_tricks.sliding_window_view(before, most, axis=1)[:, :size]
    found: FloatArray = (windows + edge[:, None, most - 1 :: -1]).min(axis=2)
    return found


def even_options(stages: Stages, number: int, *, is_wide: bool) -> Iterator[tuple[Option, ...]]:
    """Yield pipelines of one class of nodes, and ones with an even share of several classes.

    Stages of a class are next to each other and have one degree.

    Args:
        stages: All stage options.
        number: Pipelines that share the nodes.
        is_wide: Whether single stages of a class are tried, too.
    """
    most = stages.max_stages
    choices: list[list[tuple[Option, ...]]] = []
    for kind, count in stages.devices.items():
        own = [option for option in stages.options if option.node_class == kind]
        shares = [(o, min(most, count // (number * o.tp_degree))) for o in own]
        for option, share in shares:
            yield from ((option,) * n for n in (*_LENGTHS, share) if 0 < n <= share)
        rows = {(o,) * n for o, share in shares for n in (share, is_wide * 1) if 0 < n <= share}
        choices.append([(), *sorted(rows)])
    for blocks in itertools.product(*choices):
        used = [block for block in blocks if block]
        for order in itertools.permutations(used):
            options = tuple(itertools.chain.from_iterable(order))
            if len(used) > 1 and len(options) <= most:
                yield options
