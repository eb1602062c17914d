import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_hetero.core.cluster import Cluster, Link, Node
from lightning_hetero.core.devices import KNOWN_DEVICES, DeviceSpec
from lightning_hetero.core.errors import ClusterError
from tests.core.cluster_files import text_of

TEXT = """
nodes:
  - {device: A100-80GB, count: 4, price_per_hour: 16}
  - {device: mine, count: 2, price_per_hour: 2.5}
inter_node_bytes_per_s: 50e9
links:
  - {nodes: [1, 0], bytes_per_s: 12.5e9, latency_s: 20e-6}
  - {nodes: [1, 1], bytes_per_s: 8e9}
devices:
  - name: mine
    peak_flops_per_s: 1e14
    memory_bytes: 17179869184
    memory_bytes_per_s: 5e11
    intra_node_bytes_per_s: 2e10
"""
MINE = DeviceSpec(
    name="mine",
    peak_flops_per_s=1e14,
    memory_bytes=2**34,
    memory_bytes_per_s=5e11,
    intra_node_bytes_per_s=2e10,
)

positive = st.floats(1e3, 1e15)
latencies = st.floats(0, 1)
nodes = st.builds(
    Node,
    device=st.sampled_from([*KNOWN_DEVICES, "mine"]),
    count=st.integers(1, 16),
    price_per_hour=st.none() | st.floats(0, 1e4),
)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    members = tuple(draw(st.lists(nodes, min_size=1, max_size=5)))
    index = st.integers(0, len(members) - 1)
    pairs = draw(st.sets(st.tuples(index, index).map(lambda pair: tuple(sorted(pair)))))
    links = [
        Link(nodes=pair, bytes_per_s=draw(positive), latency_s=draw(st.none() | latencies))
        for pair in pairs
    ]
    return Cluster(
        nodes=members,
        inter_node_bytes_per_s=draw(positive),
        inter_node_latency_s=draw(latencies),
        intra_node_latency_s=draw(latencies),
        links=tuple(links),
        devices=(MINE,),
    )


@given(cluster=clusters())
@example(Cluster(nodes=(Node(device="A10", count=1),), inter_node_bytes_per_s=10**9))
def test_every_cluster_survives_yaml(cluster):
    assert Cluster.from_yaml(text_of(cluster)) == cluster


@given(cluster=clusters())
def test_ranks_are_numbered_node_by_node(cluster):
    ranks = [rank for index in range(len(cluster.nodes)) for rank in cluster.ranks_of(index)]
    assert ranks == list(range(cluster.num_ranks))
    for index in range(len(cluster.nodes)):
        for rank in cluster.ranks_of(index):
            assert cluster.node_of(rank) == index
            assert cluster.device_of(rank) == cluster.device_of_node(index)
    for rank in (-1, cluster.num_ranks):
        with pytest.raises(ClusterError, match=rf"Rank {rank} .*{cluster.num_ranks} devices"):
            cluster.node_of(rank)


def test_a_cluster_file_means_what_the_manual_says(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(TEXT)
    cluster = Cluster.load(path)
    assert cluster.num_ranks == 6
    assert cluster.num_devices == {"A100-80GB": 4, "mine": 2}
    assert cluster.price_per_hour == 18.5
    assert cluster.price_of([0]) == 16
    assert cluster.device_of(5) == MINE
    assert cluster.link_between(0, 1) == (12.5e9, 20e-6)
    assert cluster.link_between(1, 1) == (8e9, 3e-6)
    assert cluster.link_between(0, 0) == (300e9, 3e-6)


def test_a_price_is_known_only_if_every_node_has_one():
    priced, free = Node(device="T4", count=1, price_per_hour=0.5), Node(device="T4", count=1)
    assert Cluster(nodes=(priced, priced)).price_per_hour == 1.0
    assert Cluster(nodes=(priced, free)).price_per_hour is None
