"""The adapter to Lightning: `HeteroStrategy`, and what its hooks need. No algorithm lives here.

Lightning's public hooks don't suffice. These private names are used, and a new version of Lightning
has to be read for them (here, unless another package is named):

- `trainer._accelerator_connector.use_distributed_sampler`: no public option of a strategy keeps
  Lightning from injecting samplers,
- `Strategy._configure_launcher`, `_launcher`, `_MultiProcessingLauncher`,
  `_SubprocessScriptLauncher`: strategies start processes by overriding and setting these,
- `Strategy._lightning_module`, `_precision_plugin`: set around what `ParallelStrategy` does with
  them, which would move slices or check the plugin's type,
- `_optimizers_to_device`: what `Strategy.setup` and `load_optimizer_state_dict` call,
- `trainer._active_loop`: the counter of the batches that are evaluated or predicted,
- `Precision._after_closure`: after it nothing but the optimizer's step is left,
- `LightningOptimizer._optimizer`: the optimizer whose state `optimizer_state` returns,
- `WeightAveraging._average_model` (also `callbacks`), `StochasticWeightAveraging._average_model`:
  copies of the module that must be cut, and saved,
- `BaseFinetuning._apply_mapping_to_param_groups`, `_internal_optimizer_metadata`: what ranks must
  agree on when parameters are unfrozen,
- `FitLoop._data_source` (`autoplan`): the training loader before the first epoch,
- `_IndexBatchSamplerWrapper`, its `_batch_sampler` (`data`): what prediction wraps samplers in,
- `FitLoop._should_accumulate`, `_combined_loader` (`callbacks`): whether a batch ends a step, and
  loaders that must be made again from a recovered state,
- `call._call_callbacks_state_dict`, `_call_callbacks_load_state_dict`,
  `trainer._checkpoint_connector` with `_get_loops_state_dict` and `_loaded_checkpoint`, and
  `_hparams_name` (`callbacks`): what a checkpoint of Lightning holds but for the weights,
- `_FitLoop`, `_TrainingEpochLoop`: made anew for each generation of ranks,
- `trainer._signal_connector` with `_sigterm_notifier_fn` and `received_sigterm`, the epoch loop's
  `_broadcast_sigterm_tensor`: see `strategy.sigterm`,
- `_set_num_threads_if_needed`, `_suggested_max_num_threads` (`runtime.generation.cores`): how many
  threads Lightning's own launchers give a process,
- `_ResultMetric`, the epoch loop's `_results`, `_logger_connector._callback_metrics` (`callbacks`):
  what was logged in an epoch, which goes on where a rank is lost in it,
- `_Loop`, `_BaseProgress`, the epoch loop's `_batches_that_stepped` (`callbacks`): the counters of
  loops, which are put back to the last step's end where a rank is lost,
- what `runtime.results` reads to log inside a step, for which Lightning has no public way.
"""

from lightning_hetero.strategy.cli_layers import register_layers
from lightning_hetero.strategy.hetero import HeteroStrategy

__all__ = ["HeteroStrategy"]

register_layers()
