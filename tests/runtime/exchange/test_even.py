"""Rectangles of pieces against pieces taken one by one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.exchange.owners import assign_owners
from lightning_hetero.exchange.slices import Ownership, ParameterSpec
from lightning_hetero.exchange.transfers import ShardGroup, TransferTable, Unit
from lightning_hetero.runtime.exchange.even import EvenPieces
from lightning_hetero.runtime.slices.weights import narrow_rows

MANY_ROWS = ParameterSpec(name="many rows", shape=(3000, 2), layer=0)
"""Beside it what a few rows are padded by doesn't count."""


def store_of(rank: int) -> Any:
    return SimpleNamespace(global_rank=rank, device=torch.device("cpu"))


def unit_of_layer(specs: list[ParameterSpec], world_size: int, weights: Any = None) -> Unit:
    plan = ParallelPlan.even(world_size=world_size, num_layers=1)
    slices = assign_owners(
        specs, plan, world_size=world_size, ownership=Ownership.HOLDERS, weights=weights
    )
    (unit,) = TransferTable(specs, slices, plan).units
    return unit


def shard_group_of(unit: Unit) -> ShardGroup:
    (shard_group,) = unit.kind.shard_groups(push=False) or ()
    return shard_group


def even_pieces(unit: Unit, rank: int) -> EvenPieces:
    shard_group = shard_group_of(unit)
    return EvenPieces(unit.specs, shard_group.members, shard_group.pieces, store_of(rank))


@given(
    world_size=st.integers(2, 9),
    shapes=st.lists(
        st.one_of(
            st.just(()),
            st.tuples(st.integers(1, 40)),
            st.tuples(st.integers(1, 40), st.integers(1, 4)),
            st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 3)),
        ),
        max_size=4,
    ),
    shift=st.floats(0.0, 0.02),
)
def test_a_rectangle_holds_each_members_rows_and_gives_them_back(world_size, shapes, shift):
    specs = [
        ParameterSpec(name=str(i), shape=shape, layer=0, tp_dim=1 if len(shape) == 3 else None)
        for i, shape in enumerate(shapes)
    ]
    specs.append(MANY_ROWS)
    weights = [1.0 + shift * (rank % 2) for rank in range(world_size)]
    unit = unit_of_layer(specs, world_size, weights)
    shard_group = shard_group_of(unit)
    wholes = [torch.randn(spec.shape) for spec in specs]
    pieces = [even_pieces(unit, rank) for rank in range(world_size)]
    packed = pieces[0].pack_wholes(wholes, torch.float32)
    assert packed.shape == (world_size, pieces[0].numel)
    for rank, even in enumerate(pieces):
        expected = [
            narrow_rows(whole, spec, *rows[rank])
            for whole, spec, rows in zip(wholes, specs, shard_group.pieces, strict=True)
        ]
        taken = even.own_rows_of(wholes, specs)
        for found in (even.unpack_own(packed[rank]), taken):
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other)
        # From owners to holders and back.
        packed[rank] = even.pack_own(taken, torch.float32)
    filled = [torch.zeros(spec.shape) for spec in specs]
    pieces[-1].unpack_wholes(packed, filled)
    for one, other in zip(filled, wholes, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("rows", "is_even"), [(64, True), (63, True), (20, False), (17, False)])
def test_pieces_are_padded_to_one_size_where_that_costs_little(rows, is_even):
    unit = unit_of_layer([ParameterSpec(name="x", shape=(rows, 4), layer=0)], 8)
    assert (unit.kind.shard_groups(push=False) is not None) == is_even
