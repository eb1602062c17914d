"""A table of known accelerators: peak dense bf16 FLOP/s, memory, bandwidths.

Figures are the vendors' data sheets' (dense, without sparsity). Peak is the roof of a roofline; how
much of it a kernel reaches is the cost model's business. Where a card has no bf16 units, its fp16
tensor peak stands in. Prices differ by contract and day, so none is built in: give
`price_per_hour` in the cluster file.
"""

from dataclasses import dataclass

from lightning_hetero.core.errors import ClusterError

__all__ = ["KNOWN_DEVICES", "DeviceSpec", "find_device"]

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """What one device can do."""

    name: str
    """Name by which cluster files and profiles refer to it."""
    peak_flops_per_s: float
    """Dense 16-bit matrix peak, FLOP/s."""
    memory_bytes: int
    """Usable device memory, bytes."""
    memory_bytes_per_s: float
    """Device memory bandwidth, bytes/s."""
    intra_node_bytes_per_s: float
    """Bandwidth to a peer in the same node, one direction, bytes/s."""

    def __post_init__(self) -> None:
        for name in (
            "peak_flops_per_s",
            "memory_bytes",
            "memory_bytes_per_s",
            "intra_node_bytes_per_s",
        ):
            value = getattr(self, name)
            if not value > 0:
                raise ClusterError(f"Device {self.name!r} has {name} {value}; it must be above 0.")


def _device(
    name: str, tflops: float, memory_gib: float, memory_gb_per_s: float, link_gb_per_s: float
) -> DeviceSpec:
    return DeviceSpec(
        name=name,
        peak_flops_per_s=tflops * 1e12,
        memory_bytes=int(memory_gib * _GIB),
        memory_bytes_per_s=memory_gb_per_s * 1e9,
        intra_node_bytes_per_s=link_gb_per_s * 1e9,
    )


KNOWN_DEVICES: dict[str, DeviceSpec] = {
    device.name: device
    for device in (
        #       name          TFLOP/s  GiB  GB/s  GB/s to a peer in the node
        _device("A100-40GB", 312, 40, 1555, 300),
        _device("A100-80GB", 312, 80, 2039, 300),
        _device("A800-80GB", 312, 80, 2039, 200),
        _device("H100-80GB", 989, 80, 3350, 450),
        _device("H800-80GB", 989, 80, 3350, 200),
        _device("H200-141GB", 989, 141, 4800, 450),
        _device("GH200-96GB", 989, 96, 4000, 450),
        _device("H20-96GB", 148, 96, 4000, 450),
        _device("B200-180GB", 2250, 180, 7700, 900),
        _device("V100-16GB", 125, 16, 900, 150),
        _device("V100-32GB", 125, 32, 900, 150),
        _device("A10", 125, 24, 600, 32),
        _device("A10G", 70, 24, 600, 32),
        _device("A30", 165, 24, 933, 100),
        _device("A40", 150, 48, 696, 56),
        _device("L4", 121, 24, 300, 32),
        _device("L40S", 362, 48, 864, 32),
        _device("T4", 65, 16, 320, 16),
        _device("RTX-2080", 81, 8, 448, 16),
        _device("RTX-3090", 71, 24, 936, 28),
        _device("RTX-4090", 165, 24, 1008, 32),
        _device("Titan-RTX", 130, 24, 672, 50),
    )
}
"""Device types that a cluster may name without describing them."""


def find_device(name: str, custom: tuple[DeviceSpec, ...] = ()) -> DeviceSpec:
    """Return the device of that name, custom ones first; ClusterError lists the known names."""
    for device in custom:
        if device.name == name:
            return device
    try:
        return KNOWN_DEVICES[name]
    except KeyError:
        known = ", ".join(sorted({*KNOWN_DEVICES, *(device.name for device in custom)}))
        raise ClusterError(
            f"Unknown device {name!r}. Known: {known}. Describe another one under `devices:`."
        ) from None
