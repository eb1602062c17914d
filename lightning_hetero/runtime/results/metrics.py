"""Give the module's torchmetrics, on every rank, the states that they would have on one device.

Last stages update metrics, each with its pipeline's micro-batches; other ranks have no states. When
a metric computes, the states of last stages are merged by the metric's own reductions. Its value
for a step is that of all micro-batches of the iteration.

If hooks update a metric, its states are the same on every rank and count once.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lightning_hetero.core.errors import StepError
from lightning_hetero.runtime.ranks.communicators import Communicators

_Call = tuple[tuple[Any, ...], dict[str, Any]]
_ALIKE = "_same_on_every_rank"
"""Attribute of a metric whose states are the same on every rank; copies of the metric have it."""


class StepMetrics:
    """The metrics of one module.

    A rank's states count if `reports_for_group()`: of a tensor-parallel group only the first one's.
    """

    def __init__(
        self, module: nn.Module, comms: Communicators, reports_for_group: Callable[[], bool]
    ) -> None:
        self.comms = comms
        self.reports_for_group = reports_for_group
        self.in_step = False
        """Whether a step is running, in which ranks can't wait for each other."""
        self._metrics = {
            name: item for name, item in module.named_modules() if isinstance(item, Metric)
        }
        self._is_cut = self._is_last = True
        self._calls: dict[int, list[_Call]] = {}
        self._under_way: list[list[tuple[Metric, dict[str, Any], int]]] = []
        """For each running call that only computes a value, the states to restore afterwards."""
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
        """Return the object itself, which also synchronises copies of metrics."""
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
        self._under_way.clear()
        self._is_cut, self._is_last = is_cut or self._has_ranks, is_last
        self.in_step = True
        try:
            yield
        finally:
            self.in_step = False
            for metric in self._metrics.values():
                # Without this, ranks that updated nothing would return an earlier result.
                metric._computed = None

    # -- calls in a step ----------------------------------------------------------------------

    def _begin_call(self, metric: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.in_step:
            return
        before = []
        if self._under_way or self._counts_now(metric):
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
        elif not self._under_way and not self._counts_now(metric):
            return
        update(*args, **kwargs)

    def _compute(self, metric: Metric, compute: Callable[[], Any]) -> Any:
        if self.in_step and self._is_cut and not self._under_way:
            raise StepError(
                f"{type(metric).__name__} computes inside a step, which has a part of the batch "
                "only, and where ranks can't wait for each other. Log the metric itself, or "
                "compute it in a hook."
            )
        return self._quietly(compute)

    def _quietly(self, compute: Callable[[], Any]) -> Any:
        """Compute without the warning that nothing was updated: other ranks may have done so."""
        with warnings.catch_warnings():
            if self._has_ranks:
                warnings.filterwarnings("ignore", "The ``compute`` method of metric")
            return compute()

    def _counts_now(self, metric: Metric) -> bool:
        """Return whether a step's call changes the metric.

        Raises:
            StepError: Hooks have updated it, too.
        """
        if self._is_cut and self._is_last:
            if self._has_ranks and metric._update_count and vars(metric).get(_ALIKE):
                raise StepError(
                    f"{type(metric).__name__} is updated in steps, where each rank has its own "
                    "samples, and in hooks, where all ranks have the same. Use one metric for each."
                )
            vars(metric)[_ALIKE] = False
        return self._is_last

    def is_called(self, metric: Metric) -> bool:
        """Return whether a step of this iteration has called the metric, not only updated it."""
        return id(metric) in self._calls

    def set_step_value(self, metric: Metric) -> None:
        """Let the metric's last value be that of the whole iteration; collective."""
        alone = metric.clone()
        alone.reset()
        for args, kwargs in self._calls.get(id(metric), ()):
            alone.update(*args, **kwargs)
        metric._forward_cache = self._quietly(alone.compute)


_Account = tuple[bool, int, dict[str, Any]]
"""Of one rank's metric: whether its states are the same on every rank, the number of updates, and
the states."""


class _Sync:
    """Replaces a metric's `_sync_dist`; a copy of the metric gets its own."""

    def __init__(self, metric: Metric, metrics: StepMetrics) -> None:
        self._metric = metric
        self._metrics = metrics

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Sync":
        return _Sync(memo.get(id(self._metric), self._metric), self._metrics)

    def __call__(self, *_: Any, **__: Any) -> None:
        metric, metrics = self._metric, self._metrics
        is_alike = bool(vars(metric).get(_ALIKE))
        own = None
        if metric.update_called and (is_alike or metrics.reports_for_group()):
            states = {name: getattr(metric, name) for name in metric._reductions}
            states = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), states)
            own = is_alike, metric._update_count, states
        device = metric.device
        found = [item for item in metrics.comms.gather_objects(own) if item is not None]
        for name, reduction in metric._reductions.items():
            values = tree_map_only(
                Tensor,
                lambda tensor: tensor.to(device),
                [states[name] for *_, states in _parts(found)],
            )
            if values:
                setattr(metric, name, _reduced(values, reduction))


def _parts(accounts: list[_Account]) -> list[_Account]:
    """Return the accounts to merge.

    If all are equal, hooks have updated the metric with the same values on each rank, so one of
    them counts.
    """
    if not all(is_alike for is_alike, *_ in accounts):
        return accounts
    # Ranks that joined later may have missed updates.
    most = max((count for _, count, _ in accounts), default=0)
    fullest = [item for item in accounts if item[1] == most]
    same = all(_are_equal(item[2], fullest[0][2]) for item in fullest[1:])
    return fullest[:1] if same else accounts


def _are_equal(left: Any, right: Any) -> bool:
    """Whether states are equal up to rounding."""
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
