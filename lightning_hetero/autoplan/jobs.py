"""Describe the jobs for which plans are searched: the present one, and those after a loss of ranks.

After a loss, the first remaining rank makes the plan. So each rank prepares, in advance, for the
cases in which it would be that rank: rank 0 for the loss of any other rank or node, rank 1 for that
of rank 0, the first rank of the second node for that of the first node. A plan made in advance is
used only for exactly the same devices, model, sizes and costs.
"""

import pickle
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from lightning_hetero.autoplan.facts import AutoPlan, RunFacts
from lightning_hetero.core.cluster import Cluster
from lightning_hetero.core.errors import ClusterError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.process import AnsweringProcess
from lightning_hetero.core.profile import Profile
from lightning_hetero.planner import PlanningOptions, Workload, contingency
from lightning_hetero.planner.contingency import PlanBasis, PlanningTask, Task
from lightning_hetero.runtime.iteration.config import OwnedDevice
from lightning_hetero.runtime.setup.detect import Seat, cluster_of, corrected_cluster
from lightning_hetero.simulator import MicroBatchShape, RooflineCost, StageShape, StateLayout

_DEFAULT_SAMPLES = 8
"""Samples of a rank's batch if no number is found."""
_DEFAULT_LENGTH = 512
"""Tokens of a sample if no number is found."""
_MAX_PARTS = 4
"""Largest number of micro-batches into which a batch is cut, besides single samples."""
_SCHEDULED = 4
"""Number of plans, the best ones under 1F1B, that are simulated under a computed schedule. That
takes one or two seconds."""

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is planned for: the ranks that run, their batch, and the search if one is needed."""

    task: PlanningTask
    """The search, without measured costs; its sizes of micro-batches divide the iteration."""
    batch: MicroBatchShape
    """The samples of a rank's batch."""
    is_described: bool
    """Whether the user describes the cluster."""
    assumed: tuple[str, ...]
    """Descriptions of numbers that weren't found and are assumed."""

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
                "processes run. Start one process per device, or describe the devices that run."
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
        total, wanted = samples * num_batches_of(facts), options.microbatch_sizes
        sizes = sorted(size for size in wanted or _sizes_of(samples) if total % size == 0)
        basis = PlanBasis(
            cluster=corrected_cluster(cluster, seats),
            model=model,
            states=_states_of(facts, seats),
            workload=Workload(
                sequence_length=length,
                global_batch_size=total,
                sequences_per_microbatch=sizes[0] if sizes else 1,
            ),
            profile=None,
        )
        searching = PlanningOptions(
            tp_degrees=options.tp_degrees,
            # The best plan under 1F1B needn't be the best under a solved schedule.
            num_candidates=_SCHEDULED if facts.schedule.is_solved else 1,
            # The run should start soon, and there are many cases to prepare for.
            thorough=False,
        )
        return cls(
            task=PlanningTask(
                basis=basis, options=searching, sizes=tuple(sizes), schedule=facts.schedule
            ),
            batch=(length,) * samples,
            is_described=options.cluster is not None,
            assumed=tuple(assumed),
        )

    @property
    def basis(self) -> PlanBasis:
        """All inputs of a plan's prediction but measured costs."""
        return self.task.basis

    def without(self, lost: Collection[int], facts: RunFacts, seats: Sequence[Seat]) -> "Job":
        """Return the job without some ranks; an iteration keeps its size."""
        left = [seat for rank, seat in enumerate(seats) if rank not in lost]
        cluster = self.basis.cluster.without(lost) if self.is_described else cluster_of(left)
        cluster = corrected_cluster(_cluster_for(facts, cluster), left)
        basis = replace(self.basis, cluster=cluster, states=_states_of(facts, left))
        return replace(self, task=replace(self.task, basis=basis))

    def measured(self, profile: Profile | None) -> PlanningTask:
        """Return the search with measured costs; None searches by data sheets."""
        return replace(self.task, basis=replace(self.basis, profile=profile))

    def needs_no_search(self) -> bool:
        """Whether one pipeline per rank is best: devices are equal and have room for the model.

        Predicted from data sheets.
        """
        basis = self.basis
        if self.is_described or len({node.device for node in basis.cluster.nodes}) > 1:
            return False
        # With one micro-batch, gradients aren't summed over micro-batches.
        states = replace(basis.states, summed_bytes=basis.states.gradient_bytes)
        cost = RooflineCost(basis.cluster, basis.model, layout=states)
        name = basis.cluster.nodes[0].device
        shape = StageShape(name, 1, basis.model.num_layers, has_embedding=True, has_head=True)
        needed = cost.stage_memory(shape, basis.cluster.num_ranks, [self.batch], 1)
        return needed.total <= cost.usable_bytes(name)


def _cluster_for(facts: RunFacts, cluster: Cluster) -> Cluster:
    """Return the cluster, without hosts' memory if owned slices must be on devices."""
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
    facts: RunFacts,
    seats: Sequence[Seat],
    task_of: Callable[[Job], Task[object] | None],
) -> tuple[Task[object], ...]:
    """Return the tasks that this rank would have to solve if others were lost.

    Args:
        job: The present job.
        facts: The facts of the run.
        seats: Every rank's device, by global rank.
        task_of: Returns the task of a job without the lost ranks, if it needs one.
    """
    jobs = [
        job.without(lost, facts, seats)
        for lost in losses_to_plan_for(seats, facts.comms.global_rank)
    ]
    tasks = [task_of(left) for left in jobs if left.basis.cluster.num_ranks > 1]
    return tuple(task for task in tasks if task is not None)


def _sizes_of(samples: int) -> tuple[int, ...]:
    """Return the sizes of micro-batches to try: equal parts of a batch, and single samples."""
    parts = [part for part in range(1, _MAX_PARTS + 1) if samples % part == 0]
    return tuple(dict.fromkeys([*(samples // part for part in parts), 1]))


def losses_to_plan_for(seats: Sequence[Seat], global_rank: int) -> Iterator[frozenset[int]]:
    """Yield the sets of ranks whose loss would make `global_rank` the first remaining rank.

    Args:
        seats: Every rank's device, by global rank.
        global_rank: The rank.
    """
    hosts = sorted({seat.host for seat in seats})
    ranks = [frozenset({rank}) for rank in range(len(seats))]
    nodes = [frozenset(r for r, seat in enumerate(seats) if seat.host == host) for host in hosts]
    for lost in dict.fromkeys([*ranks, *(nodes if len(nodes) > 1 else ())]):
        left = [rank for rank in range(len(seats)) if rank not in lost]
        if left and left[0] == global_rank:
            yield lost


class Contingencies:
    """One rank's solved tasks, and those that it solves in the background."""

    def __init__(self) -> None:
        self._answers: list[tuple[Task[Any], Any]] = []
        self._solving: tuple[AnsweringProcess, threading.Thread] | None = None

    def prepare(self, tasks: Sequence[Task[object]]) -> None:
        """Begin to solve tasks in the background; earlier unsolved ones are dropped."""
        self.stop()
        known = [task for task, _ in self._answers]
        new: list[Task[object]] = []
        for task in tasks:
            if task not in known and task not in new:
                new.append(task)
        if new:
            process = AnsweringProcess(contingency.__name__, is_silent=True)
            thread = threading.Thread(
                target=self._solve_all, args=(process, new), name="contingencies", daemon=True
            )
            self._solving = process, thread
            thread.start()

    def solve(self, task: Task[_T]) -> _T:
        """Return the answer to a task; search for it if it isn't known."""
        for known, answer in list(self._answers):
            if known == task:
                found: _T = answer
                return found
        return task.solve()

    def stop(self) -> None:
        """Stop solving; known answers are kept."""
        solving, self._solving = self._solving, None
        if solving is not None:
            process, thread = solving
            process.kill()
            thread.join()

    def _solve_all(self, process: AnsweringProcess, tasks: Sequence[Task[object]]) -> None:
        # If the process dies, the other tasks are solved when they are needed.
        with suppress(OSError, EOFError, pickle.UnpicklingError):
            for task in tasks:
                self._answers.append((task, process.ask(task)))
        process.stop()
