"""Tell whether a device had reached a step's end before communicators were aborted.

A host runs ahead of its device, and agrees with the others on a step whose sums may still be on
their way. Under NCCL only an abort ends the wait for a dead peer, and then the device goes on with
whatever is in the buffers. So a step counts as trained only if its end was reached before.
"""

from contextlib import suppress

import torch

__all__ = ["StepEnd"]


class StepEnd:
    """The end of a generation's last step on a rank's device; without streams it is immediate."""

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None
        self._is_cut = False
        self.is_reached = True
        """Whether the last noted end was reached before any abort."""

    def note(self, device: torch.device) -> None:
        """Note that the device has been given all work of a step; called by the main thread."""
        if device.type == "cuda":
            self._event = torch.cuda.current_stream(device).record_event()
            if self._is_cut:  # `cut` may have come before the event.
                self.is_reached = False

    def wait(self) -> None:
        """Wait until the device has reached the end."""
        if self._event is not None:
            self._event.synchronize()

    def cut(self) -> None:
        """Note that communicators are about to be aborted; called by any thread, never raises."""
        if self._is_cut:
            return
        self._is_cut = True
        with suppress(RuntimeError):  # Where the device is broken.
            if self._event is None or self._event.query():  # type: ignore[no-untyped-call]
                return
        self.is_reached = False
