"""Fit again and again, each time with the ranks that are left, without ending their processes.

The launcher is where a strategy gets hold of a whole `Trainer.fit`. With
`ElasticRestart(in_place=True)` it first makes the process that was started a keeper
(`runtime.generation.keeper`), whose child runs the script again and comes here as a worker. In the
worker a fit that ends because a rank is lost, comes or leaves is followed by another one:

1. the old generation's detector is paused, its groups are closed, and this rank's part of the last
   step is kept (`checkpoint.recovering.live`),
2. Lightning's own end of a fit: `teardown` of strategy, loops, callbacks and data module,
3. the ranks that are left form the next generation (`runtime.generation.membership`) together with
   waiting joiners (`runtime.generation.joiners`); where ranks have stopped between two steps
   to let some in or go, this comes first, so that none closes connections that others still use,
4. random state, loops and flags are put back to what they were before the first fit,
5. callbacks' `on_generation(trainer, old, new)`, and the fit begins as after any restart:
   processes meet, a plan is made for the ranks that are left, and the state comes from what they
   have kept, or else from the newest checkpoint.

A joiner comes here in its first fit, as every process does, and meets the generation that lets it
in. An error before that generation has trained a step is blamed on the joiners: the others go on
without them.

Written for NCCL, but not tried with it: only ranks abort operations, before anything waits for
them, and a step that a device hadn't finished by then doesn't count (`communicators.StepEnd`).
Generations share no communicators, and an error that poisons a process (CUDA's) ends only that one.

A retry inside the iteration was considered: it would save the set-up, but loaders, optimizers,
loops and callbacks know ranks and shares, and each would need a second way to change them. The path
by which a new process enters the run is there in any case, so an old one takes it, too.
"""

import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_hetero.core.errors import CheckpointError, ConfigurationError
from lightning_hetero.runtime.generation.entering import (
    find_layer_call_of_run,
    is_joiner,
    split_address,
)
from lightning_hetero.runtime.generation.environment import take_cores
from lightning_hetero.runtime.generation.judge import VainGenerations
from lightning_hetero.runtime.generation.keeper import KeeperTask, become_keeper
from lightning_hetero.runtime.generation.worker import JOIN, KEPT, joiner_variables
from lightning_hetero.runtime.random_state import RandomState
from lightning_hetero.runtime.ranks.failure import AgreedExit, GenerationChange
from lightning_hetero.runtime.setup.layout import find_layers
from lightning_hetero.runtime.stage.rehearsal import rehearse
from lightning_hetero.strategy.devices import leave_failures_to_ranks
from lightning_hetero.strategy.run import OutlivesRanks

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_hetero.strategy.hooks import HookedStrategy
    from lightning_hetero.strategy.processes import StartMethod

__all__ = ["HeteroLauncher", "launcher_of", "size_that_stays"]

_log = logging.getLogger(__name__)
_NO_SCRIPT = ("-c", "-", "")
"""First entries of `sys.argv` where Python runs no file."""


def launcher_of(
    strategy: "HookedStrategy",
    start_method: "StartMethod",
    num_nodes: int,
    check_world_size: Callable[[int], None],
    check_module: Callable[[], None],
) -> "_MultiProcessingLauncher | HeteroLauncher":
    """Return the launcher of this node's other processes, which starts them if nobody else has.

    Args:
        strategy: Whose launcher it is.
        start_method: See `HeteroStrategy`.
        num_nodes: Number of nodes.
        check_world_size: Raises for a number of processes that can't run, before any is started;
            not called for joiners.
        check_module: Raises for the strategy's module if it can't run; called where processes are
            started.
    """
    environment = strategy.cluster_environment
    assert environment is not None
    starts_others = not environment.creates_processes_externally
    if starts_others and not is_joiner():
        check_world_size(num_nodes * strategy.num_processes)
    if start_method != "popen":
        return _MultiProcessingLauncher(strategy, start_method=start_method)
    num_processes = len(strategy.parallel_devices or ())
    has_script = sys.argv[0] not in _NO_SCRIPT or num_processes * num_nodes == 1
    if starts_others and (hasattr(sys, "ps1") or not has_script):
        raise ConfigurationError(
            "HeteroStrategy starts its other processes by running the script again, and here is "
            "none (python -c, standard input, a notebook). Give HeteroStrategy("
            'start_method="fork"), or write the code into a file and run that.'
        )
    return HeteroLauncher(strategy, num_processes, num_nodes, check_module)


class HeteroLauncher(_SubprocessScriptLauncher):
    """Starts this node's other processes, if nobody else has, and outlives the loss of ranks.

    Args:
        strategy: Whose launcher it is.
        num_processes: Processes of this node.
        num_nodes: Number of nodes.
        check_module: See `launcher_of`.
    """

    def __init__(
        self,
        strategy: "HookedStrategy",
        num_processes: int,
        num_nodes: int,
        check_module: Callable[[], None],
    ) -> None:
        assert strategy.cluster_environment is not None
        super().__init__(strategy.cluster_environment, num_processes, num_nodes)
        self._strategy = strategy
        self._check_module = check_module

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        self._check_module()
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
            take_cores(self.num_processes)
            if trainer.state.fn == TrainerFn.FITTING:
                if is_joiner():
                    _rehearse(self._strategy, args[0])
                return _Generations(self._strategy, trainer, rule.heartbeat_timeout).fit(work)
            return work()
        if self.cluster_environment.creates_processes_externally:
            return work()
        return super().launch(function, *args, trainer=trainer, **kwargs)

    def _be_kept(self, *, replaces: bool) -> NoReturn:
        """Become the keeper of the worker that this process was started to be, or of this node's.

        Args:
            replaces: Whether joiners take the devices of lost workers.

        Raises:
            ConfigurationError: The system can't do it.
        """
        if not sys.platform.startswith("linux"):
            raise ConfigurationError(
                f"ElasticRestart(in_place=True) needs Linux, where a worker ends with its keeper; "
                f"this is {sys.platform}. Leave in_place out."
            )
        environment, joins = self.cluster_environment, is_joiner()
        started = environment.main_address, environment.main_port
        address, port = split_address(os.environ[JOIN]) if joins else started
        # What this process's first start of Lightning may have set itself isn't the user's.
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


def size_that_stays(told: Iterable[int]) -> int:
    """Return how many of a loader's batches make an iteration: as many as in earlier generations.

    Args:
        told: Each rank's number; 0 from a joiner.

    Raises:
        CheckpointError: Only joiners are left.
    """
    most = max(told)
    if not most:
        raise CheckpointError(
            "All ranks that had trained were lost before joiners had been told what they train. "
            "Start the run again; it goes on from its newest checkpoint."
        )
    return most


def _rehearse(strategy: Any, module: "pl.LightningModule") -> None:
    """Compile a layer and load its kernels, before anybody waits for this joiner."""
    call = find_layer_call_of_run(strategy._processes._start_timeout)
    options = strategy._options
    _, layers = find_layers(module, options.layers)
    if not call or not layers:
        return
    layer, start_s = layers[0], time.monotonic()
    own = vars(layer).get("forward")
    try:
        if options.config.layer_options.compile_layers:
            layer.forward = options.config.layer_options.wrap_layer(0, layer.forward)
        dtype = strategy.precision_plugin.compute_dtype
        rehearse(layer, call, device=strategy.root_device, dtype=dtype)
    except Exception as error:
        # Its first step will show whether it can train; it is only slower.
        _log.warning("This joiner's layers couldn't be called before it is let in: %r", error)
    else:
        _log.info("Called a layer in %.2f s before joining.", time.monotonic() - start_s)
    finally:
        vars(layer).pop("forward", None)
        if own is not None:
            layer.forward = own


def _rule_of(trainer: "pl.Trainer | None") -> OutlivesRanks | None:
    callbacks: list[Any] = [] if trainer is None else trainer.callbacks  # type: ignore[attr-defined]
    rules = (item for item in callbacks if isinstance(item, OutlivesRanks) and item.in_place)
    return next(rules, None)


class _Generations:
    """The fits of one `Trainer.fit`.

    Args:
        strategy: The Trainer's.
        trainer: The Trainer.
        silence: How late a heartbeat may be.
    """

    def __init__(
        self, strategy: "HookedStrategy", trainer: "pl.Trainer", silence: timedelta
    ) -> None:
        self._strategy = strategy
        self._processes = strategy.processes
        self._trainer: Any = trainer
        self._vain = VainGenerations()
        self._joiners: tuple[int, ...] = ()
        """Members that weren't in the generation before this one."""
        self._processes.outlive_ranks(silence)
        leave_failures_to_ranks(os.environ)

    def fit(self, work: Callable[[], Any]) -> Any:
        """Fit until training has ended, whichever ranks come, leave or are lost on the way."""
        # Modules and other things that stay: a collection after a loss needn't look at them.
        gc.collect()
        gc.freeze()
        before = _BeforeFit(self._trainer)
        if self._processes.joins:
            self._strategy.await_recovery()
            self._strategy.has_begun_training = True
        try:
            while True:
                try:
                    result = work()
                except GenerationChange as change:
                    end = _End(reason=str(change), leaving=change.leaving)
                except Exception as error:
                    reason = self._reason_to_go_on(error)
                    if reason is None:
                        raise
                    end = _End(reason=reason)
                else:
                    self._processes.end_generations()
                    return result
                # Outside of `except`, so that nothing of the old generation is held by its error.
                self._begin_next(end, before)
        except BaseException as error:
            if not isinstance(error, AgreedExit):
                self._processes.leave_members(error)
            raise

    def _reason_to_go_on(self, error: Exception) -> str | None:
        """Return why another generation goes on after an error; None, and log why, if none does."""
        if self._strategy.memory is not None:
            self._strategy.memory.explain(error)  # Before the others are told of it.
        trained, joiners = self._strategy.has_trained, self._joiners
        lost = self._processes.lost_peer(error)
        if joiners and not trained:
            reason = f"{type(error).__name__}: {error}"
            membership = self._processes.membership
            if lost is None and membership is not None:
                for number in joiners:
                    membership.tell_gone(number, f"The others can't train with it: {reason}")
            return f"Joiners {list(joiners)} couldn't be taken in. {reason}"
        if lost is None:
            return None
        why = self._vain.note(has_trained=trained)
        if not self._strategy.has_begun_training:
            why = "training hadn't begun"
        if why:
            _log.warning("Not going on in place, because %s. %s", why, lost)
        return None if why else str(lost)

    def _begin_next(self, end: "_End", before: "_BeforeFit") -> None:
        trainer, processes = self._trainer, self._processes
        ended = processes.generation
        if end.leaving is None:
            goes_on_live = self._end_fit(ended)
            old, new = processes.form_generation(calls_joiners=not goes_on_live)
        else:
            processes.comms.step_end.wait()  # Or the generation's end would cut it short.
            if processes.comms.global_rank in end.leaving:
                processes.see_others_off()
                raise AgreedExit(0)
            old, new = processes.form_generation(end.leaving)
            self._end_fit(ended)
        self._strategy.cluster_environment = processes.enter_generation(new)
        self._strategy.set_world_ranks()
        before.put_back(trainer)
        self._joiners = new.joiners_since(old)
        trainer.strategy.run.knows_all_ranks = not self._joiners
        rank_zero_info(
            "Generation %s: %s ranks go on in place, without ranks %s of the one before%s. %s",
            new.number,
            new.world_size,
            list(old.without(new)),
            f", with members {list(self._joiners)}" if self._joiners else "",
            end.reason,
        )
        for callback in trainer.callbacks:
            notify = getattr(callback, "on_generation", None)
            if notify is not None:
                notify(trainer, old, new)

    def _end_fit(self, generation: int) -> bool:
        """Close a generation's groups, and end its fit as Lightning does.

        Returns:
            Whether this rank keeps its part of the last step's state; see `keep_live`.
        """
        module = self._strategy.lightning_module
        self._processes.leave_generation()
        if not self._trainer.training:
            # A validation that was cut short has left modules in evaluation mode.
            self._trainer.fit_loop.epoch_loop.val_loop._on_evaluation_model_train()
        keeps = False
        for checkpoint in self._trainer.strategy.run.checkpoints:
            keeps = checkpoint.keep_live(self._trainer, generation) or keeps
        self._strategy.await_recovery()
        self._trainer._teardown()
        self._strategy._lightning_module = module
        call._call_teardown_hook(self._trainer)
        gc.collect()
        return keeps


@dataclass(frozen=True, kw_only=True)
class _End:
    """Why a generation has ended."""

    reason: str
    leaving: frozenset[int] | None = None
    """Ranks that leave, where all have stopped between two steps; None where one was lost."""


class _BeforeFit:
    """The state of a Trainer and of this process's generators of random numbers before a fit.

    Args:
        trainer: Whose fit begins.
    """

    def __init__(self, trainer: Any) -> None:
        self._random_state = RandomState.now()
        fit_loop = trainer.fit_loop
        self._epochs = fit_loop.min_epochs, fit_loop.max_epochs
        self._steps = fit_loop.epoch_loop.min_steps, fit_loop.epoch_loop.max_steps

    def put_back(self, trainer: Any) -> None:
        """Restore that state, with new loops, as in a process that is new to its fit."""
        self._random_state.put_back()
        trainer.fit_loop = _FitLoop(trainer, *self._epochs)
        trainer.fit_loop.epoch_loop = _TrainingEpochLoop(trainer, *self._steps)
        trainer.should_stop = False
        trainer.state.fn, trainer.state.status = TrainerFn.FITTING, TrainerStatus.RUNNING
        trainer.state.stage = RunningStage.TRAINING
