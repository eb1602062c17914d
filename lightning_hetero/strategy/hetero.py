"""`HeteroStrategy`: a Lightning strategy that runs a `ParallelPlan`.

A thin adapter on Lightning's public hooks, one class on another: `processes` starts and connects
ranks, `sliced` saves and loads what is in slices, `steps` deals batches and steps through them, and
this one brings the plan. In order:

1. `setup_environment`: processes meet, communicators are made,
2. `setup`: layers are found, the plan is checked or made, the module's parameters become slices,
3. `process_dataloader`: loaders deal batches out to pipelines,
4. `training_step`: one iteration of the engine, schedule and exchange included; its gradients wait
   until Lightning's `backward` puts them into the slices,
5. `save_checkpoint` and friends: consolidated files that plain Lightning reads,
6. `teardown`: the module keeps its slices behind the run, or gets whole parameters back.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
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
from lightning_hetero.autoplan.data_facts import find_data, find_sizes
from lightning_hetero.autoplan.facts import AutoPlan, AutoPlanned, RunFacts
from lightning_hetero.autoplan.request import PlanRequest, RunPlans
from lightning_hetero.autoplan.summary import StartUp
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.slices import Ownership
from lightning_hetero.data.dealer import Dealer
from lightning_hetero.data.module import HeteroDataModule
from lightning_hetero.runtime.clock import ComputeClock
from lightning_hetero.runtime.iteration.config import EngineConfig
from lightning_hetero.runtime.iteration.engine import Engine
from lightning_hetero.runtime.ranks.failure import AgreedExit
from lightning_hetero.runtime.results.iteration_loss import NonfiniteGradients
from lightning_hetero.runtime.results.targets import LossReduction
from lightning_hetero.runtime.setup.layout import ModelLayout
from lightning_hetero.runtime.slices.whole_tensors import check_optimizers
from lightning_hetero.runtime.stage.layer_wrapping import ActivationCheckpointing, LayerOptions
from lightning_hetero.runtime.tensor_parallel.sharding import TensorParallel
from lightning_hetero.strategy.precision import HeteroPrecision
from lightning_hetero.strategy.steps import StepsStrategy
from lightning_hetero.strategy.trainable import WITHOUT_LAYERS, check_trainable

__all__ = ["HeteroStrategy"]


class HeteroStrategy(StepsStrategy):
    """Train one model across unequal pipelines.

    Args:
        plan: The plan to run: a `ParallelPlan`, a path to its JSON file, "auto" or an `AutoPlan`
            to make one for the devices that run (see `lightning_hetero.autoplan`), or None for
            equal pipelines of `num_stages` stages. Under an automatic plan an iteration takes the
            loader's batch times the number of ranks, as DDP does, else times that of pipelines.
        num_candidate_plans: Plans that "auto" has at hand for a `HeteroDataModule`, which chooses
            one for every iteration; the first is the best without changing.
        num_stages: Stages of each equal pipeline; if given, "auto" means None.
        num_microbatches: Micro-batches into which a pipeline cuts its share of an iteration, where
            the plan names no number. None takes 1 for plans without stages, else 4 a stage.
        layers: Name of the module's list of layers, such as "model.blocks"; None finds it.
        ownership: Who keeps which slices of masters and optimizer state; "parameter" for
            optimizers that need whole matrices, such as Muon.
        tp_plan: How tensor parallelism shards modules, name pattern to style (see
            `runtime.tensor_parallel.styles`); None takes the module's own plan. One given here also
            allows a later plan with tensor parallelism where the first has none.
        sequence_parallel: Whether tensor-parallel ranks cut hidden states along the tokens between
            attention and MLP, which saves activations of norms and dropout.
        activation_checkpointing: Layers that compute their activations again in backward: "none",
            "full", or n for every n-th.
        compile_layers: Whether `torch.compile` compiles each layer for training passes.
        fp32_gradients: Whether a rank that computes in bf16 sums the gradients of several
            micro-batches in fp32. False takes 2 bytes a parameter less, and rounds every sum.
        loss_reduction: What a loss is over its batch; None finds out, and warns where it can't. For
            means over other things than samples the module may have `num_target_tokens(batch)`.
        share_outputs: Whether every rank gets what steps return and append to the module's lists.
        nonfinite_gradients: What an iteration does whose gradients are NaN or infinite on any rank:
            "error" ends the run and names the rank, "skip" leaves the iteration out on all of them.
        local_buffers: Whether buffers may follow what each micro-batch holds, as BatchNorm's do in
            DDP, with the first pipeline's kept. If not, they are refused unless one device agrees.
        whole_after_run: Whether every rank's module has whole parameters behind a run. If not, it
            keeps its slices: see `whole_state_dict`.
        timeout: How long a rank waits for another before it gives up.
        start_method: How processes are started: "popen" runs the script again for each, "spawn",
            others use multiprocessing, and the module comes back whole. torchrun starts its own.
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
        plan: ParallelPlan | AutoPlan | str | Path | None = "auto",
        *,
        num_candidate_plans: int = 1,
        num_stages: int | None = None,
        num_microbatches: int | None = None,
        layers: str | None = None,
        ownership: Ownership | Literal["auto", "holders", "even", "parameter"] = Ownership.AUTO,
        tp_plan: Mapping[str, str] | None = None,
        sequence_parallel: bool = False,
        activation_checkpointing: ActivationCheckpointing = "none",
        compile_layers: bool = False,
        fp32_gradients: bool = True,
        loss_reduction: LossReduction | Literal["mean", "sum"] | None = None,
        share_outputs: bool = True,
        nonfinite_gradients: NonfiniteGradients | Literal["error", "skip"] = "error",
        local_buffers: bool = False,
        whole_after_run: bool = False,
        timeout: timedelta = timedelta(minutes=5),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        process_group_backend: str | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            whole_after_run=whole_after_run,
            timeout=timeout,
            start_method=start_method,
            process_group_backend=process_group_backend,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        if num_microbatches is not None and num_microbatches < 1:
            raise ConfigurationError(
                f"num_microbatches is {num_microbatches}; it must be 1 or more."
            )
        self._request = PlanRequest.of(
            plan, num_stages=num_stages, num_candidate_plans=num_candidate_plans
        )
        self.candidate_plans: tuple[ParallelPlan, ...] = ()
        """Plans among which a data module may choose; there from `setup` on."""
        self.candidate_costs: tuple[tuple[PipelineCost, ...], ...] | None = None
        """What their pipelines cost; None where nobody has measured it."""
        self.slowdown = 1.0
        """How many times slower this rank computes than it could; set before `setup`."""
        self.make_clock: Callable[[torch.device], ComputeClock] = ComputeClock
        """Makes what times the rank's actions; set before `setup`."""
        self.memory_bytes: int | None = None
        """Memory that an automatic plan may use of this rank's device; None asks the device."""
        self.auto_planned: AutoPlanned | None = None
        """What the automatic plan rests on; None where a plan was given."""
        self._announced: ParallelPlan | None = None
        self._num_microbatches = num_microbatches
        self._layers = layers
        self._ownership = Ownership(ownership)
        self._tp_plan = tp_plan
        self._sequence_parallel = sequence_parallel
        self._layer_options = LayerOptions(
            activation_checkpointing=activation_checkpointing, compile_layers=compile_layers
        )
        self._engine_options: dict[str, Any] = {
            "layer_options": self._layer_options,
            "fp32_gradients": fp32_gradients,
            "loss_reduction": loss_reduction and LossReduction(loss_reduction),
            "share_outputs": share_outputs,
            "nonfinite_gradients": NonfiniteGradients(nonfinite_gradients),
            "local_buffers": local_buffers,
        }

    # -- plan and data --------------------------------------------------------------------------

    def change_plan(self, plan: ParallelPlan) -> int:
        """Run another plan from now on; called by every rank with the same plan, between steps.

        No optimizer state moves and nothing restarts: only the next iterations' weights travel
        elsewhere. Batches that were dealt already run under the plan they were dealt for. A data
        module names each iteration's plan itself: see `set_candidate_plans`.

        Returns:
            Training iterations that still run under the plans of before.

        Raises:
            PlanError: The plan doesn't fit the ranks or the model.
            ConfigurationError: The plan would deal otherwise to several training loaders.
        """
        self.engine.plans.check(plan)
        assert self._dealer is not None

        def most_of_ranks(number: int) -> int:
            return int(self.reduce(torch.tensor(number), group=self._control, reduce_op="max"))

        return self._dealer.change_plan(plan, most_of_ranks=most_of_ranks)

    def set_candidate_plans(
        self,
        plans: Sequence[ParallelPlan],
        costs: Sequence[Sequence[PipelineCost]] | None = None,
    ) -> int:
        """Let data modules choose among other plans; called by every rank alike, between steps.

        Iterations that are planned already run under the plans that they are planned for.

        Returns:
            Training iterations, at most, that still do so.

        Raises:
            PlanError: A plan is for another number of ranks or layers.
        """
        for plan in plans:
            self.engine.plans.check(plan)
        self.candidate_plans = tuple(plans)
        self.candidate_costs = None if costs is None else tuple(tuple(item) for item in costs)
        self._make_candidate_groups()
        return self._hand_over_plans()

    def _hand_over_plans(self) -> int:
        """Let a data module choose among the candidates; return what it has planned before."""
        trainer: Any = self._module.trainer
        if not isinstance(trainer.datamodule, HeteroDataModule):
            return 0
        return trainer.datamodule.set_candidate_plans(self.candidate_plans, self.candidate_costs)

    def _make_candidate_groups(self) -> None:
        """Make tensor-parallel groups, all ranks together, so that no iteration waits for one."""
        assert self._communicators is not None
        for candidate in self.candidate_plans:
            self._communicators.tensor_parallel_group(candidate)

    # -- set-up ---------------------------------------------------------------------------------

    @property
    @override
    def precision_plugin(self) -> HeteroPrecision:
        if self._precision_plugin is None:
            return HeteroPrecision()
        assert isinstance(self._precision_plugin, HeteroPrecision)
        return self._precision_plugin

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # Lightning gives a plugin of its own for `precision=`; None means that none was chosen yet.
        if precision_plugin is not None and not isinstance(precision_plugin, HeteroPrecision):
            name: Any = precision_plugin.precision
            precision_plugin = HeteroPrecision(name)
        self._precision_plugin = precision_plugin

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        # `Trainer.init_module(empty_init=True)`: slices get their values when they are made.
        with torch.device("meta") if empty_init else super().tensor_init_context():
            yield

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self._module
        self._failed = False
        # `process_dataloader` deals out whatever order the user's sampler gives. An injected
        # DistributedSampler would shuffle it, and no public option of a strategy prevents that.
        trainer._accelerator_connector.use_distributed_sampler = False
        if trainer.state.fn == TrainerFn.FITTING:
            check_trainable(module, trainer.callbacks)  # type: ignore[attr-defined]
        facts = self._gather_facts(module)
        self._engine, self._kept = self._make_engine(facts), None
        self._hand_over_plans()
        if trainer.state.fn == TrainerFn.FITTING:
            self._trained = self._engine.store
        num_batches = self.plan.num_pipelines if self.auto_planned is None else self.world_size
        self._dealer = Dealer(
            self.plan,
            global_rank=self.global_rank,
            num_microbatches=self._engine.config.num_microbatches,
            num_batches=num_batches,
            seed=self._engine.config.seed,
        )
        self._announce(facts, num_batches=num_batches)
        self.model_to_device()
        self._cut_copies(trainer, module)
        self._attach_logs(trainer)
        self._hide_example(module)
        self.precision_plugin.deposit_gradients = self._deposit_gradients
        self.precision_plugin.sum_over_ranks = lambda tensor: self.reduce(tensor, reduce_op="sum")
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            check_optimizers(self.optimizers, self._engine.store.slices)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _make_engine(self, facts: RunFacts) -> Engine:
        module, layout = facts.module, facts.layout
        plans = self._find_plans(facts)
        config = self._configure_engine(layout, plans.first)
        tensor_parallel = None
        if self._tp_plan is not None or plans.may_use_tensor_parallelism:
            tensor_parallel = TensorParallel(
                module, layout, option=self._tp_plan, sequence_parallel=self._sequence_parallel
            )
            layout = tensor_parallel.layout
        engine = Engine(
            module,
            layout,
            plans.first,
            facts.comms,
            config=config,
            device=self.root_device,
            clock=self.make_clock(self.root_device),
            tensor_parallel=tensor_parallel,
        )
        self._make_candidate_groups()
        return engine

    def _gather_facts(self, module: pl.LightningModule) -> RunFacts:
        assert self._communicators is not None
        trainer, precision = module.trainer, self.precision_plugin
        master = precision.master_dtype or precision.compute_dtype
        return RunFacts(
            module=module,
            layout=ModelLayout.of(module, layers=self._layers),
            comms=self._communicators,
            device=self.root_device,
            sizes=lambda: find_sizes(trainer),
            slowdown=self.slowdown,
            memory_bytes=self.memory_bytes,
            compute_bytes=precision.compute_dtype.itemsize,
            summed_bytes=4 if self._engine_options["fp32_gradients"] else 2,
            master_bytes=master.itemsize,
            data=find_data(trainer),
            num_candidate_plans=self._request.num_candidate_plans,
        )

    def _announce(self, facts: RunFacts, *, num_batches: int) -> None:
        """Say once for each plan what starts; collective."""
        if self.plan != self._announced:
            self._announced = self.plan
            start = StartUp.gather(facts, self.engine, self.auto_planned, num_batches=num_batches)
            rank_zero_info("%s", start)

    def _find_plans(self, facts: RunFacts) -> RunPlans:
        plans = self._request.answer(facts)
        self.auto_planned = plans.auto
        self.candidate_plans, self.candidate_costs = plans.candidates, plans.costs
        return plans

    def _configure_engine(self, layout: ModelLayout, plan: ParallelPlan) -> EngineConfig:
        if not layout.layers:
            self._layer_options.refuse_without_layers()
            rank_zero_warn(WITHOUT_LAYERS)
        precision = self.precision_plugin
        return EngineConfig(
            num_microbatches=self._num_microbatches
            or max(item.usual_num_microbatches for item in plan.pipelines),
            ownership=self._ownership,
            compute_dtype=precision.compute_dtype,
            master_dtype=precision.master_dtype,
            seed=self.broadcast(torch.initial_seed() % 2**31),
            **self._engine_options,
        )

    # -- the end --------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        if isinstance(exception, AgreedExit):
            self.stop_watching()
        elif self._detector is not None:
            self._detector.report(exception)

    @override
    def teardown(self) -> None:
        self._remove_engine()
        if not self._failed:
            self.stop_watching()
        if self._failed and self._lightning_module is not None:
            # Lightning moves it to CPU, which meta tensors refuse: that would hide the first error.
            meta = any(parameter.is_meta for parameter in self._lightning_module.parameters())
            self._lightning_module = None if meta else self._lightning_module
        super().teardown()
        # Last of all after a failure: what waits for a dead peer here is ended, too.
        self.stop_watching()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register(
            cls.strategy_name, cls, description="Unequal pipelines on unequal devices"
        )


HeteroStrategy.register_strategies(StrategyRegistry)
