"""Find the layers of the user's module, and describe all its parameters.

The layer list is the one that the user names, else the `ModuleList` (or `Sequential`) of modules of
one kind that has the most parameters. Modules are of one kind if they have the same class, or if
they are blocks whose forwards have the same first argument, as in hybrid models. Parameters outside
of the layers are called *outer*. Those that are registered before the layers are assumed to be used
before them, the others after them. This assumption only decides which ranks own their slices; which
stages compute with them is observed in the first iteration.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from lightning_hetero.core.errors import ModelError
from lightning_hetero.exchange.slices import OuterRole, ParameterSpec
from lightning_hetero.runtime.slices.frozen import (
    STAYS_FROZEN,
    is_opaque,
    is_quantized,
    packed_size,
)


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in a module where a parameter is registered; a tied parameter has several slots."""

    module: nn.Module
    attribute: str
    name: str

    @property
    def current(self) -> nn.Parameter:
        """The parameter that is registered here at present."""
        parameter = self.module._parameters[self.attribute]
        assert parameter is not None
        return parameter

    def put(self, parameter: nn.Parameter) -> None:
        """Register another parameter here."""
        self.module._parameters[self.attribute] = parameter


@dataclass(frozen=True, kw_only=True)
class ModelLayout:
    """The layers and parameters of one module."""

    layers_name: str | None
    """Name of the layer list, None if the module has none."""
    layers: tuple[nn.Module, ...]
    """The layers in order."""
    specs: tuple[ParameterSpec, ...]
    """All parameters in registration order; a tied one appears once."""
    slots: Mapping[str, tuple[Slot, ...]]
    """Where each parameter is registered."""

    @classmethod
    def of(cls, module: nn.Module, *, layers: str | None = None) -> "ModelLayout":
        """Examine a module.

        Raises:
            ModelError: `layers` names no list of modules, layers share a parameter, or a parameter
                is of another kind than fp32, bf16 or fp16.
        """
        layers_name, modules = find_layers(module, layers)
        slots: dict[str, list[Slot]] = defaultdict(list)
        order: list[str] = []
        names: dict[int, str] = {}
        parameters: dict[str, nn.Parameter] = {}
        for prefix, owner in module.named_modules():
            for attribute, parameter in owner._parameters.items():
                if parameter is None:
                    continue
                full = f"{prefix}.{attribute}" if prefix else attribute
                order.append(full)
                name = names.setdefault(id(parameter), full)
                parameters.setdefault(name, parameter)
                slots[name].append(Slot(owner, attribute, full))
        specs = tuple(
            _spec(name, parameters[name], [slot.name for slot in slots[name]], layers_name)
            for name in parameters
        )
        return cls(
            layers_name=layers_name,
            layers=modules,
            specs=_with_roles(specs, slots, order),
            slots={name: tuple(items) for name, items in slots.items()},
        )

    @property
    def num_layers(self) -> int:
        """Number of layers; 1 for a module without a layer list, which is one indivisible layer."""
        return max(len(self.layers), 1)

    def put(self, name: str, parameter: nn.Parameter) -> None:
        """Register another parameter in all slots of this name."""
        for slot in self.slots[name]:
            slot.put(parameter)

    def require_layers(self) -> None:
        """Raise ModelError unless there is a layer list whose entries are called as modules."""
        if not self.layers:
            raise ModelError(
                "The plan cuts the model into stages, or recomputes layers, but the module has no "
                "list of layers. Keep the repeated blocks in one nn.ModuleList, or name it: "
                'HeteroStrategy(layers="model.blocks").'
            )
        entry = self.layers[0]
        if getattr(entry.forward, "__func__", None) is nn.Module.forward:
            raise ModelError(
                f"The plan cuts the model into stages, or recomputes layers, but "
                f"{self.layers_name} lists entries of {type(entry).__name__}, which are never "
                "called as a whole. Make each one module with a forward, or use a plan whose "
                "pipelines have one stage and recompute nothing."
            )


def find_layers(module: nn.Module, name: str | None) -> tuple[str | None, tuple[nn.Module, ...]]:
    """Return the name and the modules of the layer list, (None, ()) if there is none.

    Raises:
        ModelError: `name` names nothing, or something that is no list of modules.
    """
    if name is not None:
        try:
            found = module.get_submodule(name)
        except AttributeError as error:
            known = [prefix for prefix, item in module.named_modules() if _is_list(item)]
            raise ModelError(
                f"layers={name!r} names no submodule of {type(module).__name__}. Lists of modules "
                f"there: {known}."
            ) from error
        if not isinstance(found, nn.ModuleList | nn.Sequential) or not len(found):
            raise ModelError(
                f"layers={name!r} is a {type(found).__name__} with {len(list(found.children()))} "
                "children; it must be a ModuleList or Sequential with at least one layer."
            )
        return name, tuple(found)
    best: tuple[int, str, tuple[nn.Module, ...]] | None = None
    for prefix, item in module.named_modules():
        if _is_list(item):
            size = sum(parameter.numel() for parameter in item.parameters())
            if size and (best is None or size > best[0]):
                best = size, prefix, tuple(item.children())
    return (None, ()) if best is None else (best[1], best[2])


def _is_list(module: nn.Module) -> bool:
    """Whether a module is a list of modules of one kind (no embeddings, no Sequential of one)."""
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    if not is_list or isinstance(module, ParametrizationList):
        return False
    entries = list(module.children())
    least = 1 if isinstance(module, nn.ModuleList) else 2
    if len(entries) < least or isinstance(entries[0], nn.Embedding):
        return False
    return len({type(entry) for entry in entries}) == 1 or _are_blocks(entries)


def _are_blocks(entries: Sequence[nn.Module]) -> bool:
    """Whether all modules have submodules with parameters, and forwards with one first argument.

    So linear layers and norms in turn aren't blocks, though all of them take an `input`.
    """
    for entry in entries:
        if not any(True for part in entry.children() for _ in part.parameters()):
            return False
    firsts = {_first_argument(entry) for entry in entries}
    return len(firsts) == 1 and firsts != {None}


def _first_argument(module: nn.Module) -> str | None:
    """Return the name of the first argument of a module's forward; None if it is unknown."""
    try:
        return next(iter(signature(module.forward).parameters), None)
    except (TypeError, ValueError):
        return None  # The forward isn't a Python function.


def _spec(
    name: str, parameter: nn.Parameter, names: Sequence[str], layers_name: str | None
) -> ParameterSpec:
    layers = {_layer_index(item, layers_name) for item in names}
    if len(layers) > 1:
        raise ModelError(
            f"Parameter {name} is shared between layers (registered as {list(names)}). Stages can "
            "share parameters only outside the layers, such as embedding and head."
        )
    if parameter.requires_grad and is_quantized(parameter):
        raise ModelError(STAYS_FROZEN.format(name))
    if parameter.requires_grad or not is_opaque(parameter):
        _check_dtype(name, parameter.dtype)
    return ParameterSpec(
        name=name,
        shape=tuple(parameter.shape),
        layer=layers.pop(),
        requires_grad=parameter.requires_grad,
        packed=None if parameter.requires_grad else packed_size(parameter),
    )


def _check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise ModelError for complex, integer and 8-byte parameters, which fp32 can't represent."""
    if dtype.is_complex:
        remedy = "Keep its real and imaginary parts in a real one, and use torch.view_as_complex"
    elif not dtype.is_floating_point:
        remedy = "Register it as a buffer"
    elif dtype.itemsize > torch.float32.itemsize:
        remedy = "Convert the module to fp32"
    else:
        return
    kind = str(dtype).removeprefix("torch.")
    raise ModelError(
        f"Parameter {name} is {kind}, but parameters are computed with in fp32 or bf16. {remedy}."
    )


def _layer_index(name: str, layers_name: str | None) -> int | None:
    if layers_name is None:
        return 0
    prefix = f"{layers_name}." if layers_name else ""
    head = name.removeprefix(prefix).split(".", 1)[0]
    return int(head) if name.startswith(prefix) and head.isdigit() else None


def _with_roles(
    specs: Sequence[ParameterSpec], slots: Mapping[str, Sequence[Slot]], order: Sequence[str]
) -> tuple[ParameterSpec, ...]:
    """Guess which end of the pipeline uses each outer parameter from where it is registered."""
    layered = {spec.name for spec in specs if spec.layer is not None}
    first_layer = next((i for i, name in enumerate(order) if name in layered), 0)
    before = set(order[:first_layer])

    def roles(spec: ParameterSpec) -> frozenset[OuterRole]:
        ends = (slot.name in before for slot in slots[spec.name])
        return frozenset(OuterRole.FIRST if first else OuterRole.LAST for first in ends)

    return tuple(
        spec if spec.layer is not None else replace(spec, roles=roles(spec)) for spec in specs
    )
