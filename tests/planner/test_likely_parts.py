"""Which parts of a cluster are searched, after a glance at each."""

from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.planner.parts import (
    LikelyParts,
    of_some_types,
    without_a_node,
    without_another,
)


def test_types_that_hold_everybody_up_are_left_out_of_many_devices():
    names = ("A100-80GB", "RTX-4090", "T4")
    cluster = Cluster(nodes=tuple(Node(device=name, count=4) for name in names for _ in range(40)))

    def glance(part, _worst):
        return 9.0 if any(part[80:]) else 300 / sum(part), 40

    parts = LikelyParts(
        cluster,
        [1.0] * 40 + [2.0] * 40 + [5.0] * 40,
        least=lambda part: 100 / sum(part),
        glance=glance,
    )
    assert parts.far_ahead(float("inf")) == (4,) * 80 + (0,) * 40
    # It has been searched, and others that leave out those devices are next.
    likeliest = parts.likeliest(0.95 * 300 / 320)
    assert 0 < len(likeliest) <= 3
    assert (4,) * 80 + (0,) * 40 not in likeliest
    assert not any(any(part[80:]) for part in likeliest)


def test_of_many_devices_parts_that_look_no_better_than_all_are_not_searched():
    cluster = Cluster(nodes=(Node(device="T4", count=4),) * 20)

    def likeliest(fewer: float) -> list[tuple[int, ...]]:
        parts = LikelyParts(
            cluster,
            [1.0] * 20,
            least=lambda part: 100 / sum(part),
            glance=lambda part, _worst: (10.0 if sum(part) == 80 else fewer, 8),
        )
        return parts.likeliest(9.9)

    assert likeliest(10.1) == []
    assert likeliest(9.95) != []


def test_of_many_devices_types_that_look_nearly_as_good_as_all_are_searched_first():
    nodes = [*(Node(device="A100-80GB", count=8),) * 8, *(Node(device="T4", count=8),) * 8]
    scores = {(64, 0): 10.2, (64, 64): 10.0, (64, 32): 9.9}
    parts = LikelyParts(
        Cluster(nodes=tuple(nodes)),
        [1.0] * 8 + [4.0] * 8,
        least=lambda part: 100 / sum(part),
        glance=lambda part, _worst: (scores.get((sum(part[:8]), sum(part[8:])), 20.0), 8),
    )
    assert parts.far_ahead(float("inf")) is None
    first, second = parts.likeliest(8.9)
    assert first == (8,) * 8 + (0,) * 8
    assert sum(second) == 96


def test_of_parts_that_idle_devices_alone_tell_apart_the_smallest_is_searched():
    """Together they would take the place of all others: a node more made a plan 8 % slower."""
    cluster = Cluster(nodes=(*[Node(device="A100-80GB", count=1)] * 3, Node(device="T4", count=4)))
    # T4s are left idle at a glance, so that parts of 3, 2 and 1 A100s are told apart by these.
    parts = LikelyParts(
        cluster,
        [1.0] * 3 + [5.0],
        least=lambda part: 1 / sum(part),
        glance=lambda part, _worst: (10.0 - 0.1 * sum(part[:3]), 8),
    )
    assert parts.far_ahead(float("inf")) is None
    assert parts.likeliest(11.0) == [(1, 1, 1, 0), (1, 1, 0, 0), (1, 0, 0, 0)]


def test_one_node_of_each_class_is_left_out():
    cluster = Cluster(
        nodes=(
            *[Node(device="T4", count=2)] * 2,
            Node(device="T4", count=4),
            *[Node(device="A100-80GB", count=4, price_per_hour=price) for price in (1.0, 1.0, 2.0)],
        )
    )
    assert without_a_node(cluster) == [
        (2, 0, 4, 4, 4, 4),
        (2, 2, 0, 4, 4, 4),
        (2, 2, 4, 4, 0, 4),
        (2, 2, 4, 4, 4, 0),
    ]
    assert without_a_node(Cluster(nodes=(Node(device="T4", count=8),))) == []


def test_another_node_is_left_out_of_the_same_class():
    nodes = [Node(device=name, count=2) for name in ("T4", "A100-80GB", "T4")]
    cluster = Cluster(nodes=tuple(nodes))
    assert without_another(cluster, (2, 2, 0)) == (0, 2, 0)
    assert without_another(cluster, (0, 2, 0)) is None
    assert without_another(Cluster(nodes=(nodes[0],) * 2), (2, 0)) is None


def test_parts_have_all_devices_of_any_types_or_of_all_but_one_if_types_are_many():
    names = ("T4", "V100-16GB", "A100-80GB", "T4")
    cluster = Cluster(nodes=tuple(Node(device=name, count=4) for name in names))
    assert of_some_types(cluster) == [
        (4, 0, 0, 4),
        (0, 4, 0, 0),
        (0, 0, 4, 0),
        (4, 4, 0, 4),
        (4, 0, 4, 4),
        (0, 4, 4, 0),
    ]
    assert of_some_types(Cluster(nodes=(Node(device="T4", count=8),))) == []
    many = (*names[:3], "RTX-4090", "A10-24GB")
    cluster = Cluster(nodes=tuple(Node(device=name, count=1) for name in many))
    parts = [tuple(int(node != lacked) for node in range(5)) for lacked in reversed(range(5))]
    assert of_some_types(cluster) == parts
