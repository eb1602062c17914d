"""Laws of ownership by room: everything is owned once, nobody above his share, holders first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.exchange.owner_shares import OwnedUnit, spread_ownership


@st.composite
def units_and_shares(draw):
    num_ranks = draw(st.integers(1, 8))
    ranks = st.lists(st.integers(0, num_ranks - 1), min_size=1, max_size=3, unique=True).map(tuple)
    holders = st.lists(ranks, min_size=1, max_size=3).map(tuple)
    units = draw(
        st.lists(
            st.builds(OwnedUnit, size=st.integers(1, 1000).map(float), holders=holders),
            min_size=1,
            max_size=8,
        )
    )
    shares = draw(st.lists(st.integers(0, 9), min_size=num_ranks, max_size=num_ranks))
    shares[draw(st.integers(0, num_ranks - 1))] += 1
    return units, shares


@given(units_and_shares())
def test_every_unit_is_owned_once_and_every_rank_owns_its_share(case):
    units, shares = case
    owned = spread_ownership(units, shares)
    assert [sum(claims.values()) for claims in owned] == pytest.approx([1.0] * len(units))
    total = sum(unit.size for unit in units)
    for rank, share in enumerate(shares):
        sizes = [u.size * c.get(rank, 0.0) for u, c in zip(units, owned, strict=True)]
        assert sum(sizes) == pytest.approx(total * share / sum(shares), abs=1e-6 * total)


def test_holders_with_room_own_what_they_hold_and_no_more_moves_than_must():
    units = [OwnedUnit(size=10.0, holders=((0,), (1,))), OwnedUnit(size=30.0, holders=((2,), (3,)))]
    owned = spread_ownership(units, [5, 5, 15, 15])
    assert owned == [{0: 0.5, 1: 0.5}, {2: 0.5, 3: 0.5}]
    # Rank 2 has no room: the other holder takes what it can, the first ranks the rest.
    owned = spread_ownership(units, [10, 10, 0, 20])
    assert owned[0] == pytest.approx({0: 0.5, 1: 0.5})
    assert owned[1] == pytest.approx({3: 20 / 30, 0: 5 / 30, 1: 5 / 30})
