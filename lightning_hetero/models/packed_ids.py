"""Know the token ids of packed samples again, whatever a user makes of them before the model.

`model(input_ids=batch["input_ids"])` leaves out where the samples end, and a model can't see it:
one row of tokens looks like any other. But a view shares its tensor's memory, so the memory tells.
"""

from weakref import WeakValueDictionary

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["num_samples_seen", "remember_packed"]

_ids_at: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
"""Token ids of packed batches that are still alive, by the address of their memory."""
_borders_of = WeakTensorKeyDictionary()
"""Where their samples start and the last one ends."""


def remember_packed(input_ids: Tensor, cu_seqlens: Tensor) -> None:
    """Know these token ids again while they are alive.

    Args:
        input_ids: Samples end to end, (T,).
        cu_seqlens: Where samples start and the last one ends, (samples + 1,).
    """
    if type(input_ids) is Tensor and not input_ids.is_meta:
        _ids_at[input_ids.untyped_storage().data_ptr()] = input_ids
        _borders_of[input_ids] = cu_seqlens


def num_samples_seen(ids: object) -> int:
    """Return in how many packed samples token ids lie, or a view of some; 1 if nobody packed them.

    Waits for the device where they were packed and are on one.
    """
    if type(ids) is not Tensor or ids.is_meta:
        return 1
    known = _ids_at.get(ids.untyped_storage().data_ptr())
    if known is None:
        return 1
    start = ids.storage_offset() - known.storage_offset()
    starts: list[int] = _borders_of[known][:-1].tolist()
    return 1 + sum(start < border < start + ids.numel() for border in starts)
