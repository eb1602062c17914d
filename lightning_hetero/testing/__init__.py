"""Try plans out without the devices that they are for: emulated devices on a CPU."""

from lightning_hetero.testing.emulated import EmulatedDevices

__all__ = ["EmulatedDevices"]
