"""Let the host judge a device's numbers one iteration later, without waiting for the device.

A host that reads a number which the device has yet to compute waits, and afterwards the device
idles until the host has enqueued more. So numbers that only decide whether a run may go on are
copied asynchronously, and judged when all ranks have agreed on the next iteration: by then they
have long arrived. On a CPU they are judged at once.
"""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["LateNumbers"]

Judgement = Callable[[Tensor], None]


class LateNumbers:
    """Numbers on their way from one device to its host.

    Called by every rank alike, on numbers that all ranks have, so that all raise the same error in
    the same iteration.

    ::

        late = LateNumbers(torch.device("cuda"))
        late.settle()  # those of the iteration before
        late.judge(totals, check_totals)

    Args:
        device: Where they are computed.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_late = device.type != "cpu"
        """Whether `judge` leaves its judgement to the next `settle`."""
        self._pending: list[tuple[Tensor, torch.cuda.Event | None, Judgement]] = []

    def judge(self, numbers: Tensor, judgement: Judgement, *, now: bool = False) -> None:
        """Call `judgement` with the numbers on the CPU; `now` waits for the device."""
        if now or not self.is_late:
            judgement(numbers.cpu())
            return
        arriving = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=numbers.is_cuda)
        arriving.copy_(numbers.detach(), non_blocking=True)
        arrived = torch.cuda.current_stream().record_event() if numbers.is_cuda else None
        self._pending.append((arriving, arrived, judgement))

    def settle(self) -> None:
        """Call the judgements that `judge` has left; raises what they raise."""
        pending, self._pending = self._pending, []
        for numbers, arrived, judgement in pending:
            if arrived is not None:
                arrived.synchronize()
            judgement(numbers)
