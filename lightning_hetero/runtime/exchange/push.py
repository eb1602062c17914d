"""Push gradients from the holders straight to the owners of slices, and sum them there.

A layer's push is posted inside the last backward, as soon as that has left the layer. The owner
sums the pipelines' pieces in fp32 (or the master's dtype if that is wider) and in pipeline order:
the result is the same bit for bit on every run. A `torch.profiler` trace shows the ranges
"push.post" with their units, and "push.wait".
"""

import weakref
from collections.abc import Callable

from torch import Tensor

from lightning_hetero.core.errors import StepError
from lightning_hetero.runtime.clock import traced
from lightning_hetero.runtime.exchange.messages import Sums, TwoLegged, has_streams
from lightning_hetero.runtime.exchange.routes import Routes
from lightning_hetero.runtime.slices.host_memory import arrive_on_host, wait_for_device
from lightning_hetero.runtime.slices.weights import ComputeWeights

__all__ = ["Push"]


class Push:
    """Send gradients to the owners of slices, a unit as soon as its last backward has ended.

    Called by every rank once per training iteration: `start`, the last backward pass between
    `begin_last_backward` and `end_last_backward`, `finish`. Units leave in one global order,
    descending, whatever the order in which they become ready.
    """

    def __init__(self, weights: ComputeWeights, routes: Routes) -> None:
        self._weights = weights
        self._options = routes.options
        pushes = routes.pushes(routes.table.trainable_units, weights)
        self._here = {unit.index: pushed for unit, pushed in pushes}
        """Units of which this rank holds or owns anything."""
        self._units = {index: unit for index, unit in self._here.items() if unit.travels}
        self._sent_by_unit = {index: unit.leaving for index, unit in self._units.items()}
        """The parameters of each unit whose gradients leave this rank."""
        # What leaves last is ready when the pass ends: to count its gradients would tell no more.
        self._counted = dict([*self._sent_by_unit.items()][:-1])
        """The same of those that may leave within the last backward pass."""
        self._first_legs: list[TwoLegged] = []
        """Units that are posted, and whose second leg isn't."""
        self._waiting: list[int] = []
        self._ready: set[int] = set()
        self._awaited: dict[int, set[str]] | None = None
        """In the last backward pass, the gradients of each unit that have yet to come."""
        for unit, names in self._counted.items():
            for name in names:
                hook = self._gradient_hook(unit, name)
                weights.shards[name].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _gradient_hook(self, unit: int, name: str) -> Callable[[Tensor], None]:
        # Weakly: a hook that holds what holds its own tensor is a cycle that torch never collects.
        push = weakref.ref(self)

        def arrived(_: Tensor) -> None:
            alive = push()
            if alive is not None:
                alive._count(unit, name)

        return arrived

    def _count(self, unit: int, name: str) -> None:
        if self._awaited is None:
            return
        awaited = self._awaited[unit]
        if not awaited:
            raise StepError(
                f"The gradient of {name} comes in several parts and was sent after the first, as "
                "under torch.utils.checkpoint with use_reentrant=True. Use use_reentrant=False."
            )
        awaited.discard(name)
        if not awaited:
            self.unit_ready(unit)

    def start(self) -> None:
        """Begin an iteration's push; units of which this rank sends nothing are ready."""
        self._first_legs.clear()
        self._waiting = list(self._units)
        self._ready = {unit for unit, names in self._sent_by_unit.items() if not names}

    def begin_last_backward(self) -> None:
        """Post each unit as soon as its gradients are final, from now on."""
        self._awaited = {unit: set(names) for unit, names in self._counted.items()}

    def end_last_backward(self) -> None:
        """Post the units that are left."""
        self._awaited = None
        self._post_rest()

    def unit_ready(self, unit: int) -> None:
        """Say that a unit's gradients are final here; posts whatever can go now, in order."""
        self._ready.add(unit)
        while self._waiting and self._waiting[0] in self._ready:
            self._post(self._waiting.pop(0))

    def finish(self) -> Sums:
        """Post what is left, wait, and return the summed gradient of each slice with rows.

        They are there when this returns, but on an accelerator without standbys: on its stream.
        """
        self._post_rest()
        self._go_on()
        with traced("push.wait"):
            for unit in self._units.values():
                unit.wait()
            self._options.side_stream.join(self._options.side_stream.mark())
        totals = Sums({}, [])
        store = self._weights.store
        for unit in self._here.values():
            sums = unit.sum()
            if store.owned_device != store.device:
                # Unit by unit, so that the device never holds the sums of all.
                sums = Sums.of(arrive_on_host(sums.by_name))
            totals.by_name.update(sums.by_name)
            totals.memory.extend(sums.memory)
            unit.finish()
        if store.owned_device != store.device or store.has_standbys:
            wait_for_device(store.device)
        return totals

    def _post_rest(self) -> None:
        while self._waiting:
            self._post(self._waiting.pop(0))

    def gradients(self) -> list[Tensor]:
        """Return what this rank's backwards have made, in as few tensors as there are.

        In training only, after the last of them.
        """
        self._options.side_stream.join(self._options.side_stream.mark())
        return [gradient for unit in self._here.values() for gradient in unit.gradients()]

    def missing(self) -> list[str]:
        """Return the parameters for which this rank's backward made no gradient."""
        return sorted(
            name
            for name, shard in self._weights.shards.items()
            if shard.requires_grad and shard.grad is None
        )

    def _post(self, unit: int) -> None:
        posted = self._units[unit]
        with traced(f"push.post {unit}"), self._options.side_stream.after_compute():
            posted.post()
        if isinstance(posted, TwoLegged):
            self._first_legs.append(posted)
            if has_streams(self._weights.store.device):  # Else the host would wait.
                self._go_on()

    def _go_on(self) -> None:
        """Post second legs; all ranks have one order of all legs."""
        while self._first_legs:
            with self._options.side_stream.after_compute():
                self._first_legs.pop(0).go_on()
