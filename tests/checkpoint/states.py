"""A small model's state, cut over ranks by any plan, and ranks that are threads."""

import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from lightning_hetero.checkpoint import (
    CheckpointContent,
    CheckpointId,
    CheckpointWriter,
    Peers,
    Recovered,
    Recovery,
    SliceContent,
    SliceNeed,
    Store,
    Tier,
    TierKind,
    WriterOptions,
)
from lightning_hetero.core.plan import ParallelPlan, PipelinePlan, StagePlan
from lightning_hetero.exchange.owners import assign_owners
from lightning_hetero.exchange.slices import OuterRole, Ownership, ParameterSpec, Slice
from lightning_hetero.exchange.transfers import unit_of
from tests.checkpoint.stand_ins import MemoryStore, Throttle, ThrottledStore, peers_in_threads

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


def cut(tensor: torch.Tensor, dim: int, rows: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return rows of a tensor; a tensor without dims whole."""
    if not tensor.ndim:
        return tensor.clone()
    return torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in rows], dim)


def owned(
    plan: ParallelPlan,
    world_size: int,
    *,
    ownership: Ownership = Ownership.HOLDERS,
    items: Sequence[ParameterSpec] | None = None,
    standbys: Sequence[int] = (),
) -> dict[str, tuple[Slice, ...]]:
    """Return who owns what."""
    return assign_owners(
        items or specs(), plan, world_size=world_size, ownership=ownership, standbys=standbys
    )


def contents(
    step: int,
    plan: ParallelPlan,
    world_size: int,
    *,
    attempt: int = 0,
    ownership: Ownership = Ownership.HOLDERS,
    items: Sequence[ParameterSpec] | None = None,
    standbys: Sequence[int] = (),
) -> list[CheckpointContent]:
    """Return what each rank saves at a step; with standbys what each keeps."""
    parameters = items or specs()
    owners = owned(plan, world_size, ownership=ownership, items=parameters, standbys=standbys)
    pieces: list[list[SliceContent]] = [[] for _ in range(world_size)]
    for spec in parameters:
        for piece in owners[spec.name]:
            rows = spec.cut_dim, [(piece.start, piece.stop)]
            content = SliceContent(
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
            for rank in piece.ranks:
                pieces[rank].append(content)
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
    rows = {
        spec.name: tuple((p.start, p.stop) for p in owners[spec.name] if p.owner == rank)
        for spec in parameters
    }
    return [
        SliceNeed(spec.name, spec.shape, spec.cut_dim, rows[spec.name])
        for spec in parameters
        if rows[spec.name]
    ]


def assert_is_state(recovered: Recovered | None, needs: Sequence[SliceNeed], step: int) -> None:
    """Compare with the state at a step, bit for bit."""
    assert recovered is not None
    assert recovered.id.step == step
    assert recovered.metadata["global_step"] == step
    assert [item.parameter for item in recovered.slices] == [need.parameter for need in needs]
    for item, need in zip(recovered.slices, needs, strict=True):
        weight, moment = (
            cut(full_tensor(need.parameter + end, need.shape, step), need.dim, need.rows)
            for end in ("", "/m")
        )
        assert torch.equal(item.weight, weight), need
        assert torch.equal(item.state["exp_avg"], moment), need
        assert item.state["step"].item() == step
        assert item.scalars == {"lr_scale": 0.5, "seen": step}


class SlowStores(dict[str, Any]):
    """The stores that a rank serves, behind a link of limited bandwidth."""

    def __init__(self, throttle: Throttle) -> None:
        super().__init__()
        self.throttle = throttle

    def __getitem__(self, name: str) -> ThrottledStore:
        return ThrottledStore(super().__getitem__(name), self.throttle)


def run_ranks(
    world_size: int,
    action: Callable[[int, Peers], T],
    *,
    bytes_per_s: float | None = None,
    timeout_s: float = 30.0,
) -> list[T]:
    """Run `action(rank, peers)` for all ranks at once; raise the first error."""
    peers = peers_in_threads(world_size, timeout_s=timeout_s)
    if bytes_per_s is not None:
        for item in peers:
            item.server.stores = SlowStores(Throttle(bytes_per_s))
    with ThreadPoolExecutor(world_size) as pool:
        results = [pool.submit(action, rank, peers[rank]) for rank in range(world_size)]
        try:
            return [result.result() for result in results]
        finally:
            for item in peers:
                item.close()


class Nodes:
    """Each node's own tiers and one remote store for all."""

    def __init__(self, names: Sequence[str], *, remote: bool = True) -> None:
        self.memory = {name: MemoryStore(f"{name}/shm") for name in names}
        self.disk = {name: MemoryStore(f"{name}/disk") for name in names}
        self.remote: Store | None = MemoryStore("remote") if remote else None

    def tiers(self, node: str) -> list[Tier]:
        own = [
            Tier(kind=TierKind.MEMORY, store=self.memory[node]),
            Tier(kind=TierKind.DISK, store=self.disk[node]),
        ]
        if self.remote is None:
            return own
        return [*own, Tier(kind=TierKind.REMOTE, store=self.remote)]

    def lose(self, node: str) -> None:
        self.memory[node].files.clear()
        self.disk[node].files.clear()


def recover(
    needs: Sequence[SliceNeed], tiers: Sequence[Tier], *, step: int | None = None, **options: Any
) -> Recovered | None:
    return Recovery(tiers, **options).recover(needs, step=step)


def begin_run(tiers: Sequence[Tier], **options: Any) -> CheckpointId:
    return Recovery(tiers, **options).begin_run()


def write(
    tiers: Sequence[Sequence[Tier]],
    action: Callable[[int, CheckpointWriter], T],
    *,
    node_of_rank: Sequence[str] = "abc",
    timeout_s: float = 30.0,
    **options: Any,
) -> list[T]:
    """Run `action(rank, writer)` for the ranks with these tiers, then close the writers."""

    def run(rank: int, peers: Peers) -> T:
        writer = CheckpointWriter(
            tiers[rank],
            node_of_rank=node_of_rank[: len(tiers)],
            peers=peers,
            options=WriterOptions(**options),
        )
        result = action(rank, writer)
        writer.close()
        return result

    return run_ranks(len(tiers), run, timeout_s=timeout_s)


def save_all(
    nodes: Nodes, node_of_rank: Sequence[str], parts: list[CheckpointContent], *, replicas: int = 1
) -> None:
    def action(rank: int, writer: CheckpointWriter) -> None:
        saved = writer.save(parts[rank])
        saved.wait_until_confirmed(20)
        assert saved.wait_until_uploaded(20) == (nodes.remote is not None)

    tiers = [nodes.tiers(node) for node in node_of_rank]
    write(tiers, action, node_of_rank=node_of_rank, replicas=replicas)


def recover_all(
    nodes: Nodes, node_of_rank: Sequence[str], needs: list[list[SliceNeed]], **options: Any
) -> list[Recovered | None]:
    def action(rank: int, peers: Peers) -> Recovered | None:
        tiers = nodes.tiers(node_of_rank[rank])
        return recover(needs[rank], tiers, node=node_of_rank[rank], peers=peers, **options)

    return run_ranks(len(node_of_rank), action)


def uneven_plan() -> ParallelPlan:
    """Two pipelines: TP 2 in one stage, TP 1 in stages of 3 and 1 layers."""
    return ParallelPlan(
        pipelines=(
            PipelinePlan(stages=(StagePlan(ranks=(0, 1), layers=range(4)),)),
            PipelinePlan(
                stages=(
                    StagePlan(ranks=(2,), layers=range(3)),
                    StagePlan(ranks=(3,), layers=range(3, 4)),
                )
            ),
        )
    )


PLANS = {
    "one device": (ParallelPlan.even(world_size=1, num_layers=4), 1),
    "tp 2": (ParallelPlan.even(world_size=2, num_layers=4, tp_degree=2), 2),
    "tp 4": (ParallelPlan.even(world_size=4, num_layers=4, tp_degree=4), 4),
    "pp 2": (ParallelPlan.even(world_size=2, num_layers=4, num_stages=2), 2),
    "dp 3": (ParallelPlan.even(world_size=3, num_layers=4), 3),
    "uneven": (uneven_plan(), 4),
    "idle rank": (ParallelPlan.even(world_size=2, num_layers=4), 3),
}


def disk(store: Store, **options: int) -> Tier:
    return Tier(kind=TierKind.DISK, store=store, **options)


def remote(store: Store, **options: int) -> Tier:
    return Tier(kind=TierKind.REMOTE, store=store, **options)


class Gate:
    """A `before` that holds writes up until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()

    def __call__(self, verb: str, name: str) -> None:
        if verb == "write":
            self.reached.set()
            assert self.open.wait(20)


TWO = ParallelPlan.even(world_size=2, num_layers=4)
