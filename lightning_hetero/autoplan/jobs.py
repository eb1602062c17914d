"""Jobs for which plans are searched: the present one, and those after a loss of ranks."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_hetero.autoplan.contingencies import losses_to_plan_for
from lightning_hetero.autoplan.facts import AutoPlan, RunFacts
from lightning_hetero.core.cluster import Cluster
from lightning_hetero.core.errors import ClusterError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.profile import Profile
from lightning_hetero.planner import PlanningOptions, Workload
from lightning_hetero.planner.contingency import PlanBasis, PlanningTask, Task
from lightning_hetero.runtime.iteration.config import OwnedDevice
from lightning_hetero.runtime.setup.detect import Seat, cluster_of, corrected_cluster
from lightning_hetero.simulator import RooflineCost, StageShape, StateLayout

__all__ = ["Job", "foresee", "holds_everything", "needs_no_search", "num_batches_of"]

_DEFAULT_SAMPLES = 8
_DEFAULT_LENGTH = 512
_MAX_PARTS = 4


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a plan is for: cluster, model and the size of an iteration."""

    cluster: Cluster
    model: ModelSpec
    states: StateLayout
    sequence_length: int
    batch_size: int
    num_batches: int
    """The loader's batches in an iteration."""
    microbatch_sizes: tuple[int, ...]
    assumed: tuple[str, ...]
    """Numbers that weren't found and had to be assumed, in words."""

    @classmethod
    def of(
        cls, options: AutoPlan, facts: RunFacts, model: ModelSpec, seats: Sequence[Seat]
    ) -> "Job":
        """Return the job of the ranks that run; called on rank 0.

        Raises:
            ClusterError: The cluster that the user describes has another number of devices.
        """
        cluster = options.cluster
        if isinstance(cluster, str | Path):
            cluster = Cluster.load(cluster)
        if cluster is not None and facts.first_ranks is not None:
            cluster = cluster.without(set(range(cluster.num_ranks)).difference(facts.first_ranks))
        cluster = _cluster_for(facts, cluster or cluster_of(seats))
        if cluster.num_ranks != facts.comms.world_size:
            raise ClusterError(
                f"The cluster has {cluster.num_ranks} devices but {facts.comms.world_size} "
                "processes run. Start one process a device, or describe the devices that run."
            )
        found = facts.sizes()
        assumed = []
        samples = options.batch_size or found.samples
        if samples is None:
            samples = _DEFAULT_SAMPLES
            assumed.append(f"batch_size {samples}")
        length = options.sequence_length or found.sequence_length
        if length is None:
            length = _DEFAULT_LENGTH
            assumed.append(f"sequence_length {length}")
        return cls(
            cluster=corrected_cluster(cluster, seats),
            model=model,
            states=_states_of(facts, seats),
            sequence_length=length,
            batch_size=samples,
            num_batches=num_batches_of(facts),
            microbatch_sizes=options.microbatch_sizes or _microbatch_sizes(samples),
            assumed=tuple(assumed),
        )

    def without(
        self, lost: Collection[int], options: AutoPlan, facts: RunFacts, seats: Sequence[Seat]
    ) -> "Job":
        """Return the job without some ranks; an iteration keeps its size."""
        left = [seat for rank, seat in enumerate(seats) if rank not in lost]
        is_described = options.cluster is not None
        cluster = self.cluster.without(lost) if is_described else cluster_of(left)
        cluster = corrected_cluster(_cluster_for(facts, cluster), left)
        return replace(self, cluster=cluster, states=_states_of(facts, left))

    def tasks(self, options: AutoPlan, profile: Profile | None) -> tuple[PlanningTask, ...]:
        """Return the search over sizes of micro-batches that divide the iteration, if any do."""
        batch = self.batch_size * self.num_batches
        sizes = tuple(sorted(size for size in self.microbatch_sizes if batch % size == 0))
        return (replace(self.task(options, profile, sizes[0]), sizes=sizes),) if sizes else ()

    def task(
        self, options: AutoPlan, profile: Profile | None, microbatch_size: int
    ) -> PlanningTask:
        """Return the search for one size of micro-batches."""
        basis = PlanBasis(
            cluster=self.cluster,
            model=self.model,
            states=self.states,
            workload=Workload(
                sequence_length=self.sequence_length,
                global_batch_size=self.batch_size * self.num_batches,
                sequences_per_microbatch=microbatch_size,
            ),
            profile=profile,
        )
        # A run is to start soon, and plans for losses of ranks are many.
        searching = PlanningOptions(tp_degrees=options.tp_degrees, num_candidates=1, thorough=False)
        return PlanningTask(basis=basis, options=searching)


def _cluster_for(facts: RunFacts, cluster: Cluster) -> Cluster:
    """Return a cluster without hosts' memory if owned slices must live on devices."""
    if facts.owned_device is not OwnedDevice.DEVICE:
        return cluster
    nodes = tuple(replace(node, host_memory_bytes=None) for node in cluster.nodes)
    return replace(cluster, nodes=nodes)


def _states_of(facts: RunFacts, seats: Sequence[Seat]) -> StateLayout:
    factor = max(seat.correction.activation_factor for seat in seats)
    return replace(facts.state_layout(), activation_factor=factor)


def num_batches_of(facts: RunFacts) -> int:
    """Return the number of the loader's batches, or of ranks' shares, in an iteration."""
    return facts.num_batches or facts.comms.world_size


def foresee(
    job: Job,
    options: AutoPlan,
    facts: RunFacts,
    seats: Sequence[Seat],
    tasks_of: Callable[[Job], Iterable[Task[object]]],
) -> tuple[Task[object], ...]:
    """Return the tasks that this rank would have to solve if others were lost.

    Args:
        job: The present job.
        options: The user's facts and choices.
        facts: The facts of the run.
        seats: Every rank's device, by global rank.
        tasks_of: Returns the tasks of a job without the lost ranks.
    """
    found: list[Task[object]] = []
    for lost in losses_to_plan_for(seats, facts.comms.global_rank):
        left = job.without(lost, options, facts, seats)
        if left.cluster.num_ranks > 1:
            found += tasks_of(left)
    return tuple(found)


def needs_no_search(job: Job, options: AutoPlan) -> bool:
    """Whether devices are equal and hold the whole model: then one pipeline per rank is best."""
    are_equal = len({node.device for node in job.cluster.nodes}) == 1
    return options.cluster is None and are_equal and holds_everything(job)


def _microbatch_sizes(samples: int) -> tuple[int, ...]:
    parts = [part for part in range(1, _MAX_PARTS + 1) if samples % part == 0]
    return tuple(dict.fromkeys([*(samples // part for part in parts), 1]))


def holds_everything(job: Job) -> bool:
    """Return whether a device holds the whole model and a whole batch, by the roofline."""
    # One micro-batch is no sum.
    states = replace(job.states, summed_bytes=job.states.gradient_bytes)
    cost = RooflineCost(job.cluster, job.model, layout=states)
    name = job.cluster.nodes[0].device
    shape = StageShape(name, 1, job.model.num_layers, has_embedding=True, has_head=True)
    batch = (job.sequence_length,) * job.batch_size
    needed = cost.stage_memory(shape, job.cluster.num_ranks, [batch], 1)
    return needed.total <= cost.usable_bytes(name)
