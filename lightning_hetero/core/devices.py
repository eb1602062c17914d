"""A table of known accelerators: peak dense FLOP/s by precision, memory, bandwidths.

Figures are those of the vendors' data sheets (dense, without sparsity). The peak is the roof of a
roofline model; the cost model decides how much of it kernels reach. Cards before Ampere have no
bf16 units (and the P40 no useful fp16 units): what is computed in bf16 there runs at the rate of
fp32. Prices differ by contract and day, so none is built in: give `price_per_hour` in the cluster
file.

Short names and those that drivers report are understood: `H100`, `a100`, `NVIDIA A100-SXM4-40GB`.
"""

import functools
import re
from dataclasses import replace
from enum import StrEnum

from lightning_hetero.core.errors import ClusterError
from lightning_hetero.core.reading import check_numbers, readable
from lightning_hetero.core.texts import nearest

__all__ = ["KNOWN_DEVICES", "Arithmetic", "DeviceSpec", "canonical_name", "find_device"]

_GIB = 2**30
_MEASURES = "_per_s", "_bytes"
"""Endings of fields whose values must be above 0."""


class Arithmetic(StrEnum):
    """The format of numbers in which matrix products are computed."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


@readable
class DeviceSpec:
    """Speed, memory and bandwidths of one device type."""

    name: str
    """Name by which cluster files and profiles refer to it."""
    peak_flops_per_s: float
    """Dense matrix peak in the 16-bit formats that it computes natively, FLOP/s."""
    memory_bytes: int
    """Usable device memory, bytes."""
    memory_bytes_per_s: float
    """Device memory bandwidth, bytes/s."""
    intra_node_bytes_per_s: float
    """Bandwidth to a peer in the same node, one direction, bytes/s."""
    host_bytes_per_s: float = 25e9
    """Bandwidth to the memory of its host, one direction, bytes/s (PCIe 4.0 with 16 lanes)."""
    is_cpu: bool = False
    """Whether it is a CPU, on which ranks communicate by gloo; all others do by NCCL."""
    has_bf16: bool = True
    """Whether it computes bf16 natively; without, bf16 runs at fp32's rate."""
    has_fp16: bool = True
    """Whether it computes fp16 natively; without, fp16 runs at fp32's rate."""
    fp32_flops_per_s: float | None = None
    """Dense 32-bit matrix peak, FLOP/s, of TF32 where there is; None is half the 16-bit peak."""

    def __post_init__(self) -> None:
        rates = {name: value for name, value in vars(self).items() if name.endswith(_MEASURES)}
        check_numbers(ClusterError, f"Device {self.name!r}", 0, is_above=True, **rates)

    def is_native(self, arithmetic: Arithmetic) -> bool:
        """Return whether it has units for this format."""
        if arithmetic is Arithmetic.BF16:
            return self.has_bf16
        return self.has_fp16 or arithmetic is Arithmetic.FP32

    def flops_per_s(self, arithmetic: Arithmetic) -> float:
        """Return the dense matrix peak in this format: fp32's where it has no units for it."""
        if arithmetic is not Arithmetic.FP32 and self.is_native(arithmetic):
            return self.peak_flops_per_s
        return self.fp32_flops_per_s or self.peak_flops_per_s / 2


_PCIE_3, _PCIE_4, _PCIE_5 = 12.5, 25, 50
"""The rate of copies between device and pinned host memory over 16 lanes, GB/s."""


def _device(
    name: str,
    tflops: float,
    memory_gib: float,
    memory_gb_per_s: float,
    link_gb_per_s: float,
    host_gb_per_s: float,
) -> DeviceSpec:
    return DeviceSpec(
        name=name,
        peak_flops_per_s=tflops * 1e12,
        memory_bytes=int(memory_gib * _GIB),
        memory_bytes_per_s=memory_gb_per_s * 1e9,
        intra_node_bytes_per_s=link_gb_per_s * 1e9,
        host_bytes_per_s=host_gb_per_s * 1e9,
    )


def _old(device: DeviceSpec, fp32_tflops: float, *, has_fp16: bool = True) -> DeviceSpec:
    """Return a device from before Ampere: it has neither bf16 units nor TF32."""
    rate = fp32_tflops * 1e12
    return replace(device, has_bf16=False, has_fp16=has_fp16, fp32_flops_per_s=rate)


KNOWN_DEVICES: dict[str, DeviceSpec] = {
    device.name: device
    for device in (
        #       name          TFLOP/s  GiB  GB/s  GB/s to a peer in the node and to the host
        _device("A100-40GB", 312, 40, 1555, 300, _PCIE_4),
        _device("A100-80GB", 312, 80, 2039, 300, _PCIE_4),
        _device("A800-80GB", 312, 80, 2039, 200, _PCIE_4),
        _device("H100-80GB", 989, 80, 3350, 450, _PCIE_5),
        _device("H100-PCIe-80GB", 756, 80, 2039, 300, _PCIE_5),
        _device("H100-NVL-94GB", 835, 94, 3938, 300, _PCIE_5),
        _device("H800-80GB", 989, 80, 3350, 200, _PCIE_5),
        _device("H200-141GB", 989, 141, 4800, 450, _PCIE_5),
        _device("GH200-96GB", 989, 96, 4000, 450, 450),
        _device("H20-96GB", 148, 96, 4000, 450, _PCIE_5),
        _device("B200-180GB", 2250, 180, 7700, 900, _PCIE_5),
        _device("MI300X-192GB", 1307, 192, 5300, 64, _PCIE_5),
        _device("RX-7900-XTX", 123, 24, 960, 32, _PCIE_4),
        _old(_device("P100-16GB", 18.7, 16, 732, 16, _PCIE_3), 9.3),
        _old(_device("P40", 11.8, 24, 346, 16, _PCIE_3), 11.8, has_fp16=False),
        _old(_device("V100-16GB", 125, 16, 900, 150, _PCIE_3), 15.7),
        _old(_device("V100-32GB", 125, 32, 900, 150, _PCIE_3), 15.7),
        _device("A10", 125, 24, 600, 32, _PCIE_4),
        _device("A10G", 70, 24, 600, 32, _PCIE_4),
        _device("A30", 165, 24, 933, 100, _PCIE_4),
        _device("A40", 150, 48, 696, 56, _PCIE_4),
        _device("L4", 121, 24, 300, 32, _PCIE_4),
        _device("L40S", 362, 48, 864, 32, _PCIE_4),
        _old(_device("T4", 65, 16, 320, 16, _PCIE_3), 8.1),
        # GeForce: the rate with fp32 accumulation, at which training runs.
        _old(_device("RTX-2080", 40.3, 8, 448, 16, _PCIE_3), 10.1),
        _device("RTX-3060-12GB", 25.5, 12, 360, 28, _PCIE_4),
        _device("RTX-3080", 59.5, 10, 760, 28, _PCIE_4),
        _device("RTX-3090", 71, 24, 936, 28, _PCIE_4),
        _device("RTX-4060-Ti-16GB", 44.1, 16, 288, 16, _PCIE_3),  # Eight lanes of PCIe 4.0.
        _device("RTX-4070", 58.3, 12, 504, 32, _PCIE_4),
        _device("RTX-4080", 97.5, 16, 717, 32, _PCIE_4),
        _device("RTX-4090", 165, 24, 1008, 32, _PCIE_4),
        _device("RTX-5070-Ti", 87.9, 16, 896, 64, _PCIE_5),
        _device("RTX-5080", 112.6, 16, 960, 64, _PCIE_5),
        _device("RTX-5090", 209, 32, 1792, 64, _PCIE_5),
        _device("RTX-6000-Ada", 364, 48, 960, 32, _PCIE_4),
        _device("RTX-A6000", 155, 48, 768, 56, _PCIE_4),
        _old(_device("Titan-RTX", 130, 24, 672, 50, _PCIE_3), 16.3),
    )
}
"""Device types that a cluster may name without describing them."""


_USUAL = {"a100": "A100-80GB", "v100": "V100-16GB"}
"""The device that a name without its memory means, if devices differ only in memory."""
_DECORATION = frozenset(
    {"nvidia", "geforce", "tesla", "graphics", "amd", "radeon", "instinct", "oam"}
)
_MEMORY = re.compile(r"\d+gb")
_FORM = re.compile(r"sxm\d?|pcie|hbm\d?e?|generation")
"""Words in the names that drivers and shops use, which don't matter."""


@functools.cache
def canonical_name(name: str) -> str | None:
    """Return the known device that a name means, in the table's spelling; None if unknown.

    Case, separators, vendor and form factor don't matter; memory may be left out.
    """
    in_order = re.findall(r"[a-z0-9]+", name.lower())
    words, joined = set(in_order), "".join(in_order)
    said = {word for word in words if _MEMORY.fullmatch(word)}
    found: list[tuple[int, str]] = []
    for known in KNOWN_DEVICES:
        parts = known.lower().split("-")
        model = [part for part in parts if not _MEMORY.fullmatch(part)]
        memory, compact = set(parts) - set(model), "".join(model)
        rest = words - set(model) - said - _DECORATION
        is_named = words >= set(model) and all(map(_FORM.fullmatch, rest))
        is_joined = joined in ("".join(parts), compact, compact.replace("rtx", ""))
        is_usual = said <= memory or not memory if said else _USUAL.get(compact, known) == known
        if (is_named or is_joined) and is_usual:
            found.append((len(model), known))
    return max(found, key=lambda pair: pair[0])[1] if found else None


def find_device(name: str, custom: tuple[DeviceSpec, ...] = ()) -> DeviceSpec:
    """Return the device of that name, custom ones first.

    Raises:
        ClusterError: No device has that name; the message lists the nearest name and all known
            ones.
    """
    for device in custom:
        if device.name == name:
            return device
    known = canonical_name(name)
    if known is not None:
        return KNOWN_DEVICES[known]
    names = sorted({*KNOWN_DEVICES, *(device.name for device in custom)})
    raise ClusterError(
        f"Unknown device {name[:80]!r}.{nearest(name, names)} Known: {', '.join(names)}. Describe "
        "another one under `devices:`, or measure it with `lightning-hetero profile` and give its "
        "file."
    )
