"""Run iterations of one module under a plan: pull, 1F1B, push, agree.

An iteration on every rank:

1. *cut*: the rank's batch is cut into micro-batches,
2. *pull*: weights travel from the owners of slices to the stages, unit by unit in order of need,
3. *propagate*: the stage's actions run in 1F1B order, each forward runs the user's step,
4. *push*: gradients travel to the owners, a unit as soon as its last backward has ended,
5. *agree*: losses, logged values and target tokens are summed over all ranks, and the owners divide
   their gradients by the iteration's target tokens: what one big device would have computed.

Design: optimization apart from propagation (Hydraulis §5), on asymmetric pipelines (AutoHet §III).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hetero.core.actions import Action, ActionKind, schedule_1f1b, schedule_forward
from lightning_hetero.core.errors import StepError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.slices import OuterRole, Ownership, ParameterSpec, assign_owners
from lightning_hetero.core.transfers import TransferTable, unit_of
from lightning_hetero.runtime.activations import ActivationLink
from lightning_hetero.runtime.agreement import (
    Agreed,
    Agreement,
    Header,
    Report,
    fingerprint_of,
)
from lightning_hetero.runtime.boundary import (
    MicrobatchRun,
    StageBoundary,
    StageEnd,
    preserved_random_state,
)
from lightning_hetero.runtime.communicators import Communicators
from lightning_hetero.runtime.exchange import Pull, Push
from lightning_hetero.runtime.layout import ModelLayout
from lightning_hetero.runtime.microbatches import count_samples, cut_batch
from lightning_hetero.runtime.step_logs import LogEntry, StepLogs
from lightning_hetero.runtime.targets import LossWatch, as_weight, count_targets
from lightning_hetero.runtime.weights import ComputeWeights, SliceStore

__all__ = ["Engine", "EngineConfig", "IterationKey"]

_BOTH_ENDS = frozenset({OuterRole.FIRST, OuterRole.LAST})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine runs its plans."""

    num_microbatches: int
    """Micro-batches of a pipeline for which the plan names no number."""
    ownership: Ownership = Ownership.AUTO
    owner_weights: tuple[float, ...] | None = None
    """Share of slices of each rank; equal if None."""
    propagation_dtype: torch.dtype = torch.float32
    master_dtype: torch.dtype | None = None
    """Dtype of master slices; None keeps the parameters' own."""
    seed: int = 0
    """Base of the micro-batches' random seeds; the same on all ranks."""


@dataclass(frozen=True, kw_only=True)
class IterationKey:
    """What an iteration's random numbers depend on."""

    stage: int
    """0 training, 1 validation, 2 test, 3 prediction."""
    epoch: int
    batch_idx: int


@dataclass
class _InFlight:
    """What a stage keeps of a micro-batch between its forward and its backward."""

    hidden_in: Tensor | None
    output: Tensor
    """Hidden state sent on, or the weighted loss on the last stage."""


@dataclass
class _Iteration:
    """The sums and outputs of one iteration on this rank."""

    microbatches: Sequence[Any]
    loss_sum: Tensor
    weight: Tensor
    outputs: list[Any] = field(default_factory=list)
    in_flight: dict[int, _InFlight] = field(default_factory=dict)


class Engine:
    """One module's slices and the plan that runs it, on one rank.

    Args:
        module: The user's LightningModule, whole and with the same weights on every rank.
        layout: Its layers and parameters.
        plan: The plan to run.
        communicators: The process groups.
        config: Options.
        device: The rank's device.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: ModelLayout,
        plan: ParallelPlan,
        communicators: Communicators,
        *,
        config: EngineConfig,
        device: torch.device,
    ) -> None:
        self.module = module
        self.layout = layout
        self.config = config
        self.device = device
        self.comms = communicators
        self.plan = plan
        self.peak_in_flight = 0
        self._specs = tuple(
            spec if spec.layer is not None else replace(spec, roles=_BOTH_ENDS)
            for spec in layout.specs
        )
        self._roles_known = all(p.num_stages == 1 for p in plan.pipelines)
        self.boundary = StageBoundary(layout.layers)
        self.logs = StepLogs(module, device)
        self._agreements: dict[int, Agreement] = {}
        self.store = self._make_store(plan)
        self._apply_plan(plan)
        self.weights_are_stale = True
        self._only_trainable_stale = False
        self.gradients: dict[str, Tensor] = {}

    # -- set-up ---------------------------------------------------------------------------------

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
        store = SliceStore(
            self.layout,
            slices,
            global_rank=self.comms.global_rank,
            device=self.device,
            dtype=self.config.master_dtype,
        )
        for name in store.specs:
            # What the ranks' modules were initialised to may differ: rank 0's is what counts.
            whole = self.layout.slots[name][0].current.detach()
            if self.comms.world_size > 1:
                whole = whole.contiguous()
                dist.broadcast(whole, 0, group=self.comms.control)
            store.adopt(name, whole)
        return store

    def _apply_plan(self, plan: ParallelPlan) -> None:
        """Make the tables, weights and links of a plan; no optimizer state moves."""
        rank = self.comms.global_rank
        self.plan = plan
        self.place = plan.place(rank)
        self._table = TransferTable(self._specs, self.store.slices, plan)
        self.weights = ComputeWeights(
            self.store, self._table, dtype=self.config.propagation_dtype, share_memory=True
        )
        dtype = self.config.propagation_dtype
        exchange = self.comms.exchange
        self._pull = Pull(self.store, self.weights, group=exchange, dtype=dtype)
        self._push = Push(self.store, self.weights, group=exchange, dtype=dtype)
        self._gradient_counts = _GradientCounter(self._specs, self.weights, self._push, plan)
        previous = following = None
        if self.place is not None:
            pipeline = plan.pipelines[self.place.pipeline_index]
            index, tp_rank = self.place.stage_index, self.place.tp_rank
            if index > 0:
                previous = pipeline.stages[index - 1].ranks[tp_rank]
            if index + 1 < pipeline.num_stages:
                following = pipeline.stages[index + 1].ranks[tp_rank]
        self._link = ActivationLink(
            previous=previous,
            following=following,
            forward_group=self.comms.forward,
            backward_group=self.comms.backward,
        )

    def _learn_roles(self, reports: Sequence[Report]) -> None:
        """Drop outer weights from the end of the pipeline where no gradient reached them.

        Every rank sees the same reports, so all ranks make the same tables.
        """
        seen: dict[str, set[OuterRole]] = {}
        for pipeline in self.plan.pipelines:
            if pipeline.num_stages == 1:
                continue
            for stage_index, role in ((0, OuterRole.FIRST), (-1, OuterRole.LAST)):
                for rank in pipeline.stages[stage_index].ranks:
                    missing = set(reports[rank].missing)
                    for spec in self._specs:
                        if spec.layer is None and spec.requires_grad and spec.name not in missing:
                            seen.setdefault(spec.name, set()).add(role)
        self._roles_known = True
        self._specs = tuple(
            replace(spec, roles=frozenset(seen[spec.name])) if spec.name in seen else spec
            for spec in self._specs
        )
        self.weights.release()
        self._apply_plan(self.plan)
        self.mark_weights_stale()

    def mark_weights_stale(self, *, only_trainable: bool = False) -> None:
        """Say that slices have changed, so that the next iteration pulls.

        Args:
            only_trainable: Frozen parameters are as they were (an optimizer step).
        """
        everything = self.weights_are_stale and not self._only_trainable_stale
        self.weights_are_stale = True
        self._only_trainable_stale = only_trainable and not everything

    @property
    def num_parameter_bytes(self) -> int:
        """Bytes of slices and compute weights on this rank."""
        return self.store.num_bytes() + self.weights.num_bytes()

    @property
    def num_microbatches(self) -> tuple[int, ...]:
        """Micro-batches of each pipeline in a full iteration."""
        return tuple(
            self.config.num_microbatches if p.num_microbatches is None else p.num_microbatches
            for p in self.plan.pipelines
        )

    # -- iterations -----------------------------------------------------------------------------

    def train(self, step: Callable[[Any], Any], batch: Any, key: IterationKey) -> Tensor:
        """Run one training iteration and return its loss, the same on every rank.

        Leaves the gradient of each slice in `self.gradients`.

        Raises:
            StepError, BatchError, ModelError: The step, the batch or the model breaks the contract.
        """
        self.weights.clear_gradients()
        iteration = self._begin(batch)
        with preserved_random_state(), self.logs.recording(), self.weights.in_module():
            self._start_pull()
            self._push.start()
            for action, upcoming in _with_next(self._schedule(iteration, training=True)):
                self._expect(iteration, action, upcoming)
                if action.kind is ActionKind.FORWARD:
                    self._forward(step, iteration, action.microbatch_index, key, training=True)
                else:
                    last = action.microbatch_index + 1 == len(iteration.microbatches)
                    self._backward(iteration, action.microbatch_index, is_last=last)
            missing = tuple(self._push.missing())
            agreement = self._begin_agreement(iteration, key, batch, missing)
            self._finish_pull()
            gradients = self._push.finish()
            self._link.finish()
        agreed = agreement.finish()
        loss_sum, weight = agreed.sums[:, 0].sum(), agreed.sums[:, 1].sum()
        self._keep_gradients(gradients, agreed, weight)
        self.logs.replay(agreed.entries, agreed.sums[:, 2:], agreed.num_samples)
        if not self._roles_known:
            self._learn_roles(agreed.reports)
        return (loss_sum / weight).float()

    def evaluate(self, step: Callable[[Any], Any], batch: Any, key: IterationKey) -> list[Any]:
        """Run one iteration forward only; returns the last stage's outputs, one a micro-batch."""
        iteration = self._begin(batch)
        with preserved_random_state(), self.logs.recording(), self.weights.in_module():
            self._start_pull()
            for action in self._schedule(iteration, training=False):
                self._forward(step, iteration, action.microbatch_index, key, training=False)
            agreement = self._begin_agreement(iteration, key, batch, ())
            self._finish_pull()
            self._link.finish()
        agreed = agreement.finish()
        self.logs.replay(agreed.entries, agreed.sums[:, 2:], agreed.num_samples)
        return iteration.outputs

    def _begin(self, batch: Any) -> _Iteration:
        microbatches: list[Any] = []
        if self.place is not None:
            microbatches = cut_batch(batch, self.num_microbatches[self.place.pipeline_index])
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        return _Iteration(microbatches=microbatches, loss_sum=zero, weight=zero)

    def _schedule(self, iteration: _Iteration, *, training: bool) -> tuple[Action, ...]:
        if self.place is None:
            return ()
        index, count = self.place.stage_index, len(iteration.microbatches)
        if not training:
            return schedule_forward(stage_index=index, num_microbatches=count)
        num_stages = self.plan.pipelines[self.place.pipeline_index].num_stages
        return schedule_1f1b(stage_index=index, num_stages=num_stages, num_microbatches=count)

    def _start_pull(self) -> None:
        if self.weights_are_stale:
            self._pull.start(trainable_only=self._only_trainable_stale)
            self._pull.wait_unit(-1)

    def _finish_pull(self) -> None:
        self._pull.finish()
        self.weights_are_stale = False

    def _before_layer(self, index: int) -> None:
        self._pull.wait_unit(index)
        if index == self.layout.num_layers:
            self._pull.wait_unit(-1)

    # -- one action -----------------------------------------------------------------------------

    def _forward(
        self,
        step: Callable[[Any], Any],
        iteration: _Iteration,
        index: int,
        key: IterationKey,
        *,
        training: bool,
    ) -> None:
        assert self.place is not None
        microbatch = iteration.microbatches[index]
        watch = LossWatch()
        run = self._microbatch_run(index, key, watch, training=training)
        try:
            with self.boundary.running(run):
                output = step(microbatch)
        except StageEnd as end:
            self.logs.drop_microbatch()
            self._link.send_hidden(end.hidden)
            if training:
                iteration.in_flight[index] = _InFlight(run.hidden_in, end.hidden)
            self.peak_in_flight = max(self.peak_in_flight, len(iteration.in_flight))
            return
        if self.layout.layers and not run.finished:
            raise StepError(
                "The step returned without calling the model's layers. Call the model once in it."
            )
        self._take_output(iteration, index, run, output, training=training)

    def _take_output(
        self, iteration: _Iteration, index: int, run: MicrobatchRun, output: Any, *, training: bool
    ) -> None:
        """Weigh what a last stage's step returned."""
        microbatch = iteration.microbatches[index]
        watch = run.behind_layers
        assert isinstance(watch, LossWatch)
        num_targets = count_targets(self.module, microbatch, watch, count_samples(microbatch))
        weight = as_weight(num_targets, self.device)
        self.logs.keep_microbatch(weight)
        iteration.weight = iteration.weight + weight
        if not training:
            iteration.outputs.append(output)
            return
        loss = _loss_of(output)
        # The mean of no targets is no number, and must count nothing.
        weighted = torch.where(
            weight > 0, loss.float() * weight.float(), loss.new_zeros(()).float()
        )
        iteration.loss_sum = iteration.loss_sum + weighted.detach().double()
        iteration.in_flight[index] = _InFlight(run.hidden_in, weighted)
        self.peak_in_flight = max(self.peak_in_flight, len(iteration.in_flight))

    def _microbatch_run(
        self, index: int, key: IterationKey, watch: LossWatch, *, training: bool
    ) -> MicrobatchRun:
        assert self.place is not None
        pipeline = self.plan.pipelines[self.place.pipeline_index]
        first = sum(self.num_microbatches[: self.place.pipeline_index])
        seed = (self.config.seed, key.stage, key.epoch, key.batch_idx, first + index)

        def receive(like: Tensor) -> Tensor:
            return self._link.receive_hidden(like).requires_grad_(training)

        return MicrobatchRun(
            layers=pipeline.stages[self.place.stage_index].layers,
            num_layers=self.layout.num_layers,
            seed=seed,
            receive=receive if self.place.stage_index else None,
            before_layer=self._before_layer,
            behind_layers=watch,
        )

    def _expect(self, iteration: _Iteration, action: Action, upcoming: Action | None) -> None:
        """Begin to receive the gradient that the next action needs, while this one computes.

        Only when this action is a forward: behind a backward, the order on the communicator must
        stay receive, send, receive, send.
        """
        if (
            upcoming is not None
            and upcoming.kind is ActionKind.BACKWARD
            and action.kind is ActionKind.FORWARD
            and self._link.following is not None
            and upcoming.microbatch_index in iteration.in_flight
        ):
            output = iteration.in_flight[upcoming.microbatch_index].output
            self._link.expect_gradient(upcoming.microbatch_index, output)

    def _backward(self, iteration: _Iteration, index: int, *, is_last: bool) -> None:
        held = iteration.in_flight.pop(index)
        gradient = None
        if self._link.following is not None:
            self._link.expect_gradient(index, held.output)
            gradient = self._link.receive_gradient(index)
        with self._gradient_counts.counting(is_last=is_last):
            if held.output.requires_grad:
                torch.autograd.backward(held.output, gradient)
        if self._link.previous is not None:
            assert held.hidden_in is not None
            back = held.hidden_in.grad
            self._link.send_gradient(torch.zeros_like(held.hidden_in) if back is None else back)

    # -- agreement ------------------------------------------------------------------------------

    def _begin_agreement(
        self, iteration: _Iteration, key: IterationKey, batch: Any, missing: tuple[str, ...]
    ) -> Agreement:
        place = self.place
        speaks = place is not None and place.stage_index == place.tp_rank == 0
        samples = sum(_epoch_weight(item) for item in iteration.microbatches) if speaks else 0
        header = Header(
            num_samples=samples,
            pipeline_index=-1 if place is None else place.pipeline_index,
            fingerprint=0 if place is None else fingerprint_of(batch),
        )

        def sums_of(entries: Sequence[LogEntry]) -> Tensor:
            totals = torch.stack([iteration.loss_sum, iteration.weight])
            row = torch.cat([totals, self.logs.as_row(entries)])
            # Ranks of a tensor-parallel group have the same loss: the first one counts.
            return row if place is None or place.tp_rank == 0 else torch.zeros_like(row)

        agreement = self._agreements.setdefault(key.stage, Agreement(self.comms, self.device))
        agreement.begin(Report(entries=self.logs.entries, missing=missing), header, sums_of)
        return agreement

    def _keep_gradients(self, gradients: dict[str, Tensor], agreed: Agreed, weight: Tensor) -> None:
        """Divide by the iteration's target tokens; leave out what no holder has a gradient for."""
        scale = torch.where(weight > 0, 1.0 / weight, torch.zeros_like(weight))
        used = self._used_somewhere(agreed.reports, gradients)
        self.gradients = {
            name: gradient.mul_(scale.to(gradient.dtype))
            for name, gradient in gradients.items()
            if name in used
        }

    def _used_somewhere(self, reports: Sequence[Report], names: Sequence[str] | Any) -> set[str]:
        missing = [set(report.missing) for report in reports]
        return {
            name
            for name in names
            if any(
                name not in missing[holding.global_rank] for holding in self._table.holdings(name)
            )
        }


class _GradientCounter:
    """Tells the push when the gradients of a unit are final, during the last backward."""

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        weights: ComputeWeights,
        push: Push,
        plan: ParallelPlan,
    ) -> None:
        self._push = push
        self._active = False
        self._left: dict[int, int] = {}
        self._sizes = {unit: len(names) for unit, names in push.names_by_unit.items()}
        for spec in specs:
            shard = weights.shards.get(spec.name)
            unit = unit_of(spec, plan.num_layers)
            if shard is not None and spec.name in push.names_by_unit.get(unit, ()):
                shard.register_post_accumulate_grad_hook(self._hook(unit))  # type: ignore[no-untyped-call]

    def _hook(self, unit: int) -> Callable[[Tensor], None]:
        def arrived(_: Tensor) -> None:
            if self._active:
                self._left[unit] -= 1
                if self._left[unit] == 0:
                    self._push.unit_ready(unit)

        return arrived

    def counting(self, *, is_last: bool) -> "_GradientCounter":
        """Count inside this context if the iteration's last backward runs in it."""
        self._active = is_last
        self._left = dict(self._sizes)
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self._active = False


def _with_next(actions: Sequence[Action]) -> list[tuple[Action, Action | None]]:
    return list(zip(actions, (*actions[1:], None), strict=True)) if actions else []


def _epoch_weight(microbatch: Any) -> int:
    """Return how much a micro-batch counts in an epoch's mean: tokens if it knows them."""
    own = getattr(microbatch, "num_target_tokens", None)
    return int(own) if isinstance(own, int) else count_samples(microbatch)


def _loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, dict) else output
    if loss is None:
        raise StepError(
            "training_step returned None. Under a pipeline every micro-batch needs a loss: return "
            "the loss, or one that is 0 times the model's output to skip a micro-batch."
        )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise StepError(
            f"training_step returned {type(output).__name__}; it must return the loss, a tensor "
            "with one element, or a dict that holds it under 'loss'."
        )
    if not loss.requires_grad:
        raise StepError(
            "training_step returned a loss without gradients. Don't detach it, and let at least "
            "one parameter that it depends on require gradients."
        )
    return loss.reshape(())
