"""Whether a device had come to a step's end before communicators were aborted.

A host runs ahead of its device, and agrees with the others on a step whose sums may still travel.
Under NCCL an abort is all that ends the wait for a dead peer; then the device goes on with whatever
lies in the buffers. So a step counts as trained only if its end was reached before.
"""

from contextlib import suppress

import torch

__all__ = ["StepEnd"]


class StepEnd:
    """The end of a generation's last step on one rank's device; at once without streams."""

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None
        self._is_cut = False
        self.is_reached = True
        """Whether no abort has come before the end that was noted last."""

    def note(self, device: torch.device) -> None:
        """Note that all of a step has been given to the device; in the main thread."""
        if device.type == "cuda":
            self._event = torch.cuda.current_stream(device).record_event()
            if self._is_cut:  # Looked at after the event is known, as `cut` sets it before.
                self.is_reached = False

    def wait(self) -> None:
        """Wait until the device is there."""
        if self._event is not None:
            self._event.synchronize()

    def cut(self) -> None:
        """Say that communicators are about to be aborted; from any thread, and never raises."""
        if self._is_cut:
            return
        self._is_cut = True
        with suppress(RuntimeError):  # Where the device is broken.
            if self._event is None or self._event.query():  # type: ignore[no-untyped-call]
                return
        self.is_reached = False
