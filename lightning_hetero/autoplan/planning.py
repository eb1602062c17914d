"""Decide which plans a run has: a given one, equal pipelines, or plans made for its ranks.

`PlanRequest` is what the user asks for by `HeteroStrategy(plan=…)`; `PlanRequest.answer` returns
the plans for a run, `facts.RunPlans`. For `plan="auto"`, `make_plan` goes through these steps:

1. With one rank, or a module without layers: one pipeline per rank, as under DDP; done.
2. Detect the cluster from the ranks, the model's sizes from the module, and the size of an
   iteration from loader, data module or options.
3. If the devices are equal and each has room for the whole model: one pipeline per rank, without a
   search; done.
4. Find the costs of computing: from data sheets (the roofline) if all devices are known, else from
   a measured or cached profile.
5. Rank 0 searches for the best plan, with several sizes of micro-batches, and sends it to all
   ranks.

If a data module assigns samples of different lengths, several plans are made for these lengths
(Hydraulis §7); the first of them is the best single plan.

With other data an iteration takes as many samples as under DDP, the loader's batch times the number
of ranks, under any plan. So planning changes no hyperparameter (AutoHet §III, Algorithm 1).
"""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_hetero.autoplan.facts import AutoPlan, AutoPlanned, DataFacts, RunFacts, RunPlans
from lightning_hetero.autoplan.jobs import Contingencies, Job, foresee, num_batches_of
from lightning_hetero.core.devices import KNOWN_DEVICES
from lightning_hetero.core.errors import ConfigurationError, PlanError, PlanningError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.process import membership_name
from lightning_hetero.core.profile import Profile
from lightning_hetero.planner import CandidateOptions, PlanningResult
from lightning_hetero.planner.contingency import PlanBasis, PlanningTask, ProposalTask
from lightning_hetero.planner.search import sizes_of
from lightning_hetero.runtime.setup.detect import Seat
from lightning_hetero.runtime.setup.layout import ModelLayout
from lightning_hetero.runtime.setup.profile_cache import profile_seats
from lightning_hetero.runtime.setup.profiling import ProfileOptions
from lightning_hetero.runtime.setup.sizes import infer_model_spec
from lightning_hetero.schedules import Schedule
from lightning_hetero.simulator import (
    bound_line,
    fitting_lines,
    host_bytes,
    host_lines,
    model_lines,
    prediction_lines,
)

_MAX_PROFILED_TOKENS = 4096
_UNKNOWN_SIZES = (
    "This module's sizes are unknown (no list of layers, or layers without matrices), so nothing "
    "was planned: every rank gets a whole model and as many samples, however fast it is. Name "
    'the list with layers="model.blocks", or give a plan.'
)


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The user's choice of plans.

    Raises:
        ConfigurationError: A number is below 1.
    """

    plan: ParallelPlan | AutoPlan | None
    """None for equal pipelines."""
    num_stages: int = 1
    """Number of stages of each pipeline, if pipelines are equal."""
    num_candidate_plans: int = 1
    """Number of plans to make for a `HeteroDataModule`."""
    contingencies: Contingencies = field(default_factory=Contingencies, compare=False, repr=False)
    """Plans that are made in advance for losses of ranks."""

    def __post_init__(self) -> None:
        for name in ("num_stages", "num_candidate_plans"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; it must be 1 or more.")

    @classmethod
    def of(
        cls,
        plan: ParallelPlan | AutoPlan | Mapping[str, Any] | str | Path | None,
        *,
        num_stages: int | None,
        num_candidate_plans: int,
    ) -> "PlanRequest":
        """Return the request for `HeteroStrategy`'s arguments of the same names.

        Raises:
            PlanError: The plan's file can't be read, or there is no such plan.
            ConfigurationError: `plan` doesn't name a plan.
        """
        if plan == "auto":
            plan = AutoPlan() if num_stages is None else None
        elif isinstance(plan, str | Path):
            plan = ParallelPlan.load(plan)
        elif isinstance(plan, Mapping):
            plan = ParallelPlan.from_dict(plan)
        elif not isinstance(plan, ParallelPlan | AutoPlan | None):
            raise ConfigurationError(
                f"plan is of type {type(plan).__name__}; give a ParallelPlan, its dictionary, the "
                'path of its JSON file, "auto", an AutoPlan, or None for equal pipelines.'
            )
        stages = 1 if num_stages is None else num_stages
        return cls(plan=plan, num_stages=stages, num_candidate_plans=num_candidate_plans)

    def check_world_size(self, world_size: int) -> None:
        """Refuse a request that a number of processes can't run, before they are started.

        Raises:
            PlanError: The given plan names other ranks, or equal pipelines don't use all of them.
        """
        if isinstance(self.plan, ParallelPlan):
            self.plan.check_world_size(world_size)
        elif self.plan is None:
            ParallelPlan.even(
                world_size=world_size, num_layers=self.num_stages, num_stages=self.num_stages
            )

    def for_survivors(
        self, world_size: int, first_ranks: Sequence[int] | None = None
    ) -> "PlanRequest":
        """Return the request after a loss of ranks; a plan that can't run any more is replaced.

        Args:
            world_size: Number of remaining ranks.
            first_ranks: Their ranks in the first start; None if there are joiners, whose devices
                aren't in the cluster that the user describes.
        """
        if isinstance(self.plan, AutoPlan) and self.plan.cluster is not None and not first_ranks:
            rank_zero_warn(
                "The given cluster doesn't name the devices of joiners, so devices are detected."
            )
            return replace(self, plan=replace(self.plan, cluster=None))
        try:
            self.check_world_size(world_size)
        except PlanError as error:
            rank_zero_info("The given plan can't run any more (%s), so another one is made.", error)
            return replace(self, plan=AutoPlan(), num_stages=1)
        return self

    def answer(self, facts: RunFacts) -> RunPlans:
        """Return the plans to run; called by all ranks.

        Raises:
            PlanError: The plan doesn't fit the ranks or the model.
            ModelError: The plan has stages, but the module has no list of layers.
        """
        found = self._find(facts)
        _check(found.first, facts.layout, world_size=facts.comms.world_size)
        return found

    def _find(self, facts: RunFacts) -> RunPlans:
        if isinstance(self.plan, AutoPlan):
            auto = make_plan(
                self.plan, facts, self.contingencies, num_candidate_plans=self.num_candidate_plans
            )
            if membership_name() is not None:
                self.contingencies.prepare(auto.foreseen)
            if auto.warning is not None:
                rank_zero_warn(auto.warning)
            if auto.candidates is None:
                return RunPlans(first=auto.plan, candidates=(auto.plan,), auto=auto)
            plans, costs = auto.candidates.plans, auto.candidates.costs
            return RunPlans(first=auto.plan, candidates=plans, costs=costs, auto=auto)
        if self.plan is None and self.num_stages > 1:
            facts.layout.require_layers()
        plan = self.plan or ParallelPlan.even(
            world_size=facts.comms.world_size,
            num_layers=facts.layout.num_layers,
            num_stages=self.num_stages,
        )
        return RunPlans(first=plan, candidates=(plan,))


def _check(plan: ParallelPlan, layout: ModelLayout, *, world_size: int) -> None:
    plan.check_world_size(world_size)
    if plan.works_by_layers:
        layout.require_layers()
    if layout.layers:
        plan.check_num_layers(layout.num_layers)
    elif plan.num_layers != 1:
        raise PlanError(
            f"The plan covers {plan.num_layers} layers but the module has no list of layers. "
            'Name it: HeteroStrategy(layers="model.blocks").'
        )


def make_plan(
    options: AutoPlan,
    facts: RunFacts,
    contingencies: Contingencies,
    *,
    num_candidate_plans: int = 1,
) -> AutoPlanned:
    """Make a plan for the ranks that run; called by all ranks, with the same result on each.

    Args:
        options: The user's facts and choices.
        facts: The facts of the run.
        contingencies: Plans that were made in advance.
        num_candidate_plans: Number of plans to make for data that a data module assigns.

    Raises:
        PlanningError: Under no plan does the model fit on these devices.
        ClusterError, ProfileError: The given cluster or profile is invalid or for something else.
    """
    if facts.comms.world_size == 1:
        return _data_parallel(facts, "nothing: there is one rank")
    seats = facts.detect_seats()
    unequal = len({seat.device.name for seat in seats}) > 1
    model = infer_model_spec(facts.module, facts.layout)
    if model is None:
        # Equal devices get this plan anyway; for others, or a given cluster, say why it is used.
        warning = _UNKNOWN_SIZES if unequal or options.cluster is not None else None
        return replace(
            _data_parallel(facts, "nothing: no plan could be predicted"), warning=warning
        )
    if facts.data is not None:
        choosing = CandidateOptions(
            num_candidate_plans=num_candidate_plans, tp_degrees=options.tp_degrees
        )
        return _plan_for_data(options, facts, model, seats, contingencies, choosing)
    job = facts.comms.on_rank_0(lambda: Job.of(options, facts, model, seats))
    if not unequal and job.needs_no_search():
        return _data_parallel(
            facts, "data parallelism: the devices are equal and hold the whole model"
        )
    profile = _profile_of(options, job, seats, facts, _uniform_microbatches(job))
    found = facts.comms.on_rank_0(lambda: _search(job, contingencies, profile))

    def task_of(left: Job) -> PlanningTask | None:
        return None if left.needs_no_search() or not left.task.sizes else left.measured(profile)

    return replace(found, foreseen=foresee(job, facts, seats, task_of))


def _plan_for_data(
    options: AutoPlan,
    facts: RunFacts,
    model: ModelSpec,
    seats: Sequence[Seat],
    contingencies: Contingencies,
    choosing: CandidateOptions,
) -> AutoPlanned:
    """Make plans for samples of different lengths (Hydraulis §7); collective over all ranks."""
    assert facts.data is not None
    data = facts.comms.on_rank_0(facts.data)
    samples = max(1, data.tokens_per_step // (data.typical * num_batches_of(facts)))
    typical = replace(
        options, sequence_length=data.typical, batch_size=samples, microbatch_sizes=(1,)
    )
    usual = replace(facts, schedule=Schedule.ONE_F_ONE_B)
    job = facts.comms.on_rank_0(lambda: Job.of(typical, usual, model, seats))
    profile = _profile_of(options, job, seats, facts, _varied_microbatches(data.longest))

    def task_of(planned: Job) -> ProposalTask:
        return ProposalTask(
            typical=planned.measured(profile),
            lengths=tuple(data.lengths.tolist()),
            tokens_per_step=data.tokens_per_step,
            options=choosing,
        )

    found = facts.comms.on_rank_0(lambda: _propose(task_of(job), contingencies, data))
    return replace(found, foreseen=foresee(job, facts, seats, task_of))


def _data_parallel(facts: RunFacts, reason: str) -> AutoPlanned:
    even = ParallelPlan.even(
        world_size=facts.comms.world_size, num_layers=facts.layout.num_layers, num_stages=1
    )
    return AutoPlanned(plan=even, summary=f"planned         {reason}")


def _uniform_microbatches(job: Job) -> tuple[tuple[int, ...], ...]:
    """Return the micro-batches to measure if all samples have one length."""
    shapes = [job.batch[:1] * size for size in job.task.sizes or (1,)]
    small = [shape for shape in shapes if sum(shape) <= _MAX_PROFILED_TOKENS]
    return tuple(small or shapes[:1])


def _varied_microbatches(longest: int) -> tuple[tuple[int, ...], ...]:
    """Return micro-batches to measure: costs per length², token and micro-batch follow."""
    top = min(longest, _MAX_PROFILED_TOKENS)
    shapes = [(top // 16,), (top // 4,), (top // 4,) * 4, (top,)]
    return tuple(dict.fromkeys(shape for shape in shapes if shape[0] > 0))


def _profile_of(
    options: AutoPlan,
    job: Job,
    seats: Sequence[Seat],
    facts: RunFacts,
    microbatches: tuple[tuple[int, ...], ...],
) -> Profile | None:
    """Return measured costs, or None if data sheets suffice; called by all ranks."""
    given = options.profile
    if given is not None:
        age = datetime.timedelta(days=options.max_profile_age_days)

        def read() -> Profile:
            profile = given if isinstance(given, Profile) else Profile.load(given)
            profile.check(model=job.basis.model, max_age=age)
            return profile

        return facts.comms.on_rank_0(read)
    if options.cluster is not None or all(seat.device.name in KNOWN_DEVICES for seat in seats):
        return None
    measured = ProfileOptions(
        microbatches=microbatches, tp_degrees=options.tp_degrees, max_block=4, num_repeats=7
    )
    return profile_seats(job.basis.model, measured, seats, facts.comms, facts.device)


def _search(job: Job, contingencies: Contingencies, profile: Profile | None) -> AutoPlanned:
    task = job.measured(profile)
    found: PlanningResult | PlanningError = PlanningError("No micro-batch size divides the batch.")
    if task.sizes:
        found = contingencies.solve(task)
    if isinstance(found, PlanningError):
        raise PlanningError(
            f"{found} To run it all the same, give a plan: HeteroStrategy(plan=...)."
        )
    return AutoPlanned(
        plan=found.best.plan,
        basis=replace(task.basis, workload=found.workload),
        summary=_summary(job, found, task.basis),
        simulation=found.best.simulation,
        lower_bound_s=found.lower_bound_s,
    )


def _propose(task: ProposalTask, contingencies: Contingencies, data: DataFacts) -> AutoPlanned:
    found = contingencies.solve(task)
    if isinstance(found, PlanningError):
        raise found
    basis = task.typical.basis
    several = len(found.plans) > 1
    dynamic = f", {found.dynamic_s:.4g} s with the best of {len(found.plans)} plans for each"
    gap = found.dynamic_s / found.bound_s - 1.0
    lines = [
        f"planned for     {data.tokens_per_step:,} tokens an iteration in samples of up to "
        f"{data.longest:,}, by {_source(measured=basis.profile is not None)}",
        f"iteration time  {found.static_s:.4g} s under this plan{dynamic if several else ''}, "
        "before exchange and optimizer step",
        f"throughput      {data.tokens_per_step / found.dynamic_s:,.0f} tokens/s",
        *host_lines(host_bytes(found.plans[0], basis.cost())),
        *model_lines(basis.cost()),
        bound_line(f"faster than {found.bound_s:.4g} s", gap, plans="mix of pipelines"),
    ]
    return AutoPlanned(plan=found.plans[0], candidates=found, basis=basis, summary="\n".join(lines))


def _summary(job: Job, result: PlanningResult, basis: PlanBasis) -> str:
    workload, simulation, bound_s = result.workload, result.best.simulation, result.lower_bound_s
    gap = simulation.iteration_time_s / bound_s - 1.0
    lines = [
        f"planned for     {workload.global_batch_size} samples of {workload.sequence_length:,} "
        f"tokens an iteration, {sizes_of(result)} a micro-batch, by "
        f"{_source(measured=basis.profile is not None)}",
        *prediction_lines(simulation, workload.num_tokens),
        *fitting_lines(result.best.plan, simulation),
        *model_lines(basis.cost()),
        bound_line(f"faster than {bound_s:.4g} s", gap),
        f"limited by      {result.limit}",
    ]
    if job.assumed:
        lines.append(
            f"assumed         {', '.join(job.assumed)}: give them in HeteroStrategy(plan="
            "AutoPlan(...))"
        )
    return "\n".join(lines)


def _source(*, measured: bool) -> str:
    return "a measured profile" if measured else "data sheets"
