"""Make a plan ready to run on one rank, and change to another plan.

Slices stay with their owners, so no optimizer state moves; everything else that a plan needs is
made anew. Ranks communicate for this only if the plan needs new process groups. So the plan can
change between any two iterations.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.core.errors import PlanError
from lightning_hetero.core.places import RankPlace
from lightning_hetero.core.plan import ParallelPlan, PipelinePlan
from lightning_hetero.exchange.neighbours import stage_edges
from lightning_hetero.exchange.transfers import (
    ExchangeKind,
    TransferTable,
    UnitKind,
    are_collective,
)
from lightning_hetero.runtime.clock import ComputeClock
from lightning_hetero.runtime.exchange.by_node import groups_on_nodes
from lightning_hetero.runtime.exchange.messages import ExchangeOptions, SideStream
from lightning_hetero.runtime.exchange.pull import Pull
from lightning_hetero.runtime.exchange.push import Push
from lightning_hetero.runtime.exchange.routes import Routes
from lightning_hetero.runtime.iteration.config import EngineConfig
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.slices.weights import ComputeWeights, SliceStore
from lightning_hetero.runtime.stage.chunks import Chunk, chunks_of
from lightning_hetero.runtime.stage.outer_parameters import OuterRoles, ReadWatch
from lightning_hetero.runtime.stage.split_layers import LayerSplitter
from lightning_hetero.runtime.tensor_parallel.sharding import TensorParallel

MAX_KNOWN_PLANS = 16
"""Number of plans whose transfer tables are kept; for other plans they are computed again."""
MERGED_NUMEL = 2**20
"""Largest number of elements of consecutive small layers that are merged into one unit. A fast link
moves these 2 or 4 MB in about the time of its latency."""


@dataclass(eq=False, kw_only=True)
class RunningPlan:
    """A plan that is ready to run on one rank: its place, weights, transfers and neighbours."""

    plan: ParallelPlan
    place: RankPlace | None
    """This rank's place in the plan; None if it is idle."""
    table: TransferTable
    weights: ComputeWeights
    pull: Pull
    push: Push
    chunks: tuple[Chunk, ...]
    """This rank's stages, ascending; none if it is idle."""
    shares_memory: bool
    """Whether slices may be views of the compute weights: see `ComputeWeights`."""
    num_microbatches: tuple[int, ...]
    """Micro-batches of each pipeline in a full iteration."""
    reads: set[str] | None = None
    """Parameters outside the layers that this iteration has used; None in iterations that don't
    record this (see `outer_parameters`)."""
    num_in_flight: int = 0
    """Number of micro-batches whose forward has ended and whose backward hasn't begun. On a rank
    with several chunks a micro-batch counts once for each chunk that it is in."""

    @property
    def pipeline(self) -> PipelinePlan:
        """This rank's pipeline; must not be read on an idle rank."""
        assert self.place is not None
        return self.plan.pipelines[self.place.pipeline_index]

    @property
    def layers(self) -> frozenset[int]:
        """Layers of this rank's stages; none if it is idle."""
        return frozenset(index for chunk in self.chunks for index in chunk.stage.layers)

    @property
    def is_last(self) -> bool:
        """Whether the user's step runs to its end on this rank; True on idle ranks."""
        return not self.chunks or self.chunks[-1].is_last

    @property
    def has_both_ends(self) -> bool:
        """Whether this rank runs the pipeline's first stage and, as another chunk, its last."""
        return len(self.chunks) > 1 and self.chunks[0].index == 0 and self.is_last

    @cached_property
    def outer(self) -> frozenset[str]:
        """This rank's parameters outside the layers."""
        specs = self.weights.store.specs
        return frozenset(name for name in self.weights.shards if specs[name].layer is None)

    def parameters_of(self, chunk: Chunk) -> frozenset[str]:
        """Return this rank's parameters of a chunk; chunks at both ends have outer ones, too."""
        specs, layers = self.weights.store.specs, chunk.stage.layers
        own = frozenset(name for name in self.weights.shards if specs[name].layer in layers)
        return own | self.outer if chunk.is_last or chunk.index == 0 else own

    @cached_property
    def splitter(self) -> LayerSplitter:
        """Splits backward passes into gradients of inputs and of this rank's weights."""
        return LayerSplitter({shard: name for name, shard in self.weights.shards.items()})

    def finish_exchange(self, *, is_training: bool) -> dict[str, Tensor] | None:
        """Wait for all of the iteration's messages; return the slices' summed gradients, if any."""
        self.pull.finish()
        sums = self.push.finish() if is_training else None
        for chunk in self.chunks:
            chunk.link.finish()
        return sums

    def unused(self, num_missing: Mapping[str, int]) -> set[str]:
        """Return the parameters that got no gradient on any holder.

        Args:
            num_missing: For each parameter that some holder has no gradient of, the number of such
                holders.
        """
        items = num_missing.items()
        return {name for name, number in items if number == len(self.table.holdings(name))}

    def read_watch(self, chunk: Chunk) -> ReadWatch | None:
        """Return a watch of the outer parameters that a micro-batch uses, or None if not needed."""
        is_first = chunk.link.previous is None
        if self.reads is None or is_first is chunk.is_last or self.has_both_ends:
            return None
        return ReadWatch(self.weights.outer, self.reads, is_first=is_first)


class PlanSwitch:
    """Holds the plan that runs on one rank, and changes it.

    Every rank calls each method with the same arguments, between iterations.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        store: SliceStore,
        comms: Communicators,
        *,
        clock: ComputeClock,
        config: EngineConfig,
        tensor_parallel: TensorParallel | None,
    ) -> None:
        self._store = store
        self._config = config
        # One stream for all plans: torch has a pool of 32, so two plans might get the same one.
        side_stream = SideStream(store.device)
        self._comms = comms
        self._clock = clock
        self._options = ExchangeOptions(
            group=comms.exchange,
            group_of=self._group_of,
            kind=config.exchange,
            node_of_rank=config.node_of_rank,
            dtype=config.compute_dtype,
            clock=clock,
            side_stream=side_stream,
        )
        self._known: dict[ParallelPlan, Routes] = {}
        """The plans that ran or were prepared most recently, the latest one last."""
        self._tensor_parallel = tensor_parallel
        self._roles = OuterRoles()
        self._specs = self._roles.apply(store.specs.values(), known=False)
        self.prepare([plan])
        self.running = self._make_ready(plan, shares_memory=True)
        """The plan that runs."""

    def prepare(self, plans: Sequence[ParallelPlan]) -> None:
        """Create the process groups of plans that may run, so that no iteration waits for it.

        Communicates over all ranks if there are new groups. A plan that wasn't prepared can run,
        too: its units without a group travel by messages.
        """
        numels: Counter[tuple[int, ...]] = Counter()
        for plan in plans:
            self._connect(plan)
        # If not even all ranks together would use a collective, smaller groups won't either.
        for plan in plans if self._are_collective(range(self._comms.world_size)) else ():
            # Parameters that turn out to be used at one end only have the groups of its layers.
            for unit in self._routes_of(plan).table.units:
                for ranks in unit.kind.groups | self._groups_on_nodes(unit.kind):
                    numels[ranks] += unit.numel
        # Groups that move the most elements come first; the order is the same on all ranks.
        wanted = sorted(filter(self._are_collective, numels), key=lambda m: (-numels[m], m))
        self._comms.make_exchange_groups(wanted)

    def _connect(self, plan: ParallelPlan) -> None:
        """Create the communicators of a plan's stages; communicates if there are new ones."""
        self._comms.connect(stage_edges(plan))
        if self._tensor_parallel is not None:
            self._comms.tensor_parallel_group(plan)

    def _groups_on_nodes(self, kind: UnitKind) -> set[tuple[int, ...]]:
        """Return the ranks that sum gradients of a kind of units together, node by node."""
        if self._options.kind is not ExchangeKind.BY_NODE:
            return set()
        shard_groups, nodes = kind.shard_groups(push=True) or (), self._options.node_of_rank
        return set().union(*(groups_on_nodes(item.members, nodes) for item in shard_groups))

    def _are_collective(self, members: Sequence[int]) -> bool:
        if self._comms.exchange is None:
            return False
        backend = dist.get_backend(self._comms.exchange)
        return are_collective(self._options.kind, backend, len(members))

    def _group_of(self, members: tuple[int, ...]) -> dist.ProcessGroup | None:
        return self._comms.exchange_group(members) if self._are_collective(members) else None

    def table_of(self, plan: ParallelPlan) -> TransferTable:
        """Return what a plan would move between which ranks; communicates nothing."""
        slices = self._store.slices
        return TransferTable(self._specs, slices, plan, merged_numel=MERGED_NUMEL)

    def _routes_of(self, plan: ParallelPlan) -> Routes:
        routes = self._known.pop(plan, None)
        if routes is None:
            place = plan.place(self._comms.global_rank)
            stages = () if place is None else plan.pipelines[place.pipeline_index].stages
            routes = Routes(
                self.table_of(plan),
                self._store,
                self._options,
                stage_ranks=() if place is None else stages[place.stage_index].ranks,
                stage_group=self._comms.tensor_parallel_group(plan),
            )
        self._known[plan] = routes  # The most recently used plan is last.
        if len(self._known) > MAX_KNOWN_PLANS:
            self._known.pop(next(iter(self._known)))
        return routes

    def check(self, plan: ParallelPlan) -> None:
        """Refuse a plan that can't run here.

        Raises:
            PlanError: It is for another number of ranks or layers, or it has tensor parallelism for
                which the module wasn't prepared.
            ModelError: It has stages or recomputes layers, but the module's layers don't allow it.
        """
        plan.check_world_size(self._comms.world_size)
        plan.check_num_layers(self._store.layout.num_layers)
        if plan.works_by_layers:
            self._store.layout.require_layers()
        if self._tensor_parallel is None and plan.has_tensor_parallelism:
            raise PlanError(
                "The plan uses tensor parallelism, for which the module wasn't prepared, because "
                "the first plan had none. Give HeteroStrategy(tp_plan=...)."
            )

    def change(self, plan: ParallelPlan) -> None:
        """Run another plan from now on; communicates only if it needs new groups."""
        if plan is not self.running.plan and plan != self.running.plan:
            self.check(plan)
            self._replace(plan, shares_memory=False)

    def follow_freezing(self) -> bool:
        """Update what is pushed after parameters were frozen or unfrozen.

        Returns whether any were, since the last call; the same on every rank.
        """
        changed = self._store.follow_freezing()
        if changed:
            self._hold(known=self._roles.are_known)
        return changed

    def thaw(self, names: Sequence[str]) -> None:
        """Give owners to frozen weights, which had none, because they are to train from now on."""
        self._store.thaw(names)
        self._remake()

    def begin(self, phase: int, epoch: int) -> RunningPlan:
        """Return the plan for an iteration.

        In a phase's first iteration of an epoch it is recorded which parameters outside the layers
        are used: see `outer_parameters`.
        """
        is_watched = self._roles.is_due(phase, epoch) and self.running.plan.max_stages > 1
        if is_watched:
            self._hold(known=False)
        self.running.reads = set() if is_watched else None
        return self.running

    def learn_roles(self, reads: Mapping[int, Sequence[str]], phase: int, epoch: int) -> None:
        """Hold parameters outside the layers only on the stages that have used them.

        Every rank knows what each rank has used, so all ranks make the same tables.
        """
        if self.running.reads is not None and reads:
            self._roles.learn(self.running.plan, reads, phase=phase, epoch=epoch)
            self._hold(known=True)

    def close(self) -> None:
        """Free the plan's weights; slices keep their values."""
        self.running.weights.release()
        del self.running

    def _hold(self, *, known: bool) -> None:
        specs = self._roles.apply(self._store.specs.values(), known=known)
        if specs != self._specs:
            self._specs = specs
            self._remake()

    def _remake(self) -> None:
        self._known.clear()
        self._replace(self.running.plan, shares_memory=self.running.shares_memory)

    def _replace(self, plan: ParallelPlan, *, shares_memory: bool) -> None:
        with torch.inference_mode(mode=False):  # Weights made in a validation may train later.
            self.running.weights.release()
            # Both plans' weights at the same time might not fit into the device's memory.
            del self.running
            self.running = self._make_ready(plan, shares_memory=shares_memory)

    def _make_ready(self, plan: ParallelPlan, *, shares_memory: bool) -> RunningPlan:
        self._connect(plan)
        if self._tensor_parallel is not None:
            self._tensor_parallel.enter_plan(plan, self._comms)
        store, routes = self._store, self._routes_of(plan)
        table = routes.table
        weights = ComputeWeights(
            store, table, dtype=self._options.dtype, share_memory=shares_memory
        )
        return RunningPlan(
            plan=plan,
            place=plan.place(self._comms.global_rank),
            table=table,
            weights=weights,
            pull=Pull(store, weights, routes),
            push=Push(weights, routes),
            chunks=chunks_of(
                plan,
                self._comms,
                device=store.device,
                clock=self._clock,
                group=None if self._tensor_parallel is None else self._tensor_parallel.group,
            ),
            shares_memory=shares_memory,
            num_microbatches=plan.count_microbatches(self._config.num_microbatches),
        )
