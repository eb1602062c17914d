from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.exchange.neighbours import deal_pieces, find_neighbours
from tests.core.sample_plans import random_plan


@st.composite
def two_groups(draw):
    ranks = draw(st.permutations(range(draw(st.integers(2, 12)))))
    cut = draw(st.integers(1, len(ranks) - 1))
    return tuple(ranks[:cut]), tuple(ranks[cut:])


@given(groups=two_groups(), num_bytes=st.integers(0, 100))
def test_every_receiver_has_all_bytes_after_its_group_has_put_pieces_together(groups, num_bytes):
    senders, receivers = groups
    pieces = deal_pieces(senders, receivers)
    assert [piece.receiver for piece in pieces] == list(receivers)
    assert {piece.sender for piece in pieces} <= set(senders)
    parts = [piece.bounds(num_bytes) for piece in sorted(pieces, key=lambda p: p.receiver)]
    if len(receivers) <= len(senders):
        assert parts == [(0, num_bytes)] * len(receivers)
        assert len({piece.sender for piece in pieces}) == len(receivers)
    else:
        assert parts[0][0] == 0
        assert parts[-1][1] == num_bytes
        assert all(one[1] == other[0] for one, other in pairwise(parts))
        most = max(sum(p.sender == rank for p in pieces) for rank in senders)
        assert most == -(-len(receivers) // len(senders))


@given(rng=st.randoms(use_true_random=False))
def test_what_one_rank_sends_another_one_receives_in_a_queue_of_its_own(rng):
    plan, _ = random_plan(rng, has_chunks=True)
    for pipeline in plan.pipelines:
        sent, received, edges = set(), set(), Counter()
        for rank in pipeline.ranks:
            for stage, ends in find_neighbours(rank, pipeline).items():
                assert [end is None for end in ends] == [
                    stage == 0,
                    stage == pipeline.num_stages - 1,
                ]
                for end in filter(None, ends):
                    sent.update(end.sent)
                    received.add(end.received)
                    edges[end.received.edge] += 1
        assert sent == received
        assert set(edges.values()) <= {1}
