"""Quantities with units, and names of devices: what they mean in a file."""

import pytest

from lightning_hetero.core.cluster import Cluster
from lightning_hetero.core.devices import canonical_name
from lightning_hetero.core.reading import MeasureUnit, parse_quantity


@pytest.mark.parametrize(
    ("text", "unit", "number"),
    [
        ("80 GiB", MeasureUnit.BYTES, 80 * 2**30),
        ("80GB", MeasureUnit.BYTES, 80e9),
        ("400 Gbit/s", MeasureUnit.BYTES_PER_S, 50e9),
        ("12.5 GB/s", MeasureUnit.BYTES_PER_S, 12.5e9),
        ("1 MiB/s", MeasureUnit.BYTES_PER_S, 2**20),
        ("312 TFLOP/s", MeasureUnit.FLOPS_PER_S, 312e12),
        ("20 µs", MeasureUnit.SECONDS, 20e-6),
        ("-3", None, -3),
    ],
)
def test_quantities_mean_what_they_say(text, unit, number):
    assert parse_quantity(text, unit) == pytest.approx(number, rel=1e-12)


@pytest.mark.parametrize(
    "text", ["80 Gib/s", "80 GiBB", "GiB", "1 2", "1e", "", "nan", "inf", "0x10"]
)
def test_what_is_no_quantity_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="80 GiB"):
        parse_quantity(text, MeasureUnit.BYTES)


def test_a_cluster_file_takes_units_and_short_names():
    cluster = Cluster.from_yaml(
        """
nodes:
  [{device: h100, count: 8}, {device: NVIDIA A100-SXM4-40GB, count: 8}, {device: big, count: 1}]
inter_node_bytes_per_s: 400 Gbit/s
inter_node_latency_s: 20 us
links: [{nodes: [0, 1], bytes_per_s: 12.5 GB/s}]
devices:
  - {name: big, peak_flops_per_s: 1 PFLOP/s, memory_bytes: 4e12, memory_bytes_per_s: 8 TB/s,
     intra_node_bytes_per_s: 900 GB/s}
"""
    )
    assert [node.device for node in cluster.nodes] == ["H100-80GB", "A100-40GB", "big"]
    assert (cluster.inter_node_bytes_per_s, cluster.inter_node_latency_s) == (50e9, 20e-6)
    assert cluster.link_between(0, 1)[0] == 12.5e9
    assert cluster.device_of(16).memory_bytes == 4 * 10**12
    assert cluster.device_of(16).peak_flops_per_s == 1e15


def test_a_rate_that_is_likely_meant_in_another_unit_warns():
    with pytest.warns(UserWarning, match=r"`inter_node_bytes_per_s` is 50, in bytes/s.*'50 GB/s'"):
        Cluster.from_yaml("nodes: [{device: T4, count: 1}]\ninter_node_bytes_per_s: 50")
    Cluster.from_yaml("nodes: [{device: T4, count: 1}]\ninter_node_bytes_per_s: 50 B/s")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("H100", "H100-80GB"),
        ("a100", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe-80GB"),
        ("A6000", "RTX-A6000"),
        ("V100", "V100-16GB"),
        ("A10G", "A10G"),
        ("A100-64GB", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("Gaudi", None),
        ("", None),
    ],
)
def test_short_names_and_those_of_drivers_are_understood(name, meant):
    assert canonical_name(name) == meant
