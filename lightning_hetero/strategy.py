"""`HeteroStrategy`: a Lightning strategy that runs a `ParallelPlan`.

A thin adapter on Lightning's public hooks. What it calls, in order:

1. `setup_environment`: processes meet, communicators are made,
2. `setup`: layers are found, the plan is checked or made, the module's parameters become slices,
3. `process_dataloader`: loaders deal batches out to pipelines,
4. `training_step`: one iteration of the engine, schedule and exchange included; its gradients wait
   until Lightning's `backward` puts them into the slices,
5. `save_checkpoint` and friends: consolidated files that plain Lightning reads,
6. `teardown`: whole parameters go back into the module.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.optimizer import _optimizer_to_device, _optimizers_to_device
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from typing_extensions import override

from lightning_hetero.assign import PipelineCost
from lightning_hetero.autoplan import make_plan
from lightning_hetero.core.batches import AssignedBatch
from lightning_hetero.core.errors import ConfigurationError, PeerError, PlanError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.slices import Ownership
from lightning_hetero.data.batch_sizes import BatchSizes, find_batch_sizes
from lightning_hetero.data.dealer import Dealer
from lightning_hetero.data.module import HeteroDataModule
from lightning_hetero.plan_facts import AutoPlan, AutoPlanned, DataFacts, RunFacts
from lightning_hetero.precision import HeteroPrecision
from lightning_hetero.processes import ProcessesStrategy
from lightning_hetero.runtime.averaging import cut_copy, cut_when_loading
from lightning_hetero.runtime.boundary import preserved_random_state
from lightning_hetero.runtime.engine import Engine, EngineConfig
from lightning_hetero.runtime.failure import AgreedExit
from lightning_hetero.runtime.layer_wrapping import ActivationCheckpointing, LayerOptions
from lightning_hetero.runtime.layout import ModelLayout
from lightning_hetero.runtime.microbatches import join_outputs
from lightning_hetero.runtime.propagation import IterationKey
from lightning_hetero.runtime.state import (
    gather_optimizer_state,
    load_module_state,
    scatter_optimizer_state,
    spread_whole,
    whole_module_state,
)
from lightning_hetero.runtime.tensor_parallel import TensorParallel
from lightning_hetero.runtime.whole_matrices import check_optimizers

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from lightning_hetero.runtime.weights import SliceStore

__all__ = ["HeteroStrategy"]

_T = TypeVar("_T")
_STAGES = {"train": 0, "validate": 1, "sanity_check": 1, "test": 2, "predict": 3}


class HeteroStrategy(ProcessesStrategy):
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
            `runtime.tp_plan`); None takes the module's own plan. One given here also allows a
            later plan with tensor parallelism where the first has none.
        sequence_parallel: Whether tensor-parallel ranks cut hidden states along the tokens between
            attention and MLP, which saves activations of norms and dropout.
        activation_checkpointing: Layers that compute their activations again in backward: "none",
            "full", or n for every n-th.
        compile_layers: Whether `torch.compile` compiles each layer for training passes.
        timeout: How long a rank waits for another before it gives up.
        start_method: How processes are started: "popen" runs the script again for each, "spawn",
            "fork" and "forkserver" use multiprocessing. Under torchrun nothing is started.
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
        self._plan_source = _plan_source(plan, num_stages)
        if num_candidate_plans < 1:
            raise ConfigurationError(
                f"num_candidate_plans is {num_candidate_plans}; it must be 1 or more."
            )
        self._num_candidate_plans = num_candidate_plans
        self.candidate_plans: tuple[ParallelPlan, ...] = ()
        """Plans among which a data module may choose; there from `setup` on."""
        self.candidate_costs: tuple[tuple[PipelineCost, ...], ...] | None = None
        """What their pipelines cost; None where nobody has measured it."""
        self._num_stages = num_stages or 1
        self.slowdown = 1.0
        """How many times slower this rank computes than it could; set before `setup`."""
        self.auto_planned: AutoPlanned | None = None
        """What the automatic plan rests on; None where a plan was given."""
        self._num_microbatches = num_microbatches
        self._layers = layers
        self._ownership = Ownership(ownership)
        self._tp_plan = tp_plan
        self._sequence_parallel = sequence_parallel
        self._layer_options = LayerOptions(
            activation_checkpointing=activation_checkpointing, compile_layers=compile_layers
        )
        self._engine: Engine | None = None
        self._dealer: Dealer | None = None
        self._trained: SliceStore | None = None
        """What the optimizers hold, also after the run that trained."""
        self._cut_when_loading: RemovableHandle | None = None
        self._failed = False

    # -- plan and data --------------------------------------------------------------------------

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # Not used by our own runs, see `setup`; for users who build samplers from it.
        place = self.engine.place
        index = 0 if place is None else place.pipeline_index
        return {"num_replicas": self.plan.num_pipelines, "rank": index}

    @property
    def engine(self) -> Engine:
        """What runs the plan; there from `setup` to `teardown`."""
        assert self._engine is not None, "the strategy has not been set up"
        return self._engine

    @property
    def plan(self) -> ParallelPlan:
        """The plan that runs."""
        return self.engine.plan

    def change_plan(self, plan: ParallelPlan) -> int:
        """Run another plan from now on; called by every rank with the same plan, between steps.

        No optimizer state moves and nothing restarts: only the next iterations' weights travel
        elsewhere. Batches that were dealt already run under the plan they were dealt for. A data
        module that assigns iterations ahead names each one's plan itself, so give it the plan.

        Returns:
            Training iterations that still run under the plans of before.

        Raises:
            PlanError: The plan doesn't fit the ranks or the model.
            ConfigurationError: The plan would deal otherwise to several training loaders.
        """
        self.engine.check_plan(plan)
        assert self._dealer is not None
        return self._dealer.change_plan(plan, most_of_ranks=self._most_of_ranks)

    def _most_of_ranks(self, number: int) -> int:
        found = self.reduce(torch.tensor(number), group=self._control, reduce_op="max")
        return int(found)

    def set_candidate_plans(
        self,
        plans: Sequence[ParallelPlan],
        costs: Sequence[Sequence[PipelineCost]] | None = None,
    ) -> None:
        """Let data modules made from now on choose among other plans; the same on every rank.

        Raises:
            PlanError: A plan is for another number of ranks or layers.
        """
        for plan in plans:
            self.engine.check_plan(plan)
        self.candidate_plans = tuple(plans)
        self.candidate_costs = None if costs is None else tuple(tuple(item) for item in costs)

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
        module = self.lightning_module
        assert module is not None
        self._failed = False
        if self._detector is not None:
            self._detector.start()
        # `process_dataloader` deals out whatever order the user's sampler gives. An injected
        # DistributedSampler would shuffle it, and no public option of a strategy prevents that.
        trainer._accelerator_connector.use_distributed_sampler = False
        if trainer.state.fn == TrainerFn.FITTING:
            _check_trainable(module)
        self._engine = self._make_engine(module)
        if trainer.state.fn == TrainerFn.FITTING:
            self._trained = self._engine.store
        self._dealer = Dealer(
            self.plan,
            global_rank=self.global_rank,
            num_microbatches=self._engine.config.num_microbatches,
            num_batches=self.plan.num_pipelines if self.auto_planned is None else self.world_size,
            seed=self._engine.config.seed,
        )
        self.model_to_device()
        self._cut_copies(trainer, module)
        self.precision_plugin.deposit_gradients = self._deposit_gradients
        self.precision_plugin.sum_over_ranks = lambda tensor: self.reduce(tensor, reduce_op="sum")
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            check_optimizers(self.optimizers, self._engine.store.slices)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _cut_copies(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Let whole state dicts be loaded into slices, and cut what callbacks have copied."""
        assert self._communicators is not None
        store = self.engine.store
        self._cut_when_loading = cut_when_loading(module, store)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if not isinstance(callback, WeightAveraging | StochasticWeightAveraging):
                continue
            copy = callback._average_model
            if copy is not None:
                whole = copy.module if isinstance(copy, AveragedModel) else copy
                cut_copy(whole, store, self._communicators)

    def _make_engine(self, module: pl.LightningModule) -> Engine:
        assert self._communicators is not None
        layout = ModelLayout.of(module, layers=self._layers)
        self.candidate_plans, self.candidate_costs = (), None
        plan = self._make_plan(layout)
        self.candidate_plans = self.candidate_plans or (plan,)
        staged = plan.max_stages > 1
        if staged:
            layout.require_layers()
        elif not layout.layers:
            rank_zero_warn(
                "The module has no list of layers, so it is trained data parallel, one whole model "
                "a rank. To cut it into stages, keep its repeated blocks in one nn.ModuleList or "
                'name it: HeteroStrategy(layers="model.blocks").'
            )
        num_microbatches = self._num_microbatches or (4 * plan.max_stages if staged else 1)
        precision = self.precision_plugin
        config = EngineConfig(
            num_microbatches=num_microbatches,
            ownership=self._ownership,
            propagation_dtype=precision.propagation_dtype,
            master_dtype=precision.master_dtype,
            seed=self.broadcast(torch.initial_seed() % 2**31),
            layer_options=self._layer_options,
        )
        self._check_layer_options(layout)
        tensor_parallel = None
        every = (pipeline for item in self.candidate_plans for pipeline in item.pipelines)
        if self._tp_plan is not None or any(p.tp_degree > 1 for p in every):
            tensor_parallel = TensorParallel(
                module, layout, option=self._tp_plan, sequence_parallel=self._sequence_parallel
            )
            layout = tensor_parallel.layout
        engine = Engine(
            module,
            layout,
            plan,
            self._communicators,
            config=config,
            device=self.root_device,
            tensor_parallel=tensor_parallel,
        )
        for candidate in self.candidate_plans:
            # Made now, by all ranks together, so that no iteration waits for a group.
            self._communicators.tensor_parallel_group(candidate)
        engine.clock.slowdown = self.slowdown
        why = "" if self.auto_planned is None else f"\n{self.auto_planned.summary}"
        rank_zero_info(f"HeteroStrategy runs this plan on {self.world_size} ranks:\n{plan}{why}")
        return engine

    def _check_layer_options(self, layout: ModelLayout) -> None:
        if self._layer_options.change_layers and not layout.layers:
            raise ConfigurationError(
                "activation_checkpointing and compile_layers work layer by layer, but the module "
                'has no list of layers. Name it: HeteroStrategy(layers="model.blocks").'
            )

    def _make_plan(self, layout: ModelLayout) -> ParallelPlan:
        plan = self._plan_source
        if isinstance(plan, AutoPlan):
            plan = self._plan_automatically(plan, layout)
        elif plan is None:
            plan = ParallelPlan.even(
                world_size=self.world_size,
                num_layers=layout.num_layers,
                num_stages=self._num_stages,
            )
        plan.check_world_size(self.world_size)
        if layout.layers or plan.max_stages > 1:
            layout.require_layers()
            plan.check_num_layers(layout.num_layers)
        elif plan.num_layers != 1:
            raise PlanError(
                f"The plan covers {plan.num_layers} layers but the module has no list of layers. "
                'Name it: HeteroStrategy(layers="model.blocks").'
            )
        return plan

    def _plan_automatically(self, options: AutoPlan, layout: ModelLayout) -> ParallelPlan:
        assert self._communicators is not None
        assert self.lightning_module is not None
        precision = self.precision_plugin
        master = precision.master_dtype or precision.propagation_dtype
        self.auto_planned = make_plan(
            options,
            RunFacts(
                module=self.lightning_module,
                layout=layout,
                comms=self._communicators,
                device=self.root_device,
                sizes=self._find_batch_sizes,
                slowdown=self.slowdown,
                propagation_bytes=precision.propagation_dtype.itemsize,
                master_bytes=master.itemsize,
                data=self._find_data(),
                num_candidate_plans=self._num_candidate_plans,
            ),
        )
        if self.auto_planned.warning is not None:
            rank_zero_warn(self.auto_planned.warning)
        found = self.auto_planned.candidates
        if found is not None:
            self.candidate_plans, self.candidate_costs = found.plans, found.costs
        return self.auto_planned.plan

    def _find_data(self) -> Callable[[], DataFacts] | None:
        """Return what tells of the samples that a data module assigns to plans."""
        assert self.lightning_module is not None
        trainer: Any = self.lightning_module.trainer
        datamodule = trainer.datamodule
        if not isinstance(datamodule, HeteroDataModule):
            return None
        return lambda: DataFacts(
            lengths=datamodule.sample_lengths(), tokens_per_step=datamodule.tokens_per_step
        )

    def _find_batch_sizes(self) -> BatchSizes:
        assert self.lightning_module is not None
        trainer: Any = self.lightning_module.trainer
        # Nothing public holds the loader before the first epoch.
        loader = getattr(getattr(trainer.fit_loop, "_data_source", None), "instance", None)
        with preserved_random_state():
            return find_batch_sizes([loader, trainer.datamodule, self.lightning_module])

    @override
    def model_to_device(self) -> None:
        # Parameters are slices on the device already; what is left are buffers.
        module = self.lightning_module
        assert module is not None
        for owner in module.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    owner._buffers[name] = buffer.to(self.root_device)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        assert self._dealer is not None
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        return self._dealer.deal(
            dataloader, is_training=trainer.training, epoch=_epoch_to_load(trainer)
        )

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        if not isinstance(batch, AssignedBatch):
            return super().batch_to_device(batch, device, dataloader_idx)
        moved = [
            super(HeteroStrategy, self).batch_to_device(item, device, dataloader_idx)
            for item in batch.micro_batches
        ]
        return replace(batch, micro_batches=tuple(moved))

    # -- steps ----------------------------------------------------------------------------------

    @override
    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        module = self.lightning_module
        assert module is not None

        def step(microbatch: Any) -> Any:
            return module.training_step(microbatch, *args, **kwargs)

        assert self._dealer is not None
        batch_idx = module.trainer.fit_loop.batch_idx
        with self._watching():
            self.engine.change_plan(self._dealer.plan_to_run(batch, batch_idx))
            loss, outputs = self.engine.train(step, batch, self._key(args))
        return {"loss": loss, **(join_outputs(outputs) or {})}

    @override
    def validation_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        return self._evaluate(self.lightning_module.validation_step, batch, args, kwargs)

    @override
    def test_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        return self._evaluate(self.lightning_module.test_step, batch, args, kwargs)

    @override
    def predict_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        outputs = self._evaluate(self.lightning_module.predict_step, batch, args, kwargs)
        return self._share_in_pipeline(outputs)

    def _evaluate(
        self, method: Callable[..., Any], batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        assert self._dealer is not None
        with self._watching():
            self.engine.change_plan(self._dealer.plan_to_evaluate(batch))
            outputs = self.engine.evaluate(
                lambda microbatch: method(microbatch, *args, **kwargs), batch, self._key(args)
            )
            return join_outputs(outputs)

    def _share_in_pipeline(self, outputs: Any) -> Any:
        """Return the last stage's outputs on every rank of its pipeline; collective."""
        if self.world_size == 1:
            return outputs
        everyone: list[Any] = [None] * self.world_size
        place = self.engine.place
        dist.all_gather_object(everyone, outputs, group=self._control)
        if place is None:
            return None
        last = self.plan.pipelines[place.pipeline_index].stages[-1]
        return everyone[last.ranks[0]]

    def _key(self, args: tuple[Any, ...]) -> IterationKey:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        stage = trainer.state.stage
        assert stage is not None
        batch_idx = args[0] if args and isinstance(args[0], int) else 0
        return IterationKey(
            stage=_STAGES[str(stage.value)], epoch=trainer.current_epoch, batch_idx=batch_idx
        )

    def _deposit_gradients(self) -> None:
        """Add the iteration's gradients to the slices, as a backward would."""
        module = self.lightning_module
        assert module is not None
        scale = 1.0 / module.trainer.accumulate_grad_batches
        for name, gradient in self.engine.gradients.items():
            master = self.engine.store.masters[name]
            gradient = gradient.mul_(scale) if scale != 1.0 else gradient
            if master.grad is None:
                master.grad = gradient
            else:
                master.grad += gradient
        self.engine.gradients = {}

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self.engine.mark_weights_stale(only_trainable=True)
        return output

    @override
    def on_train_start(self) -> None:
        self.engine.mark_weights_stale()

    @override
    def on_validation_start(self) -> None:
        # Callbacks such as weight averaging may swap weights in before and out after validation.
        self.engine.mark_weights_stale()

    @override
    def on_validation_end(self) -> None:
        self.engine.mark_weights_stale()

    @override
    def on_test_start(self) -> None:
        self.engine.mark_weights_stale()

    @override
    def on_predict_start(self) -> None:
        self.engine.mark_weights_stale()

    # -- checkpoints ----------------------------------------------------------------------------

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        if self._engine is None:
            # Saved after the run: parameters are whole on every rank.
            return self.lightning_module.state_dict()
        assert self._communicators is not None
        return whole_module_state(self.engine.store, self._communicators, self.lightning_module)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self._communicators is not None
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        assert self._trained is not None, "nothing was trained"
        return gather_optimizer_state(self._trained, self._communicators, optimizer)

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        path = Path(str(checkpoint_path))
        if type(self.checkpoint_io) is TorchCheckpointIO and path.is_file():
            # Every rank reads only the pages of its slices.
            with suppress(RuntimeError):
                loaded: dict[str, Any] = torch.load(
                    path, map_location="cpu", mmap=True, weights_only=bool(weights_only)
                )
                return loaded
        return super().load_checkpoint(checkpoint_path, weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        load_module_state(
            self.engine.store, self.lightning_module, checkpoint["state_dict"], strict=strict
        )
        self.engine.mark_weights_stale()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            scatter_optimizer_state(self.engine.store, optimizer, state)
            _optimizer_to_device(optimizer, self.root_device)

    # -- the end --------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        if self._detector is not None and not isinstance(exception, PeerError | AgreedExit):
            self._detector.report(exception)

    @override
    def teardown(self) -> None:
        if self._engine is not None:
            if not self._failed:
                assert self._communicators is not None
                spread_whole(self._engine.store, self._communicators)
            self._engine.remove()
            self._engine = None
        if self._cut_when_loading is not None:
            self._cut_when_loading.remove()
            self._cut_when_loading = None
        if self._detector is not None:
            self._detector.stop()
        if self._failed and self._lightning_module is not None:
            # Lightning would move it to CPU, which what is still on the meta device can't be, and
            # that error would hide the one that made the run fail.
            meta = any(parameter.is_meta for parameter in self._lightning_module.parameters())
            self._lightning_module = None if meta else self._lightning_module
        super().teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register(
            cls.strategy_name, cls, description="Unequal pipelines on unequal devices"
        )


def _plan_source(
    plan: ParallelPlan | AutoPlan | str | Path | None, num_stages: int | None
) -> ParallelPlan | AutoPlan | None:
    if plan == "auto":
        return AutoPlan() if num_stages is None else None
    return ParallelPlan.load(plan) if isinstance(plan, str | Path) else plan


def _epoch_to_load(trainer: pl.Trainer) -> int:
    """Return the epoch that a new loader is for: the next one if a run resumes where one ended."""
    loop: Any = trainer.fit_loop
    counted = loop.epoch_progress.total
    has_ended = (
        loop.restarting
        and loop.epoch_loop.batch_progress.is_last_batch
        and counted.processed < counted.started
    )
    return int(trainer.current_epoch + has_ended)


def _check_trainable(module: pl.LightningModule) -> None:
    if not module.automatic_optimization:
        raise ConfigurationError(
            "HeteroStrategy needs automatic optimization, because a step's backward runs inside "
            "the pipeline's schedule. Remove `self.automatic_optimization = False` and return the "
            "loss from training_step."
        )
    if type(module).backward is not pl.LightningModule.backward:
        raise ConfigurationError(
            f"{type(module).__name__} overrides backward, which HeteroStrategy never calls: the "
            "backward runs inside the pipeline's schedule. Put what it does into training_step, "
            "on_before_backward or on_after_backward."
        )


HeteroStrategy.register_strategies(StrategyRegistry)
