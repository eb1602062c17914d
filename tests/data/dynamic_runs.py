"""Runs of the data module that tests start in several processes, under candidate plans or none."""

import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning as L

from lightning_hetero import AutoPlan, HeteroStrategy, ParallelPlan
from lightning_hetero.assign import PipelineCost
from lightning_hetero.autoplan.facts import AutoPlanned
from lightning_hetero.data import HeteroDataModule
from lightning_hetero.models import PackedBatch
from lightning_hetero.models.batches import AssignedBatch
from lightning_hetero.straggler.prediction import move_ranks
from lightning_hetero.testing import EmulatedDevices
from tests.capped_memory import CappedMemory
from tests.data.rows import Rows, RowStream, lengths_of
from tests.fits import Case, Outcome, outcome_of, train
from tests.plans import Plan
from tests.runtime.case_modules import PackedModule

LENGTHS = [length + 1 for length in lengths_of(40, longest=30)]
LONGER = 8
"""How many times as long samples are that one device has no room for."""
SHORT = 16
"""Most tokens of a micro-batch on a single rank."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a rank knows after a run; `seen` are the validation losses."""

    outcome: Outcome
    plans: list[Any]
    """The plan of every step, as a dict."""
    longest_microbatch: int
    num_left_in_store: int
    num_before: list[int]
    """Steps before those that ran under moved plans, and before those that ran under the first."""


class Module(PackedModule):
    """The reference model, which also validates and looks at the batches it is given."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(Case(model="packed", num_layers=num_layers))
        self.plans: list[Any] = []
        self.seen: list[float] = []
        self.longest = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if isinstance(batch, AssignedBatch):
            self.plans.append(batch.plan.to_dict())
            sizes = [item.num_tokens for item in batch.microbatches]
            self.longest = max([self.longest, *sizes])

    def validation_step(self, batch: PackedBatch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=batch.num_target_tokens)

    def on_validation_epoch_end(self) -> None:
        self.seen.append(float(self.trainer.callback_metrics["val_loss"]))


def data_of(times: int, *, stream: bool) -> HeteroDataModule:
    """Return samples that are so many times as long."""
    lengths = [times * length for length in LENGTHS]
    return HeteroDataModule(
        RowStream(lengths) if stream else Rows(lengths),
        Rows(lengths[:20]),
        tokens_per_step=60 * times,
        context_length=31 * times,
        lengths=None if stream else lengths,
        seed=2,
        num_ahead=2,
    )


class Candidates(L.Callback):
    """Gives the strategy its candidates before the data module asks for them."""

    def __init__(self, plans: list[dict[str, Any]]) -> None:
        self.plans = [ParallelPlan.from_dict(plan) for plan in plans]

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(trainer.strategy, HeteroStrategy)
        trainer.strategy.set_candidate_plans(self.plans, [costs_of(plan) for plan in self.plans])


class Moves(L.Callback):
    """Puts the next rank in each rank's place, in all plans, after one step; and back later."""

    def __init__(self, steps: tuple[int, int]) -> None:
        self.steps = steps
        self.num_before: list[int] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        strategy = trainer.strategy
        if trainer.global_step not in self.steps:
            return
        assert isinstance(strategy, HeteroStrategy)
        by, size = (-1 if self.num_before else 1), trainer.world_size
        taken_by = {rank: (rank + by) % size for rank in range(size)}
        plans = [move_ranks(plan, taken_by) for plan in strategy.candidate_plans]
        num_left = strategy.set_candidate_plans(plans, strategy.candidate_costs)
        self.num_before.append(trainer.global_step + num_left)
        groups = strategy.engine.comms._groups
        assert all(s.ranks in groups for p in plans for *_, s in p.iter_stages() if s.tp_degree > 1)


class Saves(L.Callback):
    """Saves a checkpoint after one step."""

    def __init__(self, step: int, path: str) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def costs_of(plan: ParallelPlan) -> list[PipelineCost]:
    """Return costs by which short samples want single ranks and long ones need several."""
    return [
        PipelineCost(
            a=0.0,
            b=1e-3 * max(len(stage.layers) for stage in pipeline.stages),
            c=1e-3,
            max_len=SHORT if len(pipeline.ranks) == 1 else 40,
            util_len=10,
            num_stages=pipeline.num_stages,
        )
        for pipeline in plan.pipelines
    ]


def case_of(
    plan: Plan | None, world_size: int, *, times: int = 1, stream: bool = False, **how: Any
) -> Case:
    """Return two epochs of samples that are so many times as long."""
    return Case(
        model=partial(Module, 3 if times == 1 else 6),
        plan=plan,
        world_size=world_size,
        data=partial(data_of, times, stream=stream),
        max_epochs=2,
        **how,
    )


def fit(
    rank: int,
    plans: list[Plan],
    world_size: int,
    save: tuple[int, str] | None = None,
    resume: str | None = None,
    moves: tuple[int, int] = (-1, -1),
    *,
    stream: bool = False,
) -> Ran:
    """Train two epochs under candidate plans, on a single device without them.

    Of a stream nobody knows the lengths of samples before they are read.
    """
    callbacks: list[L.Callback] = [Moves(moves)]
    callbacks += [Saves(*save)] if save else []
    callbacks += [Candidates(plans)] if plans else []
    case = case_of(plans[0] if plans else None, world_size, stream=stream, ckpt_path=resume)
    return ran(train(case, *callbacks, CountKeys()))


def fit_automatically(
    rank: int, slowdowns: tuple[float, ...], memory_bytes: int, cache: str
) -> tuple[Ran, AutoPlanned]:
    """Train long samples under whatever plans are proposed for devices with so much memory.

    A cap leaves a quarter more, for what operations of small layers need for a moment.
    """
    os.environ["LIGHTNING_HETERO_CACHE"] = cache
    options = {"plan": AutoPlan(tp_degrees=(1,)), "num_candidate_plans": 4}
    callbacks = [
        EmulatedDevices(slowdowns, memory_bytes=memory_bytes),
        CappedMemory((1.25 * memory_bytes,) * len(slowdowns)),
    ]
    case = case_of(None, len(slowdowns), times=LONGER, options=options)
    module = train(case, *callbacks, CountKeys())
    return ran(module), module.trainer.strategy.auto_planned


class CountKeys(L.Callback):
    """Counts what the store still has of plans in the end."""

    num_left = 0

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.strategy.barrier()
        store = trainer.datamodule._planner._store  # type: ignore[attr-defined]
        if trainer.world_size > 1:
            self.num_left = sum("train/" in key for key in store._store.list_keys())


def ran(module: Any) -> Ran:
    callbacks = module.trainer.callbacks
    return Ran(
        outcome=outcome_of(module),
        plans=module.plans,
        longest_microbatch=module.longest,
        num_left_in_store=sum(c.num_left for c in callbacks if isinstance(c, CountKeys)),
        num_before=[n for c in callbacks if isinstance(c, Moves) for n in c.num_before],
    )
