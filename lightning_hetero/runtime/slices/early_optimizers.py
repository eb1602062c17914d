"""Give slices to optimizers that were made before the module was cut, as `LightningCLI` makes them.

Such an optimizer has the module's whole parameters, which nothing would train; in a later
generation of a run, the slices of the one before.
"""

import weakref
from collections.abc import Mapping, Sequence

from torch import nn
from torch.optim import Optimizer

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.runtime.slices.weights import SliceStore

__all__ = ["parameters_of", "take_over"]

Parameters = Mapping[str, weakref.ref[nn.Parameter]]

_NAME = "name_in_early_optimizer"
"""The attribute of a slice that says which parameter an optimizer holds it for."""


def parameters_of(module: nn.Module) -> Parameters:
    """Return a module's parameters by name, without keeping them."""
    found = module.named_parameters(remove_duplicate=False)
    return {name: weakref.ref(parameter) for name, parameter in found}


def take_over(
    optimizers: Sequence[Optimizer], before: Parameters, store: SliceStore, *, recovers: bool
) -> None:
    """Replace parameters by their slices in the groups of optimizers.

    Args:
        optimizers: Those of the run.
        before: The module's parameters before they were cut.
        store: Has the slices.
        recovers: Whether a generation follows another one, so states will be recovered.

    Raises:
        ConfigurationError: An optimizer has no parameter of this run, or a state that no slice of
            it can take.
    """
    names = {
        id(whole): name
        for name, slots in store.layout.slots.items()
        for slot in slots
        if slot.name in before and (whole := before[slot.name]()) is not None
    }
    own = {id(master) for master in store.masters.values()}
    for optimizer in optimizers:
        given = [item for group in optimizer.param_groups for item in group["params"]]
        others = [item for item in given if id(item) not in own]
        known = {id(item): names.get(id(item)) or vars(item).get(_NAME) for item in others}
        early = {key: store.masters[name] for key, name in known.items() if name in store.masters}
        has_state = any(optimizer.state.get(item) for item in others if id(item) in early)
        if (others and len(others) == len(given) and not early) or (has_state and not recovers):
            raise ConfigurationError(
                f"{type(optimizer).__name__} was made before this run cut the module's parameters "
                "into slices, and has a state of whole parameters or slices of an earlier run. "
                "Make it in configure_optimizers."
            )
        for item in others:
            if id(item) in early:
                optimizer.state.pop(item, None)  # It is recovered.
                vars(early[id(item)])[_NAME] = known[id(item)]
        for group in optimizer.param_groups if early else ():
            group["params"] = [early.get(id(item), item) for item in group["params"]]
