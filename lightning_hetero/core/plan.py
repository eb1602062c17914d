"""Plans as data: which ranks run which layers of which pipeline.

A `ParallelPlan` is plain data: the planner makes it, the simulator times it, the runtime executes
it, and it can be written to JSON and read back. AutoHet calls it an asymmetric 3D parallel
structure (§III), Hydraulis a heterogeneous strategy S (§5).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from lightning_hetero.core.errors import PlanError
from lightning_hetero.core.places import (
    RankPlace,
    check_owners,
    check_owners_exist,
    find_places,
    workers_of,
)
from lightning_hetero.core.reading import LayerRange, build, plain, readable
from lightning_hetero.core.recomputation import check_recomputation, describe_recomputation
from lightning_hetero.core.texts import format_table, load_file, parse_json

__all__ = ["ParallelPlan", "PipelinePlan", "StagePlan"]


@readable
class StagePlan:
    """A run of consecutive layers on one tensor-parallel group.

    ::

        StagePlan(ranks=(2, 3), layers=range(8, 16))  # layers 8 to 15, each on ranks 2 and 3
    """

    ranks: tuple[int, ...]
    """Global ranks of the tensor-parallel group, in order of `tp_rank`."""
    layers: LayerRange
    """Indices of the stage's layers; consecutive, at least one."""
    recomputed_layers: int | None = None
    """Number of the stage's layers, counted from its first, that recompute their activations in
    backward; None leaves it to the budget, or to the strategy's option."""
    selective_layers: int | None = None
    """Number of layers after the `recomputed_layers` that recompute all but matrix products and
    attention; a compiled layer among them recomputes everything."""
    activation_budget_bytes: int | None = None
    """Upper limit on the bytes that the activations of all micro-batches in flight take on each of
    the stage's ranks. Each micro-batch recomputes as few layers as this limit allows; None sets no
    limit."""

    def __post_init__(self) -> None:
        if not self.ranks:
            raise PlanError("A stage has no ranks. Give it at least one rank or drop the stage.")
        if any(rank < 0 for rank in self.ranks):
            raise PlanError(
                f"Stage ranks {list(self.ranks)} hold a negative rank; ranks start at 0."
            )
        where = f"Stage on ranks {list(self.ranks)}"
        if self.layers.step != 1 or len(self.layers) == 0 or self.layers.start < 0:
            raise PlanError(
                f"{where} has layers [{self.layers.start}, {self.layers.stop}); a stage needs at "
                "least one layer, [first, last + 1)."
            )
        check_recomputation(where, len(self.layers), **self.recomputation)

    @property
    def recomputation(self) -> dict[str, int | None]:
        """The settings of recomputation, by the fields' names."""
        names = "recomputed_layers", "selective_layers", "activation_budget_bytes"
        return {name: getattr(self, name) for name in names}

    @property
    def tp_degree(self) -> int:
        """Number of ranks that share each of the stage's layers."""
        return len(self.ranks)


@readable
class PipelinePlan:
    """One model replica: stages that cover every layer once and in order.

    ::

        PipelinePlan(stages=(first, second), num_microbatches=8)  # two `StagePlan`s

    Raises:
        PlanError: There are no stages, or they skip or repeat layers.
    """

    stages: tuple[StagePlan, ...]
    """Stages in the order in which activations flow. If a group of ranks runs several of them, its
    chunks, each of these names the same ranks in the same order."""
    num_microbatches: int | None = None
    """Micro-batches of this pipeline in an iteration; None leaves it to the strategy."""
    microbatch_size: int | None = None
    """Relative size of a micro-batch: with 2 here and 1 in another pipeline, this one's have twice
    as many samples; None is 1."""

    def __post_init__(self) -> None:
        if not self.stages:
            raise PlanError("A pipeline has no stages. Give it at least one stage.")
        for name, least in (("num_microbatches", 0), ("microbatch_size", 1)):
            if (value := getattr(self, name)) is not None and value < least:
                raise PlanError(f"{name} is {value}; it must be {least} or more, or left out.")
        next_layer = 0
        for stage_index, stage in enumerate(self.stages):
            if stage.layers.start != next_layer:
                problem = "skips" if stage.layers.start > next_layer else "repeats"
                raise PlanError(
                    f"Stage {stage_index} (ranks {list(stage.ranks)}) starts at layer "
                    f"{stage.layers.start} but the stages before it end at {next_layer}: the plan "
                    f"{problem} layers. Let it start at layer {next_layer}."
                )
            next_layer = stage.layers.stop

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stages)

    @property
    def num_layers(self) -> int:
        """Number of layers that the stages cover."""
        return self.stages[-1].layers.stop

    @property
    def usual_num_microbatches(self) -> int:
        """Default number of micro-batches: 4 for each group of ranks, or 1 for one stage."""
        return 4 * len(self.groups) if self.num_stages > 1 else 1

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each stage, in order; a group that runs several stages appears once."""
        return tuple(dict.fromkeys(stage.ranks for stage in self.stages))

    @property
    def workers(self) -> tuple[int, ...]:
        """For each stage the index in `groups` of the group that runs it."""
        return workers_of([stage.ranks for stage in self.stages])

    @property
    def has_chunks(self) -> bool:
        """Whether any group runs several stages."""
        return len(self.groups) < self.num_stages

    @property
    def tp_degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degree of each stage."""
        return tuple(stage.tp_degree for stage in self.stages)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All global ranks, group by group."""
        return tuple(rank for group in self.groups for rank in group)


@readable
class ParallelPlan:
    """All pipelines, their stages, ranks and layers.

    ::

        plan = ParallelPlan.even(world_size=4, num_layers=8, num_stages=2)
        plan.save("plan.json")
        HeteroStrategy(plan=ParallelPlan.load("plan.json"))

    Raises:
        PlanError: A rank is in two groups, layers are skipped or repeated, or pipelines disagree on
            the number of layers.
    """

    pipelines: tuple[PipelinePlan, ...]
    """The model replicas; they may differ in stages, layer splits and TP degrees."""
    owner_shares: tuple[float, ...] | None = None
    """For each global rank, idle ones included, how much it owns of all master weights, optimizer
    states and summed gradients: (3, 1) are three quarters and one quarter. None leaves ownership to
    the strategy."""
    host_owners: tuple[int, ...] = ()
    """Global ranks that keep their own slices in host memory and run the optimizer step there."""
    _ranks: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.pipelines:
            raise PlanError("A plan has no pipelines. Give it at least one pipeline.")
        sizes = [pipeline.num_layers for pipeline in self.pipelines]
        if len(set(sizes)) > 1:
            raise PlanError(
                f"Pipelines cover {sizes} layers; each must cover the same model. Make the last "
                f"stage of every pipeline end at layer {max(sizes)}."
            )
        if all(pipeline.num_microbatches == 0 for pipeline in self.pipelines):
            raise PlanError("Every pipeline has num_microbatches 0; at least one must have work.")
        ranks = sorted(rank for pipeline in self.pipelines for rank in pipeline.ranks)
        object.__setattr__(self, "_ranks", tuple(ranks))
        if len(set(ranks)) < len(ranks):
            find_places([[stage.ranks for stage in item.stages] for item in self.pipelines])
        check_owners(self.owner_shares, self.host_owners, self.ranks[-1])

    @property
    def num_layers(self) -> int:
        """Number of layers of the model."""
        return self.pipelines[0].num_layers

    @property
    def num_pipelines(self) -> int:
        """Number of pipelines (data-parallel replicas)."""
        return len(self.pipelines)

    @property
    def max_stages(self) -> int:
        """Number of stages of the longest pipeline."""
        return max(pipeline.num_stages for pipeline in self.pipelines)

    @property
    def works_by_layers(self) -> bool:
        """Whether the module must have a list of layers: for several stages, or to recompute."""
        parts = (stage.recomputation.values() for _, _, stage in self.iter_stages())
        return self.max_stages > 1 or any(map(any, parts))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks that compute, ascending."""
        return self._ranks

    @cached_property
    def _places(self) -> Mapping[int, RankPlace]:
        """Found when first asked for: a search makes thousands of plans and needs few."""
        return find_places([[stage.ranks for stage in item.stages] for item in self.pipelines])

    def place(self, global_rank: int) -> RankPlace | None:
        """Return a rank's place, or None if it is idle under this plan."""
        return self._places.get(global_rank)

    def share(self, global_rank: int) -> float:
        """Return the share of a micro-batch's layers that a rank computes; 0 if it is idle."""
        place = self.place(global_rank)
        if place is None:
            return 0.0
        stages = self.pipelines[place.pipeline_index].stages
        own = [stages[index] for index in place.chunks]
        return sum(len(s.layers) for s in own) / (self.num_layers * own[0].tp_degree)

    def count_microbatches(self, unnamed: int | None = None) -> tuple[int, ...]:
        """Return the micro-batches of each pipeline in a full iteration.

        Args:
            unnamed: Number for pipelines whose `num_microbatches` is None; None here takes each
                pipeline's `usual_num_microbatches`.
        """
        return tuple(
            item.num_microbatches
            if item.num_microbatches is not None
            else item.usual_num_microbatches
            if unnamed is None
            else unnamed
            for item in self.pipelines
        )

    def iter_stages(self) -> Iterator[tuple[int, int, StagePlan]]:
        """Yield (pipeline_index, stage_index, stage) in order."""
        for pipeline_index, pipeline in enumerate(self.pipelines):
            for stage_index, stage in enumerate(pipeline.stages):
                yield pipeline_index, stage_index, stage

    def check_world_size(self, world_size: int) -> None:
        """Raise PlanError unless every rank of the plan is below `world_size`."""
        missing = [rank for rank in self.ranks if rank >= world_size]
        if missing:
            raise PlanError(
                f"The plan names rank {missing[0]} but {world_size} processes run (ranks 0 to "
                f"{world_size - 1}). Start {self.ranks[-1] + 1} processes or change the plan."
            )
        check_owners_exist(self.owner_shares, self.host_owners, world_size)

    def check_num_layers(self, num_layers: int) -> None:
        """Raise PlanError unless the plan covers a model of `num_layers` layers."""
        if self.num_layers != num_layers:
            raise PlanError(
                f"The plan covers {self.num_layers} layers but the model has {num_layers}. Let the "
                f"last stage of every pipeline end at layer {num_layers}."
            )

    @property
    def has_tensor_parallelism(self) -> bool:
        """Whether any stage has several ranks."""
        return any(stage.tp_degree > 1 for _, _, stage in self.iter_stages())

    @classmethod
    def even(
        cls,
        *,
        world_size: int,
        num_layers: int,
        num_stages: int = 1,
        tp_degree: int | Sequence[int] = 1,
    ) -> Self:
        """Return equal pipelines, whose stages differ by at most one layer.

        Args:
            world_size: Number of ranks; all get a place.
            num_layers: Layers of the model.
            num_stages: Stages of each pipeline.
            tp_degree: Ranks of each stage, or one number for each stage.

        Raises:
            PlanError: `world_size` isn't a multiple of a pipeline's ranks, or there are fewer
                layers than stages.
        """
        degrees = [tp_degree] * num_stages if isinstance(tp_degree, int) else [*tp_degree]
        fits = len(degrees) == num_stages > 0 and min(degrees) > 0
        if not fits or world_size % sum(degrees):
            raise PlanError(
                f"{world_size} processes can't be split into pipelines of {num_stages} stages × "
                f"{tp_degree} tensor-parallel ranks. Choose num_stages × tp_degree that divides "
                f"{world_size}, or one degree for each stage whose sum does."
            )
        if num_layers < num_stages:
            raise PlanError(
                f"{num_layers} layers can't fill {num_stages} stages. Use at most {num_layers}."
            )
        cuts = [num_layers * index // num_stages for index in range(num_stages + 1)]
        firsts = [sum(degrees[:index]) for index in range(num_stages + 1)]
        pipelines = tuple(
            PipelinePlan(
                stages=tuple(
                    StagePlan(
                        ranks=tuple(range(base + firsts[s], base + firsts[s + 1])),
                        layers=range(cuts[s], cuts[s + 1]),
                    )
                    for s in range(num_stages)
                )
            )
            for base in range(0, world_size, firsts[-1])
        )
        return cls(pipelines=pipelines)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-ready dicts and lists; `layers` is [first, last + 1)."""
        found: dict[str, Any] = plain(self)
        return found

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build and validate a plan from data like that of `to_dict`.

        `layers` may be written as [0, 4] or "range(0, 4)": layers 0 to 3, the end is exclusive.

        Raises:
            PlanError: A key is missing or unknown, a value has the wrong type, or the plan is
                invalid.
        """
        return build(cls, data, "plan", PlanError)

    def to_json(self) -> str:
        """Return the plan as a JSON text."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse a JSON text like that of `to_json`; PlanError if it isn't a valid plan."""
        return cls.from_dict(parse_json(text, "plan", PlanError))

    def save(self, path: str | Path) -> None:
        """Write the plan as a JSON file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a plan from a JSON file; PlanError names the file that is wrong or missing."""
        return load_file(path, "plan", PlanError, cls.from_json)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            (
                str(pipeline_index),
                str(stage_index),
                ",".join(map(str, stage.ranks)),
                str(stage.tp_degree),
                f"{stage.layers.start}-{stage.layers.stop - 1} ({len(stage.layers)})",
                _work(self.pipelines[pipeline_index]),
            )
            for pipeline_index, stage_index, stage in self.iter_stages()
        ]
        header = ["pipeline", "stage", "ranks", "TP", "layers", "micro-batches"]
        stages = [stage for _, _, stage in self.iter_stages()]
        cells = [describe_recomputation(**stage.recomputation) or "-" for stage in stages]
        if set(cells) != {"-"}:
            header.append("recomputed")
            rows = [(*row, cell) for row, cell in zip(rows, cells, strict=True)]
        return format_table(header, rows)


def _work(pipeline: PipelinePlan) -> str:
    count = "-" if pipeline.num_microbatches is None else str(pipeline.num_microbatches)
    return count if pipeline.microbatch_size is None else f"{count} × {pipeline.microbatch_size}"
