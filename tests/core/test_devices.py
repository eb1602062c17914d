"""Each device computes every precision at its own rate, and 16-bit is not one speed."""

import pytest

from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.devices import Arithmetic, find_device
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.simulator import (
    RooflineCost,
    StateLayout,
    precision_notes,
)
from tests.core.cluster_files import text_of


@pytest.mark.parametrize(
    ("name", "bf16", "fp16", "fp32"),
    [
        ("V100", 15.7, 125, 15.7),
        ("T4", 8.1, 65, 8.1),
        ("P40", 11.8, 11.8, 11.8),
        ("A100", 312, 312, 156),
    ],
)
def test_a_format_without_units_runs_at_the_rate_of_fp32(name, bf16, fp16, fp32):
    device = find_device(name)
    rates = [device.flops_per_s(item) / 1e12 for item in Arithmetic]
    assert rates == pytest.approx([bf16, fp16, fp32])


def test_what_a_device_lacks_may_be_told_in_a_file():
    text = (
        "nodes: [{device: mine, count: 2}]\n"
        "devices:\n"
        "  - {name: mine, peak_flops_per_s: 100 TFLOP/s, memory_bytes: 16 GiB, "
        "memory_bytes_per_s: 900 GB/s, intra_node_bytes_per_s: 16 GB/s, has_bf16: false, "
        "fp32_flops_per_s: 10 TFLOP/s}\n"
    )
    cluster = Cluster.from_yaml(text)
    assert cluster.device_of(0).flops_per_s(Arithmetic.BF16) == 10e12
    assert Cluster.from_yaml(text_of(cluster)) == cluster


def test_notes_name_the_devices_that_lack_the_precision_and_their_rates():
    cluster = Cluster(
        nodes=tuple(Node(device=name, count=1) for name in ("V100-32GB", "P40", "T4"))
    )
    model = ModelSpec.load("opt-350m")

    def notes(precision: str) -> list[str]:
        return precision_notes(
            RooflineCost(cluster, model, layout=StateLayout.of_precision(precision))
        )

    assert notes("bf16-mixed")[0] == (
        "V100-32GB has no bf16 units and runs it at the rate of fp32 (TFLOP/s: 125 in fp16 and "
        "15.7 in fp32)"
    )
    assert len(notes("bf16-mixed")) == 3
    assert [note[:22] for note in notes("16-true")] == ["P40 has no fp16 units "]
    assert notes("32-true") == []
