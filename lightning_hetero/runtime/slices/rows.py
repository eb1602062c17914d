"""Give hooks parameters and gradients whose norms and sums are those of the whole tensors.

Between steps a parameter, and its gradient, has only this rank's rows. Hooks get both as subclasses
of torch's own classes, which treat functions in three ways:

1. Functions that work row by row, such as `grad.mul_(0.5)`, return a tensor of this rank's rows.
2. Reductions over rows, such as `grad.norm()`, `weight.mean()` or `grad.abs().max()`, are computed
   over all ranks' rows. All ranks must call them. So `clip_grad_norm_` and Lightning's `grad_norm`
   work as they are.
3. Functions whose result would silently differ are refused: choosing rows by number (see
   `own_rows`), passing values to numpy, copying or saving the rows of one rank.

Optimizers, and the package itself, get plain tensors.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import prod

import torch
from torch import Tensor, nn

from lightning_hetero.runtime.slices.reductions import sum_of_powers
from lightning_hetero.runtime.slices.row_tensors import ParameterRows, Part, Ranks, mark
from lightning_hetero.runtime.slices.weights import SliceStore


def own_rows(parameter: Tensor) -> Tensor:
    """Return the numbers of the rows (indices of dim 0) that this rank has of a parameter.

    Between steps `parameter` has only these rows; under other strategies these are all rows. So a
    hook trains only the new rows of an embedding by ::

        def on_before_optimizer_step(self, optimizer):
            table = self.model.embed.weight
            table.grad[own_rows(table) < self.num_old_rows] = 0
    """
    part: Part | None = vars(parameter).get("_part")
    kept: tuple[tuple[int, int], ...] = ((0, parameter.shape[0] if parameter.ndim else 1),)
    if part is not None and part.cut_dim == 0:
        kept = part.kept or ((0, 0),)
    return torch.cat([torch.arange(*rows, device=parameter.device) for rows in kept])


class HookedSlices:
    """Gives hooks a store's slices as tensors that can reduce over all ranks.

    ::

        hooked = HookedSlices(store, reduce)
        hooked.enter()  # Hooks run.
        hooked.leave()  # The optimizer steps, or an iteration begins.

    Args:
        store: The rank's slices.
        reduce: Returns a "sum", "max" or "min" of a tensor over all ranks.
        is_needed: Whether ranks have different rows; else hooks get the slices as they are.
    """

    def __init__(
        self, store: SliceStore, reduce: Callable[[Tensor, str], Tensor], *, is_needed: bool
    ) -> None:
        self._store = store
        self._is_needed = is_needed
        self._ranks = Ranks(reduce, self._counted_gradients)
        self._with_gradients: set[str] = set()
        """Names of the parameters of which some rank has rows of a gradient."""
        self._given: dict[str, Tensor] = {}
        """Gradients that hooks have asked for."""
        self._num_frozen = -1

    def _learn_rows(self) -> None:
        """Note which rows this rank has: in the beginning, and after frozen weights get owners."""
        store = self._store
        if len(store.frozen.sources) == self._num_frozen:
            return
        self._num_frozen = len(store.frozen.sources)
        for name, master in store.masters.items() if self._is_needed else ():
            part = _part_of(store, name, self._ranks)
            vars(master).update(_part=part, _ask_gradient=self._ask_gradient)

    def enter(self) -> None:
        """Give hooks the slices from now on."""
        if self._is_needed:
            self._learn_rows()
            self._ranks.are_in_hooks = True
            for master in self._store.masters.values():
                master.__class__ = ParameterRows

    def leave(self) -> None:
        """Make the slices plain parameters again."""
        if not self._ranks.are_in_hooks:
            return
        self._ranks.are_in_hooks = False
        self._ranks.powers.clear()
        for master in self._store.masters.values():
            master.__class__ = nn.Parameter
        for name, gradient in self._given.items():
            gradient.__class__ = Tensor
            if not self._store.owns(name):
                self._store.masters[name].grad = None  # An optimizer skips it then.
        self._given.clear()

    def close(self) -> None:
        """Leave hooks for the last time; breaks reference cycles through the slices."""
        self.leave()
        self._ranks.reduce = self._ranks.gradients = None
        for master in self._store.masters.values():
            vars(master).pop("_part", None)
            vars(master).pop("_ask_gradient", None)

    def note_gradients(self, names: Iterable[str], *, are_first: bool) -> None:
        """Note for which parameters an iteration has made gradients, on any rank."""
        if are_first:
            self._with_gradients.clear()
        self._with_gradients.update(names)

    def norm(self, parameters: Iterable[Tensor]) -> Tensor:
        """Return the 2-norm of the gradients of slices over all ranks; collective."""
        names = {id(master): name for name, master in self._store.masters.items()}
        parameters = list(parameters)
        with torch._C.DisableTorchFunctionSubclass():
            found = [
                part
                for item in parameters
                if item.grad is not None
                for part in self._store.owned_parts(names[id(item)], item.grad)
            ]
            # A rank that owns no slice with a gradient must take part in the sum, too.
            own = sum_of_powers(found, 2.0, device=parameters[0].device)
            assert self._ranks.reduce is not None
            return self._ranks.reduce(own, "sum").sqrt()

    def _ask_gradient(
        self, name: str, gradient: Tensor | None, *, is_new: bool = False
    ) -> Tensor | None:
        """Return a gradient for a hook; an empty one if only other ranks have rows of it."""
        exists = name in self._with_gradients
        if gradient is None and exists and not is_new and not self._store.owns(name):
            master = self._store.masters[name]
            with torch._C.DisableTorchFunctionSubclass():
                gradient = master.grad = torch.empty_like(master, requires_grad=False)
        if gradient is None:
            self._with_gradients.discard(name)
            return None
        if gradient is not self._given.get(name):
            if (before := self._given.get(name)) is not None:
                mark(before, replace(before._part, is_gradient=False))  # type: ignore[attr-defined]
            part: Part = vars(self._store.masters[name])["_part"]
            self._given[name] = mark(gradient, replace(part, is_gradient=True))
            self._with_gradients.add(name)
        return gradient

    def _counted_gradients(self) -> list[tuple[str, list[Tensor]]]:
        found = []
        for name, master in self._store.masters.items():
            if name in self._with_gradients:
                gradient = torch.empty_like(master) if master.grad is None else master.grad
                found.append((name, self._store.owned_parts(name, gradient)))
        return found


def _part_of(store: SliceStore, name: str, ranks: Ranks) -> Part:
    spec = store.specs[name]
    return Part(
        name=name,
        ranks=ranks,
        kept=store.kept[name],
        cut_dim=spec.cut_dim,
        is_uncut=len(store.slices[name]) == 1,
        num_whole=prod(spec.shape),
        dim=spec.cut_dim,
        copies=len(store.slices[name][0].ranks) if store.slices[name] else 1,
        frozen=store.frozen,
    )
