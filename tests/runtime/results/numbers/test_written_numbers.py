"""The call that logs a number says whether it counts rows."""

import math
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_hetero.runtime.results.numbers.written_numbers import TOLD, Rows, rows_counted

_LIBRARY: dict[str, Any] = {"__name__": "lightning.pytorch.made_up", "rows_counted": rows_counted}
exec(
    """
def log(name, value):
    return rows_counted(1, key=name)

def log_dict(dictionary):
    return {name: rows_counted(1, key=name) for name in dictionary}
""",
    _LIBRARY,
)


class _Module(nn.Module):
    num_parts = 3

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity(), nn.Identity()])
        self.example = deque([1, 2])
        self.log, self.log_dict = _LIBRARY["log"], _LIBRARY["log_dict"]

    def counts(self, batch: Any) -> list[Rows]:
        x, labels = batch
        rows, length = x.shape
        tokens = rows * length
        return [
            self.log("n", len(x)),
            self.log("n", float(x.size(0))),
            self.log("n", value=torch.tensor(float(rows))),
            self.log("n", tokens),
            self.log("n", labels.numel()),
            self.log("n", len(batch[0])),
        ]

    def constants_step(self, batch: Any, i: int) -> list[Rows]:
        width = batch[0].shape[1]
        return [
            self.log("n", 1),
            self.log("n", float(self.num_parts)),
            self.log("n", i),
            self.log("n", width),
            self.log("n", len(self.layers)),
            self.log("n", len(batch)),
        ]

    def counts_by_numpy(self, x: Any) -> list[Rows]:
        shape, array = np.array(x.shape), x.numpy()
        rows = np.prod(shape)
        return [
            self.log("n", rows),
            self.log("n", math.prod(x.shape)),
            self.log("n", float(np.prod(tuple(x.size())))),
            self.log("n", float(shape[0])),
            self.log("n", np.asarray(x.shape)[0].item()),
            self.log("n", x.shape.numel()),
            self.log("n", len(array)),
            self.log("n", array.shape[0]),
            self.log("n", len(x.detach().numpy())),
            self.log("n", np.float64(array.size)),
        ]

    def constants_by_numpy(self, x: Any) -> list[Rows]:
        shape = x.shape
        return [
            self.log("n", np.array(x.shape)[1]),
            self.log("n", math.prod(x.shape[1:])),
            self.log("n", float(shape[1])),
            self.log("n", len(x.shape)),
        ]

    def unclear(self, x: Any, given: int) -> list[Rows]:
        rows = changing = x.shape[0]
        changing += rows
        self.counted = len(x)
        return [
            self.log("n", given),
            self.log("n", changing),
            self.log("n", self.counted),
            self.log("n", len(x) * len(x)),
            self.log("n", max(len(x), 1)),
            self.log("n", x.mean().round(decimals=2)),
            self.log("n", len(self.example)),
        ]

    def told(self, x: Any) -> Rows:
        correct = (x > 0).sum().item()
        found: Rows = self.log("n", correct)
        return found

    def in_dict(self, x: Any) -> dict[str, Rows]:
        found: dict[str, Rows] = self.log_dict({"n": len(x), "one": 1, "loss": x.mean()})
        return found


def test_calls_say_what_whole_numbers_count() -> None:
    module, batch = _Module(), (torch.ones(4, 5), torch.ones(4))
    assert module.counts(batch) == [(4,)] * 6
    assert module.constants_step(batch, 1) == [()] * 6
    assert module.counts_by_numpy(batch[0]) == [(4,)] * 10
    assert module.constants_by_numpy(batch[0]) == [()] * 4
    assert module.unclear(batch[0], 4) == [None] * 7
    assert module.told(batch[0]) == TOLD
    assert module.in_dict(batch[0]) == {"n": (4,), "one": (), "loss": None}


def test_without_source_nobody_knows() -> None:
    user: dict[str, Any] = {"__name__": "user", "log": _LIBRARY["log"]}
    exec("def step(x):\n    return log('n', len(x))", user)
    assert user["step"](torch.ones(4)) is None
