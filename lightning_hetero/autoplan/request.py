"""Decide which plans a run has: a given one, equal pipelines, or plans made for its ranks.

`PlanRequest` is the user's choice in `HeteroStrategy(plan=…)`, `RunPlans` its result for a run;
`planning` makes plans if that is asked for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_hetero.assign import PipelineCost
from lightning_hetero.autoplan.contingencies import Contingencies
from lightning_hetero.autoplan.facts import AutoPlan, AutoPlanned, RunFacts
from lightning_hetero.autoplan.planning import make_plan
from lightning_hetero.core.errors import ConfigurationError, PlanError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.process.identity import membership_name
from lightning_hetero.runtime.setup.layout import ModelLayout

__all__ = ["PlanRequest", "RunPlans"]


@dataclass(frozen=True, kw_only=True)
class RunPlans:
    """The plans of a run; the same on every rank."""

    first: ParallelPlan
    """The plan that runs first."""
    candidates: tuple[ParallelPlan, ...]
    """Plans among which a data module may choose."""
    costs: tuple[tuple[PipelineCost, ...], ...] | None = None
    """Costs of the candidates' pipelines; None if they weren't measured."""
    auto: AutoPlanned | None = None
    """The automatic plan and its basis; None if a plan was given."""

    @property
    def may_use_tensor_parallelism(self) -> bool:
        """Whether a stage of any of them has several ranks."""
        return any(plan.has_tensor_parallelism for plan in self.candidates)


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The user's choice of plans.

    Raises:
        ConfigurationError: A number is below 1.
    """

    plan: ParallelPlan | AutoPlan | None
    """None for equal pipelines."""
    num_stages: int = 1
    """Stages of each pipeline of equal ones."""
    num_candidate_plans: int = 1
    """Number of plans to make for a `HeteroDataModule`."""
    contingencies: Contingencies = field(default_factory=Contingencies, compare=False, repr=False)
    """Plans that are made in advance, for losses of ranks."""

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

    @property
    def may_use_tensor_parallelism(self) -> bool:
        """Whether a given plan has a stage of several ranks; a plan to be made is known later."""
        return isinstance(self.plan, ParallelPlan) and self.plan.has_tensor_parallelism

    def check_world_size(self, world_size: int) -> None:
        """Refuse a request that can't run on a number of processes, before these are started.

        Raises:
            PlanError: The given plan names other ranks, or equal pipelines don't take all of them.
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
        """Return the request after a loss of ranks: a plan is made anew if this one can't run.

        Args:
            world_size: Number of ranks that are left.
            first_ranks: Their ranks in the first start; None if there are joiners, whose devices
                no described cluster contains.
        """
        if isinstance(self.plan, AutoPlan) and self.plan.cluster is not None and not first_ranks:
            rank_zero_warn(
                "The given cluster doesn't name the devices of joiners, so devices are detected."
            )
            return replace(self, plan=replace(self.plan, cluster=None))
        try:
            self.check_world_size(world_size)
        except PlanError as error:
            rank_zero_info("The given plan can't run any more (%s); another one is made.", error)
            return replace(self, plan=AutoPlan(), num_stages=1)
        return self

    def answer(self, facts: RunFacts) -> RunPlans:
        """Return the plans to run; collective over all ranks if they have to be made.

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
