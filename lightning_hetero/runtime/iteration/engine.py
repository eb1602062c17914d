"""Run iterations of one module under a plan: cut, pull, forward and backward, push, agree.

An iteration on every rank, see `Engine.run`:

1. *cut*: the rank's batch is cut into micro-batches,
2. *pull*: weights travel from the owners of slices to the stages, unit by unit in order of need,
3. *forward, backward*: the stage's actions run in 1F1B order, each forward runs the user's step,
4. *push*: gradients travel to the owners, a unit as soon as its last backward pass has ended,
5. *agree*: losses, logged values and target tokens are summed over all ranks. If the loss is a
   mean, the owners divide their gradients by the iteration's number of target tokens. So the
   gradient is the one that a single device would compute from the whole batch.

Outside of training there is no backward and no push.

Design: optimization separate from propagation (Hydraulis §5), asymmetric pipelines (AutoHet §III).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetero.core.places import RankPlace
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.exchange.owners import list_owners
from lightning_hetero.models.batches import AssignedBatch, cut_batch, sizes_of
from lightning_hetero.runtime.clock import ComputeClock
from lightning_hetero.runtime.iteration.agreement import Agreement, Flag, Header, Report
from lightning_hetero.runtime.iteration.buffers import BufferWatch
from lightning_hetero.runtime.iteration.config import EngineConfig, IterationKey, Phase
from lightning_hetero.runtime.iteration.passes import StagePasses
from lightning_hetero.runtime.iteration.recomputation_choice import RecomputationChoice
from lightning_hetero.runtime.iteration.running_plan import PlanSwitch, RunningPlan
from lightning_hetero.runtime.iteration.schedule_choice import ScheduleChoice
from lightning_hetero.runtime.iteration.split_run import SplitRun
from lightning_hetero.runtime.iteration.step_results import LossScale, StepGradients, StepResults
from lightning_hetero.runtime.random_state import PreservedRandomState
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.ranks.meeting import check_alike
from lightning_hetero.runtime.results.iteration_loss import NUM_TOTALS, without_sums
from lightning_hetero.runtime.results.metrics import StepMetrics
from lightning_hetero.runtime.results.outputs import Records, records_of
from lightning_hetero.runtime.results.step_logs import LogEntry, StepLogs
from lightning_hetero.runtime.setup.layout import ModelLayout
from lightning_hetero.runtime.setup.materialize import materialize
from lightning_hetero.runtime.setup.weight_sources import find_frozen
from lightning_hetero.runtime.slices.frozen import FrozenWeights
from lightning_hetero.runtime.slices.weights import SliceStore
from lightning_hetero.runtime.stage.boundary import StageBoundary
from lightning_hetero.runtime.tensor_parallel.sharding import TensorParallel


class Engine:
    """One module's slices and the plan that runs it, on one rank."""

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
        self.logs = StepLogs(
            module, device, StepMetrics(module, communicators, self._reports_for_group)
        )
        self._agreements = defaultdict[Phase, Agreement](partial(Agreement, communicators, device))
        self.store = self._make_store(plan)
        self.buffers = BufferWatch(module, layout, communicators, may_differ=config.allow_mixing)
        self.plans = PlanSwitch(
            plan,
            self.store,
            communicators,
            clock=clock,
            config=config,
            tensor_parallel=tensor_parallel,
        )
        """The plan that runs, and changes to other plans."""
        self._recomputation = RecomputationChoice(config.layer_options)
        self.schedules = ScheduleChoice(
            config.schedule,
            communicators,
            clock,
            is_split=not config.layer_options.compile_layers,
        )
        self._split = SplitRun(module, layout, self.boundary, communicators, config, device)
        self.gradients = StepGradients(self.store, device, config)
        """The gradients of the last training iteration, for the optimizer."""
        self.fingerprint = 0
        """Hash of the next batch, computed before the batch is moved to the device; ranks compare
        it."""
        self._flags = Flag(0)
        self.leaving: frozenset[int] = frozenset()
        """Ranks whose machines are about to be taken away, as told in the last iteration; the same
        on every rank."""
        self.has_joiners = False
        """Whether other processes were waiting to join in the last iteration; the same on every
        rank."""

    @property
    def is_leaving(self) -> bool:
        """Whether this rank's machine is about to be taken away, as last given to `tell`."""
        return Flag.LEAVES in self._flags

    def tell(self, *, is_leaving: bool, sees_joiners: bool = False) -> None:
        """Tell all ranks, with each iteration from now on, what this rank knows.

        Args:
            is_leaving: Whether this rank's machine is about to be taken away.
            sees_joiners: Whether other processes wait to join.
        """
        self._flags = Flag(is_leaving * Flag.LEAVES | sees_joiners * Flag.SEES_JOINERS)

    # -- an iteration ---------------------------------------------------------------------------

    def run(
        self, step: Callable[[Any], Any], batch: Any, key: IterationKey
    ) -> tuple[Tensor | None, Records]:
        """Run one iteration. Called by all ranks together.

        In training, the gradient of each slice is in `self.gradients` afterwards.

        Args:
            step: Runs the user's step on one micro-batch.
            batch: This rank's batch; the same on all ranks of a pipeline.
            key: Phase, epoch and number of the iteration. Only in training there is a backward.

        Returns:
            The loss, the same on every rank, None outside of training; and what the steps returned
            and recorded, by pipeline.

        Raises:
            StepError, BatchError, ModelError: Step, batch or model break the contract.
        """
        is_training = key.phase is Phase.TRAIN
        running = self.plans.begin(key.phase, key.epoch)
        microbatches, first_index = self._cut(batch)
        sizes = [sizes_of(item) for item in microbatches]
        is_cut = isinstance(batch, AssignedBatch) or sum(self.num_microbatches) > 1
        seed = self.config.seed, key.phase, key.epoch, key.batch_idx
        if is_training and is_cut and self._split.is_due():
            self._check_split(step, microbatches, seed)
        scale = self._split.scale if is_cut or not is_training else LossScale(is_sum=True)
        self.buffers.begin(key.phase)
        results = StepResults(
            self.module,
            self.logs,
            self.device,
            scale=scale,
            is_training=is_training,
            factor=self.gradients.loss_scale,
        )
        schedule = self.schedules.of(
            running, [tokens for _, tokens in sizes], is_training=is_training
        )
        passes = StagePasses(
            running,
            self.boundary,
            results,
            microbatches,
            [samples for samples, _ in sizes],
            self._recomputation.of(running.chunks, microbatches, schedule.actions),
            first_index=first_index,
            seed=seed,
            splitter=running.splitter if schedule.is_split else None,
        )
        if is_training:
            running.weights.clear_gradients(self.config.gradient_dtype(len(microbatches)))
        with self.clock.iteration():
            with self._stage_ready(running):  # Pull.
                # Forward and backward; a unit's push begins in its last backward pass.
                if is_training:
                    running.push.start()
                passes.run(schedule, step, clock=self.clock, after_action=self.buffers.look)
                results.finish(running.push.gradients)
                # Agree: each rank sends its row now and reads the others' after the push. With
                # standbys it sends its row only after the push. Then a rank that has received all
                # rows knows that all ranks have their gradients; so if a rank is lost, either all
                # others make the optimizer step or none does.
                begin = partial(self._begin_agreement, key.phase, results, passes)
                agreement = None if is_training and self.store.has_standbys else begin()
                # Push.
                with self.clock.waiting():
                    sums = running.finish_exchange(is_training=is_training)
                agreement = agreement or begin()
            with self.clock.waiting():
                agreed = agreement.finish()
        # Not earlier: a rank may raise only after it has sent all that the others wait for.
        self.settle()
        self.leaving, self.has_joiners = agreed.leaving, agreed.has_joiners
        self.buffers.settle(agreed.reports.buffers, self.plan)
        loss = self.gradients.finish(
            sums, running.unused(agreed.reports.num_missing), agreed.sums, scale, str(key)
        )
        self.logs.replay(agreed.reports.entries, agreed.sums[:, NUM_TOTALS:], agreed.num_samples)
        self.peak_in_flight = max(self.peak_in_flight, passes.peak_in_flight)
        if is_training:
            self.schedules.learn(running)
        del running, passes, begin  # Free the plan's weights: another plan may run next.
        self.plans.learn_roles(agreed.reports.reads, key.phase, key.epoch)
        self._recomputation.learn(agreed.reports.measured)
        return loss, records_of(
            results.records, self.plan, self.comms, self.device, shared=agreed.returns
        )

    def _cut(self, batch: Any) -> tuple[list[Any], int]:
        """Return this rank's micro-batches, and the first one's index among all pipelines'."""
        if isinstance(batch, AssignedBatch):
            return list(batch.microbatches), batch.first_index
        if self.place is None:
            return [], 0
        index, counts = self.place.pipeline_index, self.num_microbatches
        return cut_batch(batch, counts[index]), sum(counts[:index])

    @contextmanager
    def _stage_ready(self, running: RunningPlan) -> Iterator[None]:
        """Context in which steps can run: weights arrive, and logs are recorded."""
        with (
            PreservedRandomState(),
            self.logs.recording(is_last=running.is_last),
            running.weights,
        ):
            running.pull.start(needed=(-1, running.plan.num_layers))  # Those outside the layers.
            yield

    def _check_split(
        self, step: Callable[[Any], Any], batches: Sequence[Any], seed: tuple[int, ...]
    ) -> None:
        """Check whether the loss is a sum or a mean; called by all ranks, in few iterations."""
        running = self.plans.running

        with self._stage_ready(running):
            self._split.run(step, batches, running, seed=seed, recompute=self._recomputation.alone)
            running.finish_exchange(is_training=False)

    def _begin_agreement(
        self, phase: Phase, results: StepResults, passes: StagePasses
    ) -> Agreement:
        """Send this rank's row of the agreement, without waiting for the others."""
        place, running = self.place, self.plans.running
        is_first = place is not None and place.stage_index == place.tp_rank == 0
        returns = self.config.share_outputs and not all(i.is_empty for i in results.records)
        header = Header(
            num_samples=results.epoch_weight if is_first else 0,
            pipeline_index=-1 if place is None else place.pipeline_index,
            fingerprint=0 if place is None else self.fingerprint,
            flags=self._flags | returns * Flag.RETURNS,
        )
        report = Report(
            entries=self.logs.entries,
            missing=passes.missing() if results.is_training else (),
            buffers=(place and self.buffers.report(running.layers)) or (),
            reads=tuple(sorted(running.reads or ())),
            measured=self._recomputation.measured,
        )

        def sums_of(entries: Sequence[LogEntry]) -> Tensor:
            row = results.row(entries)
            # Ranks of a tensor-parallel group have the same loss: the first one counts.
            return row if self._reports_for_group() else without_sums(row)

        agreement = self._agreements[phase]
        agreement.begin(report, header, sums_of)
        return agreement

    def _reports_for_group(self) -> bool:
        """Whether this rank reports the loss that all ranks of its tensor-parallel group have."""
        return self.place is None or self.place.tp_rank == 0

    def settle(self) -> None:
        """Check the last iteration's sums, which arrive one iteration late on an accelerator.

        Called by all ranks together.
        """
        self.gradients.settle()

    # -- plan and slices ------------------------------------------------------------------------

    @property
    def plan(self) -> ParallelPlan:
        """The plan that runs."""
        return self.plans.running.plan

    @property
    def place(self) -> RankPlace | None:
        """This rank's place in the plan, None if it is idle."""
        return self.plans.running.place

    def change_plan(self, plan: ParallelPlan) -> None:
        """Run another plan from the next iteration on; called by every rank with the same plan.

        No optimizer state moves: slices stay with their owners.
        """
        if plan != self.plan:
            self.buffers.share()
        self.plans.change(plan)

    def remove(self) -> None:
        """Restore the methods of the module and its layers, and free the compute weights."""
        self.plans.close()
        self.logs.remove()
        self.boundary.remove()
        if self.tensor_parallel is not None:
            self.tensor_parallel.remove()

    def mark_weights_stale(self, *, only_trainable: bool = False) -> None:
        """Note that slices have changed, so that the next iteration pulls."""
        self.plans.running.pull.mark_stale(only_trainable=only_trainable)

    @property
    def num_microbatches(self) -> tuple[int, ...]:
        """Micro-batches of each pipeline in a full iteration."""
        return self.plans.running.num_microbatches

    def reseed(self, seed: int) -> None:
        """Draw the random numbers of another seed from now on; called by every rank alike."""
        self.config = replace(self.config, seed=seed)

    def _make_store(self, plan: ParallelPlan) -> SliceStore:
        specs, options, comms = self.layout.specs, self.config, self.comms
        find_owners = partial(options.owners, plan=plan, world_size=comms.world_size)
        slices = find_owners(specs)
        # Before any message whose size depends on them.
        check_alike(comms, plan=plan, parameters=specs, owners=list_owners(slices), options=options)
        sources = find_frozen(self.module, self.layout, comms)
        slices |= dict.fromkeys(sources, ())
        store = SliceStore(
            self.layout,
            slices,
            global_rank=self.comms.global_rank,
            device=self.device,
            dtype=self.config.master_dtype,
            on_host=self.config.owned_device.is_on_host(plan, self.comms.global_rank),
            frozen=FrozenWeights(sources, find_owners),
        )
        materialize(self.module, store, self.comms, seed=self.config.seed)
        return store
