"""Pull weights from the owners of slices to the stages that need them, in order of need.

All messages of a pull are posted before the first layer runs, and each layer waits only for its own
weights. If other code of a step uses a weight, such as a penalty on weights, it waits when it reads
the weight. A `torch.profiler` trace shows the ranges "pull.post" and "pull.wait" with the numbers
of their units.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_hetero.core.errors import ModelError
from lightning_hetero.exchange.transfers import Unit
from lightning_hetero.runtime.clock import traced
from lightning_hetero.runtime.exchange.routes import PulledUnit, Routes
from lightning_hetero.runtime.slices.digests import digests_of, has_costly_checks
from lightning_hetero.runtime.slices.known_by_shape import ASKS_FOR_NO_VALUE
from lightning_hetero.runtime.slices.weights import ComputeWeights, SliceStore


class _Arriving(nn.Parameter):
    """A compute weight that is still arriving; functions that need its values first wait for it."""

    _wait: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in ASKS_FOR_NO_VALUE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for item in tree_leaves((args, kwargs)):
            if isinstance(item, _Arriving):
                item._wait()
        return func(*args, **kwargs)


def _mark(weights: Iterable[Any], wait: Callable[[], None]) -> None:
    for weight in weights:
        weight.__class__ = _Arriving
        weight._wait = wait


def _unmark(weights: Iterable[Any]) -> None:
    for weight in weights:
        if "_wait" in weight.__dict__:
            # So that weight and pull don't keep each other alive until a garbage collection.
            del weight.__dict__["_wait"]
            if type(weight) is _Arriving:
                weight.__class__ = nn.Parameter  # type: ignore[assignment]


class Pull:
    """Brings the weights of a rank's stages up to date.

    In each iteration every rank calls `start`, then `wait_unit` before a unit's weights are used,
    then `finish`. A unit is first *stale*; `start` posts its messages and it is *arriving*; after
    `wait_unit` its weights are there; after `finish` its sends have left, too. A pull moves only
    units that were marked stale since the last pull, because an optimizer step or a loaded
    checkpoint has changed them. At first all units are stale.
    """

    def __init__(
        self,
        store: SliceStore,
        weights: ComputeWeights,
        routes: Routes,
    ) -> None:
        self._store = store
        self._weights = weights
        self._options = routes.options
        self._all = self._prepare(routes, routes.table.units)
        self._trainable = self._all
        if routes.table.trainable_units != routes.table.units:
            self._trainable = self._prepare(routes, routes.table.trainable_units)
        self._stale: dict[int, PulledUnit] | None = self._all
        """The units that the next pull moves, by each of their indices (see `Unit.indices`); None
        if no unit is stale."""
        self._posted: dict[PulledUnit, torch.cuda.Event | None] = {}
        """Units whose messages were posted and whose weights nobody has waited for. On CUDA each
        has an event that marks the end of its packing and local copies."""
        self._moved: list[PulledUnit] = []
        """Units whose messages were posted in this iteration: `finish` waits until their sends have
        left."""
        self._seen: list[tuple[int, int]] = []
        """Version and address of each slice when the last pull ended (`_marks`). If they differ at
        the next pull and the slice isn't stale, somebody has changed it."""
        self._versions = _versions_of(weights.shards)
        """Version counter of each compute weight when it was made: a step must not change it."""
        self._is_marked = False
        """Whether weights that were posted are `_Arriving`."""
        self._num_started = 0
        self._arrived_bits: dict[str, int] | None = None
        """Digests of the compute weights, in iterations that check whether a step changes any of
        their bits."""
        self._frozen_bits: dict[str, int] | None = None
        """Digests of the frozen slices after an iteration with that check."""

    def _prepare(self, routes: Routes, units: Sequence[Unit]) -> dict[int, PulledUnit]:
        found = {unit: routes.pulled(unit, self._weights) for unit in units}
        return {
            index: pulled
            for unit, pulled in found.items()
            if pulled is not None
            for index in unit.indices
        }

    def mark_stale(self, *, only_trainable: bool = False) -> None:
        """Make the next pull move all units, or only those with trainable parameters."""
        trainable = only_trainable and self._stale is not self._all
        self._stale = self._trainable if trainable else self._all

    def start(self, *, needed: Iterable[int] = ()) -> None:
        """Post all messages of this rank, units ascending, and make the local copies.

        Raises:
            ModelError: A slice has changed, but not been marked stale.
        """
        self._check_unchanged()
        self._weights.gather_replaced()
        self._num_started += 1
        if self._stale is not None:
            self._post(self._stale)
        if has_costly_checks(self._num_started):
            needed = self._stale or ()
        for index in needed:
            self.wait_unit(index)
        self._is_marked = bool(self._posted)
        # A unit that has several indices is marked under one of them.
        under_way = {unit: index for index, unit in (self._stale or {}).items()}
        for unit in self._posted:
            _mark(unit.arriving_weights.values(), partial(self.wait_unit, under_way[unit]))
        if has_costly_checks(self._num_started):
            self._arrived_bits = digests_of(self._weights.plain)

    def _post(self, stale: Mapping[int, PulledUnit]) -> None:
        stream = self._options.side_stream
        with stream.after_compute():
            for index, unit in stale.items():
                if unit in self._posted:
                    continue
                with traced(f"pull.post {index}"):
                    unit.post()
                self._moved.append(unit)
                self._posted[unit] = stream.mark()

    def _check_unchanged(self) -> None:
        """Refuse slices that were changed but not marked stale.

        Their holders would compute with the old values.
        """
        frozen_bits, self._frozen_bits = self._frozen_bits, None
        if self._stale is self._all:
            return
        masters, seen = self._store.masters, self._seen
        for (name, master), mark, before in zip(masters.items(), self._marks(), seen, strict=True):
            is_due = self._stale is not None and master.requires_grad
            if mark != before and not is_due:
                _refuse_changed_between_steps(name)
        if frozen_bits is not None:
            for name, bits in digests_of(self._frozen_slices()).items():
                if bits != frozen_bits.get(name, bits):
                    _refuse_changed_between_steps(name)

    def _frozen_slices(self) -> dict[str, Tensor]:
        masters = self._store.masters.items()
        return {name: master for name, master in masters if not master.requires_grad}

    @property
    def is_under_way(self) -> bool:
        """Whether any weights may not have arrived yet."""
        return bool(self._posted)

    def wait_unit(self, index: int) -> None:
        """Wait until the weights of unit `index` have arrived; return at once if they have."""
        pulled = None if self._stale is None else self._stale.get(index)
        if pulled not in self._posted:
            return
        # Torch function modes that watch the user's step mustn't see this.
        with self._options.clock.waiting(), torch._C.DisableTorchFunction():
            self._options.side_stream.join(self._posted.pop(pulled))
            if pulled.travels:
                with traced(f"pull.wait {index}"):
                    pulled.wait()
        if self._is_marked:
            _unmark(pulled.arriving_weights.values())

    def finish(self) -> None:
        """Wait for the units that are left, and until this rank's sends have left.

        Raises:
            ModelError: The step has changed a weight.
        """
        if self._posted:
            for index in self._stale or ():
                self.wait_unit(index)
        self._is_marked = False
        versions = _versions_of(self._weights.shards)
        if versions != self._versions:
            _refuse_changed_in_step(versions, self._versions)
        if self._arrived_bits is not None:
            bits = digests_of(self._weights.plain)
            if bits != self._arrived_bits:
                _refuse_changed_in_step(bits, self._arrived_bits)
            self._arrived_bits = None
            self._frozen_bits = digests_of(self._frozen_slices())
        for pulled in self._moved:
            pulled.finish()
        self._moved.clear()
        self._stale = None
        self._weights.return_replaced()
        self._seen = self._marks()

    def _marks(self) -> list[tuple[int, int]]:
        """Return version and address of each slice.

        `master.data.mul_(...)` changes neither: digests find that.
        """
        masters = self._store.masters.values()
        pairs = zip(map(_version_of, masters), map(Tensor.data_ptr, masters), strict=True)
        return list(pairs)


_version_of = attrgetter("_version")


def _versions_of(weights: Mapping[str, Tensor]) -> dict[str, int]:
    with torch._C.DisableTorchFunctionSubclass():  # It asks for no values.
        return dict(zip(weights, map(_version_of, weights.values()), strict=True))


def _refuse_changed_in_step(after: Mapping[str, int], before: Mapping[str, int]) -> NoReturn:
    name = next(name for name, mark in after.items() if before[name] != mark)
    raise ModelError(
        f"A step changes parameter {name} in place, which each micro-batch does, and "
        "to this rank's copy only. Change it in on_train_batch_end, leave max_norm of "
        "embeddings out, or register what isn't optimized as a buffer."
    )


def _refuse_changed_between_steps(name: str) -> NoReturn:
    raise ModelError(
        f"Parameter {name} was changed between steps, without an optimizer's step on "
        "it, as a hook does that averages weights into frozen ones. Let it require "
        "gradients and use it under torch.no_grad(): then it travels in each step."
    )
