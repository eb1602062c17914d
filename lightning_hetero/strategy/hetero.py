"""`HeteroStrategy`: a Lightning strategy that runs a `ParallelPlan`.

The strategy is a thin adapter. Lightning's hooks are in `hooks`; the work is done by the strategy's
parts: `Processes` (connections to other processes), `SlicedState` (the module's weights), `Dealer`
(which rank gets which samples) and `Steps` (one iteration of the engine for each step). Lightning
calls in this order:

1. `setup_environment`: the processes connect to each other, communicators are made.
2. `setup`: layers are found, the plan is checked or made, the module's parameters become slices.
3. `process_dataloader`: the loaders' batches are distributed over the pipelines.
4. `training_step`: the engine runs one whole iteration, pull and push included. The gradients are
   kept until Lightning calls `backward`, which puts them into the slices.
5. `save_checkpoint` and others: consolidated files that plain Lightning reads.
6. `teardown`: the module keeps its slices after the run, or gets whole parameters back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_hetero.assign import PipelineCost
from lightning_hetero.autoplan.engine_choices import with_owner_shares
from lightning_hetero.autoplan.facts import AutoPlan, AutoPlanned, Emulation
from lightning_hetero.autoplan.out_of_memory import MemoryWatch
from lightning_hetero.autoplan.planning import PlanRequest
from lightning_hetero.autoplan.summary import StartUp
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.data.dealer import Dealer
from lightning_hetero.data.module import HeteroDataModule
from lightning_hetero.exchange.slices import Ownership
from lightning_hetero.exchange.transfers import ExchangeKind
from lightning_hetero.runtime.iteration.config import EngineConfig, OwnedDevice
from lightning_hetero.runtime.results.counts import LossReduction
from lightning_hetero.runtime.results.iteration_loss import NonfiniteGradients
from lightning_hetero.runtime.slices.early_optimizers import name_parameters, take_over
from lightning_hetero.runtime.slices.step_trial import check_steps
from lightning_hetero.runtime.stage.recomputation import ActivationCheckpointing, LayerOptions
from lightning_hetero.schedules import Schedule
from lightning_hetero.strategy.engine_options import EngineOptions
from lightning_hetero.strategy.generations import size_that_stays
from lightning_hetero.strategy.hooks import HookedStrategy
from lightning_hetero.strategy.launcher import launcher_of
from lightning_hetero.strategy.processes import Processes, StartMethod
from lightning_hetero.strategy.run import Run
from lightning_hetero.strategy.sliced_state import SlicedState
from lightning_hetero.strategy.steps import Steps
from lightning_hetero.strategy.trainable import check_quantized, check_trainable


class HeteroStrategy(HookedStrategy):
    """Train one model across unequal pipelines.

    ::

        trainer = Trainer(strategy=HeteroStrategy(), accelerator="gpu", devices=4)
        trainer.fit(model, loader)

    Args:
        plan: The plan to run: a `ParallelPlan`, its dictionary, or the path of its JSON file.
            "auto" or an `AutoPlan` makes one for the devices that run (see
            `lightning_hetero.autoplan`). None makes equal pipelines of `num_stages` stages. Under
            an automatic plan an iteration takes one batch of the loader for each rank, as in DDP;
            else one for each pipeline.
        num_candidate_plans: Number of plans that "auto" makes for a `HeteroDataModule`, which
            chooses one for every iteration.
        num_stages: Number of stages of each of several equal pipelines. If it is given,
            `plan="auto"` counts as None: no plan is searched for.
        num_microbatches: Micro-batches into which a pipeline cuts its share of an iteration, if the
            plan names no number. None takes 1 for pipelines of one stage, else 4 for each stage.
        schedule: The order of a pipeline's passes. "1f1b": one forward, one backward. "split":
            gradients of linear layers' weights are computed in idle time (Zero Bubble), with the
            memory of 1F1B. "deep": the same, and stages run ahead as far as memory allows where
            that saves time. "auto": "deep" where it saves 1 % of an iteration, else "1f1b". Orders
            other than 1F1B are solved for the times of stages and links measured in a plan's first
            iterations. An automatic plan is the best one under the chosen schedule; ranks may then
            run several stages, their chunks. Backward passes of compiled layers aren't split.
        layers: Name of the module's list of layers, such as "model.blocks"; None finds it.
        ownership: Which ranks own which slices of weights and optimizer states (see
            `exchange.slices.Ownership`). "holders": the ranks that compute with them. "even": all
            ranks, in equal parts. "parameter": whole parameters, for optimizers that need whole
            matrices, such as Muon. "memory": in proportion to the memory that stages leave free.
            "auto" follows the plan's `owner_shares`; without, it is "holders", or "even" for
            several plans or idle ranks.
        redundancy: With 1, a second rank (on another node, if there is one) keeps a copy of each
            slice and makes the same optimizer steps, so that the loss of a rank loses no state.
            This doubles owned memory and the bytes of a push. It needs an optimizer that computes
            element by element, or `ownership="parameter"`.
        standby_check_steps: Both copies of each slice are compared after this many optimizer steps,
            which finds a device that computes wrongly; 0 never compares.
        owned_device: Where slices and optimizer states live: on the "device", in the host's memory
            ("cpu"), where the optimizer then runs, too (`AdamW(fused=True)` is fastest), or "auto":
            on the host for ranks in the plan's `host_owners`.
        exchange: How weights and gradients travel: by "messages" or by "collectives" (both sum
            gradients in the order of pipelines), "by-node" (each node sums its gradients first), or
            "reduce-scatter" (the backend sums in the compute dtype, in its own order). "auto" takes
            collectives, by node if that is faster, and messages for up to 8 ranks on gloo.
        tp_plan: How tensor parallelism shards modules: name patterns and their styles (see
            `runtime.tensor_parallel.styles`). None takes the module's own plan. Give it if only
            later plans use tensor parallelism.
        sequence_parallel: Whether tensor-parallel ranks cut activations along the tokens between
            attention and MLP, which saves activations of norms and dropout.
        activation_checkpointing: Layers that recompute activations in backward: "none", "full", n
            for every n-th, or "selective": all but matrix products and attention. A plan's own
            settings count before it.
        activation_budget_bytes: Most bytes of layers' activations that each rank keeps. Every
            micro-batch recomputes as few layers as that allows; the first iteration nearly all, to
            measure one.
        compile_layers: Whether `torch.compile` compiles each layer for training passes.
        fp32_gradients: Whether a rank that computes in bf16 sums the gradients of several
            micro-batches in fp32. False saves 2 bytes per parameter, but rounds every sum.
        loss_reduction: Whether the loss is the "mean" or "sum" over its batch. None finds out
            before the first step; a given one is checked then. If it is a mean over something that
            can't be counted in the batch, the module needs a method `num_target_tokens(batch)`,
            which counts that.
        share_outputs: Whether every rank gets what steps return and append to the module's lists.
        nonfinite_gradients: If gradients are NaN or infinite on any rank, "error" ends the run and
            names the rank, "skip" leaves the iteration out on all ranks.
        allow_mixing: Whether samples of a micro-batch may affect each other (batch statistics,
            in-batch negatives, routers), as they do inside a rank under DDP. Buffers are then those
            of the first pipeline. If False, a step whose gradients show such effects is refused.
        whole_after_run: Whether every rank's module has whole parameters after a run. If False, it
            keeps its slices: see `whole_state_dict`.
        timeout: How long a rank waits for another before it gives up, in set-up and in steps. Must
            be longer than any work that one rank does alone, such as measuring its device.
        start_timeout: How long processes may take to connect, imports included; at least `timeout`,
            which applies from then on.
        start_method: How processes are started: "popen" runs the script again for each; the others
            use multiprocessing, and make the module whole afterwards. torchrun starts them itself.
        process_group_backend: "nccl", "gloo", …; None takes what fits the device.
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer.
        checkpoint_io: How checkpoint files are written.
        precision_plugin: Set by the Trainer from `precision=`.

    Raises:
        PlanError, ModelError, ConfigurationError: See their messages; on every rank.
    """

    strategy_name = "hetero"

    def __init__(  # noqa: PLR0913 - Lightning hands the last five over by name
        self,
        plan: ParallelPlan | AutoPlan | Mapping[str, Any] | str | Path | None = "auto",
        *,
        num_candidate_plans: int = 1,
        num_stages: int | None = None,
        num_microbatches: int | None = None,
        schedule: Schedule | Literal["auto", "1f1b", "split", "deep"] = Schedule.ONE_F_ONE_B,
        layers: str | None = None,
        ownership: (
            Ownership | Literal["auto", "holders", "even", "parameter", "memory"]
        ) = Ownership.AUTO,
        redundancy: int = 0,
        standby_check_steps: int = 100,
        owned_device: OwnedDevice | Literal["auto", "device", "cpu"] = OwnedDevice.AUTO,
        exchange: ExchangeKind
        | Literal["auto", "messages", "collectives", "by-node", "reduce-scatter"] = "auto",
        tp_plan: Mapping[str, str] | None = None,
        sequence_parallel: bool = False,
        activation_checkpointing: ActivationCheckpointing = "none",
        activation_budget_bytes: int | None = None,
        compile_layers: bool = False,
        fp32_gradients: bool = True,
        loss_reduction: LossReduction | Literal["mean", "sum"] | None = None,
        share_outputs: bool = True,
        nonfinite_gradients: NonfiniteGradients | Literal["error", "skip"] = "error",
        allow_mixing: bool = False,
        whole_after_run: bool = False,
        timeout: timedelta = timedelta(minutes=5),
        start_timeout: timedelta = timedelta(minutes=10),
        start_method: StartMethod = "popen",
        process_group_backend: str | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            Processes(
                timeout=timeout,
                start_timeout=max(start_timeout, timeout),
                backend=process_group_backend,
            ),
            # With multiprocessing the module goes back to the main process, which has no slices.
            SlicedState(whole_after_run=whole_after_run or start_method != "popen"),
            start_method=start_method,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._request = PlanRequest.of(
            plan, num_stages=num_stages, num_candidate_plans=num_candidate_plans
        )
        self.options = EngineOptions(
            num_microbatches=num_microbatches,
            redundancy=redundancy,
            layers=layers,
            tp_plan=tp_plan,
            sequence_parallel=sequence_parallel,
            config=EngineConfig(
                ownership=Ownership(ownership),
                owned_device=OwnedDevice(owned_device),
                schedule=Schedule(schedule),
                exchange=ExchangeKind(exchange),
                standby_check_steps=standby_check_steps,
                layer_options=LayerOptions(
                    activation_checkpointing=activation_checkpointing,
                    activation_budget_bytes=activation_budget_bytes,
                    compile_layers=compile_layers,
                ),
                fp32_gradients=fp32_gradients,
                loss_reduction=loss_reduction and LossReduction(loss_reduction),
                share_outputs=share_outputs,
                nonfinite_gradients=NonfiniteGradients(nonfinite_gradients),
                allow_mixing=allow_mixing,
            ),
        )
        """The user's options for the engine."""
        self.candidate_plans: tuple[ParallelPlan, ...] = ()
        """Plans among which a data module may choose; set by `setup`."""
        self.candidate_costs: tuple[tuple[PipelineCost, ...], ...] | None = None
        """Costs of each candidate plan's pipelines; None if they weren't measured."""
        self.auto_planned: AutoPlanned | None = None
        """The basis of the automatic plan; None where a plan was given."""
        self.run = Run(self)
        """Lets the run's callbacks find each other."""
        self.emulation = Emulation()
        """The device that this rank emulates; callbacks may replace it in their `setup`."""
        self._announced: ParallelPlan | None = None
        self._num_batches = 0
        """Batches of the user's loader that make an iteration."""

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        # `override`, since notebooks may import a module again.
        strategy_registry.register(
            cls.strategy_name,
            cls,
            description="Unequal pipelines on unequal devices",
            override=True,
        )

    # -- plan -----------------------------------------------------------------------------------

    def change_plan(self, plan: ParallelPlan) -> int:
        """Run another plan from now on; called by every rank with the same plan, between steps.

        No optimizer state moves and nothing restarts: only the weights of the next iterations go to
        other ranks. Batches that were dealt out already still run under the plan at that time.

        Returns:
            The number of training iterations that still run under earlier plans.

        Raises:
            PlanError: The plan doesn't fit the ranks or the model.
            ConfigurationError: There are several training loaders, to which the plan deals
                differently; or a data module chooses the plans (see `set_candidate_plans`).
        """
        self.engine.plans.check(plan)
        assert self._dealer is not None
        return self._dealer.change_plan(plan, most_of_ranks=self.processes.most)

    def set_candidate_plans(
        self,
        plans: Sequence[ParallelPlan],
        costs: Sequence[Sequence[PipelineCost]] | None = None,
    ) -> int:
        """Replace the plans that data modules choose from; called by all ranks alike between steps.

        Returns:
            The most training iterations that still run under earlier plans.

        Raises:
            PlanError: A plan is for another number of ranks or layers.
        """
        for plan in plans:
            self.engine.plans.check(plan)
        self.engine.plans.prepare(plans)
        self.candidate_plans = tuple(plans)
        self.candidate_costs = None if costs is None else tuple(tuple(item) for item in costs)
        if self.datamodule is None:
            return 0
        return self.datamodule.set_candidate_plans(self.candidate_plans, self.candidate_costs)

    @property
    def datamodule(self) -> HeteroDataModule | None:
        """The data module that assigns samples to plans, if the run has one."""
        found = self._trainer.datamodule
        return found if isinstance(found, HeteroDataModule) else None

    # -- set-up ---------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        check = self._request.check_world_size
        self._launcher = launcher_of(self, self._start_method, self.num_nodes, check)

    def check_before_start(self) -> None:
        """Refuse what this process alone can see to be wrong; the launcher calls it first."""
        plan, options = self._request.plan, self.options
        if (module := self._lightning_module) is not None:
            given = plan if isinstance(plan, ParallelPlan) else None
            check_quantized(module, given, layers=options.layers, tp_plan=options.tp_plan)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self._failed = False
        with self.processes.watching():
            self._set_up(trainer)

    def _set_up(self, trainer: pl.Trainer) -> None:
        # `process_dataloader` deals out samples in the order of the user's sampler. An injected
        # DistributedSampler would change the order, and no public option of a strategy prevents it.
        trainer._accelerator_connector.use_distributed_sampler = False
        trains = trainer.state.fn == TrainerFn.FITTING
        if trains:
            check_trainable(self._module, self._trainer.callbacks)
        self.precision_plugin.convert_module(self._module)
        name_parameters(self._module)
        self._set_up_engine(trains=trains)
        self.model_to_device()
        self._slices.prepare_module(self._module, self._trainer.callbacks)
        self._slices.show_whole_in_summaries(self._trainer.callbacks)
        self.precision_plugin.connect_strategy(self)
        if trains:
            self.setup_optimizers(trainer)
            recovers = self._slices.awaits_recovery
            take_over(self.optimizers, self.engine.store, recovers=recovers)
            check_steps(self.optimizers, self.engine.store, self.engine.comms)
        self.setup_precision_plugin()
        if trains:
            _optimizers_to_device(self.optimizers, self.engine.store.owned_device)
        self.hooked_slices.enter()

    def _set_up_engine(self, *, trains: bool) -> None:
        """Take or make the plans, and make the engine, dealer and steps for them; collective."""
        precision = self.precision_plugin
        facts = self.options.gather_facts(
            self._module, self.processes.comms, self.root_device, precision, self.emulation
        )
        request = self._request
        told = facts.comms.gather_objects((torch.initial_seed() % 2**31, self._num_batches))
        if self.awaits_recovery:
            self._num_batches = size_that_stays(number for _, number in told)
            members = self.processes.membership
            first_ranks = None if members is None else members.first_ranks
            facts = replace(facts, num_batches=self._num_batches, first_ranks=first_ranks)
            request = request.for_survivors(self.world_size, first_ranks)
        plans = request.answer(facts)
        if self.options.config.ownership is Ownership.MEMORY:
            plans = with_owner_shares(plans, facts)
        self.auto_planned = plans.auto
        engine = self.options.make_engine(facts, plans, precision, seed=told[0][0])
        reduce = partial(self.processes.reduce_in_hooks, device=self.root_device)
        self._slices.begin(engine, trains=trains, reduce=reduce)
        self.set_candidate_plans(plans.candidates, plans.costs)
        if not self.awaits_recovery:
            self._num_batches = self.plan.num_pipelines if plans.auto is None else self.world_size
        self._dealer = Dealer(
            self.plan,
            global_rank=self.global_rank,
            num_microbatches=engine.config.num_microbatches,
            num_batches=self._num_batches,
            seed=lambda: engine.config.seed,
        )
        self._steps = Steps(self._module, engine, self._dealer, precision.forward_context)
        start = StartUp.gather(facts, engine, plans.auto, num_batches=self._num_batches)
        self.memory = MemoryWatch(start, engine, lambda: self.optimizers)
        if self.plan != self._announced:
            self._announced = self.plan
            rank_zero_info("%s", start)
            if plans.auto is None and start.idle_warning is not None:
                rank_zero_warn(start.idle_warning)


HeteroStrategy.register_strategies(StrategyRegistry)
