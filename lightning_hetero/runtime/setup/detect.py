"""Find out on which machines and devices a run's ranks are: the `Cluster` for which plans are made.

Every rank reports its *seat*: its host and its device. Consecutive ranks on one host with one type
of device are a node of the cluster. CUDA devices are looked up in the table of known devices, by
name and memory. For other devices, such as CPUs, rough figures serve until a profile is measured.
"""

import os
import platform
import re
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, groupby
from pathlib import Path

import torch

from lightning_hetero.core.cluster import Cluster, Link, Node
from lightning_hetero.core.devices import KNOWN_DEVICES, DeviceSpec, canonical_name
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.simulator import MemoryCorrection

# Per core: two 8-wide fused multiply-adds a cycle at 2 GHz. Used until a profile is measured.
_CPU_FLOPS_PER_S = 64e9
_CPU_BYTES_PER_S = 10e9
# Messages between processes of one host by gloo.
_CPU_LINK_BYTES_PER_S = 1e9
_CPU_LINK_LATENCY_S = 200e-6
_CPU_NETWORK_BYTES_PER_S = 1.25e9
# 16-bit FLOPs of one multiprocessor per cycle, as on Ampere.
_SM_FLOPS_PER_CYCLE = 2048
_AMPERE = 8
"""The first compute capability with bf16 units."""
_UNKNOWN_CLOCK_HZ = 1.5e9
_UNKNOWN_GPU_BYTES_PER_S = 500e9
_PCIE_BYTES_PER_S = 16e9
_MEMORY = re.compile(r"\b\d+GB\b", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Where one rank runs."""

    host: str
    """Name of the machine."""
    node: str = ""
    """Name of its node, whose ranks are lost together. By default the host's name with torchrun's
    group rank."""
    device: DeviceSpec
    """Its device, slowdown included."""
    base: str
    """Name of the device type without slowdown."""
    slowdown: float = 1.0
    """Factor by which the rank emulates a device slower than its hardware."""
    is_cpu: bool = True
    """Whether it computes on the host's CPU."""
    shares_memory: bool = True
    """Whether a CPU's memory is that of the host, which its ranks share."""
    host_memory_bytes: float | None = None
    """The host's memory, if the device has its own; None for a CPU."""
    correction: MemoryCorrection = field(default_factory=MemoryCorrection)
    """Correction from earlier runs that ran out of memory; `device.memory_bytes` includes it."""


def detect_seats(
    comms: Communicators,
    device: torch.device,
    *,
    slowdown: float = 1.0,
    memory_bytes: int | None = None,
    node: str | None = None,
    correction_of: Callable[[str], MemoryCorrection] | None = None,
) -> tuple[Seat, ...]:
    """Return the seats of all ranks by global rank; collective over all ranks.

    Args:
        comms: The run's communicators.
        device: This rank's device.
        slowdown: Factor by which this rank emulates a slower device.
        memory_bytes: Memory to plan with instead of the device's own.
        node: Name of this rank's node, if nodes are emulated.
        correction_of: Returns the correction of a device type from runs that ran out of memory.
    """
    base = describe_device(device)
    spec = slowed(base, slowdown)
    if memory_bytes is not None:
        spec = replace(spec, memory_bytes=memory_bytes)
    correction = MemoryCorrection() if correction_of is None else correction_of(spec.name)
    corrected = correction.corrected_bytes(spec.memory_bytes)
    seat = Seat(
        host=socket.gethostname(),
        node=node or f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}".strip(),
        device=replace(spec, memory_bytes=corrected),
        base=base.name,
        slowdown=slowdown,
        is_cpu=device.type == "cpu",
        shares_memory=memory_bytes is None and corrected == spec.memory_bytes,
        host_memory_bytes=None if device.type == "cpu" else _host_memory_bytes(),
        correction=correction,
    )
    return tuple(comms.gather_objects(seat))


def corrected_cluster(cluster: Cluster, seats: Sequence[Seat]) -> Cluster:
    """Return a cluster whose device types have no more memory than their ranks' corrections say."""
    devices = {spec.name: spec for spec in cluster.devices}
    for global_rank, seat in enumerate(seats):
        spec = cluster.device_of(global_rank)
        spec = devices.get(spec.name, spec)
        corrected = seat.correction.corrected_bytes(spec.memory_bytes)
        if corrected < spec.memory_bytes:
            devices[spec.name] = replace(spec, memory_bytes=corrected)
    return replace(cluster, devices=tuple(devices.values()))


def cluster_of(seats: Sequence[Seat]) -> Cluster:
    """Return the cluster of these seats, which are given by global rank."""
    any_cpu = any(seat.is_cpu for seat in seats)
    nodes, hosts = [], []
    for (host, name), group in groupby(seats, key=lambda seat: (seat.host, seat.device.name)):
        members = list(group)
        host_bytes = members[0].host_memory_bytes
        if host_bytes is not None:  # All of the host's devices share it.
            host_bytes *= len(members) / sum(seat.host == host for seat in seats)
        nodes.append(Node(device=name, count=len(members), host_memory_bytes=host_bytes))
        hosts.append(host)
    devices = _devices_of(seats)
    latency_s = _CPU_LINK_LATENCY_S if any_cpu else 3e-6
    network = Cluster.inter_node_bytes_per_s, Cluster.inter_node_latency_s
    if any_cpu:
        network = _CPU_NETWORK_BYTES_PER_S, 100e-6
    rates = [devices[node.device].intra_node_bytes_per_s for node in nodes]
    links = tuple(
        # Between nodes of one host, where the slower device bounds each.
        Link(nodes=(a, b), bytes_per_s=min(rates[a], rates[b]), latency_s=latency_s)
        for a, b in combinations(range(len(hosts)), 2)
        if hosts[a] == hosts[b]
    )
    return Cluster(
        nodes=tuple(nodes),
        links=links,
        devices=tuple(spec for spec in devices.values() if KNOWN_DEVICES.get(spec.name) != spec),
        inter_node_bytes_per_s=network[0],
        inter_node_latency_s=network[1],
        intra_node_latency_s=latency_s,
    )


def _devices_of(seats: Sequence[Seat]) -> dict[str, DeviceSpec]:
    """Return the device types by name, with the memory that each rank may fill."""
    per_host = Counter(seat.host for seat in seats)
    devices: dict[str, DeviceSpec] = {}
    for seat in seats:
        spec = seat.device
        if seat.is_cpu and seat.shares_memory:
            spec = replace(spec, memory_bytes=spec.memory_bytes // per_host[seat.host])
        known = devices.setdefault(spec.name, spec)
        # Hosts with the same CPU may have unequal memory: a plan must fit the smallest.
        if spec.memory_bytes < known.memory_bytes:
            devices[spec.name] = spec
    return devices


def describe_device(device: torch.device) -> DeviceSpec:
    """Return the type of a device of this machine, with rough figures unless it is a known one."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        known = match_device(properties.name, properties.total_memory)
        if known is not None:
            return known
        clock_hz = getattr(properties, "clock_rate", _UNKNOWN_CLOCK_HZ / 1e3) * 1e3
        return DeviceSpec(
            name=_slug(properties.name),
            peak_flops_per_s=properties.multi_processor_count * _SM_FLOPS_PER_CYCLE * clock_hz,
            memory_bytes=properties.total_memory,
            memory_bytes_per_s=_UNKNOWN_GPU_BYTES_PER_S,
            intra_node_bytes_per_s=_PCIE_BYTES_PER_S,
            has_bf16=getattr(properties, "major", _AMPERE) >= _AMPERE,
        )
    return DeviceSpec(
        name=f"{device.type}-{_slug(_processor_name())}",
        peak_flops_per_s=_CPU_FLOPS_PER_S * torch.get_num_threads(),
        memory_bytes=_host_memory_bytes(),
        memory_bytes_per_s=_CPU_BYTES_PER_S,
        intra_node_bytes_per_s=_CPU_LINK_BYTES_PER_S,
        is_cpu=device.type == "cpu",
    )


def _host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def match_device(name: str, memory_bytes: int) -> DeviceSpec | None:
    """Return the known device with a driver's name, such as "NVIDIA A100-SXM4-80GB", or None.

    Drivers add vendor, form factor and memory to the known name. A name with any other word is
    another card (RTX 3090 Ti), or part of one. If several devices differ only in memory, the one
    with the nearest memory is returned; None if that differs by more than a quarter.
    """
    model = _MEMORY.sub("", name)

    def distance(spec: DeviceSpec) -> float:
        return abs(spec.memory_bytes / memory_bytes - 1)

    found = [
        spec
        for spec in KNOWN_DEVICES.values()
        if distance(spec) <= 0.25
        # Drivers may tell of other memory than the device's own, such as that of GH200's host.
        and canonical_name(f"{model} {' '.join(_MEMORY.findall(spec.name))}") == spec.name
    ]
    return min(found, key=distance, default=None)


def slowed(device: DeviceSpec, slowdown: float) -> DeviceSpec:
    """Return a device that is slower by a factor, which is appended to its name."""
    if slowdown == 1:
        return device
    fp32 = device.fp32_flops_per_s
    return replace(
        device,
        name=f"{device.name}/{slowdown:g}",
        peak_flops_per_s=device.peak_flops_per_s / slowdown,
        memory_bytes_per_s=device.memory_bytes_per_s / slowdown,
        fp32_flops_per_s=None if fp32 is None else fp32 / slowdown,
    )


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), "") or platform.processor() or platform.machine()


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text.split("@")[0]).strip("-")
