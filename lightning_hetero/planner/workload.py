"""The planning problem: an iteration's work, the objective, options and valid TP degrees."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from numbers import Integral

from lightning_hetero.core.errors import PlanningError, ProfileError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.simulator import CostModel, StageShape


class Objective(StrEnum):
    """The quantity to minimise."""

    THROUGHPUT = "throughput"
    """Seconds per token."""
    COST = "cost"
    """Money per token; nodes may stay unused."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One iteration: equal sequences in equal micro-batches.

    ::

        Workload(sequence_length=4096, global_batch_size=256)  # 256 micro-batches of one sequence

    Raises:
        PlanningError: A size isn't a whole number above 0, or micro-batches don't divide the batch.
    """

    sequence_length: int
    """Tokens of each sequence."""
    global_batch_size: int
    """Sequences of an iteration, over all pipelines."""
    sequences_per_microbatch: int = 1
    """Sequences that one forward takes together."""

    def __post_init__(self) -> None:
        for name in ("sequence_length", "global_batch_size", "sequences_per_microbatch"):
            _check_whole(name, getattr(self, name))
        if self.global_batch_size % self.sequences_per_microbatch:
            raise PlanningError(
                f"A global batch of {self.global_batch_size} sequences can't be cut into "
                f"micro-batches of {self.sequences_per_microbatch}. Choose a divisor of "
                f"{self.global_batch_size}."
            )

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of an iteration, over all pipelines."""
        return self.global_batch_size // self.sequences_per_microbatch

    @property
    def microbatch(self) -> tuple[int, ...]:
        """Lengths of the sequences in one micro-batch."""
        return (self.sequence_length,) * self.sequences_per_microbatch

    @property
    def num_tokens(self) -> int:
        """Tokens of an iteration."""
        return self.global_batch_size * self.sequence_length


@dataclass(frozen=True, kw_only=True)
class PlanningOptions:
    """How to search.

    ::

        plan(cluster, model, workload, PlanningOptions(objective="cost", tp_degrees=(1, 2)))

    Raises:
        PlanningError: An option isn't a whole number above 0, or the objective isn't known.
    """

    objective: Objective = Objective.THROUGHPUT
    """The quantity to minimise; or its name."""
    equal_microbatches: bool = False
    """Give every pipeline the same number of micro-batches, as AutoHet does."""
    tp_degrees: tuple[int, ...] | None = None
    """Tensor-parallel degrees to consider; None means all that the model and nodes allow."""
    num_candidates: int = 5
    """How many of the best plans to return, 1 or more."""
    thorough: bool = True
    """Whether local search may use its whole budget, or an eighth of it."""

    def __post_init__(self) -> None:
        if self.objective not in list(Objective):
            known = " or ".join(repr(str(item)) for item in Objective)
            raise PlanningError(f"The objective is {self.objective!r}; it must be {known}.")
        object.__setattr__(self, "objective", Objective(self.objective))
        _check_whole("num_candidates", self.num_candidates)
        degrees = self.tp_degrees
        if degrees is None:
            return
        if not isinstance(degrees, Sequence) or not degrees:
            raise PlanningError(f"tp_degrees are {degrees!r}; give one or more, such as (1, 2).")
        for degree in degrees:
            _check_whole("A degree of tp_degrees", degree)


def _check_whole(name: str, value: object) -> None:
    if type(value) is bool or not isinstance(value, Integral) or value < 1:
        raise PlanningError(f"{name} is {value!r}; it must be a whole number, 1 or more.")


def valid_tp_degrees(
    cost: CostModel, workload: Workload, options: PlanningOptions
) -> tuple[int, ...]:
    """Return the TP degrees that fit into a node and the model, and that the cost model knows.

    The runtime supports any degree that divides the query heads (and the MLP's width).

    Raises:
        PlanningError: A requested degree doesn't fit into a node or doesn't divide the heads.
        ProfileError: The profile has times for none of the possible degrees.
    """
    if options.tp_degrees is not None:
        for degree in options.tp_degrees:
            _check_tp_degree(cost, degree)
        return tuple(sorted(set(options.tp_degrees)))
    largest = max(node.count for node in cost.cluster.nodes)
    widths = cost.model.num_heads, cost.model.intermediate_size
    most = 1 if _is_quantized(cost.model) else largest
    degrees = [d for d in range(1, most + 1) if all(width % d == 0 for width in widths)]
    problems = {degree: _missing_times(cost, workload, degree) for degree in degrees}
    known = tuple(degree for degree in degrees if problems[degree] is None)
    first = problems[degrees[0]]
    if not known and first is not None:
        raise first
    return known


def explain_no_room(cost: CostModel, workload: Workload, tp_degrees: Sequence[int]) -> str:
    """Return why no plan has room for the model, with the numbers and what to do."""
    cluster, model = cost.cluster, cost.model
    room = sum(cost.usable_bytes(node.device) * node.count for node in cluster.nodes)
    states = float(model.num_params) * (cost.layout.weight_bytes + cost.layout.summed_bytes)
    states += model.num_params * cost.layout.device_kept_bytes
    states += cost.frozen_bytes(
        StageShape(cluster.nodes[0].device, 1, model.num_layers, True, True)
    )
    return (
        f"{model.name} fits nowhere: its weights, gradients and optimizer states take "
        f"{states / 2**30:.1f} GiB, activations of {sum(workload.microbatch)} tokens a micro-batch "
        f"come on top, and {cluster.num_ranks} devices have {room / 2**30:.1f} GiB to use (TP "
        f"degrees {list(tp_degrees)}). Add devices, allow a larger TP degree, shorten the "
        "sequences or micro-batches, or give the nodes host_memory_bytes for states."
    )


def _check_tp_degree(cost: CostModel, degree: int) -> None:
    model, largest = cost.model, max(node.count for node in cost.cluster.nodes)
    if degree > largest:
        raise PlanningError(
            f"TP degree {degree} needs {degree} devices in one node, but the largest node has "
            f"{largest}. Ask for a degree of at most {largest}."
        )
    if degree > 1 and _is_quantized(model):
        raise PlanningError(
            f"{model.name} has quantized matrices, which tensor parallelism of degree {degree} "
            "can't cut. Ask for degree 1, or for a model that isn't quantized."
        )
    if model.num_heads % degree:
        raise PlanningError(
            f"TP degree {degree} doesn't divide the {model.num_heads} heads of {model.name}. Ask "
            f"for degrees that divide {model.num_heads}."
        )


def _is_quantized(model: ModelSpec) -> bool:
    return model.tuning is not None and model.tuning.stored_bits is not None


def _missing_times(cost: CostModel, workload: Workload, degree: int) -> ProfileError | None:
    """Return the error of a device type that can form such a group but has no times, or None."""
    try:
        for entry in cost.cluster.nodes:
            if entry.count >= degree:
                cost.compute_s(StageShape(entry.device, degree, 1), workload.microbatch)
    except ProfileError as error:
        return error
    return None
