"""Give the module's torchmetrics the states that they would have on one device, on every rank.

Last stages update them, each with its pipeline's micro-batches. When a metric computes, the states
of those ranks are merged by its own reductions; other ranks have no states. Its value for a step is
that of all micro-batches of the iteration.

A metric that gets single numbers, such as a loss, would get those of micro-batches. So such a call
is deferred: its numbers are joined as logged ones are (`step_logs`), and then every rank calls the
metric once, with the batch's numbers. States that hooks update are the same on every rank, too, and
count once.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lightning_hetero.core.errors import StepError
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.results.numbers.kinds import Kind
from lightning_hetero.runtime.results.numbers.reductions import Reductions
from lightning_hetero.runtime.results.numbers.written_numbers import Rows, may_count, rows_counted

__all__ = ["Argument", "MetricCall", "StepMetrics"]

_Call = tuple[tuple[Any, ...], dict[str, Any]]
Argument = int | str
"""Position or name of an argument."""

_OF_BATCH = (Kind.MEAN, Kind.MAX, Kind.MIN)
"""Kinds of a micro-batch's numbers from which a metric can't make the batch's."""
_ALIKE = "_same_on_every_rank"
"""Attribute of a metric whose states are the same on every rank; copies of the metric have it."""


@dataclass(frozen=True)
class MetricCall:
    """A call of a metric with single numbers."""

    metric: str
    """Name of the submodule."""
    verb: str
    """ "forward" or "update"."""
    index: int
    """Index among such calls of the step."""


class StepMetrics:
    """The metrics of one module.

    Args:
        module: The LightningModule that holds them.
        comms: The communicators.
        speaks: Whether this rank's states count: the first of a tensor-parallel group does.
    """

    def __init__(self, module: nn.Module, comms: Communicators, speaks: Callable[[], bool]) -> None:
        self.comms = comms
        self.speaks = speaks
        self.in_step = False
        """Whether a step runs, in which ranks can't wait for each other."""
        self._metrics = {
            name: item for name, item in module.named_modules() if isinstance(item, Metric)
        }
        self._names = {id(item): name for name, item in self._metrics.items()}
        self._is_cut = self._is_last = True
        self._calls: dict[int, list[_Call]] = {}
        self._fed: set[int] = set()
        """Metrics that were called with the batch's numbers."""
        self._numbers: list[tuple[MetricCall, dict[Argument, tuple[Any, Rows]]]] = []
        """Deferred calls of the micro-batch."""
        self._given: list[tuple[Metric, Tensor]] = []
        """Tensors that were arguments of other calls."""
        self._under_way: list[list[tuple[Metric, dict[str, Any], int]]] = []
        """For each running call: the states to restore after it, if it was run for its value."""
        self._hooks, self._own = [], []
        for metric in self._metrics.values():
            self._hooks += [
                metric.register_forward_pre_hook(self._begin_call, with_kwargs=True),
                metric.register_forward_hook(self._end_call),
            ]
            self._own.append((metric, metric.update, metric.compute))
            metric.update = partial(self._update, metric, metric.update)  # type: ignore[method-assign]
            metric.compute = partial(self._compute, metric, metric.compute)  # type: ignore[method-assign]
            is_torchs = type(metric)._sync_dist is Metric._sync_dist
            if self._has_ranks and "_sync_dist" not in vars(metric) and is_torchs:
                metric._sync_dist = _Sync(metric, self)  # type: ignore[method-assign]

    @property
    def are_any(self) -> bool:
        """Whether the module has metrics."""
        return bool(self._metrics)

    @property
    def _has_ranks(self) -> bool:
        return self.comms.world_size > 1

    def __deepcopy__(self, memo: dict[int, Any]) -> "StepMetrics":
        """Return itself: it also synchronises copies of metrics."""
        return self

    def remove(self) -> None:
        """Restore the metrics' own methods."""
        for hook in self._hooks:
            hook.remove()
        for metric, update, compute in self._own:
            metric.update, metric.compute = update, compute  # type: ignore[method-assign]
            vars(metric).pop("_sync_dist", None)

    @contextmanager
    def recording(self, *, is_cut: bool, is_last: bool) -> Iterator[None]:
        """Watch the calls of metrics inside this context, which holds an iteration's steps.

        Args:
            is_cut: Whether the iteration may have several micro-batches.
            is_last: Whether the rank's stage is a last one.
        """
        self._calls.clear()
        self._fed.clear()
        self._under_way.clear()
        self._is_cut, self._is_last = is_cut or self._has_ranks, is_last
        self.in_step = True
        try:
            yield
        finally:
            self.in_step = False
            for metric in self._metrics.values():
                # Otherwise ranks that updated nothing would return what they computed before.
                metric._computed = None

    # -- calls in a step ----------------------------------------------------------------------

    def _begin_call(self, metric: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.in_step:
            return
        before = []
        if self._under_way or self._counts_now(metric, "forward", args, kwargs):
            self._calls.setdefault(id(metric), []).append((args, kwargs))
        else:
            inside = (item for item in metric.modules() if isinstance(item, Metric))
            before = [(item, item._copy_state_dict(), item._update_count) for item in inside]
        self._under_way.append(before)

    def _end_call(self, *_: Any) -> None:
        for metric, states, count in self._under_way.pop() if self.in_step else ():
            for name, value in states.items():
                setattr(metric, name, value)
            metric._update_count, metric._computed = count, None

    def _update(
        self, metric: Metric, update: Callable[..., None], *args: Any, **kwargs: Any
    ) -> None:
        if not self.in_step:
            vars(metric)[_ALIKE] = True
        elif not self._under_way and not self._counts_now(metric, "update", args, kwargs):
            return
        update(*args, **kwargs)

    def _compute(self, metric: Metric, compute: Callable[[], Any]) -> Any:
        if self.in_step and self._is_cut and not self._under_way:
            raise StepError(
                f"{type(metric).__name__} computes inside a step, which has a part of the batch "
                "only, and where ranks can't wait for each other. Log the metric itself, or "
                "compute it in a hook."
            )
        return compute()

    def _counts_now(
        self, metric: Metric, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Return whether a call changes the metric now; defer it if it has single numbers only.

        Raises:
            StepError: The metric has the batch's numbers already, and now gets samples.
        """
        if not self._is_cut or not self._is_last:
            return self._is_last
        given: dict[Argument, Any] = {}
        given.update(enumerate(args))
        given.update(kwargs)
        if given and all(map(_is_number, given.values())):
            call = MetricCall(self._names[id(metric)], verb, len(self._numbers))
            rows = {place: rows_counted(place) for place in given if may_count(given[place])}
            told = {place: (value, rows.get(place)) for place, value in given.items()}
            self._numbers.append((call, told))
            return False
        if self._has_ranks and metric._update_count and vars(metric).get(_ALIKE):
            raise _mixed(metric)
        vars(metric)[_ALIKE] = False
        self._given += [(metric, item) for item in given.values() if isinstance(item, Tensor)]
        return True

    def take_numbers(
        self, reductions: Reductions | None = None
    ) -> list[tuple[MetricCall, dict[Argument, tuple[Any, Rows]]]]:
        """Return the deferred calls of the micro-batch that ends, and forget them.

        Each number comes with the rows that it counts.

        Args:
            reductions: What is known of its numbers; None if the micro-batch is dropped.

        Raises:
            StepError: A mean or extreme of the micro-batch went into a metric that wasn't deferred.
        """
        numbers, given = self._numbers, self._given
        self._numbers, self._given = [], []
        for metric, item in given if reductions is not None else ():
            known = reductions.of(item) if reductions is not None else None
            if known is not None and known.kind in _OF_BATCH:
                raise StepError(
                    f"{type(metric).__name__} gets a {known.kind} over the samples of a "
                    "micro-batch among its arguments, where one device has that of the whole "
                    "batch. Give it samples, or numbers without dims alone, such as "
                    "`metric.update(loss)`; or log the number by self.log."
                )
        return numbers

    # -- the batch's numbers ------------------------------------------------------------------

    def feed(self, calls: Mapping[MetricCall, Mapping[Argument, Tensor]]) -> None:
        """Make the deferred calls with the numbers of a batch; every rank makes the same calls.

        Raises:
            StepError: A metric has got samples before.
        """
        for call, given in calls.items():
            metric = self._metrics[call.metric]
            if self._has_ranks and metric._update_count and not vars(metric).get(_ALIKE):
                raise _mixed(metric)
            args = [given[place] for place in sorted(i for i in given if isinstance(i, int))]
            kwargs = {name: item for name, item in given.items() if isinstance(name, str)}
            (metric if call.verb == "forward" else metric.update)(*args, **kwargs)
            self._fed.add(id(metric))

    def set_step_value(self, metric: Metric) -> None:
        """Let the metric's last value be that of the whole iteration; collective."""
        if id(metric) in self._fed:
            return
        alone = metric.clone()
        alone.reset()
        for args, kwargs in self._calls.get(id(metric), ()):
            alone.update(*args, **kwargs)
        metric._forward_cache = alone.compute()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.ndim == 0)


def _mixed(metric: Metric) -> StepError:
    return StepError(
        f"{type(metric).__name__} gets samples in steps, of which each rank has its own, and also "
        "single numbers, such as a loss, or what hooks give it, of which all ranks have the same. "
        "Use one metric for each."
    )


@dataclass(frozen=True)
class _Account:
    """The states of one rank's metric."""

    is_alike: bool
    count: int
    """Number of updates."""
    states: dict[str, Any]


class _Sync:
    """Stands in for a metric's `_sync_dist`; a copy of the metric gets one of its own."""

    def __init__(self, metric: Metric, metrics: StepMetrics) -> None:
        self._metric = metric
        self._metrics = metrics

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Sync":
        return _Sync(memo.get(id(self._metric), self._metric), self._metrics)

    def __call__(self, *_: Any, **__: Any) -> None:
        metric, metrics = self._metric, self._metrics
        is_alike = bool(vars(metric).get(_ALIKE))
        own = None
        if metric.update_called and (is_alike or metrics.speaks()):
            states = {name: getattr(metric, name) for name in metric._reductions}
            states = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), states)
            own = _Account(is_alike, metric._update_count, states)
        device = metric.device
        found = [item for item in metrics.comms.gather_objects(own) if item is not None]
        for name, reduction in metric._reductions.items():
            values = tree_map_only(
                Tensor, lambda tensor: tensor.to(device), [i.states[name] for i in _parts(found)]
            )
            if values:
                setattr(metric, name, _reduced(values, reduction))


def _parts(accounts: list[_Account]) -> list[_Account]:
    """Return the accounts to merge: one of them if they are alike, else all."""
    if not all(item.is_alike for item in accounts):
        return accounts
    # Ranks that came later may have missed updates.
    most = max((item.count for item in accounts), default=0)
    fullest = [item for item in accounts if item.count == most]
    same = all(_are_equal(item.states, fullest[0].states) for item in fullest[1:])
    return fullest[:1] if same else accounts


def _are_equal(left: Any, right: Any) -> bool:
    """Whether states are equal but for how devices round."""
    pairs = list(zip(tree_leaves(left), tree_leaves(right), strict=False))
    return len(tree_leaves(left)) == len(tree_leaves(right)) and all(
        a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-4, equal_nan=True)
        for a, b in pairs
    )


def _reduced(values: list[Any], reduction: Any) -> Any:
    """Return one state merged from those of several ranks, as torchmetrics does it."""
    if isinstance(values[0], list) or reduction is dim_zero_cat:
        items = [part for item in values for part in (item if isinstance(item, list) else [item])]
        if reduction is None or not items:
            return items
        return reduction(items)
    if len(values) == 1:
        return values[0]
    stacked = torch.stack(values)
    return stacked if reduction is None else reduction(stacked)
