"""Try runs out without the devices, or the faults, that they are for."""

from lightning_hetero.testing.emulated import EmulatedDevices
from lightning_hetero.testing.emulated_clock import EmulatedClock, LinkDelay
from lightning_hetero.testing.faults import Fault, InjectFaults, SlowLink, SlowRank

__all__ = [
    "EmulatedClock",
    "EmulatedDevices",
    "Fault",
    "InjectFaults",
    "LinkDelay",
    "SlowLink",
    "SlowRank",
]
