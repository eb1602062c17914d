"""Run iterations of one module under a plan: pull, 1F1B, push, agree.

An iteration on every rank:

1. *cut*: the rank's batch is cut into micro-batches,
2. *pull*: weights travel from the owners of slices to the stages, unit by unit in order of need,
3. *propagate*: the stage's actions run in 1F1B order, each forward runs the user's step,
4. *push*: gradients travel to the owners, a unit as soon as its last backward has ended,
5. *agree*: losses, logged values and target tokens are summed over all ranks, and the owners divide
   their gradients by the iteration's target tokens (those of a loss that is a sum stay): what one
   big device would have computed.

Design: optimization apart from propagation (Hydraulis §5), on asymmetric pipelines (AutoHet §III).
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetero.core.plan import ParallelPlan, RankPlace
from lightning_hetero.core.slices import Ownership, assign_owners
from lightning_hetero.core.transfers import TransferTable
from lightning_hetero.models.batches import AssignedBatch, cut_batch
from lightning_hetero.runtime.clock import ComputeClock
from lightning_hetero.runtime.iteration.agreement import Agreed, Agreement, Report, header_of
from lightning_hetero.runtime.iteration.buffers import BufferWatch
from lightning_hetero.runtime.iteration.config import EngineConfig
from lightning_hetero.runtime.iteration.finiteness import answer_nonfinite, describe_ranks
from lightning_hetero.runtime.iteration.passes import IterationKey, Propagation, StepContext
from lightning_hetero.runtime.iteration.plan_switch import PlanSwitch
from lightning_hetero.runtime.iteration.running_plan import RunningPlan
from lightning_hetero.runtime.random_state import preserved_random_state
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.results.iteration_loss import (
    GUESSED_LOSS,
    NUM_TOTALS,
    IterationLoss,
    without_sums,
)
from lightning_hetero.runtime.results.metrics import StepMetrics
from lightning_hetero.runtime.results.outputs import Records, records_of
from lightning_hetero.runtime.results.step_logs import LogEntry, StepLogs
from lightning_hetero.runtime.setup.alike import check_alike
from lightning_hetero.runtime.setup.layout import ModelLayout
from lightning_hetero.runtime.setup.materialize import materialize
from lightning_hetero.runtime.slices.weights import ComputeWeights, SliceStore
from lightning_hetero.runtime.stage.boundary import StageBoundary
from lightning_hetero.runtime.stage.module_calls import ModuleCalls
from lightning_hetero.runtime.tensor_parallel.sharding import TensorParallel

__all__ = ["Engine"]


class Engine:
    """One module's slices and the plan that runs it, on one rank.

    Args:
        module: The user's LightningModule, whole or on the meta device.
        layout: Its layers and parameters.
        plan: The plan to run.
        communicators: The process groups.
        config: Options.
        device: The rank's device.
        clock: Times the rank's actions.
        tensor_parallel: The sharded modules; None if no plan has a degree above 1.
    """

    def __init__(  # noqa: PLR0913 - what a run consists of
        self,
        module: nn.Module,
        layout: ModelLayout,
        plan: ParallelPlan,
        communicators: Communicators,
        *,
        config: EngineConfig,
        device: torch.device,
        clock: ComputeClock,
        tensor_parallel: TensorParallel | None = None,
    ) -> None:
        self.module = module
        self.layout = layout
        self.config = config
        self.device = device
        self.comms = communicators
        self.peak_in_flight = 0
        self.clock = clock
        self.tensor_parallel = tensor_parallel
        self.boundary = StageBoundary(
            layout.layers,
            wrap_layer=config.layer_options.wrap_layer,
            group=None if tensor_parallel is None else tensor_parallel.stage,
        )
        metrics = None
        if communicators.world_size > 1:
            metrics = StepMetrics(module, communicators, self._speaks)
        self.logs = StepLogs(module, device, metrics)
        self._agreements: dict[int, Agreement] = {}
        self.store = self._make_store(plan)
        self.buffers = BufferWatch(module, layout, communicators, may_differ=config.local_buffers)
        self._calls = ModuleCalls(module) if communicators.world_size > 1 else None
        self._plans = PlanSwitch(
            plan,
            self.store,
            communicators,
            clock=self.clock,
            dtype=config.compute_dtype,
            tensor_parallel=tensor_parallel,
        )
        self._context = StepContext(
            module=module,
            boundary=self.boundary,
            logs=self.logs,
            num_layers=layout.num_layers,
            device=device,
            seed=config.seed,
            clock=self.clock,
            buffers=self.buffers,
            loss_reduction=config.loss_reduction,
        )
        self.gradients: dict[str, Tensor] = {}
        self.gradients_are_finite = True
        """Whether the last training iteration's were; the same on every rank."""
        self.fingerprint = 0
        """Of the batch that comes next, taken before it went to the device."""
        self.leaves = False
        """Whether this rank's machine is about to be taken away; told to all in each iteration."""
        self.leaving: frozenset[int] = frozenset()
        """The ranks that said so in the last training iteration; the same on every rank."""

    # -- iterations -----------------------------------------------------------------------------

    def train(
        self, step: Callable[[Any], Any], batch: Any, key: IterationKey
    ) -> tuple[Tensor, Records]:
        """Run one training iteration.

        Returns its loss, the same on every rank, and what steps left behind besides; leaves the
        gradient of each slice in `self.gradients`.

        Raises:
            StepError, BatchError, ModelError: Step, batch or model break the contract.
        """
        self._plans.begin(key.stage, key.epoch)
        run = self._run
        propagation = self._propagation(batch, key, training=True)
        run.weights.clear_gradients(self.config.gradient_dtype(len(propagation.microbatches)))
        with self.clock.iteration():
            with preserved_random_state(), self.logs.recording(), self._weights_in_module():
                self._start_pull()
                run.push.start()
                propagation.run(step)
                missing = propagation.missing()
                agreement = self._begin_agreement(propagation, key, missing)
                with self.clock.waiting():
                    run.pull.finish()
                    gradients = run.push.finish()
                    run.link.finish()
            with self.clock.waiting():
                agreed = agreement.finish()
        self.buffers.settle([report.buffers for report in agreed.reports], self.plan)
        self.leaving = agreed.leaving
        is_cut = isinstance(batch, AssignedBatch) or sum(self.num_microbatches) > 1
        loss = IterationLoss.of(agreed.sums, agreed.loss_kinds, is_cut=is_cut)
        if loss.is_guessed and is_cut and self.comms.global_rank == 0:
            warnings.warn(GUESSED_LOSS, stacklevel=2)
        self._keep_gradients(gradients, agreed, loss.scale)
        self.gradients_are_finite = not loss.nonfinite_ranks
        if loss.nonfinite_ranks:
            self.gradients = {}
            ranks = describe_ranks(loss.nonfinite_ranks, self.plan)
            answer_nonfinite(
                f"{key} aren't finite; they come from {ranks}.", self.config.nonfinite_gradients
            )
        self.logs.replay(agreed.entries, agreed.sums[:, NUM_TOTALS:], agreed.num_samples)
        self.peak_in_flight = max(self.peak_in_flight, propagation.peak_in_flight)
        self._plans.learn_roles(agreed.reports, key.stage, key.epoch)
        return loss.value, self._records(propagation, agreed)

    def evaluate(self, step: Callable[[Any], Any], batch: Any, key: IterationKey) -> Records:
        """Run one iteration forward only; returns what its steps left behind."""
        self._plans.begin(key.stage, key.epoch)
        propagation = self._propagation(batch, key, training=False)
        with self.clock.iteration():
            with preserved_random_state(), self.logs.recording(), self._weights_in_module():
                self._start_pull()
                propagation.run(step)
                agreement = self._begin_agreement(propagation, key, ())
                with self.clock.waiting():
                    self._run.pull.finish()
                    self._run.link.finish()
            with self.clock.waiting():
                agreed = agreement.finish()
        self.buffers.settle([report.buffers for report in agreed.reports], self.plan)
        self.logs.replay(agreed.entries, agreed.sums[:, NUM_TOTALS:], agreed.num_samples)
        self._plans.learn_roles(agreed.reports, key.stage, key.epoch)
        return self._records(propagation, agreed)

    def _propagation(self, batch: Any, key: IterationKey, *, training: bool) -> Propagation:
        self.buffers.begin(key.stage)
        microbatches: list[Any] = []
        first_index = 0
        if isinstance(batch, AssignedBatch):
            microbatches, first_index = list(batch.microbatches), batch.first_index
        elif self.place is not None:
            index = self.place.pipeline_index
            microbatches = cut_batch(batch, self.num_microbatches[index])
            first_index = sum(self.num_microbatches[:index])
        return Propagation(
            self._run,
            self._context,
            microbatches,
            first_index=first_index,
            key=key,
            training=training,
        )

    @contextmanager
    def _weights_in_module(self) -> Iterator[None]:
        with self._run.weights.in_module():
            if self._calls is None:
                yield
            else:
                with self._calls.allowed():
                    yield

    def _start_pull(self) -> None:
        self._run.pull.start()
        # Either may be read at once: behind the layers, or before them on any stage.
        self._run.pull.wait_unit(-1)
        self._run.pull.wait_unit(self.layout.num_layers)

    # -- agreement ------------------------------------------------------------------------------

    def _begin_agreement(
        self, propagation: Propagation, key: IterationKey, missing: tuple[str, ...]
    ) -> Agreement:
        place = self.place
        own = propagation.microbatches
        header = header_of(own, place, fingerprint=self.fingerprint, leaves=self.leaves)
        returns = self.config.share_outputs and not all(i.is_empty for i in propagation.records)
        header = replace(header, loss_kinds=frozenset(propagation.loss_kinds), returns=returns)

        def sums_of(entries: Sequence[LogEntry]) -> Tensor:
            row = torch.cat([propagation.totals(), self.logs.as_row(entries)])
            # Ranks of a tensor-parallel group have the same loss: the first one counts.
            return row if self._speaks() else without_sums(row)

        agreement = self._agreements.setdefault(key.stage, Agreement(self.comms, self.device))
        layers = self._run.layers
        report = Report(
            entries=self.logs.entries,
            missing=missing,
            buffers=() if place is None else self.buffers.report(layers, place.pipeline_index),
            reads=tuple(sorted(propagation.reads)),
        )
        agreement.begin(report, header, sums_of)
        return agreement

    def _speaks(self) -> bool:
        """Whether this rank is the first of its tensor-parallel group, which all are alike."""
        return self.place is None or self.place.tp_rank == 0

    def _records(self, propagation: Propagation, agreed: Agreed) -> Records:
        place = self.plan, self.comms, self.device
        return records_of(propagation.records, *place, shared=agreed.returns)

    def _keep_gradients(self, gradients: dict[str, Tensor], agreed: Agreed, scale: Tensor) -> None:
        """Scale the sums; leave out what no holder has a gradient for."""
        used = self._used_somewhere(agreed.reports, gradients)
        self.gradients = {
            name: gradient.mul_(scale.to(gradient.dtype)).to(self.store.masters[name].dtype)
            for name, gradient in gradients.items()
            if name in used
        }

    def _used_somewhere(self, reports: Sequence[Report], names: Iterable[str]) -> set[str]:
        missing = [set(report.missing) for report in reports]
        if not any(missing):
            return set(names)
        holdings = self._run.table.holdings
        return {
            name
            for name in names
            if any(name not in missing[holding.global_rank] for holding in holdings(name))
        }

    # -- plan and slices ------------------------------------------------------------------------

    @property
    def plan(self) -> ParallelPlan:
        """The plan that runs."""
        return self._run.plan

    @property
    def place(self) -> RankPlace | None:
        """This rank's place in the plan, None if it is idle."""
        return self._run.place

    def transfer_table(self, plan: ParallelPlan) -> TransferTable:
        """Return what a plan would move between which ranks; communicates nothing."""
        return self._plans.table_of(plan)

    @property
    def weights(self) -> ComputeWeights:
        """This rank's compute weights under the plan."""
        return self._run.weights

    def change_plan(self, plan: ParallelPlan) -> None:
        """Run another plan from the next iteration on; called by every rank with the same plan.

        No optimizer state moves: slices stay with their owners.

        Raises:
            PlanError: See `PlanSwitch.check`.
        """
        if plan != self.plan:
            self.buffers.share()
        self._plans.change(plan)

    def check_plan(self, plan: ParallelPlan) -> None:
        """Raise PlanError for a plan that can't run here."""
        self._plans.check(plan)

    def follow_freezing(self) -> bool:
        """Move other gradients from now on if parameters were frozen or thawed since.

        Called by every rank between iterations; returns whether there were any, the same on each.
        """
        return self._plans.follow_freezing()

    def remove(self) -> None:
        """Give the module and its layers their own methods back, and let the weights go."""
        self._plans.close()
        self.logs.remove()
        self.boundary.remove()
        if self._calls is not None:
            self._calls.remove()
        if self.tensor_parallel is not None:
            self.tensor_parallel.remove()

    def mark_weights_stale(self, *, only_trainable: bool = False) -> None:
        """Say that slices have changed, so that the next iteration pulls.

        Args:
            only_trainable: Frozen parameters are as they were (an optimizer step).
        """
        self._run.pull.mark_stale(only_trainable=only_trainable)

    @property
    def num_microbatches(self) -> tuple[int, ...]:
        """Micro-batches of each pipeline in a full iteration."""
        return self.plan.count_microbatches(self.config.num_microbatches)

    def reseed(self, seed: int) -> None:
        """Draw the random numbers of another seed from now on; called by every rank alike."""
        self.config = replace(self.config, seed=seed)
        self._context = replace(self._context, seed=seed)

    @property
    def _run(self) -> RunningPlan:
        return self._plans.run

    def _make_store(self, plan: ParallelPlan) -> SliceStore:
        ownership = self.config.ownership
        if ownership is Ownership.AUTO:
            idle = len(plan.ranks) < self.comms.world_size
            ownership = Ownership.EVEN if idle else Ownership.HOLDERS
        slices = assign_owners(
            self.layout.specs,
            plan,
            world_size=self.comms.world_size,
            ownership=ownership,
            weights=self.config.owner_weights,
        )
        # Before anything else travels, whose size would hang on them.
        specs, options = self.layout.specs, self.config
        check_alike(self.comms, plan=plan, parameters=specs, owners=slices, options=options)
        store = SliceStore(
            self.layout,
            slices,
            global_rank=self.comms.global_rank,
            device=self.device,
            dtype=self.config.master_dtype,
        )
        materialize(self.module, store, self.comms, seed=self.config.seed)
        return store
