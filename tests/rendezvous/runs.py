"""Runs on gloo whose ranks say what they issued, and what the model of an iteration expects."""

import os
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import lightning as L
import torch

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.exchange.transfers import TransferTable
from lightning_hetero.runtime.exchange import by_node
from lightning_hetero.runtime.exchange.pull import Pull
from tests.rendezvous.operations import (
    CONTROL,
    EXCHANGE,
    STAGES,
    Iteration,
    Operation,
    edge_name,
    iteration_operations,
)
from tests.rendezvous.recorder import REST, Recorder
from tests.toy import CONTEXT, ToyModule, ToyOptions, loader, quiet

ROWS = 4
"""Of the batch of each of the first plan's pipelines."""
WIDTH = 16


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is run; the plans change after each iteration."""

    plans: tuple[ParallelPlan, ...]
    world_size: int
    num_layers: int = 3
    tied: bool = False
    num_iterations: int = 3
    options: dict[str, Any] = field(default_factory=dict)
    """More options of the strategy."""
    nodes: str = ""
    """The node that each rank plays; all are on this one if it is empty."""
    swaps_pulls: int | None = None
    """A rank that by mistake fetches its first two layers in another order."""


@dataclass(frozen=True)
class Found:
    """What one rank issued."""

    operations: tuple[Operation, ...]
    iterations: tuple[tuple[Operation, ...], ...]
    """The operations of each training iteration."""
    expected: tuple[tuple[Operation, ...], ...]
    """What the model says of it."""


class _Look(L.Callback):
    """Names the groups, cuts the list by iteration, and changes the plan."""

    def __init__(self, recorder: Recorder, job: Job) -> None:
        self._recorder = recorder
        self._job = job
        self._begin = 0
        self.names: dict[str, str] = {}
        self.tables: list[TransferTable] = []
        """Those of all pulls."""
        self.iterations: list[slice] = []
        self.expected: list[tuple[Operation, ...]] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._name_groups(trainer)

    def _name_groups(self, trainer: L.Trainer) -> None:
        assert isinstance(trainer.strategy, HeteroStrategy)
        comms = trainer.strategy.engine.comms
        for edge, group in comms._edges.items():
            if trainer.global_rank in edge[:2]:
                self.names[group.group_name] = edge_name(STAGES, *edge)
        for name in (EXCHANGE, CONTROL):
            group = getattr(comms, name)
            self.names[group.group_name] = name
        for ranks, group in comms._exchange_groups.items():
            if trainer.global_rank in ranks:
                self.names[group.group_name] = exchange_among(ranks)

    def name_of(self, group_name: str) -> str:
        """Return the name of a queue for that of its group."""
        group = group_name.removesuffix(REST)
        return self.names.get(group, group) + group_name[len(group) :]

    def on_train_batch_start(self, *_: Any) -> None:
        self._begin = len(self._recorder.operations)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        self.iterations.append(slice(self._begin, len(self._recorder.operations)))
        engine, world_size = strategy.engine, self._job.world_size
        num_rows = ROWS * self._job.plans[0].num_pipelines
        iteration = Iteration(
            world_size=world_size,
            num_microbatches=tuple(engine.num_microbatches),
            activation_bytes=num_rows // sum(engine.num_microbatches) * CONTEXT * WIDTH * 4,
            collective_of=lambda members: self._collective_of(engine, members),
            headers_apart=False,
        )
        lists = iteration_operations(strategy.plan, self.tables[-1], iteration)
        self.expected.append(lists[trainer.global_rank])
        strategy.change_plan(self._job.plans[trainer.global_step % len(self._job.plans)])
        self._name_groups(trainer)

    def _collective_of(self, engine: Any, members: tuple[int, ...]) -> str:
        group = engine.plans._group_of(members)
        return "" if group is None else self.names[group.group_name]


def exchange_among(ranks: tuple[int, ...]) -> str:
    """Return the name of the communicator in which some ranks, not all, pull and push."""
    return f"{EXCHANGE} {list(ranks)}"


def record(rank: int, job: Job) -> Found:
    """Train, validate and test; return what this rank issued from the first message on."""
    torch.manual_seed(0)
    recorder = Recorder()
    look = _Look(recorder, job)
    strategy = HeteroStrategy(job.plans[0], num_microbatches=2, **job.options)
    trainer = L.Trainer(
        strategy=strategy,
        callbacks=[look],
        **quiet(devices=job.world_size, max_steps=job.num_iterations, num_sanity_val_steps=0),
    )
    module = ToyModule(ToyOptions(num_layers=job.num_layers, width=WIDTH, tied=job.tied))
    rows = ROWS * max(plan.num_pipelines for plan in job.plans) * job.num_iterations
    swapped = _swapped_pulls() if rank == job.swaps_pulls else nullcontext()
    node = mock.patch.dict(os.environ, {"GROUP_RANK": job.nodes[rank]} if job.nodes else {})
    with recorder, swapped, node, _noted_tables(look.tables):
        trainer.fit(module, loader(rows, ROWS), loader(2 * ROWS, ROWS, seed=1))
        trainer.test(module, loader(2 * ROWS, ROWS, seed=1), verbose=False)
    operations = [
        replace(item, communicator=look.name_of(item.communicator)) for item in recorder.operations
    ]
    iterations = [tuple(operations[part]) for part in look.iterations]
    return Found(tuple(operations), tuple(iterations), tuple(look.expected))


def record_with_streams(rank: int, job: Job) -> Found:
    """Record a run whose second legs are posted as where there are streams, and no host waits."""
    with mock.patch.object(by_node, "has_streams", return_value=True):
        return record(rank, job)


def _noted_tables(tables: list[TransferTable]) -> Any:
    start = Pull.start

    def noted(pull: Pull, **options: Any) -> None:
        tables.append(pull._weights.table)
        start(pull, **options)

    return mock.patch.object(Pull, "start", noted)


def _swapped_pulls() -> Any:
    prepare = Pull._prepare

    def swapped(pull: Pull, *args: Any) -> Any:
        units = list(prepare(pull, *args).items())
        layers = [index for index, (unit, _) in enumerate(units) if unit >= 0]
        if len(layers) > 1:
            first, second = layers[:2]
            units[first], units[second] = units[second], units[first]
        return dict(units)

    return mock.patch.object(Pull, "_prepare", swapped)
