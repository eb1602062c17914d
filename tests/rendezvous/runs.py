"""Runs on gloo whose ranks say what they issued."""

import os
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import lightning as L

from lightning_hetero.runtime.exchange import by_node
from lightning_hetero.runtime.exchange.pull import Pull
from tests.fits import Case, train
from tests.rendezvous.operations import CONTROL, EXCHANGE, STAGES, Operation
from tests.rendezvous.recorder import REST, Recorder


class _Names(L.Callback):
    """Knows queues by what they are for; each change of plan may make some."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        comms = strategy.engine.comms
        for (sender, receiver, *channel), group in comms._edges.items():
            if trainer.global_rank in (sender, receiver):
                self.names[group.group_name] = f"{STAGES} {sender}>{receiver} {channel}"
        for name in (EXCHANGE, CONTROL):
            self.names[getattr(comms, name).group_name] = name
        for ranks, group in comms._exchange_groups.items():
            if trainer.global_rank in ranks:
                self.names[group.group_name] = f"{EXCHANGE} {list(ranks)}"

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.on_train_start(trainer)

    def of(self, group_name: str) -> str:
        """Return the name of a queue for that of its group."""
        group = group_name.removesuffix(REST)
        return self.names.get(group, group) + group_name[len(group) :]


def record(
    rank: int, case: Case, nodes: str = "", swaps_pulls: int | None = None
) -> list[Operation]:
    """Train and validate; return what this rank issued from the first message on.

    Args:
        rank: The rank.
        case: What is trained.
        nodes: The node that each rank plays; all are on this one if it is empty.
        swaps_pulls: A rank that by mistake fetches its first two layers in another order.
    """
    recorder, names = Recorder(), _Names()
    swapped = _swapped_pulls() if rank == swaps_pulls else nullcontext()
    node = mock.patch.dict(os.environ, {"GROUP_RANK": nodes[rank]} if nodes else {})
    with recorder, swapped, node:
        train(case, names)
    return [replace(item, communicator=names.of(item.communicator)) for item in recorder.operations]


def record_with_streams(rank: int, case: Case, nodes: str) -> list[Operation]:
    """Record a run whose second legs are posted as where there are streams, and no host waits."""
    with mock.patch.object(by_node, "has_streams", return_value=True):
        return record(rank, case, nodes)


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
