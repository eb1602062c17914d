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

import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.optimizer import _optimizer_to_device, _optimizers_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import Store
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from typing_extensions import override

from lightning_hetero.autoplan import AutoPlan, AutoPlanned, RunFacts, make_plan
from lightning_hetero.core.errors import ConfigurationError, PeerError, PlanError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.slices import Ownership
from lightning_hetero.data.batch_sizes import BatchSizes, find_batch_sizes
from lightning_hetero.data.dealing import DealtBatchSampler, deal_out
from lightning_hetero.precision import HeteroPrecision
from lightning_hetero.runtime.averaging import cut_copy, cut_when_loading
from lightning_hetero.runtime.boundary import preserved_random_state
from lightning_hetero.runtime.communicators import Communicators
from lightning_hetero.runtime.engine import Engine, EngineConfig
from lightning_hetero.runtime.failure import FailureDetector, connect_store
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
from lightning_hetero.runtime.step_logs import ALREADY_REDUCED
from lightning_hetero.runtime.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from lightning_hetero.runtime.weights import SliceStore

__all__ = ["HeteroStrategy"]

_T = TypeVar("_T")
_STAGES = {"train": 0, "validate": 1, "sanity_check": 1, "test": 2, "predict": 3}


class HeteroStrategy(ParallelStrategy):
    """Train one model across unequal pipelines.

    Args:
        plan: The plan to run: a `ParallelPlan`, a path to its JSON file, "auto" or an `AutoPlan`
            to make one for the devices that run (see `lightning_hetero.autoplan`), or None for
            equal pipelines of `num_stages` stages. Under an automatic plan an iteration takes the
            loader's batch times the number of ranks, as DDP does, else times that of pipelines.
        num_stages: Stages of each equal pipeline; if given, "auto" means None.
        num_microbatches: Micro-batches into which a pipeline cuts its share of an iteration, where
            the plan names no number. None takes 1 for plans without stages, else 4 a stage.
        layers: Name of the module's list of layers, such as "model.blocks"; None finds it.
        ownership: Who keeps which slices of masters and optimizer state.
        tp_plan: How tensor parallelism shards modules, name pattern to style (see
            `runtime.tp_plan`); None takes the module's own plan. One given here also allows a
            later plan with tensor parallelism where the first has none.
        sequence_parallel: Whether tensor-parallel ranks cut hidden states along the tokens between
            attention and MLP, which saves activations of norms and dropout.
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
        num_stages: int | None = None,
        num_microbatches: int | None = None,
        layers: str | None = None,
        ownership: Ownership | Literal["auto", "holders", "even", "parameter"] = Ownership.AUTO,
        tp_plan: Mapping[str, str] | None = None,
        sequence_parallel: bool = False,
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
        self._timeout = timeout
        self._start_method = start_method
        self._process_group_backend = process_group_backend
        self._num_nodes = 1
        self._engine: Engine | None = None
        self._trained: SliceStore | None = None
        self._cut_when_loading: RemovableHandle | None = None
        self._communicators: Communicators | None = None
        self._detector: FailureDetector | None = None
        self._failed = False

    # -- processes ------------------------------------------------------------------------------

    is_distributed = True
    """Lightning reads it before it injects samplers and reduces logged values."""

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        if len(self.parallel_devices) > self.local_rank:
            return self.parallel_devices[self.local_rank]
        # More processes run on this node than `devices=` says: the launcher knows better.
        device = self.parallel_devices[0]
        return device if device.type == "cpu" else torch.device(device.type, self.local_rank)

    @property
    def num_nodes(self) -> int:
        """Number of nodes that the Trainer was given; the world size comes from the environment."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Number of processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def process_group_backend(self) -> str | None:
        """Backend of the device's communicators."""
        return self._process_group_backend

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # Not used by our own runs, see `setup`; for users who build samplers from it.
        place = self.engine.place
        index = 0 if place is None else place.pipeline_index
        return {"num_replicas": self.plan.num_pipelines, "rank": index}

    def set_world_ranks(self) -> None:
        """Take ranks from the environment; only Lightning's own has to be told them."""
        environment = self.cluster_environment
        if environment is None:
            return
        # Environments that know their ranks, such as torchrun's, ignore what they are told here.
        environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    @override
    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        assert environment is not None
        if self._start_method != "popen":
            self._launcher = _MultiProcessingLauncher(self, start_method=self._start_method)
        elif not environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(
                environment, self.num_processes, self.num_nodes
            )

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        reset_seed()
        if not dist.is_initialized():
            self._init_process_group()
        if self._communicators is None:
            self._communicators = Communicators.create(
                device=self.root_device, timeout=self._timeout
            )
        if self._detector is None and self.world_size > 1:
            # A name of its own, since another Trainer of these processes may have used the store.
            name = self.broadcast(uuid.uuid4().hex)
            self._detector = FailureDetector(
                self._connect_store(),
                name,
                global_rank=self.global_rank,
                world_size=self.world_size,
                timeout=self._timeout,
            )

    def _connect_store(self) -> Store:
        environment = self.cluster_environment
        assert environment is not None
        return connect_store(
            environment.main_address,
            environment.main_port,
            global_rank=self.global_rank,
            world_size=self.world_size,
            timeout=self._timeout,
        )

    def _init_process_group(self) -> None:
        device = self.root_device
        default = "gloo" if device.type == "cpu" else dist.get_default_backend_for_device(device)
        self._process_group_backend = self._process_group_backend or default
        dist.init_process_group(
            self._process_group_backend,
            store=self._connect_store(),
            rank=self.global_rank,
            world_size=self.world_size,
            timeout=self._timeout,
            device_id=None if device.type == "cpu" else device,
        )

    @property
    def engine(self) -> Engine:
        """What runs the plan; there from `setup` to `teardown`."""
        assert self._engine is not None, "the strategy has not been set up"
        return self._engine

    @property
    def plan(self) -> ParallelPlan:
        """The plan that runs."""
        return self.engine.plan

    def change_plan(self, plan: ParallelPlan) -> None:
        """Run another plan from the next iteration on; called by every rank with the same plan.

        No optimizer state moves and nothing restarts: only the next iteration's weights travel
        elsewhere. Ranks must stay in their pipelines, and pipelines keep their numbers of
        micro-batches, because the data loader has dealt the next batches already.

        Raises:
            PlanError: The plan doesn't fit the ranks, the model or the dealing of batches.
        """
        dealt = [(sorted(p.ranks), p.num_microbatches) for p in self.plan.pipelines]
        wanted = [(sorted(p.ranks), p.num_microbatches) for p in plan.pipelines]
        if dealt != wanted:
            raise PlanError(
                f"The pipelines' (ranks, micro-batches) are {dealt} and would become {wanted}, but "
                "the data loader has dealt the next batches already. Change only which stage a "
                "rank stands in and which layers stages have."
            )
        self.engine.change_plan(plan)

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
        self.model_to_device()
        self._cut_copies(trainer, module)
        self.precision_plugin.deposit_gradients = self._deposit_gradients
        self.precision_plugin.sum_over_ranks = lambda tensor: self.reduce(tensor, reduce_op="sum")
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _cut_copies(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Let whole state dicts be loaded into slices, and cut what callbacks have copied."""
        assert self._communicators is not None
        store = self.engine.store
        self._trained = None
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
        plan = self._make_plan(layout)
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
        )
        tensor_parallel = None
        if self._tp_plan is not None or any(p.tp_degree > 1 for p in plan.pipelines):
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
        engine.clock.slowdown = self.slowdown
        why = "" if self.auto_planned is None else f"\n{self.auto_planned.summary}"
        rank_zero_info(f"HeteroStrategy runs this plan on {self.world_size} ranks:\n{plan}{why}")
        return engine

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
            ),
        )
        if self.auto_planned.warning is not None:
            rank_zero_warn(self.auto_planned.warning)
        return self.auto_planned.plan

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
        place = self.engine.place
        dealt = deal_out(
            dataloader,
            shares=self.engine.num_microbatches,
            pipeline_index=None if place is None else place.pipeline_index,
            seed=self.engine.config.seed,
            num_batches=None if self.auto_planned is None else self.world_size,
        )
        sampler = getattr(dealt, "batch_sampler", None)
        if isinstance(sampler, DealtBatchSampler):
            # A resumed loader's workers draw before Lightning says which epoch it is.
            assert self.lightning_module is not None
            sampler.set_epoch(self.lightning_module.trainer.current_epoch)
        return dealt

    # -- steps ----------------------------------------------------------------------------------

    @override
    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        module = self.lightning_module
        assert module is not None

        def step(microbatch: Any) -> Any:
            return module.training_step(microbatch, *args, **kwargs)

        with self._watching():
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
        with self._watching():
            outputs = self.engine.evaluate(
                lambda microbatch: method(microbatch, *args, **kwargs), batch, self._key(args)
            )
            return join_outputs(outputs)

    def _watching(self) -> AbstractContextManager[None]:
        """Turn another rank's failure into `PeerError`, and tell the others of one's own."""
        return nullcontext() if self._detector is None else self._detector.watching()

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

    # -- collectives ----------------------------------------------------------------------------

    @property
    def _control(self) -> dist.ProcessGroup | None:
        return None if self._communicators is None else self._communicators.control

    @override
    def reduce(
        self,
        tensor: Any,
        group: Any = None,
        reduce_op: ReduceOp | str | None = "mean",
    ) -> Any:
        """Reduce a tensor over all ranks; `mean`, `sum` and other names of `ReduceOp`."""
        if self.world_size == 1 or not isinstance(tensor, Tensor) or group == ALREADY_REDUCED:
            return tensor
        name = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
        is_mean = name in ("mean", "avg")
        operation = (
            ReduceOp.SUM
            if is_mean
            else getattr(ReduceOp, name.upper())
            if isinstance(name, str)
            else name
        )
        tensor = tensor.clone()
        with self._watching():
            dist.all_reduce(tensor, op=operation, group=group)
        return tensor / self.world_size if is_mean else tensor

    @override
    def barrier(self, name: str | None = None) -> None:
        if self.world_size > 1 and dist.is_initialized():
            with self._watching():
                dist.barrier(group=self._control)

    @override
    def broadcast(self, obj: _T, src: int = 0) -> _T:
        if self.world_size == 1 or not dist.is_initialized():
            return obj
        objects = [obj]
        with self._watching():
            dist.broadcast_object_list(objects, src, group=self._control)
        return objects[0]

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
        # After the run the optimizers still hold the slices.
        store = self._trained if self._engine is None else self._engine.store
        assert store is not None, "the strategy has not been set up"
        return gather_optimizer_state(store, self._communicators, optimizer)

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
        if self._detector is not None and not isinstance(exception, PeerError):
            self._detector.report(exception)

    @override
    def teardown(self) -> None:
        if self._engine is not None:
            if not self._failed:
                assert self._communicators is not None
                spread_whole(self._engine.store, self._communicators)
            self._engine.remove()
            self._trained, self._engine = self._engine.store, None
        if self._cut_when_loading is not None:
            self._cut_when_loading.remove()
            self._cut_when_loading = None
        if self._detector is not None:
            self._detector.stop()
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
