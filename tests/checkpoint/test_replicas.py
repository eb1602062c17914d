from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.checkpoint.commit import place_replicas
from lightning_hetero.core.errors import ConfigurationError


@st.composite
def clusters(draw: st.DrawFn) -> list[str]:
    return [
        f"n{node}"
        for node in range(draw(st.integers(1, 6)))
        for _ in range(draw(st.integers(1, 4)))
    ]


@given(node_of_rank=clusters(), replicas=st.integers(1, 4), data=st.data())
def test_copies_go_to_distinct_other_nodes_that_stay(
    node_of_rank: list[str], replicas: int, data: st.DataObject
) -> None:
    nodes = sorted(set(node_of_rank))
    leaving = data.draw(st.sets(st.sampled_from(nodes)))
    placed = place_replicas(node_of_rank, replicas=replicas, leaving=leaving)
    for rank, targets in enumerate(placed):
        places = [node_of_rank[target] for target in targets]
        assert node_of_rank[rank] not in places
        assert len(set(places)) == len(places)
        assert not set(places) & leaving
        able = [n for n in nodes if n != node_of_rank[rank] and n not in leaving]
        wanted = max(1, replicas - 1) if node_of_rank[rank] in leaving else replicas - 1
        assert len(places) == min(wanted, len(able))


@given(num_nodes=st.integers(2, 6), ranks=st.integers(1, 4), replicas=st.integers(2, 3))
def test_equal_nodes_keep_equally_much_for_their_predecessors(
    num_nodes: int, ranks: int, replicas: int
) -> None:
    node_of_rank = [f"n{node}" for node in range(num_nodes) for _ in range(ranks)]
    kept: Counter[str] = Counter()
    for rank, targets in enumerate(place_replicas(node_of_rank, replicas=replicas)):
        for target in targets:
            kept[node_of_rank[target]] += 1
            distance = (target // ranks - rank // ranks) % num_nodes
            assert 1 <= distance < replicas
    assert len(set(kept.values())) == 1


def test_less_than_one_replica_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="replicas is 0"):
        place_replicas(["a"], replicas=0)
