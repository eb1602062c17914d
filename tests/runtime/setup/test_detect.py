import pytest
import torch

from lightning_hetero.core.devices import KNOWN_DEVICES, DeviceSpec
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.setup.detect import (
    Seat,
    cluster_of,
    describe_device,
    detect_seats,
    match_device,
    slowed,
)


@pytest.mark.parametrize(
    ("name", "gib", "expected"),
    [
        ("NVIDIA A100-PCIE-40GB", 39.4, "A100-40GB"),
        ("NVIDIA GeForce RTX 3090", 23.7, "RTX-3090"),
        ("Tesla T4", 14.6, "T4"),
        ("NVIDIA A10G", 22.2, "A10G"),
        ("NVIDIA A10", 22.1, "A10"),
        ("NVIDIA H100 PCIe", 79.2, "H100-PCIe-80GB"),
        ("AMD Instinct MI300X OAM", 191.7, "MI300X-192GB"),
        ("Tesla V100-SXM2-32GB", 31.7, "V100-32GB"),
        ("NVIDIA GeForce RTX 3060", 11.6, "RTX-3060-12GB"),
        ("NVIDIA GeForce RTX 4060 Ti", 15.6, "RTX-4060-Ti-16GB"),
        ("AMD Radeon RX 7900 XTX", 24.0, "RX-7900-XTX"),
        ("NVIDIA RTX A6000", 47.5, "RTX-A6000"),
        # Other cards, or parts of one, than their names begin with.
        ("NVIDIA GeForce RTX 3090 Ti", 23.7, None),
        ("NVIDIA GeForce RTX 2080 with Max-Q Design", 7.8, None),
        ("NVIDIA GeForce RTX 4090 D", 23.5, None),
        ("NVIDIA H200 NVL", 140.4, None),
        ("NVIDIA GeForce RTX 3060", 7.6, None),
        ("NVIDIA GeForce RTX 4060 Ti", 7.6, None),
        ("Tesla P100-PCIE-12GB", 11.9, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16.0, None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9.5, None),
        ("Some New Card", 80.0, None),
    ],
)
def test_drivers_names_find_the_known_device(name: str, gib: float, expected: str | None) -> None:
    found = match_device(name, int(gib * 2**30))
    assert (found.name if found else None) == expected


def seat(host: str, name: str) -> Seat:
    return Seat(host=host, device=KNOWN_DEVICES[name], base=name, is_cpu=False)


def test_ranks_of_a_host_and_type_make_a_node_in_order_of_ranks() -> None:
    seats = [seat("a", "T4"), seat("a", "T4"), seat("a", "A10"), seat("b", "T4"), seat("b", "T4")]
    cluster = cluster_of(seats)
    assert [(node.device, node.count) for node in cluster.nodes] == [
        ("T4", 2),
        ("A10", 1),
        ("T4", 2),
    ]
    assert [cluster.device_of(rank).name for rank in range(5)] == [s.base for s in seats]
    assert cluster.link_between(0, 1)[0] == 16e9, "the slower card bounds the link in a host"
    assert cluster.link_between(0, 2)[0] == cluster.inter_node_bytes_per_s
    assert cluster.devices == ()
    assert cluster.backend == "nccl"


def test_ranks_on_one_cpu_share_its_memory() -> None:
    alone = cluster_of(
        detect_seats(Communicators(global_rank=0, world_size=1), torch.device("cpu"))
    )
    one = detect_seats(Communicators(global_rank=0, world_size=1), torch.device("cpu"))
    shared = cluster_of([*one, *one, *one])
    assert shared.device_of(2).memory_bytes == alone.device_of(0).memory_bytes // 3
    assert shared.backend == "gloo"
    own = detect_seats(
        Communicators(global_rank=0, world_size=1), torch.device("cpu"), memory_bytes=2**20
    )
    assert [cluster_of([*own] * 2).device_of(rank).memory_bytes for rank in range(2)] == [2**20] * 2


def test_a_slowdown_scales_what_computes_and_nothing_else() -> None:
    base = describe_device(torch.device("cpu"))
    slow = slowed(base, 4)
    assert isinstance(slow, DeviceSpec)
    assert slow.peak_flops_per_s == base.peak_flops_per_s / 4
    assert slow.memory_bytes == base.memory_bytes
    assert slow.intra_node_bytes_per_s == base.intra_node_bytes_per_s
    assert slow.name != base.name
    assert slowed(base, 1) is base
