"""Start a node's other processes, and wrap the whole of `Trainer.fit`.

Lightning runs the whole of `Trainer.fit` inside the launcher, so a strategy can do something before
and after it. With `ElasticRestart(in_place=True)` the launcher first turns the process that was
started into a keeper (`runtime.generation.keeper`). The keeper's child runs the script again, comes
here as a worker, and runs one fit for each generation (`generations`).
"""

import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.keep import KeeperTask, become_keeper
from lightning_hetero.runtime.generation.entering import (
    is_joiner,
    layer_call_of_run,
    share_cores,
    split_address,
)
from lightning_hetero.runtime.generation.keeper import JOIN, KEPT, joiner_variables
from lightning_hetero.runtime.setup.layout import find_layers
from lightning_hetero.runtime.stage.rehearsal import rehearse
from lightning_hetero.strategy.generations import Generations

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_hetero.callbacks import ElasticRestart
    from lightning_hetero.strategy.hetero import HeteroStrategy
    from lightning_hetero.strategy.processes import StartMethod

_log = logging.getLogger(__name__)
_NO_SCRIPT = ("-c", "-", "")
"""First entries of `sys.argv` if Python doesn't run a file."""


def launcher_of(
    strategy: "HeteroStrategy",
    start_method: "StartMethod",
    num_nodes: int,
    check_world_size: Callable[[int], None],
) -> "_CheckedLauncher | HeteroLauncher":
    """Return the launcher that starts this node's other processes, if they aren't started yet.

    Args:
        strategy: The strategy that launches.
        start_method: See `HeteroStrategy`.
        num_nodes: Number of nodes.
        check_world_size: Raises an error if a number of processes can't run the plan. Called before
            any process is started, but not for joiners.
    """
    environment = strategy.cluster_environment
    assert environment is not None
    starts_others = not environment.creates_processes_externally
    if starts_others and not is_joiner():
        check_world_size(num_nodes * strategy.num_processes)
    if start_method != "popen":
        return _CheckedLauncher(strategy, start_method=start_method)
    num_processes = len(strategy.parallel_devices or ())
    has_script = sys.argv[0] not in _NO_SCRIPT or num_processes * num_nodes == 1
    if starts_others and (hasattr(sys, "ps1") or not has_script):
        raise ConfigurationError(
            "HeteroStrategy starts its other processes by running the script again, and here is "
            "none (python -c, standard input, a notebook). Give HeteroStrategy("
            'start_method="fork"), or write the code into a file and run that.'
        )
    return HeteroLauncher(strategy, num_processes, num_nodes)


class _CheckedLauncher(_MultiProcessingLauncher):
    @override
    def launch(self, *args: Any, **kwargs: Any) -> Any:
        cast("HeteroStrategy", self._strategy).check_before_start()
        return super().launch(*args, **kwargs)


class HeteroLauncher(_SubprocessScriptLauncher):
    """Starts this node's other processes, if they aren't started yet, and outlives lost ranks.

    Args:
        strategy: The strategy that launches.
        num_processes: Number of processes on this node.
        num_nodes: Number of nodes.
    """

    def __init__(
        self,
        strategy: "HeteroStrategy",
        num_processes: int,
        num_nodes: int,
    ) -> None:
        assert strategy.cluster_environment is not None
        super().__init__(strategy.cluster_environment, num_processes, num_nodes)
        self._strategy = strategy

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        self._strategy.check_before_start()
        work = partial(function, *args, **kwargs)
        rule = _rule_of(trainer)
        if is_joiner() and (rule is None or trainer.state.fn != TrainerFn.FITTING):
            raise ConfigurationError(
                f"{JOIN} is set, so this process joins a run that trains: its script must call fit "
                "before all else, with ElasticRestart(in_place=True) among the callbacks. Unset it "
                "to start a run."
            )
        if rule is not None:
            if KEPT not in os.environ:
                self._be_kept(replaces=rule.replace_lost)
            share_cores(self.num_processes)
            if trainer.state.fn == TrainerFn.FITTING:
                if is_joiner():
                    _rehearse(self._strategy, args[0])
                return Generations(self._strategy, trainer, rule.heartbeat_timeout).fit(work)
            return work()
        if self.cluster_environment.creates_processes_externally:
            return work()
        return super().launch(function, *args, trainer=trainer, **kwargs)

    def _be_kept(self, *, replaces: bool) -> NoReturn:
        """Turn this process into the keeper of one worker, or of all workers of this node.

        Args:
            replaces: Whether joiners take the devices of lost workers.

        Raises:
            ConfigurationError: The system doesn't support it.
        """
        if not sys.platform.startswith("linux"):
            raise ConfigurationError(
                f"ElasticRestart(in_place=True) needs Linux, where a worker ends with its keeper; "
                f"this is {sys.platform}. Leave in_place out."
            )
        environment, joins = self.cluster_environment, is_joiner()
        started = environment.main_address, environment.main_port
        address, port = split_address(os.environ[JOIN]) if joins else started
        # Workers don't get variables that Lightning, not the user, has set here.
        common = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        if environment.creates_processes_externally:
            workers = [common]
        else:
            common |= {
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                "NODE_RANK": str(environment.node_rank()),
                "WORLD_SIZE": str(self.num_processes * self.num_nodes),
            }
            workers = [common | {"LOCAL_RANK": str(rank)} for rank in range(self.num_processes)]
        if joins:
            workers = [worker | joiner_variables(os.environ[JOIN]) for worker in workers]
        agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        is_first = environment.global_rank() == 0 and environment.node_rank() == 0
        become_keeper(
            KeeperTask(
                command=[sys.executable, *sys.orig_argv[1:]],
                workers=workers,
                address=address,
                port=port,
                serves=is_first and not agent_serves and not joins,
                replaces=replaces,
            )
        )


def _rehearse(strategy: Any, module: "pl.LightningModule") -> None:
    """Compile a layer and load its kernels before others wait for this joiner."""
    described, options = layer_call_of_run(strategy.processes.start_timeout), strategy.options
    _, layers = find_layers(module, options.layers)
    if not described or not layers:
        return
    layer, before = layers[0], vars(layers[0]).get("forward")
    try:
        layer.forward = options.config.layer_options.wrap_layer(0, layer.forward)
        dtype = strategy.precision_plugin.compute_dtype
        rehearse(layer, described, device=strategy.root_device, dtype=dtype)
        _log.info("Called a layer before joining.")
    except Exception as error:
        # Without this the joiner's first step is slower; that step shows whether it can train.
        _log.warning("This joiner's layers couldn't be called before it is let in: %r", error)
    finally:
        vars(layer).pop("forward", None)
        if before is not None:
            layer.forward = before


def _rule_of(trainer: "pl.Trainer | None") -> "ElasticRestart | None":
    """Return the callback by which ranks outlive others, if there is one."""
    callbacks: list[Any] = [] if trainer is None else trainer.callbacks  # type: ignore[attr-defined]
    rules = (item for item in callbacks if hasattr(item, "replace_lost") and item.in_place)
    return next(rules, None)
