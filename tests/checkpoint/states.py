"""A small model's state, cut over ranks by any plan, and ranks that are threads."""

import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from lightning_hetero.checkpoint import (
    CheckpointContent,
    CheckpointId,
    MemoryTransport,
    Recovered,
    SliceContent,
    SliceNeed,
    Transport,
)
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.slices import (
    OuterRole,
    Ownership,
    ParameterSpec,
    Slice,
    assign_owners,
)
from lightning_hetero.core.transfers import unit_of

T = TypeVar("T")
NUM_LAYERS = 4


def specs(num_layers: int = NUM_LAYERS, hidden: int = 8) -> list[ParameterSpec]:
    """Return a transformer-like model: column cuts, row cuts, norms, an embedding, a scalar."""
    items = [
        ParameterSpec(name="embed", shape=(12, hidden), roles=frozenset({OuterRole.FIRST})),
        ParameterSpec(name="scale", shape=(), roles=frozenset({OuterRole.LAST})),
    ]
    for layer in range(num_layers):
        items += [
            ParameterSpec(name=f"{layer}.up", shape=(4 * hidden, hidden), layer=layer, tp_dim=0),
            ParameterSpec(name=f"{layer}.down", shape=(hidden, 4 * hidden), layer=layer, tp_dim=1),
            ParameterSpec(name=f"{layer}.norm", shape=(hidden,), layer=layer),
        ]
    return items


def full_tensor(name: str, shape: Sequence[int], step: int) -> torch.Tensor:
    """Return what a whole tensor holds at a step; different for every name and step."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}@{step}".encode()))
    return torch.randn(tuple(shape), generator=generator)


def cut(tensor: torch.Tensor, dim: int, start: int, stop: int) -> torch.Tensor:
    """Return rows of a tensor; a tensor without dims whole."""
    return tensor.narrow(dim, start, stop - start).clone() if tensor.ndim else tensor.clone()


def owned(
    plan: ParallelPlan,
    world_size: int,
    *,
    ownership: Ownership = Ownership.HOLDERS,
    items: Sequence[ParameterSpec] | None = None,
) -> dict[str, tuple[Slice, ...]]:
    """Return who owns what."""
    return assign_owners(items or specs(), plan, world_size=world_size, ownership=ownership)


def contents(
    step: int,
    plan: ParallelPlan,
    world_size: int,
    *,
    attempt: int = 0,
    ownership: Ownership = Ownership.HOLDERS,
    items: Sequence[ParameterSpec] | None = None,
) -> list[CheckpointContent]:
    """Return what each rank saves at a step."""
    parameters = items or specs()
    owners = owned(plan, world_size, ownership=ownership, items=parameters)
    pieces: list[list[SliceContent]] = [[] for _ in range(world_size)]
    for spec in parameters:
        for piece in owners[spec.name]:
            rows = (spec.cut_dim, piece.start, piece.stop)
            pieces[piece.owner].append(
                SliceContent(
                    parameter=spec.name,
                    unit=unit_of(spec, plan.num_layers),
                    shape=spec.shape,
                    dim=spec.cut_dim,
                    start=piece.start,
                    stop=piece.stop,
                    weight=cut(full_tensor(spec.name, spec.shape, step), *rows),
                    state={
                        "exp_avg": cut(full_tensor(spec.name + "/m", spec.shape, step), *rows),
                        "step": torch.tensor(float(step)),
                    },
                    scalars={"lr_scale": 0.5, "seen": step},
                )
            )
    return [
        CheckpointContent(
            id=CheckpointId(step, attempt),
            global_rank=rank,
            world_size=world_size,
            num_layers=plan.num_layers,
            slices=tuple(pieces[rank]),
            metadata={"global_step": step, "loops": {"done": [step, "x"]}},
            rank_metadata={"rank": rank, "rng": torch.arange(3) + rank},
            plan=plan,
        )
        for rank in range(world_size)
    ]


def needs_of(
    rank: int,
    plan: ParallelPlan,
    world_size: int,
    *,
    ownership: Ownership = Ownership.HOLDERS,
    items: Sequence[ParameterSpec] | None = None,
) -> list[SliceNeed]:
    """Return what a rank asks for under a plan."""
    parameters = items or specs()
    owners = owned(plan, world_size, ownership=ownership, items=parameters)
    return [
        SliceNeed(spec.name, spec.shape, spec.cut_dim, piece.start, piece.stop)
        for spec in parameters
        for piece in owners[spec.name]
        if piece.owner == rank
    ]


def assert_is_state(recovered: Recovered | None, needs: Sequence[SliceNeed], step: int) -> None:
    """Compare with the state at a step, bit for bit."""
    assert recovered is not None
    assert recovered.id.step == step
    assert recovered.metadata["global_step"] == step
    assert [item.parameter for item in recovered.slices] == [need.parameter for need in needs]
    for item, need in zip(recovered.slices, needs, strict=True):
        rows = (need.dim, need.start, need.stop)
        weight = cut(full_tensor(need.parameter, need.shape, step), *rows)
        moment = cut(full_tensor(need.parameter + "/m", need.shape, step), *rows)
        assert torch.equal(item.weight, weight), need
        assert torch.equal(item.state["exp_avg"], moment), need
        assert item.state["step"].item() == step
        assert item.scalars == {"lr_scale": 0.5, "seen": step}


def run_ranks(
    world_size: int,
    action: Callable[[int, Transport], T],
    *,
    bytes_per_s: float | None = None,
    timeout_s: float = 30.0,
) -> list[T]:
    """Run `action(rank, transport)` for all ranks at once; raise the first error."""
    transports = MemoryTransport.create(world_size, bytes_per_s=bytes_per_s, timeout_s=timeout_s)
    with ThreadPoolExecutor(world_size) as pool:
        results = [pool.submit(action, rank, transports[rank]) for rank in range(world_size)]
        return [result.result() for result in results]
