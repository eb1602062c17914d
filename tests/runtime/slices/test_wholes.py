"""Whole tensors come together from slices, in few messages."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.exchange.owners import assign_owners
from lightning_hetero.exchange.slices import Ownership, ParameterSpec
from lightning_hetero.runtime.slices import wholes
from lightning_hetero.runtime.slices.weights import narrow_rows
from lightning_hetero.runtime.slices.wholes import gather_everywhere, gather_on_rank_0
from tests.processes import ProcessPool

NUM_RANKS = 3
SHAPES: dict[str, tuple[int, ...]] = {
    f"{layer}.{name}": shape
    for layer in range(20)
    for name, shape in {"weight": (7, 3), "bias": (7,), "scale": (), "short": (5, 2)}.items()
}
DTYPES = {"weight": torch.float32, "bias": torch.bfloat16, "scale": torch.float32}
COLUMNS = {"weight"}
"""Cut along their second dim in every other layer."""


def whole_of(name: str) -> Tensor:
    """Return values that every rank knows."""
    torch.manual_seed(len(name) + sum(map(ord, name)))
    return (100 * torch.randn(SHAPES[name])).to(DTYPES.get(name.split(".")[1], torch.int64))


def gather(rank: int) -> tuple[list[Any], list[Any], int]:
    dist.init_process_group("gloo")
    specs = []
    for name, shape in SHAPES.items():
        layer, kind = name.split(".")
        dim = 1 if kind in COLUMNS and int(layer) % 2 else 0
        specs.append(ParameterSpec(name=name, shape=shape, layer=int(layer), tp_dim=dim))
    plan = ParallelPlan.even(world_size=NUM_RANKS, num_layers=20, num_stages=1)
    slices = assign_owners(specs, plan, world_size=NUM_RANKS, ownership=Ownership.HOLDERS)
    by_name = {spec.name: spec for spec in specs}

    def own_of(name: str) -> Tensor:
        kept = [item for item in slices[name] if item.owner == rank]
        start, stop = (kept[0].start, kept[0].stop) if kept else (0, 0)
        return narrow_rows(whole_of(name), by_name[name], start, stop)

    def rows(name: str, own: Tensor, start: int, stop: int) -> Tensor:
        assert own.shape == own_of(name).shape
        return own

    store: Any = SimpleNamespace(specs=by_name, slices=slices, rows=rows, frozen=())
    comms: Any = SimpleNamespace(global_rank=rank, world_size=NUM_RANKS, control=None)
    own = {(name, 1): (name, own_of(name)) for name in SHAPES}
    messages = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal messages
        messages += 1
        return receive(*args, **kwargs)

    receive = dist.irecv
    with mock.patch.object(dist, "irecv", counted):
        on_rank_0 = gather_on_rank_0(store, comms, own)
    with mock.patch.object(wholes, "_AT_ONCE", 100), mock.patch.object(wholes, "_OF_EACH_RANK", 9):
        everywhere = gather_everywhere(store, comms, own)

    def compared(found: dict[Any, Tensor]) -> list[Any]:
        return [key for key, whole in found.items() if torch.equal(whole, whole_of(key[0]))]

    return compared(on_rank_0), compared(everywhere), messages


@pytest.mark.dist
def test_an_owner_s_rows_of_many_parameters_travel_as_one_message(pool: ProcessPool) -> None:
    found = pool.run(gather, NUM_RANKS)
    keys = {(name, 1) for name in SHAPES}
    for rank, (on_rank_0, everywhere, messages) in enumerate(found):
        assert set(on_rank_0) == (set() if rank else keys)
        assert set(everywhere) == keys
        # One from each other rank for each dtype.
        assert messages == (0 if rank else 3 * (NUM_RANKS - 1))
