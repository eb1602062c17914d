"""Find out which weights can be read from somewhere, such as the folder of a pretrained model.

A module whose weights can be read has an attribute `weight_source`, in which they have the names
that they have in that module. So no rank has to build the whole model: it reads its own rows.
`find_frozen` finds weights that never train: if each rank can read them, they needn't be owned, and
never travel.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch.distributed as dist
from torch import Tensor, nn

from lightning_hetero.core.errors import ConfigurationError, ModelError
from lightning_hetero.exchange.slices import ParameterSpec
from lightning_hetero.models.stored import Box
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.setup.layout import ModelLayout
from lightning_hetero.runtime.slices.frozen import (
    InMemory,
    Opaque,
    Reader,
    fingerprint_of,
    is_opaque,
)
from lightning_hetero.runtime.slices.known_by_shape import StandIn

BoxReader = Callable[[Box], Tensor]
"""Returns a box of one parameter or buffer, on CPU."""


class WeightSource(Protocol):
    """The type of a module's attribute `weight_source`."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the parameters and buffers that it has, by their names in the module."""

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box, which isn't empty, of the named tensor, on CPU, in any dtype."""


class WeightSources:
    """The weight sources of all modules inside one module."""

    def __init__(self, module: nn.Module) -> None:
        self._sources: list[tuple[str, WeightSource]] = [
            (f"{prefix}." if prefix else "", item.weight_source)
            for prefix, item in module.named_modules()
            if hasattr(item, "weight_source")
        ]

    def find(self, names: Iterable[str], shape: tuple[int, ...]) -> BoxReader | None:
        """Return a reader of the tensor with one of these names, None if no source has it.

        Raises:
            ModelError: A source has it in another shape.
        """
        for name in names:
            for prefix, source in self._sources:
                own = name.removeprefix(prefix)
                if not name.startswith(prefix) or own not in source.shapes:
                    continue
                if source.shapes[own] != shape:
                    raise ModelError(
                        f"{name} has shape {shape}, but {source.shapes[own]} in the weight_source "
                        "of its module. Change its size after it was read, or read it whole."
                    )
                return partial(source.read, own)
        return None

    def check_all_used(self, module: nn.Module, drawn: Sequence[str]) -> None:
        """Raise ModelError if sources have weights for names that the module no longer has.

        Parameters in `drawn`, about to be drawn anew, may then be such weights under a new name.
        """
        known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        known |= {name for name, _ in module.named_buffers()}
        unused = [
            name
            for prefix, source in self._sources
            for name in map(prefix.__add__, source.shapes)
            if name not in known
        ]
        if unused:
            raise ModelError(
                f"The module was changed after it was given its weight_source: {unused[:3]} and "
                f"{max(len(unused) - 3, 0)} more aren't in it, but {list(drawn)[:3]} and "
                f"{max(len(drawn) - 3, 0)} more would be drawn anew. Build what you add on CPU, or "
                "change a model that was read whole."
            )


_REPACKS = "support_avx512bf16_for_cpu"
"""Attribute of bitsandbytes' 4-bit modules."""
_DIFFER = (
    "The quantized weight {} differs between the ranks' modules. Load the same folder on all "
    "ranks, or call lightning.seed_everything before the module is built."
)


def find_frozen(module: nn.Module, layout: ModelLayout, comms: Communicators) -> dict[str, Reader]:
    """Return the source of each frozen parameter that every rank can read; collective.

    All others are owned: those on the meta device without a source, which are drawn, and those that
    were trained before. A single rank owns all but what can't be cut.

    Raises:
        ConfigurationError: The ranks' quantized weights differ.
    """
    _keep_packing(module)
    sources = WeightSources(module)
    own: dict[str, Reader] = {}
    told: dict[str, tuple[bool, int]] = {}
    for spec in layout.specs:
        read = None if spec.requires_grad else _source_of(layout, spec, sources)
        if read is not None:
            own[spec.name] = read
            is_kept = isinstance(layout.slots[spec.name][0].current, StandIn)
            is_built = isinstance(read, Opaque) and not read.is_stored
            digest = fingerprint_of(read, spec.shape) if is_built else 0
            told[spec.name] = isinstance(read, InMemory) and not is_kept, digest
    if comms.world_size == 1:
        return {name: read for name, read in own.items() if isinstance(read, Opaque)}
    everyone = comms.gather_objects(told)
    found = {name: read for name, read in own.items() if all(name in item for item in everyone)}
    for name, read in found.items():
        are_built = [item[name][0] for item in everyone]
        if len({item[name][1] for item in everyone}) > 1:
            raise ConfigurationError(_DIFFER.format(name))
        if any(are_built):
            # The ranks' modules may have drawn different values. Those of the first rank that has
            # been in the run are used, or else rank 0's.
            assert isinstance(read, InMemory)
            first = 0 if all(are_built) else are_built.index(False)
            dist.broadcast(read.whole, first, group=comms.control)
    return found


def _keep_packing(module: nn.Module) -> None:
    """Keep 4-bit weights as they are while a model validates on a CPU that computes in bf16.

    bitsandbytes repacks them for inference there, and training then goes on without gradients.
    """
    for part in module.modules():
        if _REPACKS in vars(part):
            vars(part)[_REPACKS] = False


def _source_of(layout: ModelLayout, spec: ParameterSpec, sources: WeightSources) -> Reader | None:
    current = layout.slots[spec.name][0].current
    if isinstance(current, StandIn):
        return current.source
    if hasattr(current, "whole_reader"):
        return Opaque(current)
    if current.is_meta:
        return sources.find([slot.name for slot in layout.slots[spec.name]], spec.shape)
    return Opaque(current) if is_opaque(current) else InMemory(current.detach().cpu().contiguous())
