"""Push gradients from the holders directly to the owners of slices, and sum them there.

During the last backward pass of a stage, the push of a layer is posted as soon as autograd has
finished with the layer. The owner sums the pipelines' pieces in fp32, or in the master's dtype if
that is wider, and in pipeline order, so the result is the same bit for bit on every run. A
`torch.profiler` trace shows the ranges "push.post", with the numbers of their units, and
"push.wait".
"""

import weakref
from collections.abc import Callable, Collection

from torch import Tensor

from lightning_hetero.core.errors import StepError
from lightning_hetero.runtime.clock import traced
from lightning_hetero.runtime.exchange.routes import Routes
from lightning_hetero.runtime.slices.host_memory import arrive_on_host, wait_for_device
from lightning_hetero.runtime.slices.weights import ComputeWeights


class Push:
    """Sends gradients to the owners of slices, each unit as soon as its gradients are final.

    In each training iteration every rank calls `start`, then `begin_last_backward` and
    `end_last_backward` around the last backward pass of each of its stages, then `finish`. Units
    leave in descending order on all ranks, whatever the order in which they become ready.
    """

    def __init__(self, weights: ComputeWeights, routes: Routes) -> None:
        self._weights = weights
        self._options = routes.options
        units = reversed(routes.table.trainable_units)
        pushes = {unit.index: routes.pushed(unit, weights) for unit in units}
        self._here = {index: pushed for index, pushed in pushes.items() if pushed is not None}
        """The units of which this rank holds or owns rows, by index."""
        self._units = {index: unit for index, unit in self._here.items() if unit.travels}
        self._sent_by_unit = {index: unit.leaving for index, unit in self._units.items()}
        """For each unit the parameters whose gradients leave this rank."""
        # The last unit is ready when the pass ends, so its gradients needn't be counted.
        self._counted = dict([*self._sent_by_unit.items()][:-1])
        """The part of `_sent_by_unit` for units that may leave during the last backward pass."""
        self._waiting: list[int] = []
        self._ready: set[int] = set()
        self._later: Collection[str] = ()
        """Parameters that also get gradients after the present pass."""
        self._awaited: dict[int, set[str]] | None = None
        """The gradients that each unit still waits for; None outside the last backward pass."""
        for unit, names in self._counted.items():
            for name in names:
                hook = self._gradient_hook(unit, name)
                weights.shards[name].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _gradient_hook(self, unit: int, name: str) -> Callable[[Tensor], None]:
        # A weak reference: torch never collects the cycle of a hook that holds its own tensor.
        push = weakref.ref(self)

        def arrived(_: Tensor) -> None:
            alive = push()
            if alive is not None:
                alive._count(unit, name)

        return arrived

    def _count(self, unit: int, name: str) -> None:
        if self._awaited is None or unit not in self._awaited:
            return
        awaited = self._awaited[unit]
        if name not in awaited:
            raise StepError(
                f"The gradient of {name} comes in several parts and was sent after the first, as "
                "under torch.utils.checkpoint with use_reentrant=True. Use use_reentrant=False."
            )
        awaited.discard(name)
        if not awaited:
            self.unit_ready(unit)

    def start(self) -> None:
        """Begin an iteration's push; units of which this rank sends nothing count as ready."""
        self._waiting = list(self._units)
        self._ready = {unit for unit, names in self._sent_by_unit.items() if not names}

    def begin_last_backward(
        self, coming: Collection[str] | None = None, later: Collection[str] = ()
    ) -> None:
        """From now on, post each unit as soon as its gradients are final.

        Args:
            coming: The parameters that get gradients in this pass; None for all of them.
            later: The parameters that get more gradients after this pass, from other stages.
        """
        self._later = later
        awaited = {
            unit: set(names) for unit, names in self._counted.items() if names.isdisjoint(later)
        }
        if coming is not None:
            awaited = {unit: names.intersection(coming) for unit, names in awaited.items()}
        self._awaited = awaited
        for unit, names in awaited.items():
            if not names:
                self.unit_ready(unit)

    def end_last_backward(self) -> None:
        """Post the remaining units, except those that get more gradients later."""
        self._awaited = None
        for unit, names in self._sent_by_unit.items():
            if names.isdisjoint(self._later):
                self.unit_ready(unit)

    def unit_ready(self, unit: int) -> None:
        """Note that a unit's gradients are final on this rank; post units whose turn has come."""
        self._ready.add(unit)
        while self._waiting and self._waiting[0] in self._ready:
            self._post(self._waiting.pop(0))

    def finish(self) -> dict[str, Tensor]:
        """Post what is left, wait, and return the summed gradient of each slice that has rows.

        On an accelerator the host doesn't wait for the sums, unless there are standbys or slices on
        the host: they are computed on the current stream.
        """
        while self._waiting:
            self._post(self._waiting.pop(0))
        with traced("push.wait"):
            for unit in self._units.values():
                unit.wait()
            self._options.side_stream.join(self._options.side_stream.mark())
        totals: dict[str, Tensor] = {}
        store = self._weights.store
        for unit in self._here.values():
            sums = unit.sum()
            if store.owned_device != store.device:
                # One unit at a time, so that the device never holds the sums of all units.
                sums = arrive_on_host(sums)
            totals.update(sums)
            unit.finish()
        if store.owned_device != store.device or store.has_standbys:
            wait_for_device(store.device)
        return totals

    def gradients(self) -> list[Tensor]:
        """Return the gradients of this rank's backward passes.

        Called in training only, after the last backward pass.
        """
        self._options.side_stream.join(self._options.side_stream.mark())
        shards = self._weights.shards.values()
        return [shard.grad for shard in shards if shard.grad is not None]

    def missing(self) -> list[str]:
        """Return the trainable parameters that got no gradient on this rank."""
        return sorted(
            name
            for name, shard in self._weights.shards.items()
            if shard.requires_grad and shard.grad is None
        )

    def _post(self, unit: int) -> None:
        posted = self._units[unit]
        with traced(f"push.post {unit}"), self._options.side_stream.after_compute():
            posted.post()
