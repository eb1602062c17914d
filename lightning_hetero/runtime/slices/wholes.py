"""Put slices together into whole tensors, on rank 0 or on all ranks.

Each owner packs its rows of many parameters into one message, of 64 MiB for all ranks together, or
256 KiB for each rank if that is more. One message for each slice would be far too many: a million
of 28 KiB for a model of 28 GB with 1,024 owners.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.slices.weights import SliceStore, narrow_rows

_Key = TypeVar("_Key")
_AT_ONCE = 2**26
_OF_EACH_RANK = 2**18


def gather_on_rank_0(
    store: SliceStore, comms: Communicators, own: Mapping[_Key, tuple[str, Tensor]]
) -> dict[_Key, Tensor]:
    """Return whole tensors, on CPU, from their owners' rows: on rank 0, none elsewhere.

    Collective over all ranks, with the same keys in the same order. By key, `own` has a parameter's
    name and a tensor shaped like this rank's slice of it.
    """
    wholes: dict[_Key, Tensor] = {}
    for batch in _batches(store, own, comms.world_size):
        wholes |= _gather(store, comms, batch)
    return wholes


def gather_everywhere(
    store: SliceStore, comms: Communicators, own: Mapping[_Key, tuple[str, Tensor]]
) -> dict[_Key, Tensor]:
    """Return whole tensors, as `gather_on_rank_0`, on every rank."""
    wholes: dict[_Key, Tensor] = {}
    for batch in _batches(store, own, comms.world_size):
        shapes = {key: store.specs[name].shape for key, (name, _) in batch.items()}
        found = _gather(store, comms, batch)
        if comms.world_size > 1:
            dtype = next(tensor.dtype for _, tensor in batch.values())
            sizes = [shape.numel() for shape in map(torch.Size, shapes.values())]
            flat = torch.empty(sum(sizes), dtype=dtype)
            if found:
                torch.cat([whole.flatten() for whole in found.values()], out=flat)
            dist.broadcast(flat, 0, group=comms.control)
            parts = zip(shapes.items(), torch.split(flat, sizes), strict=True)
            found = {key: part.view(shape).clone() for (key, shape), part in parts}
        wholes |= found
    return wholes


def _batches(
    store: SliceStore, own: Mapping[_Key, tuple[str, Tensor]], world_size: int
) -> Iterator[dict[_Key, tuple[str, Tensor]]]:
    """Yield tensors of one dtype that are gathered at a time; the same on all ranks."""
    most = max(_AT_ONCE, world_size * _OF_EACH_RANK)
    for dtype in dict.fromkeys(tensor.dtype for _, tensor in own.values()):
        batch: dict[_Key, tuple[str, Tensor]] = {}
        num_bytes = 0
        for key, (name, tensor) in own.items():
            if tensor.dtype is dtype:
                batch[key] = name, tensor
                num_bytes += store.specs[name].numel * tensor.element_size()
            if num_bytes >= most:
                yield batch
                batch, num_bytes = {}, 0
        if batch:
            yield batch


def _gather(
    store: SliceStore, comms: Communicators, batch: Mapping[_Key, tuple[str, Tensor]]
) -> dict[_Key, Tensor]:
    """Return whole tensors of one dtype on rank 0, none elsewhere."""
    own_rows: dict[tuple[_Key, int], Tensor] = {}
    with torch._C.DisableTorchFunctionSubclass():  # Hooks may save, whose slices are `Rows`.
        for key, (name, tensor) in batch.items():
            owned = [item for item in store.slices[name] if item.owner == comms.global_rank]
            on_cpu = tensor.detach().cpu() if owned else tensor
            for item in owned:
                own_rows[key, item.start] = store.rows(name, on_cpu, item.start, item.stop)
    if comms.global_rank != 0:
        if own_rows:
            message = torch.cat([rows.flatten() for rows in own_rows.values()])
            dist.send(message, 0, group=comms.control)
        return {}
    wholes: dict[_Key, Tensor] = {}
    targets: dict[int, list[Tensor]] = defaultdict(list)
    for key, (name, tensor) in batch.items():
        spec = store.specs[name]
        if name in store.frozen:
            wholes[key] = store.frozen.whole(spec).to(tensor.dtype)
            continue
        whole = wholes[key] = torch.empty(spec.shape, dtype=tensor.dtype)
        for item in store.slices[name]:
            target = narrow_rows(whole, spec, item.start, item.stop)
            if item.owner == 0:
                target.copy_(own_rows[key, item.start].view(target.shape))
            else:
                targets[item.owner].append(target)
    _receive(comms, targets)
    return wholes


def _receive(comms: Communicators, targets: Mapping[int, list[Tensor]]) -> None:
    """Fill each owner's rows, of one dtype, from its message."""
    arriving = []
    for owner, rows in targets.items():
        buffer = torch.empty(sum(item.numel() for item in rows), dtype=rows[0].dtype)
        arriving.append((dist.irecv(buffer, owner, group=comms.control), buffer, rows))
    for work, buffer, rows in arriving:
        assert work is not None
        work.wait()
        parts = torch.split(buffer, [item.numel() for item in rows])
        found = [part.view(item.shape) for part, item in zip(parts, rows, strict=True)]
        torch._foreach_copy_(rows, found)
