"""Give every slice its first values, whatever state the user's module is in.

Where they come from depends on the parameter:

- If it has values, rank 0 sends them, since the ranks' modules may have drawn different ones.
- If an earlier run of this process left it as slices, ranks keep these, and exchange rows only
  where other ranks own them now.
- If its values will be recovered, as after the loss of a rank, it is NaN until then.
- If it is on the meta device, it is read from the `weight_source` of a module around it, such as
  the folder of a pretrained model; each rank reads only the rows that it keeps.
- If there is no source either, the model's own functions draw it: `_init_weights` of the nearest
  module around it that has this method, as in Hugging Face models, or `reset_parameters`. They run
  on the CPU, for one layer at a time (or one module outside the layers), each with a seed of its
  own. So weights depend neither on the plan nor on the devices, and no rank ever has the whole
  model.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hetero.core.errors import ConfigurationError, ModelError
from lightning_hetero.runtime.random_state import PreservedRandomState, seed_of
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.setup.layout import ModelLayout
from lightning_hetero.runtime.setup.weight_sources import BoxReader, WeightSources
from lightning_hetero.runtime.slices.known_by_shape import StandIn
from lightning_hetero.runtime.slices.weights import SliceStore
from lightning_hetero.runtime.slices.wholes import gather_everywhere

_Initializer = Callable[[nn.Module], None]
_Kept = tuple[SliceStore, str]
"""The store of an earlier run, and a parameter's name in it."""


@dataclass(frozen=True, kw_only=True)
class _Unit:
    """Parameters that are drawn together: those of a layer, or of one module outside the layers."""

    name: str
    parameters: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    """Modules to initialise: those in the unit, then those around it, children before parents."""


def materialize(module: nn.Module, store: SliceStore, comms: Communicators, *, seed: int) -> None:
    """Give every slice of a module its values; called by all ranks.

    Args:
        module: The module that `store` describes. A parameter is on the meta device on all ranks
            or on none.
        store: This rank's slices, still without values.
        comms: The communicators.
        seed: Seed of drawn weights; the same on all ranks.

    Raises:
        ConfigurationError: A parameter is on the meta device, or left by an earlier run, on some
            ranks only; or that run had more ranks.
        ModelError: Nothing sets a parameter or buffer on the meta device, or a source is unfit.
    """
    layout = store.layout
    kept, awaited, absent = _find_states(store, comms)
    sources = WeightSources(module)
    readers = {
        name: sources.find([slot.name for slot in layout.slots[name]], store.specs[name].shape)
        for name in absent
        if name not in store.frozen
    }
    unread = [name for name, read in readers.items() if read is None]
    if unread:
        sources.check_all_used(module, unread)
    drawn: dict[str, Tensor] = {}
    with PreservedRandomState(), torch.no_grad(), _all_on_meta(layout):
        initializers = _initializers(module)
        for unit in _units(module, layout, unread):
            if any(store.owns(name) for name in unit.parameters):
                drawn |= _draw(unit, store, initializers, seed)
        _fill_buffers(module, sources, initializers, seed)
    for name in store.specs:
        if name in store.frozen:
            dtype = layout.slots[name][0].current.dtype
            store.adopt_rows(name, torch.empty(store.shape_of(name), dtype=dtype))
        elif name in kept:
            _adopt_kept(store, comms, name, kept[name])
        elif name in readers:
            rows = drawn.pop(name) if name in drawn else _read_rows(store, name, readers[name])
            store.adopt_rows(name, rows)
        else:
            _adopt_built(store, comms, name, is_awaited=name in awaited)


def _find_states(
    store: SliceStore, comms: Communicators
) -> tuple[dict[str, _Kept], frozenset[str], list[str]]:
    """Return slices of an earlier run, names to be recovered, and names on meta; collective.

    Every rank has a stand-in or none, else ConfigurationError is raised. If any rank awaits the
    recovery of a parameter, all ranks do.
    """
    first = {name: slots[0].current for name, slots in store.layout.slots.items()}
    stand_ins = {name: item for name, item in first.items() if isinstance(item, StandIn)}
    own = [name for name in store.specs if name in stand_ins and stand_ins[name].store is None]
    kept = {name: (i.store, i.parameter) for name, i in stand_ins.items() if i.store is not None}
    _check_owners(kept, comms)
    meta = [name for name in store.specs if first[name].is_meta and name not in kept]
    everyone = comms.gather_objects((sorted(kept), own, meta))
    names = [item for item, _, _ in everyone]
    if any(item != names[0] for item in names):
        raise ConfigurationError(
            "The module's parameters are slices of a run before on some ranks only; numbers of "
            f"them by rank: {[len(item) for item in names]}. Load whole weights on every rank or "
            "on none."
        )
    awaited = frozenset(name for _, found, _ in everyone for name in found)
    absent = [[name for name in found if name not in awaited] for _, _, found in everyone]
    if any(item != absent[0] for item in absent):
        counts = {global_rank: len(item) for global_rank, item in enumerate(absent)}
        raise ConfigurationError(
            "The ranks' modules differ in which parameters are on the meta device; numbers of them "
            f"by rank: {counts}. Build the module alike on all ranks."
        )
    return kept, awaited, absent[comms.global_rank]


def _check_owners(kept: Mapping[str, _Kept], comms: Communicators) -> None:
    slices = (item for before, name in kept.values() for item in before.slices[name])
    owners = {rank for item in slices for rank in item.ranks}
    if any(owner >= comms.world_size for owner in owners):
        raise ConfigurationError(
            f"The module's parameters are slices of a run on {max(owners) + 1} ranks or more, but "
            f"{comms.world_size} run now. Use HeteroStrategy(whole_after_run=True) for the run "
            "before."
        )


def _adopt_kept(store: SliceStore, comms: Communicators, name: str, kept: _Kept) -> None:
    """Adopt this rank's slice of a parameter from an earlier run; collective over all ranks."""
    before, old = kept
    own = before.masters[old].detach()
    unmoved = before.slices[old] == store.slices[name]
    if unmoved and before.specs[old].cut_dim == store.specs[name].cut_dim:
        store.adopt_rows(name, own)
    else:
        (whole,) = gather_everywhere(before, comms, {old: (old, own)}).values()
        store.adopt(name, whole)


def _adopt_built(store: SliceStore, comms: Communicators, name: str, *, is_awaited: bool) -> None:
    """Adopt this rank's slice of a parameter with values, or one whose values are awaited."""
    current = store.layout.slots[name][0].current
    if is_awaited:
        # With NaN, a value that is never recovered makes the first loss NaN.
        rows = torch.full(store.shape_of(name), torch.nan, dtype=current.dtype)
        store.adopt_rows(name, rows)
        return
    whole = current.detach()
    if comms.world_size > 1:
        # The ranks' modules may have drawn different values: rank 0's are used.
        whole = whole.contiguous()
        dist.broadcast(whole, 0, group=comms.control)
    store.adopt(name, whole)


def _read_rows(store: SliceStore, name: str, read: BoxReader | None) -> Tensor:
    """Return this rank's slice as read from its source; it is empty if this rank keeps no rows."""
    spec = store.specs[name]
    dtype = store.layout.slots[name][0].current.dtype
    if not store.owns(name):
        return torch.empty(store.shape_of(name), dtype=dtype)
    assert read is not None, f"{name} was neither drawn nor found"
    parts = [
        read(tuple(own if d == spec.cut_dim else (0, size) for d, size in enumerate(spec.shape)))
        for own in store.kept[name]
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, spec.cut_dim)).to(dtype)


# -- drawing ------------------------------------------------------------------------------------


def _initializers(module: nn.Module) -> dict[nn.Module, _Initializer]:
    """Return for each module the `_init_weights` of itself or of the nearest one around it."""
    found: dict[nn.Module, _Initializer] = {}

    def visit(item: nn.Module, initializer: _Initializer) -> None:
        own = getattr(item, "_init_weights", None)
        if callable(own) and len(inspect.signature(own).parameters) == 1:
            initializer = own
        found[item] = initializer
        for child in item.children():
            visit(child, initializer)

    visit(module, lambda _: None)
    return found


def _initialize(
    item: nn.Module,
    initializers: Mapping[nn.Module, _Initializer],
    members: Mapping[str, Tensor | None],
    *,
    highest: bool = False,
) -> None:
    """Set a module's own `members`, its parameters or buffers, that aren't on the meta device.

    Args:
        item: The module.
        initializers: Its functions, and those of others.
        members: The module's own mapping, in which its functions may put other tensors.
        highest: With which value members are marked as unset.
    """
    initializers[item](item)
    reset = getattr(item, "reset_parameters", None)
    if callable(reset) and any(
        _is_marked(tensor, highest=highest).any() for tensor in members.values()
    ):
        # As constructors do on the CPU, before `_init_weights` runs.
        reset()
        initializers[item](item)


def _units(module: nn.Module, layout: ModelLayout, names: Sequence[str]) -> Iterator[_Unit]:
    """Group parameters into units, in the order of the layout."""
    specs = {spec.name: spec for spec in layout.specs}
    members: dict[str, list[str]] = defaultdict(list)
    for name in names:
        unit_name = layout.slots[name][0].name.rpartition(".")[0]
        if layout.layers and specs[name].layer is not None:
            unit_name = f"{layout.layers_name}.{specs[name].layer}".removeprefix(".")
        members[unit_name].append(name)
    for unit_name, parameters in members.items():
        parts = unit_name.split(".") if unit_name else []
        around = [module.get_submodule(".".join(parts[:end])) for end in range(len(parts))]
        own = module.get_submodule(unit_name)
        inside = list(own.modules()) if own in layout.layers else [own]
        yield _Unit(
            name=unit_name,
            parameters=tuple(parameters),
            modules=(*reversed(inside), *reversed(around)),
        )


def _draw(
    unit: _Unit, store: SliceStore, initializers: Mapping[nn.Module, _Initializer], seed: int
) -> dict[str, Tensor]:
    """Return this rank's slices of a unit's parameters, all of which are drawn."""
    slots = store.layout.slots
    wholes = {}
    for name in unit.parameters:
        like = slots[name][0].current
        wholes[name] = nn.Parameter(_marked_like(like), requires_grad=like.requires_grad)
        store.layout.put(name, wholes[name])
    torch.default_generator.manual_seed(seed_of(seed, *unit.name.encode()))
    for item in unit.modules:
        _initialize(item, initializers, item._parameters)
    for name, whole in wholes.items():
        if _is_marked(whole).any():
            raise _nothing_sets(f"Parameter {name}")
        store.layout.put(name, _on_meta(whole))
    return {
        name: store.cut(name, whole).reshape(store.shape_of(name)).clone()
        for name, whole in wholes.items()
    }


def _fill_buffers(
    module: nn.Module,
    sources: WeightSources,
    initializers: Mapping[nn.Module, _Initializer],
    seed: int,
) -> None:
    """Read or compute the buffers on the meta device; every rank has all of them."""
    for prefix, item in module.named_modules():
        absent = {n: b for n, b in item._buffers.items() if b is not None and b.is_meta}
        if not absent:
            continue
        computed = []
        for highest in (False, True):
            item._buffers.update(
                {n: _marked_like(buffer, highest=highest) for n, buffer in absent.items()}
            )
            torch.default_generator.manual_seed(seed_of(seed, *prefix.encode()))
            _initialize(item, initializers, item._buffers, highest=highest)
            computed.append(dict(item._buffers))
        for attribute, buffer in absent.items():
            name = f"{prefix}.{attribute}" if prefix else attribute
            read = sources.find([name], tuple(buffer.shape))
            if read is not None:
                box = tuple((0, size) for size in buffer.shape)
                item._buffers[attribute] = read(box).to(buffer.dtype)
            elif _is_unset(*(found[attribute] for found in computed)):
                raise _nothing_sets(f"Buffer {name}")


# -- tensors without values ---------------------------------------------------------------------


@contextmanager
def _all_on_meta(layout: ModelLayout) -> Iterator[None]:
    """Hold meta tensors in all slots in this context: initialisers write to them without effect."""
    own = {name: slots[0].current for name, slots in layout.slots.items()}
    for name, parameter in own.items():
        layout.put(name, _on_meta(parameter))
    try:
        yield
    finally:
        for name, parameter in own.items():
            layout.put(name, parameter)


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def _marker(dtype: torch.dtype, *, highest: bool) -> float:
    """Return the value of a dtype that means "unset": NaN, else the lowest or highest one."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype == torch.bool:
        return highest
    return torch.iinfo(dtype).max if highest else torch.iinfo(dtype).min


def _marked_like(tensor: Tensor, *, highest: bool = False) -> Tensor:
    """Return a CPU tensor of values that mean "unset"."""
    marker = _marker(tensor.dtype, highest=highest)
    return torch.full(tensor.shape, marker, dtype=tensor.dtype, device="cpu")


def _is_marked(tensor: Tensor | None, *, highest: bool = False) -> Tensor:
    """Return for each value whether it means "unset"; never on the meta device."""
    if tensor is None or tensor.is_meta:
        return torch.tensor(False)
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.isnan()
    return tensor == _marker(tensor.dtype, highest=highest)


def _is_unset(first: Tensor | None, second: Tensor | None) -> bool:
    """Return whether a buffer kept both markers, each of which may be meant if it isn't NaN."""
    return bool((_is_marked(first) & _is_marked(second, highest=True)).any())


def _nothing_sets(what: str) -> ModelError:
    return ModelError(
        f"{what} is on the meta device, and neither _init_weights nor reset_parameters sets it. "
        "Let one of them do so, give the module a weight_source, or build it on CPU."
    )
