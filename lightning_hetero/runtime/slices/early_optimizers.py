"""Give slices to optimizers that were made before the module was cut, as `LightningCLI` makes them.

Such an optimizer has the module's whole parameters, which nothing would train; or, in a later
generation of a run, the slices of the previous one.
"""

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.runtime.slices.weights import SliceStore

_NAME = "name_in_module"
"""The attribute of a parameter or slice that has the parameter's name in the module."""


def name_parameters(module: nn.Module) -> None:
    """Tell each parameter its name, before the module is cut and its parts are freed.

    An attribute, as weak references would keep `Module.cpu` from moving quantized weights.
    """
    for name, parameter in module.named_parameters():
        vars(parameter)[_NAME] = name


def take_over(optimizers: Sequence[Optimizer], store: SliceStore, *, recovers: bool) -> None:
    """Replace parameters by their slices in the groups of optimizers.

    Raises:
        ConfigurationError: An optimizer has no parameter of this run, or has a state that slices of
            its parameters can't use.
    """
    own = {id(master) for master in store.masters.values()}
    for optimizer in optimizers:
        given = [item for group in optimizer.param_groups for item in group["params"]]
        others = [item for item in given if id(item) not in own]
        known = {id(item): vars(item).get(_NAME) for item in others}
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
