"""Small gradients go end to end, and each parcel has its rows of them."""

import torch
from torch import nn

from lightning_hetero.core.slices import Interval, ParameterSpec
from lightning_hetero.runtime.exchange.parcel_table import Parcel, Part
from lightning_hetero.runtime.exchange.pushed_parcels import GradientLine


def test_a_line_brings_the_rows_of_all_weights_to_their_parcels() -> None:
    forms: list[tuple[int, tuple[int, ...]]] = [(1, (6, 5)), (0, (4, 3)), (0, ()), (0, (3,))]
    specs = [
        ParameterSpec(name=str(index), shape=shape, layer=0, tp_dim=dim or None)
        for index, (dim, shape) in enumerate(forms)
    ]
    # The third lies elsewhere, and of the last one nothing was computed.
    rows = {3: [(0, (0, 2)), (0, (3, 5)), (1, (1, 4))], 1: [(0, (1, 4)), (3, (0, 3))]}
    weights = {i: nn.Parameter(torch.zeros(forms[i][1])) for i in (0, 1, 3)}
    for index in (0, 1):
        weights[index].grad = torch.randn(forms[index][1])
    line = GradientLine(weights, specs, [_parcel(peer, parts) for peer, parts in rows.items()])
    found = line.parts()
    assert found.keys() == rows.keys()
    for peer, parts in rows.items():
        pieces = []
        for index, (start, stop) in parts:
            gradient = weights[index].grad
            whole = torch.zeros(forms[index][1]) if gradient is None else gradient
            pieces.append(whole.narrow(forms[index][0], start, stop - start).flatten())
        assert found[peer].tolist() == torch.cat(pieces).tolist()


def test_large_weights_go_through_no_line() -> None:
    small, large = (nn.Parameter(torch.zeros(2**power)) for power in (10, 20))
    assert GradientLine.fits([small, small])
    assert not GradientLine.fits([small])
    assert not GradientLine.fits([small, large])


def _parcel(peer: int, rows: list[tuple[int, Interval]]) -> Parcel:
    parts = tuple(Part(index, 0, held, (0, 0), is_whole_slice=False) for index, held in rows)
    return Parcel(0, peer, 0, parts, (), 0)
