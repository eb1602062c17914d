from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.core.owners import assign_owners, find_standbys
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.proxies import ProxyTable, UnitRun
from lightning_hetero.core.slices import Interval, Ownership, ParameterSpec
from lightning_hetero.core.transfers import TransferTable, Unit
from tests.core.sample_plans import random_plan, small_model

RULES = st.sampled_from([Ownership.EVEN, Ownership.PARAMETER, Ownership.MEMORY])
random = st.randoms(use_true_random=False)
Row = tuple[str, int]


def everyone(unit: Unit) -> bool:
    """Let each unit have proxies that can."""
    return True


def rows_of(unit: Unit, pieces: tuple[tuple[int, int, int], ...]) -> list[Row]:
    names = [spec.name for spec in unit.specs]
    return [(names[i], row) for i, start, stop in pieces for row in range(start, stop)]


def proxies_of(run: UnitRun) -> dict[Row, int]:
    """Return the proxy of each row."""
    found: dict[Row, int] = {}
    for unit in run.units:
        for circle in unit.kind.circles(push=False) or ():
            for spec, held, pieces in zip(unit.specs, circle.held, circle.pieces, strict=True):
                for rank, (start, stop) in zip(circle.members, pieces, strict=True):
                    rows = range(held[0] + start, held[0] + stop)
                    assert not found.keys() & {(spec.name, row) for row in rows}
                    found |= {(spec.name, row): rank for row in rows}
    return found


@given(rng=random, rule=RULES, has_standbys=st.booleans())
def test_each_row_goes_once_between_who_keeps_it_and_its_proxy(rng, rule, has_standbys):
    plan, world_size = random_plan(rng)
    specs = small_model(plan.num_layers, tied=rng.random() < 0.5)
    standbys = find_standbys(range(world_size)) if has_standbys else ()
    slices = assign_owners(specs, plan, world_size=world_size, ownership=rule, standbys=standbys)
    units = TransferTable(specs, slices, plan).units
    runs = list(ProxyTable().runs(units, everyone))
    assert [i for run in runs for unit in run.units for i in unit.indices] == [
        i for unit in units for i in unit.indices
    ]
    keepers: dict[Row, set[int]] = defaultdict(set)
    for name, items in slices.items():
        for item in items:
            for row in range(item.start, item.stop):
                keepers[name, row] |= set(item.keepers)
    for run in runs:
        if run.rows is None:
            continue
        proxies, rows = proxies_of(run), run.rows
        whole = {(s.name, row) for s in rows.specs for row in range(s.cut_length)}
        assert proxies.keys() == whole
        for rank in range(world_size):
            pulled: Counter[Row] = Counter()
            for move in rows.kind.moves(rank, push=False):
                moved = rows_of(rows, move.pieces)
                assert all(move.source in keepers[row] for row in moved)
                assert all(proxies[row] == move.destination for row in moved)
                pulled.update(moved if move.destination == rank else ())
            assert pulled == Counter(row for row, proxy in proxies.items() if proxy == rank)
            pushed: Counter[Row] = Counter()
            for move in rows.kind.moves(rank, push=True):
                moved = rows_of(rows, move.pieces)
                assert all(proxies[row] == move.source for row in moved)
                pushed.update(moved if move.destination == rank else ())
            assert pushed == Counter(row for row in whole if rank in keepers[row])


def layers(num_layers: int, *shapes: tuple[int, ...]) -> list[ParameterSpec]:
    return [
        ParameterSpec(name=f"{layer}.{index}", shape=shape, layer=layer, tp_dim=0)
        for layer in range(num_layers)
        for index, shape in enumerate(shapes)
    ]


def runs_of(
    plan: ParallelPlan, specs: list[ParameterSpec], world_size: int, ownership: Ownership
) -> list[UnitRun]:
    slices = assign_owners(specs, plan, world_size=world_size, ownership=ownership)
    return list(ProxyTable().runs(TransferTable(specs, slices, plan).units, everyone))


@pytest.mark.parametrize("world_size", [64, 512])
def test_a_rank_meets_as_many_peers_as_there_are_stages_and_not_more_with_more_ranks(world_size):
    plan = ParallelPlan.even(world_size=world_size, num_layers=32, num_stages=8)
    runs = runs_of(plan, layers(32, (512, 2), (512,)), world_size, Ownership.EVEN)
    assert [len(run.units) for run in runs] == [4] * 8
    for rank in (0, 5, world_size - 1):
        for push in (False, True):
            moves = [m for run in runs if run.rows for m in run.rows.kind.moves(rank, push=push)]
            leaving = [move for move in moves if move.source == rank != move.destination]
            arriving = [move for move in moves if move.source != rank == move.destination]
            assert max(len(leaving), len(arriving)) <= 8


def test_a_run_has_no_more_units_than_a_unit_has_holders():
    plan = ParallelPlan.even(world_size=4, num_layers=10, num_stages=2)
    runs = runs_of(plan, layers(10, (16, 2)), 4, Ownership.EVEN)
    assert [run.rows.indices if run.rows else None for run in runs] == [
        (0, 1), (2, 3), (4,), (5, 6), (7, 8), (9,),
    ]  # fmt: skip


def test_owners_of_whole_parameters_have_no_proxies_nor_have_ranks_that_are_no_circles():
    plan = ParallelPlan.even(world_size=8, num_layers=4, num_stages=2)
    specs = layers(4, (16, 2))
    assert all(run.rows is None for run in runs_of(plan, specs, 8, Ownership.PARAMETER))
    assert all(run.rows for run in runs_of(plan, specs, 8, Ownership.EVEN))
    one = ParallelPlan.even(world_size=4, num_layers=4, num_stages=4)
    assert all(run.rows is None for run in runs_of(one, specs, 4, Ownership.EVEN))


def test_under_tensor_parallelism_each_part_has_proxies_of_its_own():
    plan = ParallelPlan.even(world_size=16, num_layers=2, num_stages=2, tp_degree=2)
    (run, _) = runs_of(plan, layers(2, (32, 2)), 16, Ownership.EVEN)
    rows: dict[int, Interval] = {}
    for circle in run.units[0].kind.circles(push=False) or ():
        assert len(circle.members) == 4
        (held,), (pieces,) = circle.held, circle.pieces
        rows |= {
            rank: (held[0] + start, held[0] + stop)
            for rank, (start, stop) in zip(circle.members, pieces, strict=True)
        }
    assert sorted(rows.values()) == [(i, i + 4) for i in range(0, 32, 4)]
