"""Try runs out without the devices, or the faults, that they are for."""

from lightning_hetero.testing.emulated import EmulatedDevices
from lightning_hetero.testing.faults import Fault, InjectFaults, SlowLink, SlowRank

__all__ = ["EmulatedDevices", "Fault", "InjectFaults", "SlowLink", "SlowRank"]
