"""Keep copies of the module that were made while it was whole in step with its slices.

Callbacks such as Lightning's `WeightAveraging` copy the module in their `setup`, before its
parameters become slices. Such a copy is cut like the module, so that a rank averages its own slices
only; what it saves is put together again, and what it loads is cut.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.slices.state import gather_rows
from lightning_hetero.runtime.slices.weights import SliceStore, narrow_rows

__all__ = ["cut_copy", "cut_when_loading"]


def cut_copy(copy: nn.Module, store: SliceStore, comms: Communicators) -> None:
    """Replace a whole copy's parameters by copies of this rank's slices.

    Its `state_dict` becomes collective over all ranks: rank 0 gets whole tensors.
    """
    for name, master in store.masters.items():
        own = nn.Parameter(master.detach().clone(), requires_grad=master.requires_grad)
        for slot in store.layout.slots[name]:
            owner, _, attribute = slot.name.rpartition(".")
            copy.get_submodule(owner)._parameters[attribute] = own

    def join(_: nn.Module, state: dict[str, Any], prefix: str, __: Mapping[str, Any]) -> None:
        for name in store.masters:
            slots = store.layout.slots[name]
            whole = gather_rows(store, comms, name, state[prefix + slots[0].name], everywhere=False)
            if whole is not None:
                state.update({prefix + slot.name: whole for slot in slots})

    copy.register_state_dict_post_hook(join)  # type: ignore[no-untyped-call]
    cut_when_loading(copy, store)


def cut_when_loading(module: nn.Module, store: SliceStore) -> RemovableHandle:
    """Let `module.load_state_dict` take whole tensors while its parameters are slices."""

    def cut(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, spec in store.specs.items():
            for slot in store.layout.slots[name]:
                owner, _dot, attribute = slot.name.rpartition(".")
                parameter = module.get_submodule(owner)._parameters[attribute]
                value = state.get(prefix + slot.name)
                if parameter is None or value is None or value.shape == parameter.shape:
                    continue
                if tuple(value.shape) == spec.shape:
                    rows = narrow_rows(value, spec, *store.intervals[name])
                    state[prefix + slot.name] = rows.reshape(parameter.shape)

    return module.register_load_state_dict_pre_hook(cut)  # type: ignore[no-untyped-call,no-any-return]
