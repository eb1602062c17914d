"""Each device computes every precision at its own rate, and 16-bit is not one speed."""

import pytest

from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.devices import Arithmetic, find_device
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.simulator import (
    RooflineCost,
    StageShape,
    StateLayout,
    precision_notes,
)
from tests.core.cluster_files import text_of


@pytest.mark.parametrize(
    ("name", "bf16", "fp16", "fp32"),
    [
        ("V100", 15.7, 125, 15.7),
        ("T4", 8.1, 65, 8.1),
        ("P100", 9.3, 18.7, 9.3),
        ("P40", 11.8, 11.8, 11.8),
        ("A100", 312, 312, 156),
        ("RTX 3060", 25.5, 25.5, 12.75),
        ("RTX 4060 Ti", 44.1, 44.1, 22.05),
        ("RX 7900 XTX", 123, 123, 61.5),
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


def test_a_v100_computes_fp16_several_times_faster_than_bf16_and_an_a100_as_fast():
    cluster = Cluster(nodes=(Node(device="V100-32GB", count=1), Node(device="A100-40GB", count=1)))
    model = ModelSpec.load("llama-7b")
    found = {}
    for precision in ("bf16-mixed", "16-mixed", "32-true"):
        cost = RooflineCost(cluster, model, layout=StateLayout.of_precision(precision))
        for name in cluster.num_devices:
            shape = StageShape(name, 1, 8)
            found[name, precision] = sum(cost.compute_s(shape, (4096,)))
    assert found["V100-32GB", "bf16-mixed"] > 6 * found["V100-32GB", "16-mixed"]
    # All but matrix products is twice as wide in 32 bits.
    assert found["V100-32GB", "bf16-mixed"] < found["V100-32GB", "32-true"]
    assert found["A100-40GB", "bf16-mixed"] == found["A100-40GB", "16-mixed"]


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
