"""Give slices to optimizers that were made before the module was cut, as `LightningCLI` makes them.

Such an optimizer has the module's whole parameters, which nothing would train.
"""

import weakref
from collections.abc import Mapping, Sequence

from torch import nn
from torch.optim import Optimizer

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.runtime.slices.weights import SliceStore

__all__ = ["parameters_of", "take_over"]

Parameters = Mapping[str, weakref.ref[nn.Parameter]]


def parameters_of(module: nn.Module) -> Parameters:
    """Return a module's parameters by name, without keeping them."""
    found = module.named_parameters(remove_duplicate=False)
    return {name: weakref.ref(parameter) for name, parameter in found}


def take_over(optimizers: Sequence[Optimizer], before: Parameters, store: SliceStore) -> None:
    """Replace parameters by their slices in the groups of optimizers.

    Args:
        optimizers: Those of the run.
        before: The module's parameters before they were cut.
        store: Has the slices.

    Raises:
        ConfigurationError: An optimizer has no parameter of the module, such as one of an earlier
            run, or a state of whole parameters.
    """
    slices = {
        id(whole): store.masters[name]
        for name, slots in store.layout.slots.items()
        for slot in slots
        if slot.name in before and (whole := before[slot.name]()) is not None
    }
    own = {id(master) for master in store.masters.values()}
    for optimizer in optimizers:
        given = [item for group in optimizer.param_groups for item in group["params"]]
        early = [item for item in given if id(item) in slices and id(item) not in own]
        for group in optimizer.param_groups if early else ():
            group["params"] = [slices.get(id(item), item) for item in group["params"]]
        has_none = bool(given) and not early and own.isdisjoint(map(id, given))
        if has_none or any(optimizer.state.get(item) for item in early):
            raise ConfigurationError(
                f"{type(optimizer).__name__} was made before this run cut the module's parameters "
                "into slices, and has a state of whole parameters or slices of an earlier run. "
                "Make it in configure_optimizers."
            )
