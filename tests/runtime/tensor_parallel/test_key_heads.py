"""Key and value heads are shared out to any degree that divides the query heads."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.exchange.slices import ParameterSpec
from lightning_hetero.runtime.tensor_parallel.heads import Heads


@given(
    count=st.integers(1, 6), readers=st.integers(1, 12), degree=st.integers(1, 12), data=st.data()
)
def test_ranks_hold_the_heads_that_their_queries_read(
    count: int, readers: int, degree: int, data: st.DataObject
) -> None:
    readers *= degree  # So that the degree divides the query heads.
    rows = data.draw(st.integers(1, 3))
    spec = ParameterSpec(
        name="key", shape=(count * rows, 2), tp_dim=0, tp_heads=count, tp_readers=readers
    )
    heads = Heads(count=count, readers=readers, blocks=1, attention="")
    share = count * readers // degree
    for tp_rank in range(degree):
        ((start, stop),) = spec.rows_of(tp_rank, degree)
        index, run = heads.read(tp_rank, degree)
        read = [start // rows + local for local in index for _ in range(run)]
        assert read == [q // readers for q in range(tp_rank * share, (tp_rank + 1) * share)]
        assert (start, stop) == (min(read) * rows, (max(read) + 1) * rows)


def test_one_spec_says_what_is_held_however_often() -> None:
    spec = ParameterSpec(name="key", shape=(6, 2), tp_dim=0, tp_heads=3, tp_readers=8)
    assert [spec.rows_of(rank, 2) for rank in range(2)] == [((0, 4),), ((2, 6),)]
    whole = replace(spec, tp_heads=0, tp_readers=1)
    assert [whole.rows_of(rank, 2) for rank in range(2)] == [((0, 3),), ((3, 6),)]
