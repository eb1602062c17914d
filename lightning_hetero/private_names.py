"""The private names of Lightning and torch that this package uses, each with why.

Public hooks don't suffice for these. `tests/test_private_names.py` looks for each name where it is
said to be, and finds those that the package uses and that aren't listed: a new version of Lightning
or torch has to be read for what is missing then. Names that every module of PyTorch code uses
(`torch._C`, `torch._foreach_*`, a tensor's `_version`, `torch.utils._pytree`) are listed once.

Plain data: nothing of either library is imported here.
"""

from typing import NamedTuple

__all__ = ["PRIVATE_NAMES", "PrivateName"]


class PrivateName(NamedTuple):
    """A private name of another package."""

    home: str
    """The module, and after a colon the class, in whose source it is."""
    name: str
    why: str


_LIGHTNING = "lightning.pytorch."
_TRAINER, _LOOPS = f"{_LIGHTNING}trainer.", f"{_LIGHTNING}loops."
_EPOCH = f"{_LOOPS}training_epoch_loop:_TrainingEpochLoop"
_FIT = f"{_LOOPS}fit_loop:_FitLoop"
_CONNECTOR = f"{_TRAINER}connectors."
_METRIC, _MODES = "torchmetrics.metric:Metric", "torch.utils._python_dispatch"
_DUMPS = "what a checkpoint of Lightning holds beside the weights"
_LAUNCHES = "strategies start processes by overriding and setting these"
_COUNTS = "loggers' steps, where a validation is made up for"
_HOOKS = "whether anything else runs with a module's forward or backward"
_STACKS = "code of users that runs under modes of torch is followed without them"
_BUILDS = "a model's weights are made and loaded layer by layer"

PRIVATE_NAMES = tuple(
    PrivateName(home, name, why)
    for why, home, names in (
        # -- Lightning: the start of processes, and the end of a run ------------------------------
        (_LAUNCHES, f"{_LIGHTNING}strategies.strategy:Strategy", "_configure_launcher _launcher"),
        (
            _LAUNCHES,
            f"{_LIGHTNING}strategies.launchers.multiprocessing",
            "_MultiProcessingLauncher",
        ),
        (
            _LAUNCHES,
            f"{_LIGHTNING}strategies.launchers.subprocess_script",
            "_SubprocessScriptLauncher",
        ),
        (
            "set around what `ParallelStrategy` does with them",
            f"{_LIGHTNING}strategies.strategy:Strategy",
            "_accelerator _lightning_module _precision_plugin",
        ),
        ("keeps Lightning from injecting samplers", f"{_TRAINER}trainer", "_accelerator_connector"),
        (
            "a SIGTERM ends all ranks after the same step, without a broadcast at each",
            f"{_CONNECTOR}signal_connector:_SignalConnector",
            "_sigterm_notifier_fn",
        ),
        ("as above", f"{_TRAINER}trainer", "_signal_connector"),
        ("as above", _EPOCH, "_broadcast_sigterm_tensor"),
        ("a fit ends within a process that trains on", f"{_TRAINER}trainer", "_teardown"),
        ("as above", f"{_TRAINER}call", "_call_teardown_hook"),
        (
            "modules leave evaluation mode where a validation was cut short",
            f"{_LOOPS}evaluation_loop:_EvaluationLoop",
            "_on_evaluation_model_train",
        ),
        # -- Lightning: loops and what is logged --------------------------------------------------
        ("a loop that may begin with what follows a step", f"{_LOOPS}fit_loop", "_FitLoop"),
        ("as above", f"{_LOOPS}training_epoch_loop", "_TrainingEpochLoop"),
        ("as above", _FIT, "_data_fetcher _can_stop_early _restart_stage"),
        ("the training loader, before the first epoch and after a restart", _FIT, "_data_source"),
        ("as above", _FIT, "_combined_loader"),
        (
            "whether a batch ends a step, an epoch or training",
            _EPOCH,
            "_should_accumulate _is_training_done _num_ready_batches_reached _should_check_val_fx",
        ),
        (_COUNTS, _EPOCH, "_batches_that_stepped"),
        ("the batches that are evaluated or predicted", f"{_TRAINER}trainer", "_active_loop"),
        (
            "logging inside a step follows Lightning's own rules",
            f"{_CONNECTOR}logger_connector.fx_validator",
            "_FxValidator",
        ),
        # -- Lightning: optimizers, copies of the module, checkpoints -----------------------------
        (
            "after it only the optimizer's step is left",
            f"{_LIGHTNING}plugins:Precision",
            "_after_closure",
        ),
        ("the optimizer whose state is saved", f"{_LIGHTNING}core.optimizer", "_optimizer"),
        (
            "what `Strategy.setup` calls",
            "lightning.fabric.utilities.optimizer",
            "_optimizers_to_device",
        ),
        (
            "ranks agree on what is unfrozen",
            f"{_LIGHTNING}callbacks:BaseFinetuning",
            "_apply_mapping_to_param_groups _internal_optimizer_metadata",
        ),
        (
            "copies of the module are cut, and saved",
            f"{_LIGHTNING}callbacks:WeightAveraging",
            "_average_model",
        ),
        (
            "what prediction wraps samplers in",
            f"{_LIGHTNING}overrides.distributed",
            "_IndexBatchSamplerWrapper",
        ),
        (_DUMPS, f"{_TRAINER}call", "_call_callbacks_state_dict"),
        (
            _DUMPS,
            f"{_CONNECTOR}checkpoint_connector:_CheckpointConnector",
            "_get_loops_state_dict _loaded_checkpoint",
        ),
        (_DUMPS, f"{_TRAINER}trainer", "_checkpoint_connector"),
        # -- torchmetrics -------------------------------------------------------------------------
        (
            "metrics are summed over micro-batches and ranks, and go on in mid-epoch",
            _METRIC,
            "_computed _copy_state_dict _forward_cache _reductions _sync_dist _update_count",
        ),
        # -- torch: process groups ----------------------------------------------------------------
        (
            "torch counts groups to name them; a start that failed may have counted on some ranks",
            "torch.distributed.distributed_c10d",
            "_world",
        ),
        (
            "ranks plan batches ahead through the run's store",
            "torch.distributed.distributed_c10d",
            "_get_default_store",
        ),
        # -- torch: tensors -----------------------------------------------------------------------
        (
            "sums and copies of many small tensors",
            "torch",
            "_foreach_copy_",
        ),
        ("as above", "torch", "_foreach_mul_"),
        ("as above", "torch._utils", "_flatten_dense_tensors _unflatten_dense_tensors"),
        (
            "whether a tensor was written to, and its storage",
            "torch:Tensor",
            "_version",
        ),
        ("the parameter of which a weight is a part", "torch:Tensor", "_base"),
        ("tensors that tell what is done with them", "torch:Tensor", "_make_subclass"),
        ("as above", "torch:Tensor", "_make_wrapper_subclass"),
        ("a storage's identity", "torch:UntypedStorage", "_cdata"),
        ("the operator behind a call", "torch._ops:OpOverload", "_schema"),
        ("as above", "torch.ops:aten", "_unsafe_view"),
        ("values inside any nesting of containers", "torch.utils", "_pytree"),
        # -- torch: modules -----------------------------------------------------------------------
        (_HOOKS, "torch.nn:Module", "_forward_hooks _forward_pre_hooks _backward_hooks"),
        (_HOOKS, "torch.nn:Module", "_compiled_call_impl"),
        (_HOOKS, "torch:Tensor", "_post_accumulate_grad_hooks"),
        ("slices take the places of parameters", "torch.nn:Module", "_parameters"),
        ("which buffers aren't saved", "torch.nn:Module", "_non_persistent_buffers_set"),
        ("buffers that ranks average", "torch.nn.modules.batchnorm", "_BatchNorm"),
        (
            "a layer is computed again as far as its stage has gone",
            "torch.utils.checkpoint",
            "_StopRecomputationError",
        ),
        # -- torch: modes -------------------------------------------------------------------------
        (_STACKS, "torch", "_C _dynamo"),
        (_STACKS, "torch._C", "_autograd _disabled_torch_function_impl"),
        (_STACKS, "torch._C._autograd", "_profiler_enabled _top_saved_tensors_default_hooks"),
        (_STACKS, _MODES, "_disable_current_modes _get_current_dispatch_mode"),
        (_STACKS, _MODES, "_pop_mode_temporarily"),
        (_STACKS, "torch.utils", "_device _python_dispatch"),
        ("as above", "torch", "_utils"),
        # -- transformers -------------------------------------------------------------------------
        (
            _BUILDS,
            "transformers:PreTrainedModel",
            "_from_config _is_stateful _keys_to_ignore_on_load_unexpected",
        ),
        (
            "packed samples need an attention that knows where each ends",
            "transformers:PreTrainedModel",
            "_can_set_attn_implementation",
        ),
        ("as above", "transformers:PretrainedConfig", "_attn_implementation"),
        (
            "outputs that a model records inside a stage",
            "transformers.utils.output_capturing",
            "_active_collector",
        ),
    )
    for name in names.split()
)
"""Each name, where it is, and why."""
