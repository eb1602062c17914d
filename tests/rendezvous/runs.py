"""Runs on gloo whose ranks say what they issued."""

import os
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import lightning as L
import torch

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.runtime.exchange import by_node
from lightning_hetero.runtime.exchange.pull import Pull
from tests.rendezvous.operations import CONTROL, EXCHANGE, STAGES, Operation
from tests.rendezvous.recorder import REST, Recorder
from tests.toy import ToyModule, ToyOptions, loader, quiet

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


class _Look(L.Callback):
    """Names the groups, and changes the plan after each iteration."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.names: dict[str, str] = {}

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._name_groups(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        strategy.change_plan(self._job.plans[trainer.global_step % len(self._job.plans)])
        self._name_groups(trainer)

    def _name_groups(self, trainer: L.Trainer) -> None:
        assert isinstance(trainer.strategy, HeteroStrategy)
        comms = trainer.strategy.engine.comms
        for (sender, receiver, *channel), group in comms._edges.items():
            if trainer.global_rank in (sender, receiver):
                self.names[group.group_name] = f"{STAGES} {sender}>{receiver} {channel}"
        for name in (EXCHANGE, CONTROL):
            self.names[getattr(comms, name).group_name] = name
        for ranks, group in comms._exchange_groups.items():
            if trainer.global_rank in ranks:
                self.names[group.group_name] = f"{EXCHANGE} {list(ranks)}"

    def name_of(self, group_name: str) -> str:
        """Return the name of a queue for that of its group."""
        group = group_name.removesuffix(REST)
        return self.names.get(group, group) + group_name[len(group) :]


def record(rank: int, job: Job) -> list[Operation]:
    """Train, validate and test; return what this rank issued from the first message on."""
    torch.manual_seed(0)
    recorder = Recorder()
    look = _Look(job)
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
    with recorder, swapped, node:
        trainer.fit(module, loader(rows, ROWS), loader(2 * ROWS, ROWS, seed=1))
        trainer.test(module, loader(2 * ROWS, ROWS, seed=1), verbose=False)
    return [
        replace(item, communicator=look.name_of(item.communicator)) for item in recorder.operations
    ]


def record_with_streams(rank: int, job: Job) -> list[Operation]:
    """Record a run whose second legs are posted as where there are streams, and no host waits."""
    with mock.patch.object(by_node, "has_streams", return_value=True):
        return record(rank, job)


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
