"""Change from one plan to another: slices stay with their owners, everything else is made anew.

Also what a run learns about parameters outside the layers. In an epoch's first iteration of each
kind (training, validation, test, prediction) both ends of a pipeline hold them. What was used at
one end only, in all that was seen so far, is held there only until the next epoch.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from lightning_hetero.core.errors import PlanError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.slices import OuterRole, ParameterSpec
from lightning_hetero.core.transfers import TransferTable
from lightning_hetero.runtime.clock import ComputeClock
from lightning_hetero.runtime.iteration.agreement import Report
from lightning_hetero.runtime.iteration.running_plan import RunningPlan
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.slices.weights import SliceStore
from lightning_hetero.runtime.tensor_parallel.sharding import TensorParallel

__all__ = ["PlanSwitch"]

_BOTH_ENDS = frozenset({OuterRole.FIRST, OuterRole.LAST})


class PlanSwitch:
    """The plan that runs on one rank, and the way to another one.

    All methods are called by every rank alike, between iterations.

    Args:
        plan: The first plan, which may share memory with the slices.
        store: The rank's slices.
        comms: The communicators.
        clock: Times the waits.
        dtype: Propagation dtype.
        tensor_parallel: The sharded modules; None if no plan may have a degree above 1.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        store: SliceStore,
        comms: Communicators,
        *,
        clock: ComputeClock,
        dtype: torch.dtype,
        tensor_parallel: TensorParallel | None,
    ) -> None:
        self._store = store
        self._comms = comms
        self._clock = clock
        self._dtype = dtype
        self._tensor_parallel = tensor_parallel
        self._roles: dict[str, set[OuterRole]] = {}
        """Where outer parameters were used so far."""
        self._watched: dict[int, int] = {}
        """The last epoch in which that was watched, for each kind of iteration."""
        self._specs = self._with_roles(known=False)
        self.run = self._make_run(plan, share_memory=True)
        """The plan that runs, made ready."""

    def table_of(self, plan: ParallelPlan) -> TransferTable:
        """Return what a plan would move between which ranks; communicates nothing."""
        return TransferTable(self._specs, self._store.slices, plan)

    def check(self, plan: ParallelPlan) -> None:
        """Refuse a plan that can't run here.

        Raises:
            PlanError: It is for another number of ranks or layers, or it has tensor parallelism for
                which the module wasn't prepared.
            ModelError: It has stages, for which the module's layers are unfit.
        """
        plan.check_world_size(self._comms.world_size)
        plan.check_num_layers(self._store.layout.num_layers)
        if plan.max_stages > 1:
            self._store.layout.require_layers()
        if self._tensor_parallel is None and any(p.tp_degree > 1 for p in plan.pipelines):
            raise PlanError(
                "The plan uses tensor parallelism, for which the module wasn't prepared, because "
                "the first plan had none. Give HeteroStrategy(tp_plan=...)."
            )

    def change(self, plan: ParallelPlan) -> None:
        """Run another plan from now on; communicates only where it has new groups.

        Raises:
            PlanError: See `check`.
        """
        if plan is not self.run.plan and plan != self.run.plan:
            self.check(plan)
            self._replace(plan, share_memory=False)

    def follow_freezing(self) -> bool:
        """Move other gradients from now on if parameters were frozen or thawed since.

        Returns whether there were any, the same on every rank.
        """
        changed = self._store.follow_freezing()
        if changed:
            self._specs = self._with_roles(known=bool(self._watched))
            self._replace(self.run.plan, share_memory=self.run.share_memory)
        return changed

    def begin(self, kind: int, epoch: int) -> None:
        """Make ready for an iteration: what it reads is watched if it is the first of its kind."""
        is_watched = self._watched.get(kind) != epoch and self.run.plan.max_stages > 1
        if is_watched:
            self._hold(self._with_roles(known=False))
        self.run.is_watched = is_watched

    def learn_roles(self, reports: Sequence[Report], kind: int, epoch: int) -> None:
        """Hold outer weights only where iterations that were watched have used them.

        Every rank sees the same reports, so all ranks make the same tables.
        """
        if not self.run.is_watched or not any(report.reads for report in reports):
            return
        for pipeline in self.run.plan.pipelines:
            if pipeline.num_stages == 1:
                continue
            for stage_index, role in ((0, OuterRole.FIRST), (-1, OuterRole.LAST)):
                for rank in pipeline.stages[stage_index].ranks:
                    for name in reports[rank].reads:
                        self._roles.setdefault(name, set()).add(role)
        self._watched[kind] = epoch
        self._hold(self._with_roles(known=True))

    def _with_roles(self, *, known: bool) -> tuple[ParameterSpec, ...]:
        """Return all parameters; what wasn't seen in use may be used anywhere one day."""
        return tuple(
            replace(
                spec,
                roles=frozenset(self._roles.get(spec.name, _BOTH_ENDS) if known else _BOTH_ENDS),
            )
            if spec.layer is None
            else spec
            for spec in self._store.specs.values()
        )

    def _hold(self, specs: tuple[ParameterSpec, ...]) -> None:
        if specs != self._specs:
            self._specs = specs
            self._replace(self.run.plan, share_memory=self.run.share_memory)

    def close(self) -> None:
        """Let the plan's weights go, whoever still holds this; slices stay where they are."""
        self.run.weights.release()
        del self.run

    def _replace(self, plan: ParallelPlan, *, share_memory: bool) -> None:
        with torch.inference_mode(mode=False):  # What is made for validation may train later.
            self.run.weights.release()
            # Both plans' weights together might be more than the device holds.
            del self.run
            self.run = self._make_run(plan, share_memory=share_memory)

    def _make_run(self, plan: ParallelPlan, *, share_memory: bool) -> RunningPlan:
        if self._tensor_parallel is not None:
            self._tensor_parallel.enter_plan(plan, self._comms)
        return RunningPlan(
            plan,
            self._specs,
            self._store,
            self._comms,
            clock=self._clock,
            dtype=self._dtype,
            share_memory=share_memory,
        )
