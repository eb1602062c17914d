"""Gather slices into whole tensors, and cut whole tensors into slices.

A checkpoint is consolidated: it has whole tensors under the module's own names, so plain Lightning
reads it, and it resumes under any plan. Whole tensors exist one at a time, on CPU; only the rank
that writes them has all.

Callbacks such as Lightning's `WeightAveraging` copy the module in their `setup`, before its
parameters become slices. Such a copy is cut like the module, so a rank averages its own slices
only; the copy's state is gathered when it is saved, and cut when it is loaded.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_hetero.core.errors import CheckpointError, ConfigurationError
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.setup.layout import Slot
from lightning_hetero.runtime.slices.frozen import Opaque
from lightning_hetero.runtime.slices.known_by_shape import StandIn
from lightning_hetero.runtime.slices.weights import SliceStore
from lightning_hetero.runtime.slices.wholes import gather_everywhere, gather_on_rank_0

_BESIDE_WEIGHT = ("SCB", "weight_format")
"""Keys in the `state_dict` of bitsandbytes' modules."""


@contextmanager
def _in_slots(store: SliceStore, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Context in which the module has whole tensors as parameters.

    Parameters that the user has put into the module after the run stay there.
    """
    before = []
    for name, tensor in tensors.items():
        master = store.masters[name]
        whole = tensor
        if not isinstance(whole, nn.Parameter):
            whole = nn.Parameter(tensor, requires_grad=master.requires_grad)
        for slot in store.layout.slots[name]:
            current = slot.current
            if current is master or isinstance(current, StandIn):
                before.append((slot, current))
                slot.put(whole)
    try:
        yield
    finally:
        for slot, current in before:
            slot.put(current)


def whole_module_state(
    store: SliceStore, comms: Communicators, module: nn.Module
) -> dict[str, Any]:
    """Return the whole module's `state_dict` on rank 0, an empty one elsewhere.

    Called by all ranks. It is made by the module's own `state_dict`, hooks included. It has no
    quantized weights, and no frozen ones if the module's `strict_loading` is False.
    """
    is_strict = getattr(module, "strict_loading", True)
    readers = store.frozen.sources.items()
    quantized = {name: read.like for name, read in readers if isinstance(read, Opaque)}
    left_out = list(quantized) if is_strict else list(store.frozen.sources)
    wholes = gather_on_rank_0(store, comms, _masters_but(store, left_out))
    if comms.global_rank != 0:
        return {}
    unread = {name: torch.empty(store.specs[name].shape, device="meta") for name in left_out}
    with _in_slots(store, wholes | unread | quantized):
        state: dict[str, Any] = module.state_dict()
    return without_weights(
        state, {slot.name for name in left_out for slot in store.layout.slots[name]}
    )


def without_weights(state: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return a `state_dict` without these weights, and without other entries of quantized ones."""
    absent = {*names, *(name.removesuffix("weight") + k for name in names for k in _BESIDE_WEIGHT)}
    return {
        name: value
        for name, value in state.items()
        if name not in absent and name.rpartition(".weight.")[0] + ".weight" not in absent
    }


def _masters_but(store: SliceStore, left_out: Sequence[str]) -> dict[str, tuple[str, Tensor]]:
    masters = store.masters.items()
    return {name: (name, master) for name, master in masters if name not in left_out}


def load_module_state(
    store: SliceStore, module: nn.Module, state: Mapping[str, Any], *, strict: bool
) -> None:
    """Take this rank's slices out of a whole module's `state_dict`.

    The module's own `load_state_dict` reads it, hooks and checks included. Not collective.
    """
    current = {name: torch.empty(store.specs[name].shape, device="meta") for name in store.masters}
    buffers = {name: buffer.device for name, buffer in module.named_buffers()}
    absent = {
        slot.name: current[name]
        for name in store.frozen.sources
        for slot in store.layout.slots[name]
        if slot.name not in state
    }
    with _in_slots(store, current):
        module.load_state_dict({**absent, **state}, strict=strict, assign=True)
        loaded = {name: store.layout.slots[name][0].current.detach() for name in store.masters}
    for name, whole in loaded.items():
        if not whole.is_meta:
            store.adopt(name, whole)
    for prefix, owner in module.named_modules():
        for attribute, buffer in owner._buffers.items():
            device = buffers.get(f"{prefix}.{attribute}" if prefix else attribute)
            if buffer is not None and device is not None:
                owner._buffers[attribute] = buffer.to(device)


def spread_whole(store: SliceStore, comms: Communicators) -> None:
    """Put whole parameters, on CPU, back into the module on every rank; collective."""
    masters = _masters_but(store, list(store.frozen.sources))
    for name, whole in gather_everywhere(store, comms, masters).items():
        requires_grad = store.masters[name].requires_grad
        store.layout.put(name, nn.Parameter(whole, requires_grad=requires_grad))
    spread_frozen(store)


def spread_frozen(store: SliceStore) -> None:
    """Put the whole weights that have no owners back into the module."""
    for name in store.frozen.sources:
        whole = store.frozen.whole(store.specs[name])
        if not isinstance(whole, nn.Parameter):
            whole = nn.Parameter(whole, requires_grad=False)
        store.layout.put(name, whole)


def leave_stand_ins(store: SliceStore) -> None:
    """Put stand-ins for slices into the module; they keep the store for a next run."""
    for name, slots in store.layout.slots.items():
        stand_in = StandIn.of(store, name)
        for slot in slots:
            if slot.current is store.masters[name]:
                slot.put(stand_in)


def stand_for_awaited(store: SliceStore, trains: Mapping[str, bool]) -> list[tuple[Slot, StandIn]]:
    """Return each place of a parameter with a stand-in, until its values are recovered."""
    found = []
    for name, slots in store.layout.slots.items():
        awaited = StandIn.of(store, name, is_awaited=True)
        awaited.requires_grad = trains.get(name, awaited.requires_grad)
        found += [(slot, awaited) for slot in slots]
    return found


def _names_of(store: SliceStore, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the optimizer's parameters in the order of its `state_dict`."""
    names = {id(master): name for name, master in store.masters.items()}
    try:
        return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    except KeyError:
        raise ConfigurationError(
            "An optimizer holds a tensor that isn't a parameter of the module. It can't be saved. "
            "Register every optimized tensor as a parameter of the LightningModule."
        ) from None


def gather_optimizer_state(
    store: SliceStore, comms: Communicators, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Return the optimizer's `state_dict` over whole parameters on rank 0, {} elsewhere.

    Collective over all ranks.

    Raises:
        ConfigurationError: A state tensor has neither its slice's shape nor one element, so it
            can't be put together.
    """
    names = _names_of(store, optimizer)
    local = optimizer.state_dict()
    kinds = _gather_kinds(store, comms, names, local["state"])
    sliced: dict[tuple[int, str], tuple[str, Tensor]] = {}
    for index, name in enumerate(names):
        for key, (is_sliced, dtype) in kinds[index].items():
            if is_sliced:
                own = local["state"].get(index, {}).get(key)
                if own is None:
                    own = torch.empty(store.shape_of(name), dtype=dtype)
                sliced[index, key] = name, own
    wholes = gather_on_rank_0(store, comms, sliced)
    state: dict[int, dict[str, Any]] = {}
    for index, name in enumerate(names):
        for key, (is_sliced, _) in kinds[index].items():
            if is_sliced:
                whole: Any = wholes.pop((index, key), None)
            else:
                value = local["state"].get(index, {}).get(key)
                whole = _from_owner(comms, store.slices[name][0].owner, value)
            if comms.global_rank == 0:
                state.setdefault(index, {})[key] = whole
    return {"state": state, "param_groups": local["param_groups"]} if comms.global_rank == 0 else {}


def agree_on_groups(
    store: SliceStore, comms: Communicators, optimizer: torch.optim.Optimizer
) -> None:
    """Give each of the optimizer's groups the parameters that it has on any rank.

    Called by all ranks. Callbacks that thaw parameters skip a parameter if the optimizer has an
    equal one, and all slices without rows are equal.
    """
    names = iter(_names_of(store, optimizer))
    groups = [list(islice(names, len(group["params"]))) for group in optimizer.param_groups]
    gathered = comms.gather_objects(groups)
    most = max(gathered, key=len)
    if any(len(item) < len(most) for item in gathered):
        # A rank doesn't add a new group that is empty there.
        options = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        told = max(comms.gather_objects(options), key=len)
        for names_of, option in list(zip(most, told, strict=True))[len(groups) :]:
            masters = [store.masters[name] for name in names_of]
            optimizer.add_param_group({**option, "params": masters})
        gathered = [item + most[len(item) :] for item in gathered]
    for group, *found in zip(optimizer.param_groups, *gathered, strict=True):
        if any(item != found[0] for item in found):
            united = {name for item in found for name in item}
            group["params"] = [store.masters[name] for name in store.masters if name in united]


def _gather_kinds(
    store: SliceStore,
    comms: Communicators,
    names: Sequence[str],
    state: Mapping[int, Mapping[str, Any]],
) -> list[dict[str, tuple[bool, torch.dtype | None]]]:
    """Return the keys of each parameter's state, whether they are cut like it, and their dtypes."""
    own: dict[int, dict[str, tuple[bool, torch.dtype | None]]] = {}
    for index, values in state.items():
        name = names[index]
        if store.masters[name].numel():
            own[index] = {key: _kind(store, name, key, value) for key, value in values.items()}
    merged: list[dict[str, tuple[bool, torch.dtype | None]]] = [{} for _ in names]
    for kinds in comms.gather_objects(own):
        for index, keys in kinds.items():
            merged[index].update(keys)
    return merged


def _kind(store: SliceStore, name: str, key: str, value: Any) -> tuple[bool, torch.dtype | None]:
    if not isinstance(value, Tensor) or value.ndim == 0:
        return False, None
    if value.shape == store.masters[name].shape:
        return True, value.dtype
    if len(store.slices[name]) == 1 or value.numel() == 1:
        return False, None
    raise ConfigurationError(
        f"The optimizer's {key} of {name} has shape {tuple(value.shape)} but the slice has "
        f"{tuple(store.masters[name].shape)}: it isn't element-wise and can't be put together. Use "
        'HeteroStrategy(ownership="parameter").'
    )


def _from_owner(comms: Communicators, owner: int, value: Any) -> Any:
    """Return, on rank 0, the value that the owner sends; None on other ranks."""
    if owner == 0:
        return value
    if comms.global_rank == owner:
        dist.send_object_list([value], 0, group=comms.control)
    elif comms.global_rank == 0:
        received: list[Any] = [None]
        dist.recv_object_list(received, owner, group=comms.control)
        return received[0]
    return None


def scatter_optimizer_state(
    store: SliceStore, optimizer: torch.optim.Optimizer, whole: Mapping[str, Any]
) -> None:
    """Load this rank's part of an optimizer's `state_dict` over whole parameters.

    Raises:
        CheckpointError: It was saved for other parameters.
    """
    names = _names_of(store, optimizer)
    saved = sum(len(group["params"]) for group in whole["param_groups"])
    if saved != len(names):
        raise CheckpointError(
            f"The checkpoint's optimizer has {saved} parameters but this one has {len(names)}. "
            "Configure the optimizer as it was when the checkpoint was written."
        )
    state = {}
    for index, name in enumerate(names):
        if index in whole["state"] and store.masters[name].numel():
            state[index] = {
                key: _own_part(store, name, value) for key, value in whole["state"][index].items()
            }
    optimizer.load_state_dict({"state": state, "param_groups": whole["param_groups"]})


def _own_part(store: SliceStore, name: str, value: Any) -> Any:
    spec = store.specs[name]
    if isinstance(value, Tensor) and value.ndim and tuple(value.shape) == spec.shape:
        rows = store.cut(name, value)
        return rows.clone(memory_format=torch.contiguous_format)
    return value


def cut_copy(copy: nn.Module, store: SliceStore, comms: Communicators) -> None:
    """Replace a whole copy's parameters by copies of this rank's slices.

    From then on all ranks must call its `state_dict` together: rank 0 gets whole tensors.
    """
    for name, master in store.masters.items():
        own = nn.Parameter(master.detach().clone(), requires_grad=master.requires_grad)
        for slot in store.layout.slots[name]:
            owner, _, attribute = slot.name.rpartition(".")
            copy.get_submodule(owner)._parameters[attribute] = own

    def join(_: nn.Module, state: dict[str, Any], prefix: str, __: Mapping[str, Any]) -> None:
        slots = {name: store.layout.slots[name] for name in store.masters}
        own = {name: (name, state[prefix + slots[name][0].name]) for name in slots}
        for name, whole in gather_on_rank_0(store, comms, own).items():
            state.update({prefix + slot.name: whole for slot in slots[name]})

    copy.register_state_dict_post_hook(join)  # type: ignore[no-untyped-call]
    cut_when_loading(copy, store)


def cut_when_loading(module: nn.Module, store: SliceStore) -> list[RemovableHandle]:
    """Let `load_state_dict` of a module, or a part of it, take whole tensors for slices."""
    inside = defaultdict[str, list[tuple[str, str]]](list)
    for name in store.specs:
        for slot in store.layout.slots[name]:
            words = slot.name.split(".")
            for depth in range(len(words)):
                inside[".".join(words[:depth])].append((".".join(words[depth:]), name))

    def cut_inside(own: Sequence[tuple[str, str]]) -> Callable[..., None]:
        def cut(part: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
            for place, name in own:
                value = state.get(prefix + place)
                if value is None:
                    continue
                owner, _dot, attribute = place.rpartition(".")
                parameter = part.get_submodule(owner)._parameters[attribute]
                if parameter is None or value.shape == parameter.shape:
                    continue
                if tuple(value.shape) == store.specs[name].shape:
                    state[prefix + place] = store.cut(name, value).reshape(parameter.shape)

        return cut

    return [
        module.get_submodule(path).register_load_state_dict_pre_hook(cut_inside(own))  # type: ignore[no-untyped-call]
        for path, own in inside.items()
    ]
