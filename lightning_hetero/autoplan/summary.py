"""Report a run when it starts: devices, plan, memory, iteration time, bound.

The report looks like that of `lightning-hetero plan`. For an automatic plan it contains the
planner's predictions. For a given plan, memory is computed from the run's slices, and an iteration
is simulated if all devices have data sheets and the batch size is known.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Self

from lightning_hetero.autoplan.engine_choices import state_memory
from lightning_hetero.autoplan.facts import AutoPlanned, RunFacts
from lightning_hetero.core.cluster import Cluster
from lightning_hetero.core.devices import KNOWN_DEVICES, DeviceSpec
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.texts import format_table
from lightning_hetero.exchange.owners import list_owners
from lightning_hetero.exchange.slices import ParameterSpec, Slice
from lightning_hetero.runtime.iteration.engine import Engine
from lightning_hetero.runtime.setup.detect import cluster_of
from lightning_hetero.runtime.setup.sizes import infer_model_spec
from lightning_hetero.simulator import (
    MemoryCorrection,
    MicroBatchShape,
    RooflineCost,
    StageFacts,
    devices_line,
    fitting_lines,
    model_lines,
    plan_table,
    prediction_lines,
    simulate,
    usable_bytes,
)

_NAMED_STANDBYS = 8
"""The report lists the standby of each rank up to this number of ranks."""


@dataclass(frozen=True, kw_only=True)
class StartUp:
    """What is known about a run before its first step; `str()` gives a report for people."""

    plan: ParallelPlan
    """The plan that runs first."""
    facts: RunFacts
    cluster: Cluster
    """The devices that run it, in order of rank."""
    device_names: tuple[str, ...]
    """The name of each rank's device, as the device reports it."""
    auto: AutoPlanned | None
    """The automatic plan and its basis; None if a plan was given."""
    specs: Sequence[ParameterSpec]
    """The module's parameters."""
    slices: Mapping[str, tuple[Slice, ...]]
    """Their slices, with owners and standbys."""
    num_batches: int
    """The loader's batches in an iteration."""
    num_microbatches: int
    """Number of micro-batches of pipelines for which the plan gives none."""

    @classmethod
    def gather(
        cls, facts: RunFacts, engine: Engine, auto: AutoPlanned | None, *, num_batches: int
    ) -> Self:
        """Return the report's facts, with all ranks' devices; collective."""
        basis, seats = None if auto is None else auto.basis, facts.detect_seats()
        return cls(
            plan=engine.plan,
            facts=facts,
            cluster=cluster_of(seats) if basis is None else basis.cluster,
            device_names=tuple(seat.device.name for seat in seats),
            auto=auto,
            specs=tuple(engine.store.specs.values()),
            slices=engine.store.slices,
            num_batches=num_batches,
            num_microbatches=engine.config.num_microbatches,
        )

    def has_room(self, plan: ParallelPlan) -> bool:
        """Return whether each rank has enough memory for its place in another plan.

        It adds the weights and gradients of the place, the slices that the rank owns under any
        plan, and the micro-batches, if these are predicted for the place.
        """
        needed = [terms.total for terms in state_memory(plan, self.facts, self.specs, self.slices)]
        is_alike = [p.num_stages for p in plan.pipelines] == [
            p.num_stages for p in self.plan.pipelines
        ]
        for pipeline, index, stage in plan.iter_stages():
            known = self.stage_facts[pipeline][index].memory if is_alike else None
            if known is None:
                continue
            # As if all of it grew in proportion to the layers, which is rather too much.
            before = self.plan.pipelines[pipeline].stages[index].layers
            growth = max(1.0, len(stage.layers) / len(before))
            for rank in stage.ranks:
                needed[rank] += growth * (known.total - known.states)
        return all(
            num_bytes <= usable_bytes(self.cluster.device_of(rank).memory_bytes)
            for rank, num_bytes in enumerate(needed)
        )

    @cached_property
    def stage_facts(self) -> Sequence[Sequence[StageFacts]]:
        """Predictions for each stage, [pipeline][stage]; memory as far as sizes are known.

        Memory doesn't depend on a device's speed, so devices without a data sheet have it, too.
        """
        planned = self._planned
        is_simulated = planned is not None and planned.simulation is not None
        if is_simulated or self._has_unknown_sizes:
            return self._expect()[0]
        return self._simulate()[0]

    @property
    def known_correction(self) -> MemoryCorrection:
        """The correction from earlier out-of-memory errors that the predictions include."""
        is_planned = self._planned is not None or self._longest_microbatches is not None
        if not is_planned or self.auto is None or self.auto.basis is None:
            return MemoryCorrection()
        return MemoryCorrection(activation_factor=self.auto.basis.states.activation_factor)

    @property
    def _planned(self) -> AutoPlanned | None:
        """The planning of the present plan; None if the plan was given or has been changed."""
        return self.auto if self.auto is not None and self.auto.plan == self.plan else None

    @property
    def idle_warning(self) -> str | None:
        """A warning about ranks without work; None if there are none."""
        num_ranks = self.facts.comms.world_size
        idle = sorted(set(range(num_ranks)) - set(self.plan.ranks))
        if not idle:
            return None
        speeds = [self._flops_per_s(self.cluster.device_of(rank)) for rank in range(num_ranks)]
        share = sum(speeds[rank] for rank in idle) / sum(speeds)
        return (
            f"The plan gives ranks {idle} no layers: {len(idle)} of {num_ranks} devices are "
            f"idle, {share:.0%} of the total computing power. Give them a place in the plan, let "
            f"plan='auto' make one, or start {num_ranks - len(idle)} processes."
        )

    def __str__(self) -> str:
        known, lines = self._expect()
        num_idle = self.facts.comms.world_size - len(self.plan.ranks)
        if num_idle:
            lines.append(f"idle            {num_idle} of {self.facts.comms.world_size} devices")
        lines += self._standby_lines()
        varied = self.facts.data is not None
        counts = [None for _ in self.plan.pipelines] if varied else self._counts()
        table = plan_table(self.plan, known, counts)
        # Lightning's own summary counts only what rank 0 owns.
        size = sum(spec.numel for spec in self.specs)
        head = (
            f"HeteroStrategy on {devices_line(self.cluster)}: {type(self.facts.module).__name__}, "
            f"{size:,} parameters in all"
        )
        return "\n".join([head, format_table(table.header, table.rows), *lines])

    def _standby_lines(self) -> list[str]:
        """Return lines that name the standbys; none without redundancy."""
        pairs = {i.owner: i.standby for _, items in list_owners(self.slices) for i in items}
        named = [f"{owner} by {rank}" for owner, rank in sorted(pairs.items()) if rank is not None]
        if not named:
            return []
        more = ", ..." if len(named) > _NAMED_STANDBYS else ""
        shown = ", ".join(named[:_NAMED_STANDBYS])
        text = f"redundancy      each slice twice (of rank {shown}{more}): twice the owned memory"
        return [f"{text} and the bytes of a push"]

    def _counts(self) -> tuple[int, ...]:
        return self.plan.count_microbatches(self.num_microbatches)

    def _counted_facts(self) -> Sequence[Sequence[StageFacts]]:
        """Return each stage's device and the memory of its fullest rank, without activations."""
        used = state_memory(self.plan, self.facts, self.specs, self.slices)
        found = []
        for pipeline in self.plan.pipelines:
            row = []
            for stage in pipeline.stages:
                devices = [self.cluster.device_of(rank) for rank in stage.ranks]
                slowest = min(devices, key=self._flops_per_s)
                row.append(
                    StageFacts(
                        device=slowest.name,
                        memory=max((used[rank] for rank in stage.ranks), key=sum),
                        device_bytes=min(device.memory_bytes for device in devices),
                    )
                )
            found.append(row)
        return found

    def _flops_per_s(self, device: DeviceSpec) -> float:
        return device.flops_per_s(self.facts.state_layout().computes_in)

    def _expect(self) -> tuple[Sequence[Sequence[StageFacts]], list[str]]:
        """Return the expected facts of each stage, and lines on the expected iteration."""
        auto = self._planned
        if auto is not None and auto.simulation is not None:
            return auto.simulation.stages, [auto.summary]
        lines = [] if auto is None else [auto.summary]
        if (longest := self._longest_microbatches) is not None:
            return self._filled_facts(longest), [*lines, _longest_line(longest)]
        if auto is None or auto.basis is None:
            unknown = self._unknown()
            if unknown is None:
                known, predicted = self._simulate()
                return known, lines + predicted
            lines.append(f"iteration time  not predicted: {unknown}")
        lines.append("memory          weights, gradients and Adam's states, without activations")
        return self._counted_facts(), lines

    @property
    def _longest_microbatches(self) -> list[MicroBatchShape] | None:
        """The longest micro-batches of assigned data, if the plan was made for such data."""
        candidates = None if self.auto is None else self.auto.candidates
        return None if candidates is None else candidates.longest_microbatches(self.plan)

    def _filled_facts(self, longest: Sequence[MicroBatchShape]) -> Sequence[Sequence[StageFacts]]:
        """Return the facts of each stage if all micro-batches are as long as possible."""
        assert self.auto is not None
        assert self.auto.basis is not None
        cost = self.auto.basis.cost()
        pairs = zip(longest, self.plan.pipelines, strict=True)
        work = [[microbatch] * pipeline.num_stages for microbatch, pipeline in pairs]
        found = simulate(self.plan, cost, work).stages
        return [[item._replace(busy=None) for item in row] for row in found]

    def _unknown(self) -> str | None:
        """Return what is missing for a prediction from data sheets; None if nothing is."""
        names = sorted({node.device for node in self.cluster.nodes} - KNOWN_DEVICES.keys())
        if names:
            return f"no data sheet has {', '.join(names)}"
        return "the sizes of model or batches aren't known" if self._has_unknown_sizes else None

    @property
    def _has_unknown_sizes(self) -> bool:
        unknown = self._model is None or self.facts.data is not None
        return unknown or None in astuple(self.facts.sizes())

    @cached_property
    def _model(self) -> ModelSpec | None:
        return infer_model_spec(self.facts.module, self.facts.layout)

    def _simulate(self) -> tuple[Sequence[Sequence[StageFacts]], list[str]]:
        sizes, counts = self.facts.sizes(), self._counts()
        assert self._model is not None
        assert sizes.samples is not None
        assert sizes.sequence_length is not None
        num_samples = sizes.samples * self.num_batches
        microbatch = (sizes.sequence_length,) * math.ceil(num_samples / sum(counts))
        cost = RooflineCost(self.cluster, self._model, layout=self.facts.state_layout())
        plan = self.facts.layer_options.add_to(self.plan)
        simulation = simulate(plan, cost, [[microbatch] * count for count in counts])
        lines = [
            *prediction_lines(simulation, num_samples * sizes.sequence_length),
            *fitting_lines(plan, simulation),
            *model_lines(cost),
            f"limited by      {simulation.bottleneck}",
        ]
        return simulation.stages, lines


def _longest_line(longest: Sequence[MicroBatchShape]) -> str:
    """Return a line with the lengths of micro-batches that the memory column assumes."""
    tokens = sorted({sum(microbatch) for microbatch in longest})
    least = f"{tokens[0]:,} to " if len(tokens) > 1 else ""
    return f"memory          when micro-batches of up to {least}{tokens[-1]:,} tokens fill it"
