"""Try runs out without the devices, or the faults, that they are for."""

from lightning_hetero.testing.capped_memory import CappedMemory
from lightning_hetero.testing.emulated import EmulatedClock, EmulatedDevices, LinkDelay
from lightning_hetero.testing.faults import Fault, InjectFaults, SlowLink, SlowRank
from lightning_hetero.testing.storage import (
    FaultyStore,
    MemoryStore,
    Throttle,
    ThrottledStore,
    peers_in_threads,
)

__all__ = [
    "CappedMemory",
    "EmulatedClock",
    "EmulatedDevices",
    "Fault",
    "FaultyStore",
    "InjectFaults",
    "LinkDelay",
    "MemoryStore",
    "SlowLink",
    "SlowRank",
    "Throttle",
    "ThrottledStore",
    "peers_in_threads",
]
