"""The shares of a gradient are its owners' rows, however they lie in memory."""

import pytest
import torch
from torch import nn

from lightning_hetero.core.slices import Interval, ParameterSpec
from lightning_hetero.runtime.exchange.shares import Shares

CASES: dict[str, tuple[int, list[tuple[int, Interval]]]] = {
    "all rows, owners in any order": (0, [(3, (4, 6)), (1, (0, 3)), (2, (3, 4))]),
    "one owner": (0, [(1, (0, 6))]),
    "rows of others before and behind": (0, [(1, (1, 3)), (2, (3, 5))]),
    "rows of others between": (0, [(1, (0, 2)), (2, (4, 6))]),
    "two keepers of a row": (0, [(1, (0, 4)), (2, (2, 6))]),
    "columns": (1, [(2, (2, 5)), (1, (0, 2))]),
    "all columns": (1, [(1, (0, 5))]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["rows in line", "columns in line", "none"])
def test_each_owner_gets_its_rows_in_one_dim(name: str, kind: str) -> None:
    dim, shares = CASES[name]
    weight = nn.Parameter(torch.zeros(6, 5))
    gradient = torch.arange(30.0).view(6, 5)
    if kind != "none":
        # As autograd makes them of a transposed product.
        weight.grad = gradient if kind == "rows in line" else gradient.t().contiguous().t()
    spec = ParameterSpec(name="weight", shape=(6, 5), layer=0, tp_dim=dim)
    found = dict(Shares.of(weight, spec, shares).pieces())
    expected = torch.zeros(6, 5) if kind == "none" else gradient
    assert found.keys() == {owner for owner, _ in shares}
    for owner, (start, stop) in shares:
        assert found[owner].tolist() == expected.narrow(dim, start, stop - start).flatten().tolist()
