"""Find the weights that never train, and where each rank reads them."""

import torch.distributed as dist
from torch import nn

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.slices import ParameterSpec
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.setup.layout import ModelLayout
from lightning_hetero.runtime.setup.weight_sources import WeightSources
from lightning_hetero.runtime.slices.frozen import (
    InMemory,
    Opaque,
    Reader,
    fingerprint_of,
    is_opaque,
)
from lightning_hetero.runtime.slices.known_by_shape import Awaited, StandIn

__all__ = ["find_frozen"]

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

    Args:
        module: The module.
        layout: Its parameters.
        comms: All ranks.

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
            is_kept = isinstance(layout.slots[spec.name][0].current, StandIn | Awaited)
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
        return current.store.frozen.sources.get(current.parameter)
    if isinstance(current, Awaited):
        return current.source
    if hasattr(current, "whole_reader"):
        return Opaque(current)
    if current.is_meta:
        return sources.find([slot.name for slot in layout.slots[spec.name]], spec.shape)
    return Opaque(current) if is_opaque(current) else InMemory(current.detach().cpu().contiguous())
