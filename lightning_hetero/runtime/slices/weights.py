"""Keep a rank's slices, and put the weights of its stage into the module while steps run.

Outside of steps each parameter of the module is this rank's slice of it, an fp32 master, which may
be empty: optimizers, clipping, EMA and checkpoints work on slices. During steps the module has
*compute weights* in place of slices: the rank's shards of its stages' parameters, in the compute
dtype. Parameters that only other stages use are *stubs*: tensors of the full shape, without memory
and values. Example: rank 0 of two runs layers 0 and 1, rank 1 runs layers 2 and 3, and both own
half of each weight. In a step rank 1 has whole weights of layers 2 and 3, and stubs for layers 0
and 1; between steps it has half of every weight.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from lightning_hetero.exchange.owners import list_owners
from lightning_hetero.exchange.slices import Interval, ParameterSpec, Slice, kept_rows
from lightning_hetero.exchange.transfers import TransferTable
from lightning_hetero.runtime.setup.layout import ModelLayout
from lightning_hetero.runtime.slices.frozen import FrozenWeights, is_opaque
from lightning_hetero.runtime.slices.host_memory import PinnedBlocks
from lightning_hetero.runtime.slices.known_by_shape import hide_values, show_values
from lightning_hetero.runtime.unknown import Origin, Unknown

_MASTER_BYTES = 4
_OF_CUT = (
    "A step uses parameter {name} outside of its module, but tensor parallelism has cut it among "
    "ranks. Compute what needs it inside the module, leave it out of the tensor-parallel plan, or "
    "use a plan with degree 1."
)


def narrow_rows(tensor: Tensor, spec: ParameterSpec, start: int, stop: int) -> Tensor:
    """Return rows [start, stop) of the cut dim as a view; a scalar counts as one row."""
    if not spec.shape:
        return tensor.reshape(1)[start:stop]
    return tensor.narrow(spec.cut_dim, start, stop - start)


def local_rows(intervals: Sequence[Interval], start: int, stop: int) -> Interval | None:
    """Return where rows are in concatenated intervals; None if no interval has all of them."""
    offset = 0
    for first, last in intervals:
        if first <= start and stop <= last:
            return offset + start - first, offset + stop - first
        offset += last - first
    return None


class SliceStore:
    """The master slices of one rank.

    The parameters of `layout` are still whole. Slices are on the `device` where the rank computes,
    or, with `on_host`, in the host's memory; those with floating-point values get `dtype`, unless
    it is None. Those of `frozen` weights, which have no owners, are empty on all ranks.
    """

    def __init__(  # noqa: PLR0913 - what a rank keeps, and where
        self,
        layout: ModelLayout,
        slices: Mapping[str, tuple[Slice, ...]],
        *,
        global_rank: int,
        device: torch.device,
        dtype: torch.dtype | None = None,
        on_host: bool = False,
        frozen: FrozenWeights | None = None,
    ) -> None:
        self.layout = layout
        self.slices = dict(slices)
        self.frozen = FrozenWeights() if frozen is None else frozen
        self.global_rank = global_rank
        self.device = device
        self.owned_device = torch.device("cpu") if on_host else device
        """The device of the slices, and of the optimizer's state."""
        self.specs = {spec.name: spec for spec in layout.specs}
        self.kept: dict[str, tuple[Interval, ...]] = {}
        """The rows of each parameter that this rank keeps, as owner or standby: its slice."""
        self.owned: dict[str, tuple[Interval, ...]] = {}
        """The rows that it owns: only the owner saves them, and counts them in norms."""
        self.has_standbys = False
        """Whether ranks keep more than they own."""
        self._note_owners(slices)
        self.dtype = dtype
        self._places = {name: 2**20 + index for index, name in enumerate(self.specs)}
        num_elements = sum(math.prod(self.shape_of(name)) for name in self.specs)
        is_pinned = on_host and device.type == "cuda"
        self._pinned = PinnedBlocks(_MASTER_BYTES * num_elements) if is_pinned else None
        self.masters: dict[str, nn.Parameter] = {}
        self._stubs: dict[str, nn.Parameter] = {}

    def _note_owners(self, slices: Mapping[str, tuple[Slice, ...]]) -> None:
        for names, items in list_owners(slices):
            owned = tuple((i.start, i.stop) for i in items if i.owner == self.global_rank)
            self.owned |= dict.fromkeys(names, owned)
            self.kept |= dict.fromkeys(names, kept_rows(items, self.global_rank))
            self.has_standbys |= any(item.standby is not None for item in items)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of this rank's slice of a parameter."""
        if name in self.frozen:
            # Each empty slice gets a second dim of another size. Lightning's callbacks that
            # unfreeze compare parameters by `==`, and two tensors of shape (0,) would be equal.
            return 0, self._places[name]
        num_rows = sum(stop - start for start, stop in self.kept[name])
        return self.specs[name].shape_of_rows(num_rows)

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's rows of a whole parameter.

        They are a view of it unless they are several intervals. The rows of a scalar have one dim.
        """
        spec, kept = self.specs[name], self.kept[name]
        if len(kept) > 1:
            return torch.cat([narrow_rows(whole, spec, *rows) for rows in kept], spec.cut_dim)
        return narrow_rows(whole, spec, *(kept[0] if kept else (0, 0)))

    def rows(self, name: str, own: Tensor, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of a parameter from `own`, a tensor shaped like the slice."""
        local = local_rows(self.kept[name], start, stop)
        assert local is not None, f"rows {start}-{stop} of {name} are not kept here"
        return narrow_rows(own, self.specs[name], *local)

    def owned_parts(self, name: str, own: Tensor) -> list[Tensor]:
        """Return views of the rows that this rank owns, from `own`, shaped like its slice."""
        if not self.has_standbys:
            return [own]
        return [self.rows(name, own, *rows) for rows in self.owned[name]]

    def adopt(self, name: str, whole: Tensor) -> None:
        """Keep this rank's slice of a whole parameter and register it in the module.

        The module drops the previous tensor, so memory is freed parameter by parameter.
        """
        if name in self.frozen:
            self.frozen.replace(self.specs[name], whole.detach())
            if name in self.masters:
                return
        rows = self.cut(name, whole.detach())
        if name in self.masters:
            # In place: the slice may be a view of the compute weights.
            master = self.masters[name]
            master.data.copy_(rows.reshape(master.shape))
        else:
            self.adopt_rows(name, rows)

    def adopt_rows(self, name: str, rows: Tensor) -> None:
        """Keep a copy of this rank's slice of a parameter and register it in the module."""
        own = self._copy(name, rows)
        self.masters[name] = nn.Parameter(own, requires_grad=self.specs[name].requires_grad)
        self.layout.put(name, self.masters[name])

    def _copy(self, name: str, rows: Tensor) -> Tensor:
        dtype = self.dtype if self.dtype and rows.is_floating_point() else rows.dtype
        if self._pinned is None:
            own = torch.empty(self.shape_of(name), dtype=dtype, device=self.owned_device)
        else:
            own = self._pinned.empty(self.shape_of(name), dtype)
        return own.copy_(rows.reshape(own.shape))

    def thaw(self, names: Sequence[str]) -> None:
        """Give owners to frozen weights that have had none; parameters remain the same objects."""
        slices = self.frozen.find_owners([self.specs[name] for name in names])
        self.slices |= slices
        self._note_owners(slices)
        for name in names:
            rows = self.frozen.thaw(self.specs[name], self.kept[name])
            self.masters[name].data = self._copy(name, rows)

    def owns(self, name: str) -> bool:
        """Whether this rank keeps any rows of a parameter, as owner or standby."""
        return any(stop > start for start, stop in self.kept[name])

    def stub(self, name: str, dtype: torch.dtype) -> nn.Parameter:
        """Return a parameter's stub, for stages that don't have its values; always the same."""
        kind = dtype if self.masters[name].is_floating_point() else self.masters[name].dtype
        if name not in self._stubs:
            self._stubs[name] = _make_stub(self.specs[name], kind, self.device)
        return self._stubs[name]

    def follow_freezing(self) -> bool:
        """Update the specs of parameters that were frozen or thawed; return whether any were."""
        changed = [
            name
            for name, master in self.masters.items()
            if master.requires_grad is not self.specs[name].requires_grad
        ]
        for name in changed:
            flag = self.masters[name].requires_grad
            self._stubs.pop(name, None)
            self.specs[name] = replace(self.specs[name], requires_grad=flag)
        if thawed := [name for name in changed if name in self.frozen]:
            self.thaw(thawed)
        return bool(changed)


class ComputeWeights:
    """The weights that one rank computes with under one plan.

    With `share_memory` slices are views of the compute weights where their dtypes are equal. Then
    rows that are both owned and held take memory once and needn't be copied. Only for a plan that
    stays.
    """

    def __init__(
        self, store: SliceStore, table: TransferTable, *, dtype: torch.dtype, share_memory: bool
    ) -> None:
        self.store = store
        self.table = table
        self.shards: dict[str, nn.Parameter] = {}
        self.shared: set[str] = set()
        """Names of the slices that are views of the compute weights."""
        self._stubs: dict[str, nn.Parameter] = {}
        for name, spec in store.specs.items():
            holding = table.holding(name, store.global_rank)
            if holding is None:
                self._stubs[name] = store.stub(name, dtype)
                continue
            if name in store.frozen:
                weight = store.frozen.hold(spec, holding.intervals, dtype, store.device)
                self.shards[name] = weight
            else:
                self._hold(spec, holding.intervals, dtype, share_memory=share_memory)
        held = store.frozen.held.items()
        store.frozen.held = {name: item for name, item in held if name in self.shards}
        self._cut = {
            name: shard
            for name, shard in self.shards.items()
            if tuple(shard.shape) != store.specs[name].shape and not is_opaque(shard)
        }
        """Weights that tensor parallelism has cut; only their modules compute with them."""
        self._homes = {name: master.data for name, master in store.masters.items()}
        self._addresses = [home.data_ptr() for home in self._homes.values()]
        self._gradient_dtype: torch.dtype | None = None
        """Dtype in which gradients are summed."""
        self._replaced: dict[str, Tensor] = {}
        """For each parameter whose `data` was replaced (`weight.data = average`), the value that
        was in the pulls' memory before; `return_replaced` puts it back."""
        self._places = [
            (slot.module._parameters, slot.attribute, name, parameter)
            for name, parameter in (self.shards | self._stubs).items()
            for slot in store.layout.slots[name]
        ]
        """Where each parameter is in the module, and what is there during a step."""

    def _hold(
        self,
        spec: ParameterSpec,
        intervals: tuple[Interval, ...],
        dtype: torch.dtype,
        *,
        share_memory: bool,
    ) -> None:
        master = self.store.masters[spec.name]
        shape = spec.shape_of_rows(sum(stop - start for start, stop in intervals))
        kind = dtype if master.is_floating_point() else master.dtype
        shard = torch.empty(shape, dtype=kind, device=self.store.device)
        kept = self.store.kept[spec.name]
        share_memory &= master.device == shard.device
        if share_memory and kind == master.dtype and master.numel() and len(kept) == 1:
            local = local_rows(intervals, *kept[0])
            if local is not None:
                own = narrow_rows(shard, spec, *local).view(master.shape)
                own.copy_(master.detach())
                master.data = own
                self.shared.add(spec.name)
        self.shards[spec.name] = nn.Parameter(
            shard, requires_grad=spec.requires_grad and kind.is_floating_point
        )

    @property
    def plain(self) -> dict[str, nn.Parameter]:
        """The weights held here except quantized ones, whose bits can't be compared."""
        return {name: item for name, item in self.shards.items() if not is_opaque(item)}

    @property
    def outer(self) -> dict[str, nn.Parameter]:
        """The weights held here of parameters outside the layers."""
        specs = self.store.specs
        return {name: item for name, item in self.shards.items() if specs[name].layer is None}

    def home(self, name: str) -> Tensor:
        """Return the memory from which pulls read a slice, even if its `data` was replaced."""
        return self._homes[name]

    def __enter__(self) -> None:
        """Put the compute weights into the module for the time of this context."""
        for slots, attribute, _, parameter in self._places:
            slots[attribute] = parameter

    def __exit__(self, *_: object) -> None:
        masters = self.store.masters
        for slots, attribute, name, _parameter in self._places:
            slots[attribute] = masters[name]

    def in_step(self) -> AbstractContextManager[None]:
        """Return a context that hides from the user's step the weights that are cut."""
        return self._hiding_cut() if self._cut else nullcontext()

    @contextmanager
    def _hiding_cut(self) -> Iterator[None]:
        for name, shard in self._cut.items():
            hide_values(shard, self.store.specs[name].shape, _OF_CUT.format(name=name))
        try:
            yield
        finally:
            show_values(self._cut.values())

    def gather_replaced(self) -> None:
        """Copy slices whose `data` somebody has replaced into the memory from which pulls read."""
        where = [*map(Tensor.data_ptr, self.store.masters.values())]
        if where == self._addresses or self._replaced:
            return
        for name, home in self._homes.items():
            master = self.store.masters[name]
            if master.data_ptr() != home.data_ptr():
                self._replaced[name] = home.clone()
                home.copy_(master.detach())

    def return_replaced(self) -> None:
        """Undo `gather_replaced`: who replaced the data may put the old tensor back later."""
        for name, before in self._replaced.items():
            self._homes[name].copy_(before)
        self._replaced.clear()

    def gradient(self, name: str) -> Tensor:
        """Return the gradient of this rank's shard of a parameter, zeros if there is none."""
        shard = self.shards[name]
        return torch.zeros_like(shard) if shard.grad is None else shard.grad

    def clear_gradients(self, dtype: torch.dtype) -> None:
        """Drop the gradients of the last iteration; those of the next one are summed in `dtype`."""
        for shard in self.shards.values():
            shard.grad = None
        if dtype is not self._gradient_dtype:
            self._gradient_dtype = dtype
            for shard in self.shards.values():
                if shard.requires_grad:
                    shard.grad_dtype = dtype

    def release(self) -> None:
        """Copy slices that are views of the compute weights into memory of their own."""
        for name in self.shared:
            master = self.store.masters[name]
            master.data = master.data.clone(memory_format=torch.contiguous_format)
        self.shared.clear()


def _make_stub(spec: ParameterSpec, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Return a parameter of the full shape without memory, whose values can't be read."""
    place, after = f"It belongs to layer {spec.layer}, which another stage computes.", ""
    if spec.layer is None:
        place = (
            "It lies outside the layers, and this stage doesn't hold it. In stages such a "
            "parameter may make the first layer's input and, from an epoch's first iteration on, "
            "what the last stage computes."
        )
        after = " or after them"
    origin = Origin(
        f"parameter {spec.name}",
        f"{place} Compute what needs it inside the layers{after}, or use "
        "a plan whose pipelines have one stage.",
    )
    unknown = Unknown.of(spec.shape, dtype, device, origin)
    return nn.Parameter(unknown, requires_grad=spec.requires_grad and dtype.is_floating_point)
